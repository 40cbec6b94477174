"""Writes every picture of the documentation; ``make architecture`` runs it, and a test compares the files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "kernels", "adapters", "tests")]

from architecture import draw_peers, draw_request, draw_rooms  # noqa: E402

PICTURES: dict[str, Callable[[], str]] = {
    "docs/architecture.svg": draw_rooms.draw,
    "docs/request.svg": draw_request.draw,
    "docs/peers.svg": draw_peers.draw,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")

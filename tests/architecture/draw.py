"""Writes the pictures of the documentation and the table of rooms; ``make architecture`` runs it, tests compare."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "kernels", "adapters", "tests")]

from architecture import (  # noqa: E402
    draw_adapters,
    draw_blocks,
    draw_peers,
    draw_request,
    draw_retrieval,
    draw_rooms,
    draw_slots,
    draw_speculation,
    draw_states,
    draw_step,
)

PAGE = "docs/architecture.md"
TABLE = re.compile(r"(?<=<!-- rooms: `make architecture` writes this table -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)

PICTURES: dict[str, Callable[[], str]] = {
    "docs/architecture.svg": draw_rooms.draw,
    "docs/request.svg": draw_request.draw,
    "docs/peers.svg": draw_peers.draw,
    "docs/retrieval.svg": draw_retrieval.draw,
    "docs/slots.svg": draw_slots.draw,
    "docs/blocks.svg": draw_blocks.draw,
    "docs/step.svg": draw_step.draw,
    "docs/speculation.svg": draw_speculation.draw,
    "docs/lora.svg": draw_adapters.draw,
    "docs/recurrent.svg": draw_states.draw,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(draw(), encoding="utf-8")
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (ROOT / PAGE).write_text(TABLE.sub(lambda _: draw_rooms.table(), page), encoding="utf-8")

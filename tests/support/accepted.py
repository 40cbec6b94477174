"""What engines accept, seen by a test at whatever door it came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedcore.engine.engine import Engine


def note_accepted(monkeypatch: pytest.MonkeyPatch, note: Callable[[Any], object]) -> None:
    """Call ``note`` with every request that any engine is about to accept, as it was processed."""
    accept = Engine.accept

    def accept_and_note(self: Engine, processed: Any, *given: Any, **more: Any) -> Any:
        note(processed)
        return accept(self, processed, *given, **more)

    monkeypatch.setattr(Engine, "accept", accept_and_note)

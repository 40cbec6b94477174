"""Exceptions that come at a chosen line of pagedcore, as another thread or a signal may raise them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pagedcore

_HOME = os.path.dirname(pagedcore.__file__) + os.sep


class Lost(BaseException):
    """What another thread may raise in this one at any line."""


def lose() -> None:
    """Raise it."""
    raise Lost


@contextmanager
def interrupted_at(line: int, act: Callable[[], None] = lose) -> Iterator[list[int]]:
    """Call ``act`` before the line of pagedcore with this number is executed; yield the number of lines so far."""
    count = [0]

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == line:
                act()
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(_HOME) else None

    sys.settrace(on_call)
    try:
        yield count
    finally:
        sys.settrace(None)

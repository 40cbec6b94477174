"""Stops an engine in the middle of its completions, or slows it down: for tests that a stream arrives while its tokens
are generated, and for what callers do before a completion ends.

The number of a stream's deltas is no promise, because a reader that is late gets several of them as one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pagedcore import AsyncEngine
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats

LIMIT_S: Final = 30.0


class Pause:
    """A step that waits, once, until ``end`` is called."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self._is_over = threading.Event()
        self.was_ended: bool | None = None
        """Whether the step that waited was told to go on; ``None`` before."""

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Wait in the step that decodes the last of so many tokens."""
        self._num_left -= stats.num_decode_tokens
        if self._num_left <= 0 and self.was_ended is None:
            self.was_ended = self._is_over.wait(LIMIT_S)

    def end(self) -> None:
        """Let the engine go on: its reader has what it is to have by now."""
        self._is_over.set()


@contextmanager
def paused_after(engine: AsyncEngine, num_tokens: int) -> Iterator[Pause]:
    """Let an engine decode so many tokens from now on and no more until the block, which reads to the end of the
    stream, ends the pause; fail if it could not end it."""
    pause = Pause(num_tokens)
    engine.observe(pause)
    try:
        yield pause
    finally:
        pause.end()
    assert pause.was_ended, "nothing of the stream arrived before its last token was generated"


class Brake:
    """Lets each step take so much longer until it ``is_off``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.is_off = threading.Event()

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Take longer."""
        self.is_off.wait(self._seconds)


@contextmanager
def slowed(engine: AsyncEngine, seconds: float = 0.02) -> Iterator[None]:
    """Let every step of an engine take longer within the block, so that what runs long outlasts a caller who is late.

    With ``seconds=LIMIT_S`` no step ends before the block does.
    """
    brake = Brake(seconds)
    engine.observe(brake)
    try:
        yield
    finally:
        brake.is_off.set()

"""What a worker does when it is told to end: first its calls in flight, with the door open to send new ones elsewhere.

The server that BentoML runs closes its listener as soon as the signal comes, so that a new call would wait for nobody.
Here the signal reaches that server only when nobody is inside any more, or time is up.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any


class Farewell:
    """Stands before the handler of SIGTERM that was there.

    Invariant: every signal reaches that handler, the first one late, further ones at once.
    """

    def __init__(self, drain: Callable[[], Awaitable[object]]) -> None:
        """Remember what to wait for when the first signal comes: ``drain``, on the loop of ``install``."""
        self._drain = drain
        self._previous: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Stand before the present handler, if there is one in Python and this is the thread that signals come to."""
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous, self._loop = previous, asyncio.get_running_loop()
            signal.signal(signal.SIGTERM, self._on_signal)

    def remove(self) -> None:
        """Put the handler back that was there, unless another one has taken the place since."""
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self._draining is not None or self._loop.is_closed():
            self._previous(number, frame)
            return
        # Why: a handler may interrupt the loop anywhere, so it only leaves a note.
        self._loop.call_soon_threadsafe(self._begin, number)

    def _begin(self, number: int) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._pass_on(number))

    async def _pass_on(self, number: int) -> None:
        try:
            await self._drain()
        finally:
            self._previous(number, None)

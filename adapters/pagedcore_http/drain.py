"""Draining: finish the calls in flight before the process ends, and refuse new ones meanwhile."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from pagedcore_http.refusals import NotServing

CUT_AFTER_S: Final = 5
"""Seconds after the drain until connections that are still open are cut."""
KEEP_IDLE_S: Final = 65
"""How long a server keeps an idle connection open, in seconds: longer than clients keep theirs, or one of their calls
would meet a connection that is being closed."""


class OpenCalls:
    """Counts the calls in flight.

    Invariant: ``num_open`` is the number of ``call`` blocks that were entered and not left.
    Invariant: while it drains no call is entered.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.is_draining = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call for the length of a block.

        Raises:
            NotServing: the service drains.
        """
        if self.is_draining:
            raise NotServing("this process drains: it finishes its calls in flight and takes no new ones.")
        self.num_open += 1
        self._all_closed.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._all_closed.set()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new calls and wait for those in flight; return how many are left after ``timeout_s`` seconds."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            pass
        return self.num_open


class DrainSignal:
    """Delays SIGTERM, and other signals if asked to, until the calls in flight have ended.

    A server such as uvicorn closes its listener at the signal, so that new calls meet a closed port. With this handler
    before the server's own, they get a refusal that names another process until the calls in flight have ended.

    Invariant: every signal reaches the previous handler, the first one after the drain, further ones at once.
    Invariant: uvicorn, whose handler that usually is, waits for open connections for a limited time.
    """

    def __init__(self, drain: Callable[[], Awaitable[object]],
                 signals: Collection[signal.Signals] = (signal.SIGTERM,)) -> None:
        """Take what to await at the first signal, on the loop of ``install``."""
        self._drain = drain
        self._signals = signals
        self._previous: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Replace the present handlers that are Python functions, if this is the main thread."""
        for number in self._signals if threading.current_thread() is threading.main_thread() else ():
            if callable(previous := signal.getsignal(number)):
                self._previous[number], self._loop = previous, asyncio.get_running_loop()
                signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Restore the previous handlers, unless a third one has been installed since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None or self._draining is not None or self._loop.is_closed():
            self._previous[number](number, frame)
            return
        # Why: a signal handler may interrupt the loop anywhere, so it only schedules the drain.
        self._loop.call_soon_threadsafe(self._begin, number)

    def _begin(self, number: int) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain_and_forward(number))

    async def _drain_and_forward(self, number: int) -> None:
        try:
            await self._drain()
        finally:
            _limit_uvicorn(self._previous[number])
            self._previous[number](number, None)


def _limit_uvicorn(handler: Any) -> None:
    # Why: without a limit of its operator uvicorn waits for a client that does not read as long as it stays.
    config: Any = getattr(getattr(handler, "__self__", None), "config", None)
    if getattr(config, "timeout_graceful_shutdown", 0) is None:
        config.timeout_graceful_shutdown = CUT_AFTER_S

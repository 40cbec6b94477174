"""The bounded hand-over between the engine thread and one reader, on any event loop or on none.

Unread deltas of an answer are merged, so that a slow reader costs at most one delta per answer, whose size the
request's own ``max_tokens`` bounds; it never stalls a step. A reader that vanishes aborts its request.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from pagedcore.outputs import Delta


class LoopWaiter:
    """A reader asleep on an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def wake(self) -> None:
        """Wake the reader; call it on its loop."""
        if not self.future.done():
            self.future.set_result(None)


class Stream:
    """Deltas of one request on their way to its reader.

    Invariant: at most one unread delta per answer.
    Invariant: after ``end`` nothing is added.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: dict[int, Delta] = {}
        self._waiter: LoopWaiter | None = None
        self._error: Exception | None = None
        self.has_ended = False

    def put(self, delta: Delta) -> LoopWaiter | None:
        """Add a delta; return the sleeping reader, if it is on an event loop, for the caller to wake."""
        with self._changed:
            unread = self._unread.get(delta.index)
            self._unread[delta.index] = delta if unread is None else merge(unread, delta)
            return self._release()

    def end(self, error: Exception | None = None) -> LoopWaiter | None:
        """End the stream, with an error for the reader if there is one; return the sleeping reader as ``put``."""
        with self._changed:
            if not self.has_ended:
                self.has_ended, self._error = True, error
            return self._release()

    def _release(self) -> LoopWaiter | None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        return waiter

    def take_or_wait(self) -> list[Delta]:
        """Return unread deltas, sleeping on this thread until there is one; empty at the end.

        Raises:
            Exception: the error the stream ended with, after the last delta.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self.has_ended)
            return self._take()

    def take_or_register(self, waiter: LoopWaiter) -> list[Delta] | None:
        """Return unread deltas (empty at the end), or register the waiter and return ``None``. Raises as above."""
        with self._changed:
            if self._unread or self.has_ended:
                return self._take()
            self._waiter = waiter
            return None

    def _take(self) -> list[Delta]:
        deltas, self._unread = list(self._unread.values()), {}
        if not deltas and self._error is not None:
            raise self._error
        return deltas


def merge(first: Delta, second: Delta) -> Delta:
    """Join two consecutive deltas of one answer."""
    logprobs = None if second.logprobs is None else (first.logprobs or ()) + second.logprobs
    return replace(
        second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs if logprobs is not None else first.logprobs,
    )


class StreamReader:
    """The reader's end: iterate it once, with ``for`` or ``async for``; closing or losing it calls ``abandon``."""

    def __init__(self, stream: Stream, abandon: Callable[[], None]) -> None:
        self._stream = stream
        self._finalizer = weakref.finalize(self, abandon)
        # Why: at interpreter exit the engine's own shutdown ends every request.
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[Delta]:
        while deltas := self._stream.take_or_wait():
            yield from deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self._next():
            for delta in deltas:
                yield delta

    async def _next(self) -> list[Delta]:
        while True:
            waiter = LoopWaiter()
            deltas = self._stream.take_or_register(waiter)
            if deltas is not None:
                return deltas
            await waiter.future

    def close(self) -> None:
        """Tell the engine that nobody reads any more; harmless after the end, and more than once."""
        self._finalizer()

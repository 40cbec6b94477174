"""The bounded hand-over between the engine thread and one reader, on any event loop or on none.

Unread deltas of an answer are joined, by the reader where it keeps up, so that a slow reader costs a few deltas per
answer, whose size the request's own ``max_tokens`` bounds; it never stalls a step. A reader that vanishes aborts its
request. ``Outbox`` says when deltas are handed over.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from pagedcore.clock import Clock, MonotonicClock
from pagedcore.errors import RequestTimeout
from pagedcore.outputs import Delta

Waiter = asyncio.Future[None] | threading.Event
"""A reader that sleeps: on its event loop, or on its own thread."""
MOST_PARTS: Final = 64
"""Unread deltas of one answer before they are joined on the engine thread."""
READERS_PER_INTERVAL: Final = 50
"""Readers that are told of news once per interval; with more of them intervals are longer in proportion."""


class Stream:
    """Deltas of one request on their way to its reader.

    Invariant: at most ``MOST_PARTS`` unread deltas per answer, of which the reader gets one.
    Invariant: after ``end`` nothing is added.
    """

    __slots__ = ("_error", "_lock", "_unread", "_waiter", "has_ended", "is_begun")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unread: dict[int, list[Delta]] = {}
        self._waiter: Waiter | None = None
        self._error: Exception | None = None
        self.has_ended = False
        self.is_begun = False
        """Whether a delta was ever on its way; the ``Outbox``'s own note."""

    def put(self, deltas: Iterable[Delta]) -> Waiter | None:
        """Add deltas, at least one; return the sleeping reader, if there is one, for the caller to ``wake``."""
        with self._lock:
            return self._add(deltas)

    def end(self, error: Exception | None = None, last: Iterable[Delta] = ()) -> Waiter | None:
        """End the stream with these deltas, and an error for the reader if there is one; return as ``put``."""
        with self._lock:
            if not self.has_ended:
                self.has_ended, self._error = True, error
            return self._add(last)

    def _add(self, deltas: Iterable[Delta]) -> Waiter | None:
        for delta in deltas:
            parts = self._unread.setdefault(delta.index, [])
            # Why: joining a few deltas once costs less than joining each to those before, and is the reader's work.
            if len(parts) == MOST_PARTS:
                parts[:] = [merge(parts)]
            parts.append(delta)
        waiter, self._waiter = self._waiter, None
        return waiter

    def take_or_register(self, waiter: Waiter) -> list[Delta] | None:
        """Return unread deltas (empty at the end), or register the waiter and return ``None``. Raises as ``take``."""
        with self._lock:
            if not (self._unread or self.has_ended):
                self._waiter = waiter
                return None
        return self.take()

    def take(self) -> list[Delta]:
        """Return unread deltas, empty at the end; call it when woken: then there are some, or it has ended.

        Raises:
            Exception: the error the stream ended with, after the last delta.
        """
        with self._lock:
            unread, self._unread = self._unread, {}
        if not unread and self._error is not None:
            raise self._error
        return [parts[0] if len(parts) == 1 else merge(parts) for parts in unread.values()]


def merge(deltas: Iterable[Delta]) -> Delta:
    """Join consecutive deltas of one answer, at least one."""
    text, token_ids, logprobs = "", list[int](), None
    for delta in deltas:
        text += delta.text
        token_ids += delta.token_ids
        if delta.logprobs is not None:
            logprobs = (logprobs or ()) + delta.logprobs
    return Delta(
        delta.request_id, delta.index, text, tuple(token_ids), delta.finish_reason, logprobs, delta.error,
        delta.num_prompt_tokens, delta.usage, delta.prompt_logprobs,
    )


class Outbox:
    """Keeps deltas on the engine thread until it is time to hand them over: a stream's first at once, later ones of all
    streams together, every ``interval_s``, or less often if there are more than ``READERS_PER_INTERVAL`` of them.

    Why: waking a reader costs an event loop ten to thirty microseconds, which the engine thread has to wait for; this
    keeps it to a few per cent of the time, however many there are. And a loop that wakes takes the processor from
    whoever computes, which is why it wakes once for all of its readers.

    Invariant: a delta is held back for less than such an interval and the length of a step.
    """

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = -math.inf
        self._held: dict[Stream, list[Delta]] = {}
        self._begun: list[Stream] = []

    def add(self, stream: Stream, delta: Delta) -> None:
        """Keep a delta for a stream."""
        held = self._held.get(stream)
        if held is not None:
            held.append(delta)
            return
        self._held[stream] = [delta]
        if not stream.is_begun:
            stream.is_begun = True
            self._begun.append(stream)

    def take_due(self) -> dict[Stream, list[Delta]]:
        """Take what it is time to hand over; call it once after every step."""
        begun, self._begun = self._begun, []
        now = self._clock.now()
        if now < self._next_s:
            return {stream: self.take(stream) for stream in begun}
        due, self._held = self._held, {}
        self._next_s = now + self._interval_s * max(1.0, len(due) / READERS_PER_INTERVAL)
        return due

    def take(self, stream: Stream) -> list[Delta]:
        """Take what is kept for one stream, which may be nothing."""
        return self._held.pop(stream, [])


class StreamReader:
    """The reader's end: iterate it, or await ``next``; closing or losing it calls ``abandon``.

    With ``timeout_s`` reading ends with ``RequestTimeout`` that many seconds after the reader was made, unless the
    stream has ended by then.
    """

    def __init__(self, stream: Stream, abandon: Callable[[], None], timeout_s: float | None = None) -> None:
        self._stream = stream
        self._clock = MonotonicClock()
        self._timeout_s = timeout_s
        self._deadline_s = math.inf if timeout_s is None else self._clock.now() + timeout_s
        self._finalizer = weakref.finalize(self, abandon)
        # Why: at interpreter exit the engine's own shutdown ends every request.
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[Delta]:
        while deltas := self._next_on_this_thread():
            yield from deltas

    def _next_on_this_thread(self) -> list[Delta]:
        time_left_s = self._check_time()
        waiter = threading.Event()
        deltas = self._stream.take_or_register(waiter)
        if deltas is None:
            if not waiter.wait(time_left_s):
                raise self._timed_out()
            deltas = self._stream.take()
        return deltas

    async def next(self) -> list[Delta]:
        """Return what is unread, at most one delta per answer, sleeping until there is something; empty at the end.

        Raises:
            RequestTimeout: the reader's time is up.
            Exception: the error the stream ended with, after the last delta.
        """
        time_left_s = self._check_time()
        waiter = asyncio.get_running_loop().create_future()
        deltas = self._stream.take_or_register(waiter)
        if deltas is None:
            await (waiter if time_left_s is None else self._sleep(waiter, time_left_s))
            deltas = self._stream.take()
        return deltas

    async def _sleep(self, waiter: asyncio.Future[None], time_left_s: float) -> None:
        try:
            async with asyncio.timeout(time_left_s):
                await waiter
        except TimeoutError:
            raise self._timed_out() from None

    def _check_time(self) -> float | None:
        if self._timeout_s is None:
            return None
        time_left_s = self._deadline_s - self._clock.now()
        # Why: asked before every read, because a reader that always finds something unread never sleeps.
        if time_left_s <= 0 and not self._stream.has_ended:
            raise self._timed_out()
        return max(time_left_s, 0.0)

    def _timed_out(self) -> RequestTimeout:
        return RequestTimeout(self._timeout_s or 0.0)

    def close(self) -> None:
        """Tell the engine that nobody reads any more; harmless after the end, and more than once."""
        self._finalizer()


def wake(waiters: Iterable[Waiter | None]) -> list[Waiter]:
    """Wake sleeping readers, from any thread, with one call per event loop; return those whose loop was closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    lost: list[Waiter] = []
    for waiter in waiters:
        if isinstance(waiter, threading.Event):
            waiter.set()
        elif waiter is not None:
            by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, sleeping in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, sleeping)
        except RuntimeError:
            lost += sleeping
    return lost


def _wake_all(sleeping: list[asyncio.Future[None]]) -> None:
    for future in sleeping:
        if not future.done():
            future.set_result(None)

"""The bounded hand-over between the engine thread and one reader, on any event loop or on none.

Unread deltas of a completion are read as one: a slow reader costs what the request's own ``max_tokens`` bounds, and
never stalls a step. A reader that vanishes aborts its request. When deltas are made is in ``engine_loop``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from pagedcore.errors import ForkedProcess, RequestTimeout
from pagedcore.outputs import Delta, RequestOutput, WeightsVersion
from pagedcore.protocols import MonotonicClock
from pagedcore.serving.host_program import require_other_thread, running_loop

_log: Final = logging.getLogger("pagedcore")
_T = TypeVar("_T")
_FIRST_WEIGHTS: Final = WeightsVersion(0)
Waiter = asyncio.Future[None] | threading.Event
"""A reader that sleeps: on its event loop, or on its own thread."""


def join(deltas: list[Delta]) -> Delta:
    """Return consecutive deltas of one completion as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    weights: Iterable[WeightsVersion] = ()
    if any(delta.weights for delta in deltas):
        # Why filled up: what came before other weights were loaded says nothing of its own.
        weights = chain.from_iterable(one.weights or [_FIRST_WEIGHTS] * len(one.token_ids) for one in deltas)
    return replace(
        last, text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        weights=tuple(weights),
    )


class Stream:
    """Deltas of one request on their way to its reader.

    Invariant: after the first ``end`` nothing is added, whichever thread calls.
    """

    __slots__ = ("_error", "_lock", "_unread", "_waiter", "has_ended", "is_cancelled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unread: dict[int, list[Delta]] = {}
        self._waiter: Waiter | None = None
        self._error: Exception | None = None
        self.has_ended = False
        self.is_cancelled = False
        """Whether its reader has left, which the engine may not know yet."""

    def put(self, deltas: Iterable[Delta]) -> Waiter | None:
        """Add deltas, at least one; return the sleeping reader, if there is one, for the caller to ``wake``."""
        with self._lock:
            return self._add(deltas)

    def end(self, error: Exception | None = None, last: Iterable[Delta] = ()) -> Waiter | None:
        """End the stream with these deltas, and an error for the reader if there is one; return as ``put``."""
        with self._lock:
            waiter = self._add(last)
            if not self.has_ended:
                self.has_ended, self._error = True, error
            return waiter

    def _add(self, deltas: Iterable[Delta]) -> Waiter | None:
        if self.has_ended:
            return None
        for delta in deltas:
            self._unread.setdefault(delta.index, []).append(delta)
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
        """Return what is unread, for a reader that was woken; empty at the end. Raises the error of the end, if any."""
        with self._lock:
            unread, self._unread = self._unread, {}
        if not unread and self._error is not None:
            raise self._error
        return [join(deltas) for deltas in unread.values()]


class CompletionFuture(Generic[_T]):
    """The result of one request or call on its way to a caller who wants no deltas and is not woken before the end.

    Invariant: the future is settled once, with a result or an error, unless its owner cancelled it first.
    """

    def __init__(self, settler: threading.Thread | None = None) -> None:
        self.future = AwaitableFuture[_T]()
        self.future.settler = settler
        self._settling = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        """Whether its owner cancelled it, which the engine may not know yet."""
        return self.future.cancelled()

    def complete(self, result: _T) -> None:
        """Hand the result over; what was settled or cancelled before stays as it is."""
        self._settle(self.future.set_result, result)

    def end(self, error: Exception | None = None, _: Iterable[Delta] = ()) -> Waiter | None:
        """Hand an error over if there is one; there is never a reader to wake."""
        if error is not None:
            self._settle(self.future.set_exception, error)
        return None

    def _settle(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        # Why: never released, so the first of two threads settles the future; and from here on a cancellation comes
        # too late, so it cannot meet a result half-way.
        if self._settling.acquire(blocking=False) and self.future.set_running_or_notify_cancel():
            set_outcome(outcome)


class AwaitableFuture(Future[_T]):
    """A future of ``concurrent.futures`` that can be awaited too, from any event loop; cancelling that cancels it.

    A wait for it that Ctrl-C, or another exception of this kind, breaks off cancels it. Its callbacks end nothing but
    themselves: ``Future`` guards its own thread against ``Exception``.
    """

    settler: threading.Thread | None = None
    """The thread that settles it, which is not to wait for it."""

    def __await__(self) -> Generator[Any, None, _T]:
        return asyncio.wrap_future(self).__await__()

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the result, as ``Future`` does."""
        with self._cancelled_if_broken_off():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, as ``Future`` does."""
        with self._cancelled_if_broken_off():
            return super().exception(timeout)

    @contextmanager
    def _cancelled_if_broken_off(self) -> Iterator[None]:
        if not self.done():
            require_other_thread(self.settler)
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.cancel()
            raise

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Call a function with the future when it is done, as ``Future`` does."""
        super().add_done_callback(partial(_call_back, fn))


def awaitable(running: Future[_T]) -> AwaitableFuture[_T]:
    """Return a future with the outcome of another one, which is cancelled with it."""
    own = AwaitableFuture[_T]()

    def settle(done: Future[_T]) -> None:
        if done.cancelled():
            own.cancel()
        elif own.set_running_or_notify_cancel():
            if (error := done.exception()) is not None:
                own.set_exception(error)
            else:
                own.set_result(done.result())

    own.add_done_callback(lambda future: running.cancel() if future.cancelled() else None)
    running.add_done_callback(settle)
    return own


def _call_back(callback: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    try:
        callback(future)
    except Exception:  # the future logs it
        raise
    except BaseException:
        # Why: on the main thread it may be Ctrl-C, and is that thread's own.
        if threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a callback of a future tried to end its thread")


OutputSink = Stream | CompletionFuture[RequestOutput]
"""Where the output of a request is delivered."""


class StreamReader:
    """The reader's end: iterate it, or await ``next``; closing or losing it calls ``cancel``.

    With ``timeout_s`` reading ends with ``RequestTimeout`` that many seconds after the reader was made, unless the
    stream has ended by then.
    """

    def __init__(self, stream: Stream, cancel: Callable[[], None], timeout_s: float | None = None) -> None:
        self._stream = stream
        self._clock = MonotonicClock()
        self._timeout_s = timeout_s
        self._process_id = os.getpid()
        self._deadline_s = math.inf if timeout_s is None else self._clock.now() + timeout_s
        self._finalizer = weakref.finalize(self, cancel)
        # Why: at interpreter exit the engine's own shutdown ends every request.
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[Delta]:
        while True:
            time_left_s, waiter = self._check_time(), threading.Event()
            deltas = self._stream.take_or_register(waiter)
            if deltas is None:
                if not waiter.wait(time_left_s):
                    raise self._timed_out()
                deltas = self._stream.take()
            if not deltas:
                return
            yield from deltas

    async def next(self) -> list[Delta]:
        """Return what is unread, at most one delta per completion, sleeping until there is something; empty at the end.

        Raises ``RequestTimeout`` when the reader's time is up, and what the stream ended with, after the last delta.
        """
        time_left_s = self._check_time()
        waiter = running_loop().create_future()
        deltas = self._stream.take_or_register(waiter)
        if deltas is not None:
            return deltas
        if time_left_s is None:
            await waiter
        else:
            try:
                async with asyncio.timeout(time_left_s):
                    await waiter
            except TimeoutError:
                raise self._timed_out() from None
        return self._stream.take()

    def _check_time(self) -> float | None:
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)
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
        """Abort the request; after its end, and a second time, this does nothing."""
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
        except Exception:  # a closed loop; loops of other libraries say it in other ways
            lost += sleeping
    return lost


def _wake_all(sleeping: list[asyncio.Future[None]]) -> None:
    for future in sleeping:
        if not future.done():
            future.set_result(None)

"""What crosses over from callers to the engine thread: commands in order, aborts at once, and places in the queue.

Owns the decision whether a request is taken, which is made in the caller's thread, and the refusal of everything once
the engine thread takes no more. Who carries commands out is ``engine_loop``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from queue import Empty
from time import monotonic
from typing import Any, Final, NamedTuple

from pagedcore.config.limits import MAX_HELD_SEQUENCES
from pagedcore.errors import EngineClosed, EngineOverloaded, ForkedProcess
from pagedcore.serving.stream import CompletionFuture, Stream, wake

_log: Final = logging.getLogger("pagedcore")
Sink = Stream | CompletionFuture[Any]
"""Where the result of a command is delivered, or the error instead of it."""


class Command(NamedTuple):
    """What a caller asks for."""

    run: Callable[[Any], None]
    """Gets the ``EngineLoop``, on the engine thread, between two steps."""
    sink: Sink
    """Gets the error of a command that fails or is refused."""


class Places:
    """Who may wait to be started, so that any thread knows at once whether a request can be taken.

    A place is taken before a prompt is looked at, and given back when the request is in the engine's own queue, which
    counts it from then on, or has ended before that.

    Invariant: whoever has a place is not refused later because the queue is full.
    Invariant: every request that waits is counted once.
    """

    def __init__(self, limit: int, count_in_engine: Callable[[], int]) -> None:
        """Let ``limit`` sequences wait, and ``MAX_HELD_SEQUENCES`` more of callers that wait for room.

        ``count_in_engine`` says in any thread how many wait in the engine's own queue.
        """
        self.limit = limit
        self._count_in_engine = count_in_engine
        # Why re-entrant: a scheduling policy of the user's own runs while a request is handed over.
        self._lock = threading.RLock()
        self._taken: dict[Sink, int] = {}
        self._num_taken = 0

    def take(self, sink: Sink, num_sequences: int, may_wait: bool) -> None:
        """Take places for a request. Raises ``EngineOverloaded`` if there are too few."""
        # Why: a request that could never fit is refused for that, with an error of its own.
        num_sequences = min(num_sequences, self.limit)
        limit = self.limit + MAX_HELD_SEQUENCES if may_wait else self.limit
        with self._lock:
            if (num_waiting := self._num_taken + self._count_in_engine()) + num_sequences > limit:
                raise EngineOverloaded(num_waiting, limit)
            self._taken[sink] = num_sequences
            self._num_taken += num_sequences

    @contextmanager
    def hand_over(self, sink: Sink) -> Iterator[None]:
        """Give back the places of a request that the engine's own queue takes meanwhile, at one moment for others."""
        with self._lock:
            try:
                yield
            finally:
                self.give_back(sink)

    def give_back(self, sink: Sink) -> None:
        """Give back the places of a request; a second call does nothing."""
        with self._lock:
            self._num_taken -= self._taken.pop(sink, 0)

    def sinks(self) -> list[Sink]:
        """Return who has a place."""
        with self._lock:
            return list(self._taken)


class CommandQueue:
    """A first-in, first-out queue of which one thread takes; ``put`` waits for no lock.

    Why not a ``SimpleQueue``: its ``get`` sleeps without end if it is woken for nothing when its time is over, as in
    CPython 3.11. That happens on busy machines.
    """

    def __init__(self) -> None:
        self._items: deque[Command] = deque()
        self._arrival = threading.Lock()
        """Locked until something is put; may be unlocked though the queue is empty."""
        self._arrival.acquire()

    def put(self, command: Command) -> None:
        """Add a command, and wake the thread that waits for one."""
        self._items.append(command)
        with suppress(RuntimeError):  # unlocked already, so whoever waits next will look
            self._arrival.release()

    def get(self, timeout: float) -> Command:
        """Return the next command, sleeping up to ``timeout`` seconds. Raises ``Empty`` if there is none by then."""
        end_s = monotonic() + timeout
        while not self._items:
            left_s = end_s - monotonic()
            if left_s <= 0 or not self._arrival.acquire(timeout=left_s):
                break
        return self.get_nowait()

    def get_nowait(self) -> Command:
        """Return the next command. Raises ``Empty`` if there is none."""
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None


class Commands:
    """What callers ask of the engine thread, in order. No method waits for a lock that another thread may hold long.

    Invariant: a command that ``put`` took is carried out, or its sink gets an error.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.aborts: deque[Sink] = deque()
        """Sinks whose readers have left."""
        self._queue = CommandQueue()
        self._process_id = os.getpid()
        self._make_error: Callable[[], EngineClosed] = _closed
        self.is_closed = False
        """Whether ``put`` takes no more."""

    def require_open(self) -> None:
        """Raise ``EngineClosed`` if no more is taken: ``ForkedProcess`` in a child, ``EngineHung`` after a hang."""
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)
        if self.is_closed:
            raise self._make_error()

    def put(self, run: Callable[[Any], None], sink: Sink) -> None:
        """Hand a command over. Raises as ``require_open``."""
        self.require_open()
        self._queue.put(Command(run, sink))
        # Why: without a lock, which a finalizer could ask for in the thread that has it. Whoever closes sets the mark
        # before it empties the queue, so one of the two finds this command.
        if self.is_closed:
            end_sinks((command.sink for command in self.take(None)), self._make_error())

    def abort(self, sink: Sink) -> None:
        """Abort a sink's request before the next step; without one this does nothing."""
        if not self.is_closed:
            self.aborts.append(sink)

    def wait(self, timeout_s: float) -> Command | None:
        """Return the next command, sleeping until there is one, but no longer than ``timeout_s`` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def take(self, most: int | None) -> Iterator[Command]:
        """Yield the commands that are there, at most so many, without sleeping."""
        return islice(self._take_all(), most)

    def close(self, make_error: Callable[[], EngineClosed] | None = None) -> None:
        """Refuse further calls, with ``EngineClosed`` or an error of another kind."""
        if not self.is_closed:
            self._make_error = make_error or _closed
        self.is_closed = True

    def end_all(self, error: EngineClosed) -> None:
        """End every sink that the engine does not know yet, after ``close``."""
        held = self.places.sinks()
        end_sinks(held, error)
        for sink in held:
            self.places.give_back(sink)
        end_sinks((command.sink for command in self.take(None)), error)

    def _take_all(self) -> Iterator[Command]:
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return


def end_sinks(sinks: Iterable[Sink], error: Exception) -> None:
    """End sinks with an error and wake their readers; one that cannot be ended leaves the others alone."""
    for sink in sinks:
        try:
            wake([sink.end(error)])
        except Exception:  # whatever it is, the next one must be told
            _log.exception("a reader could not be told of the end of its engine")


def as_exception(error: BaseException) -> Exception:
    """Return what a caller's function raised as an error that ends neither an event loop nor a coroutine of theirs."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    _log.error("a caller's function raised %s", type(error).__name__, exc_info=error)
    replaced = RuntimeError(f"a function that was called for this caller raised {type(error).__name__}")
    replaced.__cause__ = error
    return replaced


def _closed() -> EngineClosed:
    return EngineClosed("this engine is closed; make a new one.")

"""What runs on the engine's own thread: take commands between steps, step, deliver.

Owns the order of these three, every reader that waits for output, and when it gets some: deltas are made when they are
due, not when their tokens are. Only commands from ``async_engine`` tell it what to do; ``stream`` hands deltas over.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, ForkedProcess, PagedcoreError, StepFailed
from pagedcore.outputs import Delta
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.requests.input_processor import ProcessedRequest
from pagedcore.requests.output_processor import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.serving.health import IDLE_CHECK_S, Progress
from pagedcore.serving.stream import CompletionFuture, OutputSink, Stream, Waiter, wake

Command = Callable[["EngineLoop"], None]
"""What a caller asks for; it runs on the engine thread, between two steps."""
LULL_S: Final = 0.001
"""How long nothing must come before an engine that was idle takes its first step, in seconds."""
GATHER_S: Final = 0.01
"""The longest it waits for that."""
READERS_PER_INTERVAL: Final = 50
"""Readers that get their output once per interval; with more of them intervals are longer in proportion."""
_T = TypeVar("_T")


class Commands:
    """What callers ask of the engine thread, in order.

    Invariant: a command that ``put`` took is carried out.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()
        # Why: re-entrant, because the garbage collector may cancel a stream while this thread is in ``put``.
        self._lock = threading.RLock()
        self._process_id = os.getpid()
        self.is_closed = False
        """Whether ``put`` takes no more."""

    def require_process(self) -> None:
        """Raise ``ForkedProcess`` in a forked child, which has no engine thread."""
        if os.getpid() != self._process_id:
            raise ForkedProcess(self._process_id)

    def put(self, command: Command) -> None:
        """Hand a command over. Raises ``EngineClosed`` if the engine thread takes no more."""
        # Why: before the lock, which another thread may have held when the process was forked.
        self.require_process()
        with self._lock:
            if self.is_closed:
                raise EngineClosed("this engine is closed; make a new one.")
            self._queue.put(command)

    def wait(self, timeout_s: float) -> Command | None:
        """Return the next command, sleeping until there is one, but no longer than ``timeout_s`` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None

    def take_all(self) -> Iterator[Command]:
        """Yield the commands that are there, without sleeping."""
        while not self._queue.empty():
            yield self._queue.get()

    def close(self) -> Iterator[Command]:
        """Refuse further commands and yield those that came before."""
        with self._lock:
            self.is_closed = True
        return self.take_all()


@dataclass(eq=False, repr=False)
class StreamFlusher:
    """Says when which pending output is due: a request's first at once, later output of all requests together, every
    ``interval_s``, or less often if there are more than ``READERS_PER_INTERVAL`` readers.

    Why: a delta of ten steps takes the engine thread as long as a delta of one, and waking a reader costs an event loop
    ten to fifty microseconds, which the engine thread has to wait for; this keeps both to a few per cent of the time,
    however many readers there are. And a loop that wakes takes the processor from the threads that compute, which is
    why it wakes once for all of its readers.

    Invariant: output waits for less than such an interval and the length of a step.
    """

    interval_s: float
    clock: Clock
    _next_s: float = field(default=-math.inf, init=False)
    _readers: dict[Request, Stream] = field(default_factory=dict, init=False)
    _without_first: set[Request] = field(default_factory=set, init=False)
    _pending: dict[Request, list[PendingOutput]] = field(default_factory=dict, init=False)

    def expect(self, request: Request, stream: Stream) -> None:
        """Deliver a request's output to a stream from now on."""
        self._readers[request] = stream
        self._without_first.add(request)

    def add(self, pending: Iterable[PendingOutput]) -> None:
        """Keep what a step made pending."""
        for one in pending if self._readers else ():
            own = self._pending.setdefault(one.request, [])
            if one not in own:
                own.append(one)

    def take_due(self) -> dict[Stream, list[PendingOutput]]:
        """Take what is due; call it once after every step."""
        now = self.clock.now()
        if now >= self._next_s:
            due = self._take(list(self._pending))
            self._next_s = now + self.interval_s * max(1.0, len(due) / READERS_PER_INTERVAL)
            return due
        return self._take([request for request in self._without_first if request in self._pending])

    def take(self, request: Request) -> list[PendingOutput]:
        """Take the pending output of one request, which may be none, and expect no more of it."""
        self._readers.pop(request, None)
        self._without_first.discard(request)
        return sorted(self._pending.pop(request, []), key=lambda one: one.index)

    def _take(self, requests: Iterable[Request]) -> dict[Stream, list[PendingOutput]]:
        due: dict[Stream, list[PendingOutput]] = {}
        for request in requests:
            pending = self._pending.pop(request)
            self._without_first.discard(request)
            if (stream := self._readers.get(request)) is not None:
                due[stream] = pending
        return due


class EngineLoop:
    """What runs on the thread: take commands, step, deliver.

    Invariant: a sink is in ``_sinks`` exactly while its request runs in the engine, in ``_queued`` before that.
    """

    def __init__(self, engine: Engine, commands: Commands, flusher: StreamFlusher) -> None:
        self.engine = engine
        self.progress = Progress()
        self._flusher = flusher
        self._commands = commands
        self._sinks: dict[Request, OutputSink] = {}
        self._queued: deque[tuple[ProcessedRequest, OutputSink]] = deque()
        self._is_stopping = False

    def run(self) -> None:
        """Serve until ``stop``; whatever happens, every sink gets its end and the engine is closed."""
        cause: BaseException | None = None
        try:
            while not self._is_stopping:
                while self._queued and self.engine.can_accept(self._queued[0][0].params.num_initial_sequences):
                    self.accept(*self._queued.popleft(), may_wait=False)
                self._take_commands()
                pending = self.engine.step_pending()
                self._deliver(pending)
                if not self.engine.is_stalled:
                    self.progress.step_ended(has_output=bool(pending), has_failed=any(
                        one.sequence.finish_reason == "error" and isinstance(one.request.error, StepFailed)
                        for one in pending
                    ))
        except BaseException as error:
            cause = error
            raise
        finally:
            self.progress.has_ended = True
            self._shut_down(cause)

    def stop(self) -> None:
        """Leave the loop after the step in flight."""
        self._is_stopping = True

    def accept(self, processed: ProcessedRequest, sink: OutputSink, may_wait: bool) -> None:
        """Take a request for a sink, queue it until there is room, or end the sink with the reason."""
        if sink.is_cancelled:
            return
        has_room = not self._queued and self.engine.can_accept(processed.params.num_initial_sequences)
        if may_wait and not self._is_stopping and not has_room:
            self._queued.append((processed, sink))
            return
        self.serve(lambda: self.engine.accept(processed), sink)

    def serve(self, begin: Callable[[], Request], sink: OutputSink) -> None:
        """Begin a request or a session's turn for a sink, or end the sink with the reason."""
        try:
            request = begin()
        except PagedcoreError as error:
            wake([sink.end(error)])
            return
        self._sinks[request] = sink
        if isinstance(sink, Stream):
            self._flusher.expect(request, sink)

    def call(self, function: Callable[[Engine], _T], result: Future[_T]) -> None:
        """Settle a future with what a function of the engine returns or raises, unless it was cancelled."""
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(self.engine))
        except Exception as error:  # the caller gets it, and the engine continues
            result.set_exception(error)

    def cancel_sink(self, sink: OutputSink) -> None:
        """Abort the request whose reader is gone."""
        if self._queued:
            self._queued = deque(queued for queued in self._queued if queued[1] is not sink)
        for request, other in list(self._sinks.items()):
            if other is sink:
                # Why: a session may be closed by one task while another one reads its completion.
                last = self._take_deltas(request)
                request.abort()
                wake([self._end_request(request, last)])

    def _take_commands(self) -> None:
        if not self.engine.has_pending_requests():
            if (command := self._commands.wait(IDLE_CHECK_S)) is None:
                self.engine.idle()
            else:
                command(self)
                self._gather()
        for command in self._commands.take_all():
            command(self)

    def _gather(self) -> None:
        """Let requests that come together begin together: those that missed a step need one more for their last tokens,
        which costs about as much as if all were in it.
        """
        clock = MonotonicClock()
        end_s = clock.now() + GATHER_S
        while self.engine.has_pending_requests() and (time_left_s := end_s - clock.now()) > 0:
            if (command := self._commands.wait(min(LULL_S, time_left_s))) is None:
                return
            command(self)

    def _deliver(self, pending: list[PendingOutput]) -> None:
        self._flusher.add(pending)
        # Why: several completions of a request may end in one step, and one that was added on this thread has no sink.
        ended = dict.fromkeys(one.request for one in pending if one.sequence.finish_reason is not None
                              and one.request.is_done and one.request in self._sinks)
        waiters, sleeping = list[Waiter | None](), dict[Waiter, Stream]()
        for request in ended:
            last = self._take_deltas(request)
            if isinstance(self._sinks[request], Stream):
                last[-1] = replace(last[-1], usage=request.usage, prompt_logprobs=request.prompt_logprobs)
            waiters.append(self._end_request(request, last))
        for stream, due in self._flusher.take_due().items():
            if (waiter := stream.put([one.take_delta() for one in due])) is not None:
                sleeping[waiter] = stream
        for lost in wake([*sleeping, *waiters]):
            # Why: its loop was closed, so its reader will never come back to say that it left.
            if lost in sleeping:
                self.cancel_sink(sleeping[lost])

    def _take_deltas(self, request: Request) -> list[Delta]:
        return [one.take_delta() for one in self._flusher.take(request)]

    def _end_request(self, request: Request, last: list[Delta]) -> Waiter | None:
        sink = self._sinks.pop(request)
        if isinstance(sink, CompletionFuture):
            sink.complete(request.output())
        if not request.sequences[0].is_in_session:
            request.remove()
        return sink.end(None, last)

    def _shut_down(self, cause: BaseException | None) -> None:
        error = EngineClosed("the engine was closed while this request was in flight.")
        error.__cause__ = cause
        wake([sink.end(error, self._take_deltas(request)) for request, sink in self._sinks.items()])
        wake([sink.end(error) for _, sink in self._queued])
        self._sinks.clear()
        self._queued.clear()
        self.engine.close()
        # Why: what was sent while stopping gets its result too; accepting fails now, because the engine is closed.
        for command in self._commands.close():
            command(self)

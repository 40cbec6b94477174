"""What runs on the engine's own thread: take commands between steps, step, deliver.

Owns the order of these three, every reader that waits for output, and when it gets some: deltas are made when they are
due, not when their tokens are. What callers send is in ``commands``; ``stream`` hands deltas over.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, EngineHung, QueueTimeout, RequestAborted
from pagedcore.outputs import Delta, Explanation
from pagedcore.protocols import Clock
from pagedcore.requests.input_processor import ProcessedRequest
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.serving.commands import Command, Commands, as_exception, end_sinks
from pagedcore.serving.health import IDLE_CHECK_S, Progress
from pagedcore.serving.stream import CompletionFuture, OutputSink, Stream, Waiter, wake

LULL_S: Final = 0.001
"""How long nothing must come before an engine that was idle takes its first step, in seconds."""
GATHER_S: Final = 0.01
"""The longest it waits for that, and between two looks around while all requests wait for company."""
MAX_COMMANDS: Final = 1024
"""Commands between two steps; further ones come after the next step."""
COMMANDS_S: Final = 0.01
"""Seconds between two steps after which no further command is begun."""
READERS_PER_INTERVAL: Final = 50
"""Readers that get their output once per interval; with more of them intervals are longer in proportion."""
_T = TypeVar("_T")


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
    _without_first: dict[Request, None] = field(default_factory=dict, init=False)
    _pending: dict[Request, list[PendingOutput]] = field(default_factory=dict, init=False)

    def expect(self, request: Request, stream: Stream) -> None:
        """Deliver a request's output to a stream from now on."""
        self._readers[request] = stream
        self._without_first[request] = None

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
        self._without_first.pop(request, None)
        return sorted(self._pending.pop(request, []), key=lambda one: one.index)

    def _take(self, requests: Iterable[Request]) -> dict[Stream, list[PendingOutput]]:
        due: dict[Stream, list[PendingOutput]] = {}
        for request in requests:
            pending = self._pending.pop(request)
            self._without_first.pop(request, None)
            if (stream := self._readers.get(request)) is not None:
                due[stream] = pending
        return due


class EngineLoop:
    """What runs on the thread: take commands, step, deliver.

    Invariant: a sink is in ``_sinks`` exactly while its request runs in the engine, has a place before that, and gets
    its end in every case: by the thread, or by the one that gives it up.
    """

    def __init__(self, engine: Engine, commands: Commands, flusher: StreamFlusher) -> None:
        self.engine = engine
        self._gather_s = min(GATHER_S, engine.max_lull_s)
        self.progress = Progress()
        self.is_over = threading.Event()
        """Set when nothing is left to wait for: the thread has ended, or was given up."""
        self._flusher = flusher
        self._commands = commands
        self._clock = flusher.clock
        self._sinks: dict[Request, OutputSink] = {}
        self._requests: dict[OutputSink, Request] = {}
        # Why ordered: its first entry is found in constant time, also after thousands of others were taken out.
        self._held: OrderedDict[OutputSink, tuple[ProcessedRequest, float]] = OrderedDict()
        self._num_finished = engine.num_finished
        self._present: Command | None = None
        self._is_stopping = self._has_idle_work = False
        self._num_holding = 0

    def run(self) -> None:
        """Serve until ``stop``; whatever happens, every sink gets its end and the engine is closed."""
        error = EngineClosed("the engine was closed while this request was in flight.")
        try:
            while not self._is_stopping and not self._commands.is_closed:
                self.run_once()
        except BaseException as cause:
            error.__cause__ = cause
            raise
        finally:
            self._shut_down(error)

    def run_once(self) -> None:
        """Take commands, step once, deliver."""
        self._take_aborts()
        self._admit_held()
        self._take_commands()
        pending = self.engine.step_pending()
        self._deliver(pending)
        self._end_others()
        if not self.engine.is_stalled:
            self.progress.step_ended(has_output=bool(pending), has_failed=self.engine.has_failed)

    def stop(self) -> None:
        """Leave the loop after the step in flight."""
        self._is_stopping = True

    def give_up(self, seconds: float) -> None:
        """Leave a thread that hangs to itself, with all it may still touch; every reader gets ``EngineHung``.

        Called on any other thread. If the thread comes back, it delivers nothing and closes the engine.
        """
        self.progress.is_given_up = True
        self._commands.close(partial(EngineHung, seconds))
        self.is_over.set()
        self._end_all(EngineHung(seconds))
        self.engine.note_trouble("hang")

    def accept(self, processed: ProcessedRequest, sink: OutputSink) -> None:
        """Take a request for a sink that has a place, or hold it until the engine's queue has room."""
        if sink.is_cancelled:
            self._commands.places.give_back(sink)
        elif self._held or self._is_holding or not self.engine.can_accept(processed.params.num_initial_sequences):
            self._held[sink] = processed, self._clock.now()
        else:
            self._admit(processed, sink)

    def hold(self, is_held: bool) -> None:
        """Hold requests that come from now on, until each caller has said that it holds them no longer; their time
        limits go on.
        """
        self._num_holding += 1 if is_held else -1

    @property
    def num_held(self) -> int:
        """How many requests are held."""
        return len(self._held)

    @property
    def _is_holding(self) -> bool:
        return self._num_holding > 0 or self.engine.sleep_level > 0

    def serve(self, begin: Callable[[], Request], sink: OutputSink) -> None:
        """Begin a request or a session's turn for a sink, or end the sink with the reason."""
        if sink.is_cancelled:
            # Why: its abort may have come before, and ended nothing. Another task may wait for a session's turn.
            self._commands.places.give_back(sink)
            wake([sink.end()])
            return
        try:
            request = begin()
        except BaseException as error:  # of whatever kind, it is this caller's
            wake([sink.end(as_exception(error))])
            return
        self._sinks[request], self._requests[sink] = sink, request
        if isinstance(sink, Stream):
            self._flusher.expect(request, sink)

    def call(self, function: Callable[[Engine], _T], result: CompletionFuture[_T]) -> None:
        """Settle a future with what a function of the engine returns, unless it was cancelled."""
        if not result.is_cancelled:
            result.complete(function(self.engine))

    def explain(self, request_id: str) -> Explanation:
        """As ``Engine.explain``, for held requests too."""
        for place, (processed, since_s) in enumerate(self._held.values()):
            if processed.options.request_id == request_id:
                return Explanation(request_id, "held", "rows", self._clock.now() - since_s, num_before=place)
        return self.engine.explain(request_id)

    def abort(self, request_id: str, salt: bytes) -> bool:
        """As ``Engine.abort``, for held requests too."""
        if self.engine.abort(request_id, cache_salt=salt or None):
            return True
        for sink, (processed, _) in self._held.items():
            if (processed.options.salt, processed.options.request_id) == (salt, request_id):
                del self._held[sink]
                self._commands.places.give_back(sink)
                wake([sink.end(RequestAborted())])
                return True
        return False

    def cancel_sink(self, sink: Any) -> None:
        """Abort the request whose reader is gone, if it has one."""
        if self._held.pop(sink, None) is not None:
            self._commands.places.give_back(sink)
        elif (request := self._requests.get(sink)) is not None:
            # Why: a session may be closed by one task while another one reads its completion.
            last = self._take_deltas(request)
            request.abort()
            wake([self._end_request(request, last)])

    def _take_aborts(self) -> None:
        aborts = self._commands.aborts
        # Why counted: others may come meanwhile, without end.
        for _ in range(len(aborts)):
            self.cancel_sink(aborts.popleft())

    def _admit_held(self) -> None:
        limit_s = self.engine.turn_rules.queue_timeout_s
        while self._held:
            sink, (processed, since_s) = next(iter(self._held.items()))
            if limit_s is not None and self._clock.now() - since_s > limit_s:
                del self._held[sink]
                self._commands.places.give_back(sink)
                wake([sink.end(QueueTimeout(limit_s))])
            elif not self._is_holding and self.engine.can_accept(processed.params.num_initial_sequences):
                del self._held[sink]
                self._admit(processed, sink, self._clock.now() - since_s)
            else:
                return

    def _admit(self, processed: ProcessedRequest, sink: OutputSink, held_s: float = 0.0) -> None:
        def begin() -> Request:
            with self._commands.places.hand_over(sink):
                return self.engine.accept(processed, held_s=held_s)

        self.serve(begin, sink)

    def _take_commands(self) -> None:
        if not self.engine.has_pending_requests():
            self.progress.is_idle = True
            command = self._commands.wait(0.0 if self._has_idle_work else IDLE_CHECK_S)
            self.progress.is_idle = False
            self._has_idle_work = command is None and self.engine.idle()
            if command is not None:
                self._carry_out(command)
                self._gather()
        elif ((gated_s := self.engine.gated_s) > 0.0
              and (command := self._commands.wait(min(gated_s, GATHER_S))) is not None):
            self._carry_out(command)
        end_s = self._clock.now() + COMMANDS_S
        for command in self._commands.take(MAX_COMMANDS):
            self._carry_out(command)
            if self._clock.now() > end_s:
                return

    def _gather(self) -> None:
        """Let requests that come together begin together: those that missed a step need one more for their last tokens,
        which costs about as much as if all were in it.
        """
        end_s = self._clock.now() + self._gather_s
        while self.engine.has_pending_requests() and (time_left_s := end_s - self._clock.now()) > 0:
            if (command := self._commands.wait(min(LULL_S, time_left_s))) is None:
                return
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        # Why here too: what a caller aborted before it sent this command is gone when the command runs.
        self._take_aborts()
        self._present = command
        try:
            command.run(self)
        except BaseException as error:  # the caller gets it, and the engine continues
            wake([command.sink.end(as_exception(error))])
        self._present = None

    def _deliver(self, pending: list[PendingOutput]) -> None:
        self._flusher.add(pending)
        # Why: several completions of a request may end in one step, and one that was added on this thread has no sink.
        ended = dict.fromkeys(one.request for one in pending if one.sequence.finish_reason is not None
                              and one.request.is_done and one.request in self._sinks)
        waiters, sleeping = list[Waiter | None](), dict[Waiter, Stream]()
        try:
            for request in ended:
                waiters.append(self._finish(request, self._flusher.take(request)))
            for stream, due in self._flusher.take_due().items():
                if (waiter := stream.put([one.take_delta() for one in due])) is not None:
                    sleeping[waiter] = stream
        finally:
            # Why: a reader that was taken from its stream is woken by nothing else.
            lost = wake([*sleeping, *waiters])
        for waiter in lost:
            # Why: its loop was closed, so its reader will never come back to say that it left.
            if waiter in sleeping:
                self.cancel_sink(sleeping[waiter])

    def _end_others(self) -> None:
        """End the sinks of requests that neither a step of this loop nor their readers have ended: a function of a
        caller's, which may have made steps too, an observer, a session that was closed.
        """
        if self.engine.num_finished == self._num_finished:
            return
        for request in [request for request in self._sinks if request.is_done]:
            self._flusher.take(request)
            wake([self._finish(request, self.engine.pending_of(request))])
        self._num_finished = self.engine.num_finished

    def _finish(self, request: Request, pending: list[PendingOutput]) -> Waiter | None:
        last = [one.take_delta() for one in pending]
        if isinstance(self._sinks[request], Stream):
            last[-1] = replace(last[-1], usage=request.usage, prompt_logprobs=request.prompt_logprobs,
                               metrics=request.metrics)
        return self._end_request(request, last)

    def _take_deltas(self, request: Request) -> list[Delta]:
        return [one.take_delta() for one in self._flusher.take(request)]

    def _end_request(self, request: Request, last: list[Delta]) -> Waiter | None:
        sink = self._sinks[request]
        if isinstance(sink, CompletionFuture):
            sink.complete(request.output())
        if not request.sequences[0].is_in_session:
            request.remove()
        # Why last: whatever raises before, the sink still gets its end.
        del self._sinks[request], self._requests[sink]
        self._num_finished += 1
        return sink.end(None, last)

    def _shut_down(self, error: EngineClosed) -> None:
        self.progress.has_ended = True
        try:
            self._commands.close()
            for request, sink in list(self._sinks.items()):
                with suppress(Exception):  # the end of the stream says that something is missing
                    wake([sink.end(error, self._take_deltas(request))])
            self._end_all(error)
            self._commands.aborts.clear()
            self.engine.close()
        finally:
            self.is_over.set()

    def _end_all(self, error: EngineClosed) -> None:
        end_sinks(list(self._sinks.values()), error)
        self._commands.end_all(error)
        if (present := self._present) is not None:
            end_sinks([present.sink], error)

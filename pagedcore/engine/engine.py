"""The engine at the step level: one step = plan, reserve, execute, commit, publish.

A failed step ends the requests of its batch and nobody else; how results and failures become outputs is in
``outcomes``, how an engine is put together in ``assembly``. ``Engine`` runs in the caller's thread and is
deterministic; ``async_engine`` puts it on a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from pagedcore.errors import EngineClosed
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.outputs import Delta, RequestOutput, TokenText
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.output_text import CompletionTexts, PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.stats import Counters, EngineStats
from pagedcore.requests.turns import Turns
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions.parking import Parking
from pagedcore.sessions.session_store import SessionStore

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.plugins.observers import EngineHooks
    from pagedcore.scheduler.invariants import InvariantChecker
    from pagedcore.scheduler.plan import SchedulePlan
    from pagedcore.sessions.session import Session


class Engine:
    """Continuous batching over a paged KV pool, one ``step()`` at a time.

    Not thread-safe: use it from one thread, or use ``AsyncEngine``.

    Invariant: every accepted request gets exactly one finish reason per turn.
    Invariant: between steps every block is free, cached, on its way, or in the table of a live sequence.
    """

    def __init__(self, parts: EngineComponents, clock: Clock | None = None) -> None:
        self._parts = parts
        self._config = parts.config
        self.input_processor: InputProcessor = parts.input_processor
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._hooks = parts.hooks
        self._clock = clock if clock is not None else MonotonicClock()
        self._answers = CompletionTexts(parts.input_processor.tokenizer)
        self._requests = RequestTable(
            self, parts.config.seed, parts.kv_cache.device.hasher, shares_prefixes=parts.config.enable_prefix_caching
        )
        self._counters = Counters()
        self._output_processor = OutputProcessor(parts, self._requests, self._answers, self._counters, self._clock)
        self._turns = Turns(
            parts, self._requests, self._answers, self._output_processor.contests, self._counters, self._clock
        )
        self._mover = KVTransfers(parts.store, parts.scheduler.moves, self._clock)
        if parts.kv_cache.host is not None and parts.config.preemption == "auto":
            parts.calibrate(self._mover, self._clock)
        self._sessions = SessionStore(self, parts, self._turns, Parking(parts, self._mover, self._clock))
        self._is_closed = False
        self._laws: InvariantChecker | None = None
        if parts.config.check_invariants:
            from pagedcore.scheduler.invariants import InvariantChecker

            self._laws = InvariantChecker(parts.scheduler)
        self.is_stalled = False
        """Whether the last step computed nothing although there was work: all of it waits for blocks on their way."""
        self._hooks.engine_started(parts.info)

    @classmethod
    def from_pretrained(cls, model: Any, **settings: Any) -> Engine:
        """Build an engine.

        Args:
            model: ``"demo"``, a directory, a hub id, a loaded ``PreTrainedModel`` (taken over: its linears are
                repacked), or your own ``ModelBackend``.
            **settings: the fields of ``EngineConfig``; ``tokenizer`` may also be a tokenizer object.

        Raises:
            InvalidConfig: a setting is unknown or out of range, or the model cannot run here.
        """
        from pagedcore.engine.builder import build_components

        return cls(build_components(model, **settings))

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
        cache_salt: str | bytes | None = None,
    ) -> Request:
        """Accept a request; it waits until a step has room for it.

        Args:
            prompt: text, token ids, or chat messages.
            params: sampling parameters; ``None`` means greedy up to the model's length.
            priority: higher runs first under the "priority" policy.
            cache_salt: requests with another salt never share cached blocks with this one, nor can they tell by its
                speed what it was asked; 1 to 64 bytes. Give each tenant its own.

        Raises:
            InvalidRequest: the request is refused; the subclass names the input, the value and the limit.
            EngineOverloaded: the waiting queue is full.
            EngineClosed: after ``close()``.
        """
        return self.accept(self.prepare(prompt, params, priority=priority, cache_salt=cache_salt))

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
        cache_salt: str | bytes | None = None,
    ) -> ProcessedRequest:
        """Tokenise and validate without taking the request; callable from any thread. Raises as ``add_request``."""
        return self.input_processor.prepare(prompt, params, priority, cache_salt)

    def accept(self, prepared: ProcessedRequest) -> Request:
        """Take a prepared request. Raises ``EngineOverloaded`` or ``EngineClosed``; then nothing was taken."""
        self._require_open()
        params = prepared.params
        self._scheduler.require_room(len(prepared.token_ids) + prepared.max_tokens, params.num_initial_sequences)
        request = self._requests.add(prepared, self._clock.now())
        self._turns.start(request, len(prepared.token_ids))
        return request

    def extend_request(self, request: Request, prompt: Prompt, params: SamplingParams | None) -> None:
        """Continue a finished request; see ``Request.extend``."""
        self._require_open()
        self._turns.extend(request, prompt, params)

    def session(
        self, params: SamplingParams | None = None, *, cache_salt: str | bytes | None = None, priority: int = 0
    ) -> Session:
        """Open a conversation that can wait, fork and outlive the process; arguments as ``add_request``.

        Raises:
            InvalidRequest: the parameters are refused, or ask for more than one answer.
            TooManySessions: as many as allowed are open.
        """
        return self._sessions.open_checked(params, cache_salt, priority)

    def import_session(self, path: str | os.PathLike[str], *, cache_salt: str | bytes | None = None) -> Session:
        """Open an exported conversation; it goes on as it would have where it was exported.

        Raises:
            InvalidSessionFile: the file is damaged or no session file; ``ModelMismatch``: another model's.
            InvalidSalt: the session had a cache salt, and none is given.
            TooManySessions: as many as allowed are open. ``OSError``: the file cannot be read.
        """
        return self._sessions.take_in(self._sessions.read(path), cache_salt)

    @property
    def sessions(self) -> SessionStore:
        """The open sessions."""
        return self._sessions

    def abort_request(self, request_id: str) -> bool:
        """End a request now and free its blocks; return whether it was live. Unknown ids are no error."""
        request = self._requests.find(request_id)
        if request is None or request.is_done:
            return False
        self._output_processor.abort(request)
        self._move_blocks()
        return True

    def remove_request(self, request: Request) -> None:
        """Forget a finished request and free its blocks; a second call does nothing."""
        if self._requests.remove(request):
            for sequence in request.sequences:
                self._scheduler.remove_sequence(sequence)
                self._answers.close(sequence)

    def token_text(self, token_id: int) -> TokenText:
        """Say what a token stands for, from any thread. Raises ``InvalidRequest`` outside of the vocabulary."""
        return self.input_processor.token_text(token_id)

    def has_pending_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    def step(self) -> list[Delta]:
        """Run one step: every scheduled sequence advances; return what was added to each answer.

        Raises:
            EngineClosed: after ``close()``.
        """
        return list(map(self._output_processor.take_delta, self.step_pending()))

    def take_delta(self, news: PendingOutput) -> Delta:
        """Return what was added to an answer since its last delta."""
        return self._output_processor.take_delta(news)

    def step_pending(self) -> list[PendingOutput]:
        """Run one step, and say which answers have news instead of telling them; ``take_delta`` does, at any time.

        Why: for whoever tells of several steps at once. Deltas take 4 % of a small model's step with 64 answers.
        """
        pending = self._run_step()
        if self._laws is not None:
            self._laws.check()
        return pending

    def _run_step(self) -> list[PendingOutput]:
        self._require_open()
        self._sessions.parking.expire()
        expired = self._output_processor.expire_waiting(self._config.queue_timeout_s)
        plan = self._next_plan()
        self.is_stalled = not plan.rows and self._scheduler.has_work
        if not plan.rows:
            self._mover.settle(wait=self.is_stalled)
            return expired
        self._output_processor.note_started(plan)
        copies, before_s = self._scheduler.reserve(plan), self._clock.now()
        try:
            if copies:
                self._mover.copy(copies)
            sampled = self._runner.execute(plan.rows, self._parts.kv_cache.device)
        except Exception as error:
            self._scheduler.rollback(plan)
            return expired + self._output_processor.fail(plan, error)
        except BaseException:
            self._scheduler.rollback(plan)
            raise
        self._scheduler.costs.step.observe(plan.num_tokens, self._clock.now() - before_s)
        news = self._output_processor.commit(plan, sampled)
        self._move_blocks()
        self._output_processor.note_step(plan, self.stats)
        return expired + news

    def _next_plan(self) -> SchedulePlan:
        """Make room as long as plans ask for it, and return one that computes, or nothing while blocks move."""
        self._move_blocks()
        plan = self._scheduler.schedule()
        while plan.moves_blocks:
            self._mover.start(self._scheduler.make_room(plan))
            plan = self._scheduler.schedule()
        return plan

    def _move_blocks(self) -> None:
        self._mover.advance()

    def generate(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None, *,
        show_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer many prompts and return their outputs in the same order.

        Args:
            prompts: any number; they are fed to the waiting queue as it has room.
            params: one for all, or one per prompt.
            show_progress: a progress bar on stderr; ``None`` shows it on terminals only.

        Raises:
            InvalidRequest: a prompt or its parameters are refused; then none was started.
        """
        from pagedcore.engine.offline import run_offline

        return run_offline(self, prompts, params, show_progress=show_progress)

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all answers of a request as they stand."""
        return self._output_processor.output_of(request)

    def stats(self) -> EngineStats:
        """Return a snapshot of counters and occupancy."""
        return self._parts.stats(self._counters)

    @property
    def requests(self) -> Iterable[Request]:
        """All requests that were not removed, oldest first."""
        return self._requests

    @property
    def hooks(self) -> EngineHooks:
        """Who is told of what happens here; further observers may be added, on the engine's thread."""
        return self._hooks

    @property
    def scheduler(self) -> Any:
        """The scheduler, for invariant checks and observation; do not call its verbs."""
        return self._scheduler

    def can_accept(self, num_sequences: int = 1) -> bool:
        """Whether the waiting queue has room for a request with this many answers."""
        return self._scheduler.waiting.num_free_slots >= num_sequences

    def close(self) -> None:
        """Abort everything and refuse further calls; a second call does nothing."""
        if self._is_closed:
            return
        self._sessions.close()
        for request in self._requests:
            self.abort_request(request.request_id)
            self.remove_request(request)
        self._is_closed = True
        self._hooks.engine_stopped(self._parts.info)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("this engine is closed; make a new one.")

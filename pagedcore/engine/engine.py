"""The engine at the step level: requests come in, steps are run, outputs go out.

``Engine`` runs in the caller's thread and is deterministic; ``serving`` puts it on a thread of its own. How an engine
is built is in ``builder``, what a step is and how it is undone in ``step``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Unpack

from pagedcore.engine.calibration import calibrate
from pagedcore.engine.step import StepRunner
from pagedcore.engine.step_report import StepReport
from pagedcore.engine.whole_calls import WholeCalls
from pagedcore.errors import EngineClosed, InternalError, NotPicklable
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.request_options import NO_OPTIONS, OptionKeywords, read_options
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest, Prompt
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.stats import EngineStats
from pagedcore.requests.turn_rules import TurnRules
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import SequenceStatus
from pagedcore.sessions.kv_file import KVDirectory
from pagedcore.sessions.parking import Parking
from pagedcore.sessions.session import Session, SessionStore

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents

_MOST_SLEEP_S: Final = 0.01
"""The longest that one step sleeps for a gate, so that its caller may bring further requests meanwhile."""


class Engine(WholeCalls):
    """Continuous batching over a paged KV pool, one ``step()`` at a time.

    One thread at a time: another one's call raises ``EngineInUse``. ``AsyncEngine`` is for callers on several threads.

    Invariant: every accepted request gets exactly one finish reason per turn.
    Invariant: between steps every block is free, cached, on its way, or in the table of a live sequence.
    """

    def __init__(self, components: EngineComponents, clock: Clock | None = None) -> None:
        config, kv_cache = components.config, components.kv_cache
        self._components = components
        self.input_processor: InputProcessor = components.input_processor
        self._input_processor = self.input_processor
        self.scheduler = scheduler = components.scheduler
        """For invariant checks and observation; do not call its verbs."""
        self.hooks = components.hooks
        """The observers of this engine; further ones may be added, on the engine's thread."""
        self.chat_format, self.identity = components.chat_format, components.identity
        """``identity`` is equal for engines with the same weights, number format, kernels, versions and context, whose
        greedy completions are the same; unlike any other for a backend that does not describe its weights."""
        self.max_lull_s = math.inf if config.max_wait_ms is None else config.max_wait_s
        """The longest that an owner may let the first request of an idle engine wait for others, in seconds."""
        self._runner = components.runner
        self._clock = clock if clock is not None else MonotonicClock()
        tokenizer, sequence_ids = self.input_processor.tokenizer, count(1)
        self._outputs = OutputProcessor(
            tokenizer, scheduler, sequence_ids, self.hooks, self._clock, self.input_processor.eos_token_ids)
        self.requests = RequestTable(
            self, self.input_processor, self._outputs, scheduler, sequence_ids, self._clock, config.seed,
            config.enable_prefix_caching,
        )
        """All requests that were not removed, oldest first."""
        self._report = StepReport(scheduler, self._outputs)
        self._transfers = KVTransfers(components.store, scheduler.moves, self._clock)
        if kv_cache.host.num_blocks > 0 and config.preemption == "auto":
            self._calibrate(min(components.info.max_model_len, config.max_num_batched_tokens))
        self.turn_rules = TurnRules(scheduler, self._outputs, self._clock, config.queue_timeout_s)
        """Which requests end before they start; its ``queue_timeout_s`` is for an owner to set."""
        self._steps = StepRunner(
            scheduler, components.runner, self._transfers, self._outputs, self.turn_rules, self._clock, self._give_up
        )
        parking = Parking(
            scheduler, self._transfers, components.store, components.kv_format, KVDirectory(config.disk_kv_dir),
            self._clock, self._steps.change,
        )
        self._begin_diagnosis(parking, self._outputs.groups)
        self.sessions = SessionStore(
            self.accept, self._step_or_sleep, self.input_processor, self.requests, parking, components.fingerprint,
            config.session_secret,
        )
        """The open sessions."""
        self._is_closed, self._closing_reason, self._laws = False, "this engine is closed", components.laws
        self.hooks.engine_started(components.info)

    def _calibrate(self, most_tokens: int) -> None:
        try:
            calibrate(self._runner.backend, self.scheduler, self._transfers, self._clock, most_tokens)
        except BaseException:
            # Why: there will be no engine to close.
            self.hooks.at_the_end()
            raise

    @classmethod
    def from_pretrained(cls, model: Any, **settings: Any) -> Engine:
        """Build an engine.

        Args:
            model: ``"demo"``, a directory, a hub id, a ``PreTrainedModel`` (repacked), or your own ``ModelBackend``.
            **settings: fields of ``EngineConfig``, which replace those of ``config``; ``tokenizer`` may be an object.

        Raises:
            InvalidConfig: a setting is unknown or out of range, or the model cannot run here.
        """
        from pagedcore.engine.builder import build_components

        return cls(build_components(model, **settings))

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]
    ) -> Request:
        """Accept a request; it waits until a step has room for it.

        Args:
            prompt: text, token ids, or chat messages.
            params: sampling parameters; ``None`` means greedy up to the model's length.
            **options: the fields of ``RequestOptions``: ``priority``, ``cache_salt``, ``tenant``, ``deadline_s``, ...

        Raises:
            InvalidRequest: the request is refused; the subclass names the input, the value and the limit.
            TextFailed: the tokenizer failed on the prompt.
            EngineOverloaded: the waiting queue is full.
            EngineClosed: after ``close()``.
        """
        self._require_open()
        return self.accept(self.prepare(prompt, params, **options))

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]
    ) -> ProcessedRequest:
        """Tokenise and validate without taking the request; callable from any thread. Raises as ``add_request``."""
        return self.input_processor.process(prompt, params, read_options(options) if options else NO_OPTIONS)

    def accept(
        self, processed: ProcessedRequest, accepted: list[Request] | None = None, held_s: float = 0.0
    ) -> Request:
        """Take a prepared request, and append it to ``accepted``; it arrived ``held_s`` seconds ago.

        Raises as ``add_request``; then nothing was taken.
        """
        self._require_open()
        taken = accepted if accepted is not None else []
        num_before = len(taken)
        try:
            with self._steps.change():
                return self._noted(self.requests.accept(processed, taken, held_s))
        except BaseException:
            # Why: an interrupt may come when it was taken already, and then no caller would know of it.
            self._withdraw(taken[num_before:])
            del taken[num_before:]
            raise

    def extend_request(
        self, request: Request, prompt: Prompt, params: SamplingParams | None, index: int | None
    ) -> None:
        """Continue a completion of a finished request; see ``Request.extend``."""
        self._require_open()
        with self._steps.exclusive():
            processed = self.requests.process_turn(request, prompt, params, index)
            with self._steps.change():
                self.requests.begin_turn(request, processed, index)
                self._noted(request)

    def session(self, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]) -> Session:
        """Open a conversation that can wait, fork and outlive the process; arguments as ``add_request``.

        Raises:
            InvalidRequest: the parameters are refused, or ask for more than one completion.
            TooManySessions: as many as allowed are open.
        """
        self._require_open()
        return self.sessions.open_checked(params, read_options(options))

    def import_session(self, path: str | os.PathLike[str], **options: Unpack[OptionKeywords]) -> Session:
        """Open an exported conversation, which continues as it would have there; options as for ``add_request``.

        Raises:
            InvalidSessionFile: the file is damaged or no session file; ``ModelMismatch``: another model's.
            InvalidSalt: the session had a cache salt, and none is given.
            TooManySessions: as many as allowed are open. ``OSError``: the file cannot be read.
        """
        self._require_open()
        return self.sessions.take_in(self.sessions.read(path), options)

    def abort_request(self, request_id: str) -> bool:
        """End a request now and free its blocks; return whether it was live. Raises ``InvalidRequest`` for no text."""
        self._recover()
        request = self.requests.find(request_id)
        if request is None or request.is_done:
            return False
        with self._steps.change():
            self._outputs.abort(request)
            self._transfers.advance()
        return True

    def abort(self, request_id: str, *, cache_salt: str | bytes | None = None) -> bool:
        """Do the same for a request's own id, or for the label that its caller gave it, under the caller's salt."""
        request = self.requests.find(request_id) or self.requests.labelled(request_id, cache_salt)
        return request is not None and self.abort_request(request.request_id)

    def remove_request(self, request: Request) -> None:
        """Remove a finished request and free its blocks; a second call does nothing."""
        self._recover()
        with self._steps.change():
            self.requests.remove(request)

    def has_pending_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Run one step: every scheduled sequence advances; return what was added to each completion.

        Where all requests wait for company (``min_batch_size``), it sleeps a while, but not longer than they may wait.
        Raises ``EngineClosed`` after ``close()``.
        """
        return [pending.take_delta() for pending in self._step_or_sleep()]

    def pending_of(self, request: Request) -> list[PendingOutput]:
        """Return what may be pending of each completion of a request; of one that was removed, only how it ended."""
        return self._outputs.pending_of(request)

    @property
    def num_finished(self) -> int:
        """How many requests have ended, whatever the reason."""
        return self._outputs.counters.num_finished

    def step_pending(self) -> list[PendingOutput]:
        """Run one step; return completions with pending output, whose ``take_delta`` may be called at any time.

        Why: for a caller who reads several steps at once. Deltas take 4 % of a small model's step with 64 completions.
        """
        self._require_open()
        if self.sessions.parking.next_expiry_s < math.inf:
            self.sessions.parking.expire()
        if is_observed := self.hooks.observes_steps:
            self._report.begin()
        try:
            plan = self._steps.run()
        except (InternalError, EngineClosed) as error:
            self._mention_recording(error, "broken-step")
            raise
        if not plan.rows or self._steps.has_failed or plan.stopped_by != self._wait_log.reason:
            self._look_at(plan)
        if self._laws is not None:
            self._laws.check()
        if plan.rows and is_observed:
            self.hooks.step_done(self._report.describe(plan, self.stats))
        return self._outputs.take_untold()

    def _step_or_sleep(self) -> list[PendingOutput]:
        pending = self.step_pending()
        if not pending and (gated_s := self.gated_s) > 0.0:
            self._clock.sleep(min(gated_s, _MOST_SLEEP_S))
        return pending

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions of a request as they stand."""
        return self._outputs.output_of(request)

    def stats(self) -> EngineStats:
        """Return a snapshot of counters and occupancy."""
        kv_bytes, info, moved = self._components.kv_bytes, self._components.info, self.scheduler.counters
        block_bytes = kv_bytes // info.num_blocks
        return EngineStats(
            **asdict(self.scheduler.stats()),
            **asdict(self._outputs.counters), **self.quote_counters(),
            block_size=info.block_size,
            kv_bytes=kv_bytes,
            swapped_out_bytes=moved.num_blocks_swapped_out * block_bytes,
            swapped_in_bytes=moved.num_blocks_swapped_in * block_bytes,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            attention_backend=info.attention_backend,
            dtype=info.dtype,
            is_schedule_invariant=info.is_schedule_invariant,
        )

    @property
    def is_stalled(self) -> bool:
        """Whether the last step computed nothing although there was work: all of it waits for blocks on their way."""
        return self._steps.is_stalled

    @property
    def gated_s(self) -> float:
        """Seconds for which all requests wait for company, if no further one comes; 0: a step can compute something."""
        return max(0.0, self.scheduler.gated_s(self._clock.now())) if self.scheduler.is_gated else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last step computed nothing because the model failed."""
        return self._steps.has_failed

    def can_accept(self, num_sequences: int = 1) -> bool:
        """Whether the waiting queue has room for a request with this many initial sequences."""
        return self.scheduler.waiting.num_free_slots >= num_sequences

    def idle(self) -> bool:
        """Use a moment without work: end helper threads, take memory ahead; return whether there is more of it."""
        self._runner.idle()
        return self._transfers.populate(self.scheduler.kv_cache.device)

    def close(self) -> None:
        """Abort everything and refuse further calls; a second call does nothing."""
        if self._is_closed:
            return
        with self._steps.exclusive():
            self.sessions.close()
            self._withdraw(self.requests)
            self._is_closed = True
        self.hooks.engine_stopped(self._components.info)

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotPicklable("an engine")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _withdraw(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.abort_request(request.request_id)
            self.remove_request(request)

    def _recover(self) -> None:
        if self._steps.is_torn:
            self._steps.recover()

    def _require_open(self) -> None:
        self._recover()
        if self._is_closed:
            raise EngineClosed(f"{self._closing_reason}; make a new one.")

    def _give_up(self, reason: str) -> None:
        """Close an engine whose queues and blocks are beyond repair: end every request without a look at them."""
        self._is_closed, self._closing_reason = True, reason
        for request in self.requests:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    request.error, sequence.finish_reason = EngineClosed(reason), "error"
                    sequence.status = SequenceStatus.FINISHED
        with suppress(Exception):
            self.scheduler.restart(())
        with suppress(Exception):
            self.sessions.close()
        self.hooks.engine_stopped(self._components.info)

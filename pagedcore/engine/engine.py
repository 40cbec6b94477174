"""The engine at the step level: requests come in, steps are run, outputs go out.

``Engine`` runs in the caller's thread and is deterministic; ``serving`` puts it on a thread of its own. How an engine
is built is in ``builder``, what a step is and how it is undone in ``step``.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Unpack

from pagedcore.embedding_defaults import Pooling
from pagedcore.engine.adapter_verbs import LoadsAdapters, make_loader
from pagedcore.engine.calibration import calibrate
from pagedcore.engine.judging import JudgesTexts
from pagedcore.engine.new_weights import NewWeights, Running, Way, WeightsHolder
from pagedcore.engine.sleeping import Sleeps
from pagedcore.engine.step import StepRunner
from pagedcore.engine.step_report import StepReport
from pagedcore.engine.wait_log import WaitLog
from pagedcore.errors import EngineClosed, InternalError, NotPicklable
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.lazy_names import delegate
from pagedcore.outputs import CompletionScore, Delta, Embedding, Explanation, Quote, RequestOutput, WeightsVersion
from pagedcore.protocols import ChatMessage, Clock, MonotonicClock
from pagedcore.request_options import NO_OPTIONS, OptionKeywords, read_options
from pagedcore.requests.embedding import KEYWORDS, Text, TextEncoder, embedding_of, options_at, texts_of
from pagedcore.requests.infill import Infill
from pagedcore.requests.input_processor import ProcessedRequest, Prompt, is_single
from pagedcore.requests.observers import EngineObserver, ToldLater
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.scoring import CompletionScorer
from pagedcore.requests.stats import EngineStats
from pagedcore.requests.text_verbs import TextVerbs
from pagedcore.requests.turn_rules import TurnRules
from pagedcore.requests.validation import pair_with_params
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.sequence import SequenceStatus
from pagedcore.sessions.kv_file import KVDirectory
from pagedcore.sessions.parking import Parking
from pagedcore.sessions.session import Session, SessionStore
from pagedcore.tokenizer.chat import Chat
from pagedcore.tool_calls.chat_reply import KEYWORDS as CHAT_KEYWORDS
from pagedcore.tool_calls.chat_reply import ChatReply, begin_chat, read_reply

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents

_MOST_SLEEP_S: Final = 0.01
"""The longest that one step sleeps for a gate, so that its caller may bring further requests meanwhile."""


_quote: Callable[..., Quote] = delegate("pagedcore.analysis.quotes.quoting", "quote")
_explain: Callable[..., Explanation] = delegate("pagedcore.analysis.diagnosis.explanation", "explain")
_report_stall = delegate("pagedcore.analysis.diagnosis.explanation", "report_stall")
_recorder: Callable[..., EngineObserver] = delegate("pagedcore.analysis.recorder.dumps", "RecordsEngine")
_take_recording: Callable[..., Callable[[str | os.PathLike[str]], None]] = delegate(
    "pagedcore.analysis.recorder.dumps", "take_recording")


class Engine(JudgesTexts, LoadsAdapters, Sleeps, TextVerbs):
    """Continuous batching over a paged KV pool, one ``step()`` at a time.

    One thread at a time: another one's call raises ``EngineInUse``. ``AsyncEngine`` is for callers on several threads.

    Invariant: every accepted request gets exactly one finish reason per turn.
    Invariant: between steps every block is free, cached, on its way, or in the table of a live sequence.
    """

    def __init__(self, components: EngineComponents, clock: Clock | None = None) -> None:
        config, kv_cache = components.config, components.kv_cache
        self.components = components
        """What it was built from; for observation."""
        self.input_processor = components.input_processor
        self.scheduler = scheduler = components.scheduler
        """For invariant checks and observation; do not call its verbs."""
        self.hooks = components.hooks
        """The plugins that look on; further ones may be added, on the engine's thread."""
        self.chat_format = components.chat_format
        self.generation_defaults = self.input_processor.defaults.as_mapping
        """The model's own sampling parameters, by name: what a request has that does not say otherwise."""
        self.max_lull_s = math.inf if config.max_wait_ms is None else config.max_wait_s
        """The longest that an owner may let the first request of an idle engine wait for others, in seconds."""
        self._runner = components.runner
        self.clock: Clock = clock if clock is not None else MonotonicClock()
        tokenizer, sequence_ids = self.input_processor.tokenizer, count(1)
        self._outputs = OutputProcessor(
            tokenizer, scheduler, sequence_ids, self.hooks, self.clock, self.input_processor.eos_token_ids)
        self.adapter_registry = components.adapters
        """What requests may name as their ``lora``; do not call its verbs but ``read``."""
        self.requests = RequestTable(
            self, self.input_processor, self._outputs, scheduler, sequence_ids, self.clock, config.seed,
            config.enable_prefix_caching, components.adapters, components.num_short_tokens,
        )
        """All requests that were not removed, oldest first."""
        self._report = StepReport(scheduler, self._outputs)
        self._transfers = KVTransfers(
            components.store, scheduler.moves, self.clock, states=components.states[0], windows=components.windows)
        if kv_cache.host.num_blocks > 0 and config.preemption == "auto":
            self._calibrate(min(components.info.max_model_len, config.max_num_batched_tokens))
        self.turn_rules = TurnRules(scheduler, self._outputs, self.clock, config.queue_timeout_s)
        """Which requests end before they start; its ``queue_timeout_s`` is for an owner to set."""
        self._loader = make_loader(self.requests, scheduler, self._outputs)
        self._steps = StepRunner(
            scheduler, components.runner, self._transfers, self._outputs, self.turn_rules, self.clock, self._give_up,
            self._loader)
        self.weights_holder = WeightsHolder(self._steps, self._outputs, components)
        """For ``new_weights``."""
        parking = Parking(
            scheduler, self._transfers, components.store, components.kv_format, KVDirectory(config.disk_kv_dir),
            self.clock, self._steps.change, components.num_short_tokens, *components.states, components.windows)
        self.sessions = SessionStore(
            self.accept, self._step_or_sleep, self._steps.recover, self.input_processor, self.requests, parking,
            components.fingerprint, config.session_secret,
        )
        """The open sessions."""
        self.observers = self._outputs.observers
        """What watches it beside the plugins; see ``add_observer``."""
        self.wait_log = WaitLog()
        """What stopped the waiting queue, and when."""
        self._is_closed, self._has_stopped, self._closing_reason = False, False, "this engine is closed"
        for one in (*components.observers, *([_recorder(self)] if config.flight_recorder != "off" else [])):
            self.add_observer(one)
        self.hooks.engine_started(components.info)

    def _calibrate(self, most_tokens: int) -> None:
        try:
            calibrate(self._runner.backend, self.scheduler, self._transfers, self.clock, most_tokens)
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

    @property
    def identity(self) -> str:
        """Equal for engines with the same weights, number format, kernels, versions, context and
        ``generation_defaults``, whose greedy completions are the same; unlike any other for a backend that does not
        describe its weights, and for weights that were loaded by ``new_weights``."""
        return self.components.identity

    @property
    def weights(self) -> WeightsVersion:
        """Which weights it computes with."""
        return self.requests.weights

    def new_weights(self, version: str = "", *, running: Running = "wait", way: Way = "staged") -> NewWeights:
        """Return a context whose ``load`` takes other weights of the same model; from its end on the engine computes
        what one that is made of them computes, bit for bit.

            with engine.new_weights(version="7") as weights:
                weights.load(model.state_dict())

        Args:
            version: a label for them, of at most 64 letters, digits, dots, colons and dashes.
            running: what becomes of requests that have not ended: "wait" runs them to their ends first, "abort" aborts
                them, "keep" computes their positions again with the new weights before their next tokens.
            way: "staged" makes a second copy ready first, so that a failure leaves the old weights; "in_place" frees
                each matrix when its successor is there, and needs room for the largest one: a failure behind the first
                write leaves an engine that raises ``WeightsIncomplete`` until a whole version is loaded.

        Raises:
            InvalidRequest: an argument is out of range. ``EngineClosed``: after ``close()``.
        """
        self._require_open()
        return NewWeights(self, version, running, way)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]
    ) -> Request:
        """Accept a request; it waits until a step has room for it.

        Args:
            prompt: text, token ids, or chat messages.
            params: sampling parameters; ``None`` means the model's own, or greedy, up to the model's length.
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
            with self._steps.change(lands=False):
                return self.requests.accept(processed, taken, held_s)
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

    def generate(
        self, prompts: Iterable[Prompt] | Chat | Infill,
        params: SamplingParams | Iterable[SamplingParams] | None = None, *, show_progress: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> list[RequestOutput]:
        """Complete many prompts and return their outputs in the same order; other requests advance along with them.

        Args:
            prompts: any number, from a list or another iterable, which is read to its end before anything runs; they
                are fed to the waiting queue as it has room. One list of chat messages is one prompt, as is an
                ``Infill``.
            params: one for all, or one per prompt.
            show_progress: a progress bar; ``None`` shows it on terminals and in notebooks only.
            **options: as for ``add_request``, of every prompt; a label gets the place of its prompt behind it.

        Raises:
            InvalidRequest: a prompt or its parameters are refused; then none was started.
        """
        asked, given = read_options(options, "show_progress"), [prompts] if is_single(prompts) else prompts
        process = self.input_processor.process
        return self._complete([process(prompt, one, options_at(asked, place))
                               for place, (prompt, one) in enumerate(pair_with_params(given, params))], show_progress)

    def chat(
        self, messages: ListOf[ChatMessage] | Chat, params: SamplingParams | None = None, *,
        tools: ListOf[Mapping[str, Any]] | None = None, tool_choice: Any = None, parallel_tool_calls: bool = True,
        template_arguments: Mapping[str, Any] | None = None, reasoning_effort: str | None = None,
        **options: Unpack[OptionKeywords],
    ) -> ChatReply:
        """Complete one chat and return what the model says; other requests advance along with it.

        Args:
            messages: of the chat, with roles and contents, or a ``Chat``.
            params: as for ``add_request``, like the options.
            tools: that the model may call, as for ``Chat``.
            tool_choice: which of them, and whether it has to: "auto", "none", "required" or
                ``{"type": "function", "function": {"name": ...}}``.
            parallel_tool_calls: whether it may make several calls at once.
            template_arguments: as for ``Chat``, such as ``{"enable_thinking": False}``.
            reasoning_effort: "none" to "max", for a template that reads such an argument.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: the chat, its tools or its parameters are refused.
            RequestFailed: a completion failed.
        """
        asked = read_options(options, *CHAT_KEYWORDS)
        prompt, turn = begin_chat(
            self.chat_format, messages, params, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, template_arguments=template_arguments,
            reasoning_effort=reasoning_effort)
        (output,) = self._complete([self.input_processor.process(prompt, turn.params, asked)])
        return read_reply(turn, output)

    def embed(
        self, texts: Text | Iterable[Text], *, pooling: Pooling | None = None, normalize: bool | None = None,
        dimensions: int | None = None, prompt_name: str | None = None, show_progress: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> list[Embedding]:
        """Turn texts into vectors and return them in the same order; other requests advance in the same steps.

        What is ``None`` is as the model's directory says (``modules.json`` of sentence-transformers and what it names),
        or the last state, of length 1, where it says nothing.

        Args:
            texts: any number, each text or token ids; one of them is one.
            pooling: "last" takes the hidden state of the last token, "mean" the mean of all.
            normalize: whether a vector gets the length 1.
            dimensions: keep so many of its first numbers, before its length is made 1; for models that were trained so.
            prompt_name: the one of the model's prompts that is put before each text; "": none.
            show_progress: as for ``generate``.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: a text or a value is refused, or this model makes no vectors; then none was started.
            RequestFailed: a text could not be computed.
        """
        asked = read_options(options, *KEYWORDS, "show_progress")
        encoder = TextEncoder.of(self.input_processor, pooling, normalize, dimensions, prompt_name)
        processed = [encoder.process(one, options_at(asked, place)) for place, one in enumerate(texts_of(texts))]
        outputs = self._complete(processed, show_progress)
        return [embedding_of(one) for one in outputs]

    def score(
        self, prompt: Prompt, completions: Text | Iterable[Text], *, temperature: float | None = None,
        params: SamplingParams | None = None, show_progress: bool | None = False, **options: Unpack[OptionKeywords],
    ) -> list[CompletionScore]:
        """Say how likely given completions of a prompt are, in the same order; the prompt is computed once.

        By the model's own distribution, or by that from which a request with the same ``params`` draws: penalties,
        masks and processors act at each token as if the request had drawn those before it.

        Args:
            prompt: as for ``add_request``.
            completions: any number, each text, which is tokenised by itself, or token ids; one of them is one.
            temperature: short for ``params=SamplingParams(temperature=..., logprobs_mode="processed")``.
            params: of that request. ``logprobs_mode`` says which distribution, and what else shapes it has an effect
                with "processed" only; where completions end, and how many of what is reported, has none.
            show_progress: as for ``generate``.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: the prompt or a completion is refused; then none was started.
            RequestFailed: a completion could not be computed.
        """
        asked = read_options(options, "temperature", "params", "show_progress")
        scorer = CompletionScorer.of(self.input_processor, prompt, params, temperature)
        given = enumerate(texts_of(completions, "completions"))
        outputs = self._complete([scorer.process(one, options_at(asked, place)) for place, one in given], show_progress)
        return [scorer.score_of(one) for one in outputs]

    def _complete(
        self, processed: Iterable[ProcessedRequest], show_progress: bool | None = False
    ) -> list[RequestOutput]:
        """Feed requests to the queue as it has room, step until all are done, and return their outputs in order.

        Whatever ends this early aborts them. ``show_progress``: as for ``Engine.generate``.
        """
        from tqdm.auto import tqdm

        waiting, requests = deque(processed), list[Request]()
        # Why: a notebook's output is no terminal, which is what tqdm looks for by itself.
        by_default = False if "ipykernel" in sys.modules else None
        is_hidden = by_default if show_progress is None else not show_progress
        # Why withdrawn twice: an interrupt may come while it is done, and no caller knows of what that would leave.
        with (
            self.exclusive(), tqdm(total=len(waiting), unit="request", disable=is_hidden) as bar,
            self._withdrawing(requests), self._withdrawing(requests),
        ):
            while waiting or not all(request.is_done for request in requests):
                while waiting and self.can_accept(waiting[0].params.num_initial_sequences):
                    # Why not appended here: an interrupt between the two calls would leave the request behind.
                    self.accept(waiting.popleft(), requests)
                self._step_or_sleep()
                if not bar.disable and (done := sum(request.is_done for request in requests)) > bar.n:
                    bar.set_postfix(tokens=self.stats().num_generated_tokens, refresh=False)
                    bar.update(done - bar.n)
            return [request.output() for request in requests]

    def session(self, params: SamplingParams | None = None, **options: Unpack[OptionKeywords]) -> Session:
        """Open a conversation that can wait, fork and outlive the process; arguments as ``add_request``.

        Raises:
            InvalidRequest: the parameters are refused, or ask for more than one completion.
            TooManySessions: as many as allowed are open.
        """
        self._require_open()
        return self.sessions.open_checked(params, read_options(options))

    def import_session(
        self, path: str | os.PathLike[str], *, other_weights: str = "refuse", **options: Unpack[OptionKeywords]
    ) -> Session:
        """Open an exported conversation, which continues as it would have there; options as for ``add_request``.

        Args:
            path: of the file.
            other_weights: "recompute" takes one that other weights of the same model have brought forth, and computes
                its tokens again with those that are here; "refuse" does not.
            **options: as for ``add_request``.

        Raises:
            InvalidSessionFile: the file is damaged or no session file; ``ModelMismatch``: another model's.
            InvalidSalt: the session had a cache salt, and none is given.
            TooManySessions: as many as allowed are open. ``OSError``: the file cannot be read.
        """
        self._require_open()
        return self.sessions.take_in(self.sessions.read(path, other_weights), options)

    def abort_request(self, request_id: str) -> bool:
        """End a request now and free its blocks; return whether it was live. Raises ``InvalidRequest`` for no text.

        Called by what the engine calls amid a step, such as a logits processor, it does so when the step is over.
        """
        if (request := self.requests.find(request_id)) is None:
            return False
        if self._steps.postpones(request.abort):
            return not request.is_done
        self._recover()
        if request.is_done:
            return False
        with self._steps.change(lands=False):
            self._outputs.abort(request)
            self._transfers.advance()
        return True

    def abort(self, request_id: str, *, cache_salt: str | bytes | None = None) -> bool:
        """Do the same for a request's own id, or for the label that its caller gave it, under the caller's salt."""
        request = self.requests.find(request_id) or self.requests.labelled(request_id, cache_salt)
        return request is not None and self.abort_request(request.request_id)

    def remove_request(self, request: Request) -> None:
        """Remove a finished request and free its blocks; a second call does nothing."""
        with self._steps.change(lands=False):
            self.requests.remove(request)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out, undo a step that broke off, and end one in flight. Raises ``EngineInUse``."""
        with self._steps.at_rest():
            yield

    def add_observer(self, observer: EngineObserver) -> None:
        """Let an observer watch from now on."""
        self.observers.append(observer)
        self.scheduler.queues.observers.append(ToldLater(observer, self._outputs.news))

    def has_pending_requests(self) -> bool:
        """Whether any request waits or runs, or a step has ended whose outputs are not told."""
        return self.scheduler.has_work or self._steps.has_landed

    def step(self) -> list[Delta]:
        """Run one step: every scheduled sequence advances; return what was added to each completion.

        Where all requests wait for company (``min_batch_size``), it sleeps a while, but not longer than they may wait.
        On a GPU, what was added is what the step before has computed, which this call has waited for after it has
        launched the next one (docs/gpu.md). Raises ``EngineClosed`` after ``close()``.
        """
        return list(map(PendingOutput.take_delta, self._step_or_sleep()))

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
        # Why around all of it: observers look at what another thread's step would change.
        with self._steps.exclusive():
            if self.sessions.parking.next_expiry_s < math.inf:
                self.sessions.parking.expire()
            if self.requests.sleep_level:
                # Why: there is no request, and observers would look at blocks that have no memory.
                return self._outputs.take_untold()
            if is_observed := self.hooks.observes_steps:
                self._report.begin()
            try:
                plan = self._steps.run()
            except (InternalError, EngineClosed) as error:
                self.note_trouble("broken-step", error)
                raise
            waits = self.wait_log
            if not plan.rows or self._steps.has_failed or plan.stopped_by != waits.reason or waits.is_idle:
                self._look_at(plan)
            for one in self.observers:
                self._outputs.news.append(one.step_ended)
            if plan.rows and is_observed:
                self._outputs.news.append(partial(self.hooks.step_done, self._report.describe(plan, self.stats)))
            if self._outputs.news:
                self._steps.tell()
            return self._outputs.take_untold()

    def _look_at(self, plan: SchedulePlan) -> None:
        """Note what stops the queue, whether the model failed, and whether nothing was computed for long."""
        now_s = self.clock.now()
        if plan.stopped_by != self.wait_log.reason:
            self.wait_log.note(now_s, plan.stopped_by)
        if self._steps.has_failed and self.observers:
            failed = {row.sequence.sequence_id for row in plan.rows}
            errors = [one.error for one in self.requests if one.error is not None
                      and failed.intersection(each.sequence_id for each in one.sequences)]
            self._outputs.news.append(partial(self.note_trouble, "failed-step", *errors))
        if self.wait_log.stands_still(now_s, is_idle=not plan.rows and self._steps.is_stalled):
            _report_stall(self)
            self._outputs.news.append(partial(self.note_trouble, "stall"))

    def note_trouble(self, why: str, *errors: BaseException) -> None:
        """Let observers keep what helps to find out why; see ``EngineObserver.note_trouble``."""
        for one in self.observers:
            one.note_trouble(why, errors)

    def _step_or_sleep(self) -> list[PendingOutput]:
        pending = self.step_pending()
        if not pending and (gated_s := self.gated_s) > 0.0:
            self.clock.sleep(min(gated_s, _MOST_SLEEP_S))
        return pending

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions of a request as they stand."""
        return self._outputs.output_of(request)

    def quote(
        self, prompt: Prompt, params: SamplingParams | None = None, *, exact: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> Quote:
        """Say when a request would start, have its first token and end if it came now; nothing is accepted.

        From the first quote on, the engine learns how long completions are and how far off its quotes are; what steps
        cost it knows already. For operators and their admission control: an answer shows how much others have to do.

        Args:
            prompt: as for ``add_request``, like ``params`` and ``options``.
            exact: make a dry run of the scheduler, step by step, instead of a formula: milliseconds to seconds.

        Raises:
            InvalidRequest: as ``add_request``.
            EngineInUse: another thread is in a call of this engine.
        """
        return _quote(self, prompt, params, options, exact=exact)

    def explain(self, request_id: str) -> Explanation:
        """Say where a request stands and, if it waits, why, for how long, and who holds what it lacks.

        For operators: the answer names other requests. ``request_id`` is the engine's id or the caller's own label; an
        id that is not known gives the state "unknown".

        Raises ``EngineInUse`` if another thread is in a call of this engine, ``InvalidRequest`` for an id that is no
        text.
        """
        return _explain(self, request_id)

    def dump_recording(self, path: str | os.PathLike[str]) -> None:
        """Write what the flight recorder has to a file that only its owner can read; see ``pagedcore replay``.

        Without ``flight_recorder="tokens"`` it has no token ids and nothing that a guess of a prompt can be checked by.

        Raises:
            RecordingError: the flight recorder is off, or nothing was recorded yet.
            ForkedProcess: this process is a fork of the engine's.
            OSError: the file cannot be written; then there is none.
        """
        self.take_recording()(path)

    def take_recording(self) -> Callable[[str | os.PathLike[str]], None]:
        """Return a function that writes the recording as it is now, once, on any thread. Raises as ``dump_recording``.

        For an engine that must not wait for compression and a disk.
        """
        return _take_recording(self)

    def stats(self) -> EngineStats:
        """Return a snapshot of counters and occupancy."""
        kv_bytes, info, moved = self.components.kv_bytes, self.components.info, self.scheduler.counters
        block_bytes, state_bytes = kv_bytes // info.num_blocks, self.components.states[1]
        counts, speculation = asdict(self._outputs.counters), self.scheduler.speculation
        if self._loader is not None:
            counts |= self._loader.statistics()
        for one in self.observers:
            counts.update(one.statistics())
        return EngineStats(
            **asdict(self.scheduler.stats()),
            **counts,
            block_size=info.block_size, kv_bytes=kv_bytes,
            state_bytes=self.components.memory.states.num_bytes,
            swapped_out_bytes=moved.num_blocks_swapped_out * block_bytes + moved.num_states_swapped_out * state_bytes,
            swapped_in_bytes=moved.num_blocks_swapped_in * block_bytes + moved.num_states_swapped_in * state_bytes,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            attention_backend=info.attention_backend,
            dtype=info.dtype,
            is_schedule_invariant=info.is_schedule_invariant,
            speculation=(speculation and speculation.trouble) or self.components.speculation,
        )

    @property
    def is_stalled(self) -> bool:
        """Whether the last step computed nothing although there was work: all of it waits for blocks on their way."""
        return self._steps.is_stalled

    @property
    def gated_s(self) -> float:
        """Seconds for which all requests wait for company, if no further one comes; 0: a step can compute something."""
        return max(0.0, self.scheduler.gated_s(self.clock.now())) if self.scheduler.is_gated else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last step computed nothing because the model failed."""
        return self._steps.has_failed

    def can_accept(self, num_sequences: int = 1) -> bool:
        """Whether the waiting queue has room for a request with this many initial sequences."""
        return self.scheduler.waiting.num_free_slots >= num_sequences

    def idle(self) -> bool:
        """Use a moment without work: end helper threads, take memory ahead; return whether there is more of it."""
        with self._steps.exclusive():
            self._runner.idle()
            return self._transfers.populate(self.scheduler.kv_cache.device)

    def close(self) -> None:
        """Abort everything and refuse further calls; a second call does nothing."""
        if self._has_stopped:
            return
        with self._steps.exclusive():
            # Why: an observer of what ends here might bring something new, or raise.
            self._is_closed = self._steps.is_silent = True
            self.sessions.close()
            self._withdraw(self.requests)
            self._has_stopped, self._steps.is_silent = True, False
            try:
                self._steps.tell_last()
            finally:
                self.hooks.engine_stopped(self.components.info)

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotPicklable("an engine")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _withdrawing(self, requests: Iterable[Request]) -> Iterator[None]:
        """Abort and remove requests in the end, whatever ends this."""
        try:
            yield
        finally:
            self._withdraw(requests)

    def _withdraw(self, requests: Iterable[Request]) -> None:
        """Abort and remove requests in one change, before a hook is told of any."""
        if requests := list(requests):
            with self._steps.change(lands=False):
                self.requests.withdraw(requests)
                self._transfers.advance()

    def _recover(self) -> None:
        if self._steps.is_torn:
            self._steps.recover()

    def _require_open(self) -> None:
        self._recover()
        if self._is_closed:
            raise EngineClosed(f"{self._closing_reason}; make a new one.")

    def _give_up(self, reason: str) -> None:
        """Close an engine whose queues and blocks are beyond repair: end every request without a look at them."""
        if self._has_stopped:
            return
        self._is_closed, self._has_stopped, self._closing_reason = True, True, reason
        for request in self.requests:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    request.error, sequence.finish_reason = EngineClosed(reason), "error"
                    sequence.status = SequenceStatus.FINISHED
        with suppress(Exception):
            self.scheduler.restart(())
        with suppress(Exception):
            self.sessions.close()
        self.hooks.engine_stopped(self.components.info)

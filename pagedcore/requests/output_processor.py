"""Turns what happened to sequences into what callers see: text, pending output, finish reasons, errors.

The engine decides when; this module says what. Every way a request can end passes through here. What is kept of one
sequence is in ``pending_output``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from pagedcore.errors import (
    GrammarFailed,
    InvalidLogits,
    ProcessorFailed,
    StepFailed,
    TextFailed,
)
from pagedcore.outputs import FinishReason, RequestOutput
from pagedcore.protocols import Clock, Tokenizer
from pagedcore.requests.beam_search import Hypothesis
from pagedcore.requests.candidate_groups import Branch, CandidateGroup, CandidateGroups
from pagedcore.requests.observers import EngineObserver, News
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.stats import Counters
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence
from pagedcore.tokenizer.incremental_text import IncrementalText, new_text

if TYPE_CHECKING:
    from pagedcore.execution.sampler import SampledTokens

_NO_LOGITS: Final = "the model returned no usable logits for this request"
_NO_STATES: Final = "the model returned hidden states for this request that are not finite"


class RequestObserver(Protocol):
    """Learns of finished requests."""

    @property
    def observes_steps(self) -> bool:
        """Whether there is any point in noting what a step starts."""

    @property
    def observes_requests(self) -> bool:
        """Whether there is any point in describing a request."""

    def request_finished(self, output: RequestOutput, context: object) -> None:
        """Note that every completion of a request has finished, and what it belongs to."""


class OutputProcessor:
    """The output side of one engine.

    Invariant: a completion has pending output whenever text or tokens were added to it, and when it has ended.
    Invariant: a completion that is chosen at the end has none before all completions of its request are chosen.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, scheduler: Scheduler, sequence_ids: Iterator[int], observer: RequestObserver,
        clock: Clock, eos_token_ids: frozenset[int],
    ) -> None:
        self.by_sequence: dict[int, PendingOutput] = {}
        """By sequence id, from the time that the request was accepted until it is removed."""
        self.groups = CandidateGroups(scheduler, sequence_ids, self.open_text, self.remove_text)
        self.counters = Counters()
        self.observers: list[EngineObserver] = []
        """What watches the engine beside the plugins."""
        self.news = News()
        """What these and the plugins will be told; nothing that is undone takes any of it back."""
        self._pending: list[PendingOutput] = []
        """What was given output that no caller has been told of, in order."""
        self._num_settled = 0
        """How many of these nothing can undo any more: all but what the present step has given."""
        self.open_before: ListOf[Request] = ()
        """The requests with open groups when the present change began; set by the one that begins it."""
        self.started: list[tuple[int, float]] = []
        """Prompt tokens and seconds of waiting of what a step has started, if steps are observed; for its report."""
        self._expired: list[Sequence] = []
        """Ended by the rules before the present step."""
        self._groups: dict[str, CandidateGroup] = {}
        """Open groups with candidates in the present step, and the beams that continue others."""
        self._branches: list[Branch] = []
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock

    def open_text(
        self, request: Request, sequence: Sequence, index: int = 0, group: CandidateGroup | None = None
    ) -> PendingOutput:
        """Begin the completion of a turn, with no text; a beam needs none before it is chosen."""
        pending = self.by_sequence.get(sequence.sequence_id)
        if pending is None:
            pending = self.by_sequence[sequence.sequence_id] = PendingOutput(request, sequence, index, group)
        else:
            pending.begin_turn()
            pending.index = index
        pending.open_stream = self._stream_for(sequence) if group is None or group.search is None else None
        return pending

    def reopen_text(self, request: Request, sequence: Sequence, index: int = 0) -> PendingOutput:
        """Begin a completion that has tokens already, all of them taken, with the text that they make certain."""
        pending = self.open_text(request, sequence, index)
        pending.replay()
        pending.mark_taken()
        return pending

    def _stream_for(self, sequence: Sequence) -> Callable[[], IncrementalText] | None:
        tokenizer, params = self._tokenizer, sequence.params
        if tokenizer is None:
            return None
        return lambda: new_text(tokenizer, params, sequence.end_token_ids - self._eos_token_ids)

    def pending_of(self, request: Request) -> list[PendingOutput]:
        """Return the pending output of a request's own sequences, in order; after their removal all of it is taken."""
        return [
            self.by_sequence.get(sequence.sequence_id) or self._removed(request, sequence, index)
            for index, sequence in enumerate(request.sequences)
        ]

    def _removed(self, request: Request, sequence: Sequence, index: int) -> PendingOutput:
        """Make the text anew of a sequence that was removed, because a handle may be asked for it at any time."""
        pending = PendingOutput(request, sequence, index, None, self._stream_for(sequence))
        pending.replay()
        pending.finish_text()
        pending.mark_taken()
        return pending

    def remove_text(self, sequence: Sequence) -> None:
        """Remove a sequence, and with it what was not taken; one that is not here is no error."""
        if (pending := self.by_sequence.pop(sequence.sequence_id, None)) is not None:
            pending.begin_turn()
            pending.mark_taken()
            if pending in self._pending:
                self._num_settled -= self._pending[: self._num_settled].count(pending)
                self._pending = [one for one in self._pending if one is not pending]

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions of a request as they stand."""
        num_preemptions = sum(sequence.num_preemptions for sequence in request.sequences)
        is_read = request.reader is not None and request.sequences[0].finish_reason == "stop"
        return RequestOutput(
            request.request_id, tuple(request.prompt_token_ids),
            outputs=[pending.completion() for pending in self.pending_of(request)], is_finished=request.is_done,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=replace(request.metrics, num_preemptions=num_preemptions),
            prompt_logprobs=request.prompt_logprobs, client_request_id=request.client_request_id,
            vector=request.reader.vector() if request.reader is not None and is_read else None,
        )

    def undo_step(self, plan: SchedulePlan) -> None:
        """Let every request be where it was when the step began, with nothing computed, wherever the step broke off.

        Tokens of the step, which no caller has been told of, are taken back; candidates of open groups begin anew, and
        will be the same. The second time does nothing more.
        """
        del self._pending[self._num_settled :]
        self.open_before = tuple(dict.fromkeys(
            request for request in (*self.open_before, *self.groups.open_requests)
            if request.sequences[0].sequence_id in self.by_sequence
        ))
        size = self._scheduler.kv_cache.device.block_size
        self.groups.clear()
        for one in [one for one in self.by_sequence.values() if one.group is not None]:
            del self.by_sequence[one.sequence.sequence_id]
        ends = {row.sequence: row.known_end for row in plan.rows if row.num_sampled}
        for sequence in (*(row.sequence for row in plan.rows), *self._expired):
            if sequence.sequence_id in self.by_sequence:
                self._take_back(sequence, ends.get(sequence, len(sequence.token_ids)), size)
        for request in self.open_before:
            for sequence in request.sequences:
                self._take_back(sequence, sequence.num_prompt_tokens, size)
        self._scheduler.restart([
            one.sequence for one in self.by_sequence.values()
            if one.sequence.finish_reason is None and one.request not in self.open_before
        ])
        for request in self.open_before:
            self.groups.open_group(request, self._scheduler.take_back)
        self._scheduler.waiting.count_as_new(
            one.sequence for one in self.by_sequence.values() if one.request.metrics.first_scheduled_s is None
        )
        self._expired = []

    def take_untold(self) -> list[PendingOutput]:
        """Return what has output that no caller has been told of, each once."""
        untold, self._pending, self._num_settled = list(dict.fromkeys(self._pending)), [], 0
        return untold

    def note_step(self) -> None:
        """Note what the step has given output and finished, once nothing can undo it any more."""
        self._expired, done = [], self._pending[self._num_settled :]
        self._num_settled = len(self._pending)
        self._note_finished(done)

    def note_started(self, plan: SchedulePlan, now_s: float) -> None:
        """Stamp the requests that a plan starts."""
        if self._observer.observes_steps:
            self.started = [
                (one.num_prompt_tokens, now_s - self.by_sequence[one.sequence_id].request.metrics.arrival_s)
                for one in plan.admitted if self._scheduler.waiting.is_never_started(one)
            ]
        for sequence in plan.admitted:
            request = self.by_sequence[sequence.sequence_id].request
            if request.metrics.first_scheduled_s is None:
                request.metrics = replace(request.metrics, first_scheduled_s=now_s)
            elif pauses := request.metrics.pauses_s:
                ended = next((place for place, pause in enumerate(pauses) if pause[1] is None), len(pauses))
                closed = tuple((start_s, now_s) for start_s, _ in pauses[ended : ended + 1])
                request.metrics = replace(
                    request.metrics, pauses_s=(*pauses[:ended], *closed, *pauses[ended + 1 :])
                )

    def note_preempted(self, plan: SchedulePlan, now_s: float) -> None:
        """Stamp the requests that a plan preempts."""
        for preemption in plan.preempted:
            request = self.by_sequence[preemption.sequence.sequence_id].request
            request.metrics = replace(request.metrics, pauses_s=(*request.metrics.pauses_s, (now_s, None)))

    def collect(self, plan: SchedulePlan, sampled: SampledTokens) -> dict[int, int | None]:
        """Return the tokens of a computed step by sequence id, as ``Scheduler.commit`` takes them.

        Rows that could not be computed, or have no usable logits, end first, and alone.
        """
        if sampled.failures:
            self.fail(plan, sampled.failures)
        if sampled.draft_failure is not None and self._scheduler.speculation is not None:
            self._scheduler.speculation.give_up(sampled.draft_failure)
        if sampled.prompts or sampled.hidden:
            self._keep_prompt_logprobs(plan, sampled)
            self._hand_over_hidden(plan, sampled)
        tokens, groups = dict[int, int | None](), dict[str, CandidateGroup]()
        sequences = [row.sequence for row in plan.rows if row.num_sampled]
        for sequence, token_id, logprobs in zip(sequences, sampled.token_ids.tolist(), sampled.logprobs, strict=True):
            if token_id < 0:
                self._pending += self._end_all([sequence], "error", InvalidLogits(_NO_LOGITS))
            elif sequence.finish_reason is None:
                group = self.by_sequence[sequence.sequence_id].group
                if group is not None:
                    groups[group.request.request_id] = group
                if group is not None and group.search is not None:
                    # Why: its search chooses a beam's next token later, when every beam of the round is computed.
                    group.continuations_of[sequence.sequence_id] = logprobs.top if logprobs is not None else ()
                    tokens[sequence.sequence_id] = None
                    continue
                if logprobs is not None:
                    sequence.logprobs.append(logprobs)
                tokens[sequence.sequence_id] = token_id
        self._groups = groups
        self._branches = [one for group in groups.values() for one in self.groups.choose_beams(group, tokens)]
        return tokens

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        """Give the completions of a committed step their tokens."""
        now_s = self._clock.now()
        self._add_tokens(news, now_s)
        if self._groups:
            self.groups.add_branches(self._branches)
            self._deliver_decided(now_s)
        self.counters.num_steps += 1
        self.counters.num_rows += len(plan.rows)
        self.counters.num_computed_tokens += plan.num_tokens

    def collect_further(self, sampled: SampledTokens, place: int) -> dict[int, int]:
        """Return the tokens behind the draft number ``place`` of each row, from 0, by sequence id; a completion that
        has ended has none. One without usable logits there ends, and alone.
        """
        tokens = dict[int, int]()
        for number, drawn in sampled.further.items():
            pending = self.by_sequence.get(number)
            if place >= len(drawn) or pending is None or pending.sequence.finish_reason is not None:
                continue
            one, sequence = drawn[place], pending.sequence
            if one.token_id < 0:
                error = _failure_of(one.failure) if one.failure is not None else InvalidLogits(_NO_LOGITS)
                self._pending += self._end_all([sequence], "error", error)
                continue
            if one.logprobs is not None:
                sequence.logprobs.append(one.logprobs)
            tokens[number] = one.token_id
        return tokens

    def publish_further(self, news: ListOf[NewToken]) -> None:
        """Give completions further tokens of a committed step."""
        now_s = self._clock.now()
        self._add_tokens(news, now_s)
        self._deliver_decided(now_s)

    def fail(self, plan: SchedulePlan, errors: Mapping[int, Exception]) -> None:
        """End the requests of rows that could not be computed, by sequence id with the reason."""
        for row in plan.rows:
            if (error := errors.get(row.sequence.sequence_id)) is not None:
                self._pending += self._end_all([row.sequence], "error", _failure_of(error))

    def end_waiting(self, sequences: ListOf[Sequence], error: Exception) -> None:
        """End requests of sequences that were not started, before a step."""
        # Why first: whatever breaks this off is undone by it.
        self._expired += sequences
        self._pending += self._end_all(sequences, "error", error)

    def end_live(self, error: Exception) -> None:
        """End every request that has not ended."""
        self._pending += self._end_all([one.sequence for one in tuple(self.by_sequence.values())], "error", error)
        self.note_step()

    def abort(self, request: Request) -> None:
        """Finish what of a request has not finished, for the caller's reason."""
        self.groups.close_group(request, "abort")
        self._note_finished(self._end_all(request.sequences, "abort"))

    def _end_all(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: Exception | None = None
    ) -> list[PendingOutput]:
        """End sequences, and with a candidate its whole request; those that have finished stay as they are."""
        ended: list[PendingOutput] = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                pending = self.by_sequence[sequence.sequence_id]
                if pending.group is None:
                    ended.append(self._end(pending, reason, error))
                else:
                    self.groups.close_group(pending.request, reason)
                    ended += [self._end(one, reason, error) for one in self.pending_of(pending.request)]
        return ended

    def _end(self, pending: PendingOutput, reason: FinishReason, error: Exception | None) -> PendingOutput:
        pending.request.error = error
        self._scheduler.finish_sequence(pending.sequence, reason)
        pending.finish_text()
        return pending

    def _take_back(self, sequence: Sequence, num_tokens: int, block_size: int) -> None:
        pending = self.by_sequence[sequence.sequence_id]
        pending.open_stream = self._stream_for(sequence)
        pending.take_back(num_tokens, block_size)

    def _keep_prompt_logprobs(self, plan: SchedulePlan, sampled: SampledTokens) -> None:
        """Keep the log-probabilities of prompts; requests whose logits were unusable end."""
        for row in plan.rows:
            scored = sampled.prompts.get(row.sequence.sequence_id, [])
            if scored is None:
                self._pending += self._end_all([row.sequence], "error", InvalidLogits(_NO_LOGITS))
            elif row.sequence.prompt_logprobs is not None:
                row.sequence.prompt_logprobs += scored

    def _hand_over_hidden(self, plan: SchedulePlan, sampled: SampledTokens) -> None:
        """Give hidden states to what reads them; requests whose states are unusable end."""
        for row in plan.rows:
            states = sampled.hidden.get(row.sequence.sequence_id)
            if states is not None and row.sequence.finish_reason is None:
                reader = self.by_sequence[row.sequence.sequence_id].request.reader
                if reader is not None and not reader.read(row.hidden_positions.start, states):
                    self._pending += self._end_all([row.sequence], "error", InvalidLogits(_NO_STATES))

    def _add_tokens(self, news: ListOf[NewToken], now_s: float) -> None:
        """Add tokens to their completions; those of candidates are not pending before they are chosen."""
        for new in news:
            one = self.by_sequence[new.sequence.sequence_id]
            if (token_id := new.token_id) is None or (one.group is not None and one.group.search is not None):
                self._pending += [one] if token_id is None else []
                continue
            self.counters.num_generated_tokens += 1
            if one.group is None:
                one.times_s.append(now_s)
            if one.add_token(token_id):
                self._scheduler.finish_sequence(new.sequence, "stop")
            if new.sequence.finish_reason is not None and one.finish_text():
                # Why: the token that completed a stop string may also have been the last one allowed.
                new.sequence.finish_reason = "stop"
            if one.failure is not None:
                self._pending += self._end_without_text(one, one.failure)
            elif one.group is None:
                if one.request.metrics.first_token_s is None:
                    one.request.metrics = replace(one.request.metrics, first_token_s=now_s)
                self._pending.append(one)

    def _end_without_text(self, one: PendingOutput, failure: TextFailed) -> list[PendingOutput]:
        """End a completion whose tokens could not be turned into text, even if it has just ended by itself."""
        if one.group is not None:
            self.groups.close_group(one.request, "error")
            return [self._end(own, "error", failure) for own in self.pending_of(one.request)]
        self._end(one, "error", failure)
        # Why: it may have ended with this very token, for another reason.
        one.sequence.finish_reason = "error"
        return [one]

    def _deliver_decided(self, now_s: float) -> None:
        for group in self._groups.values():
            self._pending += self._deliver_if_decided(group, now_s)

    def _deliver_if_decided(self, group: CandidateGroup, now_s: float) -> list[PendingOutput]:
        """Give a request its chosen completions, as soon as they can be chosen."""
        request = group.request
        if self.groups.find_group(request) is not group or not group.is_decided:
            return []
        results, pending = group.results(), self.pending_of(request)
        if len(results) < len(pending):
            error = InvalidLogits("the model allows fewer different completions than this request asks for")
            self.groups.close_group(request, "error")
            return [self._end(one, "error", error) for one in pending]
        self.groups.close_group(request, "stop")
        request.metrics = replace(request.metrics, first_token_s=now_s)
        return [self._deliver(one, chosen) for one, chosen in zip(pending, results, strict=True)]

    def _deliver(self, pending: PendingOutput, chosen: Hypothesis) -> PendingOutput:
        sequence = pending.sequence
        sequence.score = chosen.score
        sequence.logprobs.extend(chosen.logprobs)
        for token_id in chosen.token_ids:
            sequence.token_ids.append(token_id)
            pending.add_token(token_id)
        pending.finish_text()
        pending.request.error = pending.failure
        self._scheduler.finish_sequence(sequence, "error" if pending.failure is not None else chosen.finish_reason)
        if sequence.params.beam_width > 1:
            self.counters.num_generated_tokens += len(chosen.token_ids)
        return pending

    def _note_finished(self, pending: list[PendingOutput]) -> None:
        """Note the requests whose last completion is among these, each once."""
        for request in dict.fromkeys(one.request for one in pending if one.sequence.finish_reason is not None):
            if request.is_done:
                request.metrics = replace(request.metrics, finished_s=self._clock.now())
                self.counters.note_finished(request)
                self.news.extend(partial(one.request_ended, request) for one in self.observers)
                if self._observer.observes_requests:
                    output = self.output_of(request)
                    self.news.append(partial(self._observer.request_finished, output, request.context))


def _failure_of(error: Exception) -> Exception:
    """Return what a request ends with whose row could not be computed."""
    if isinstance(error, GrammarFailed | ProcessorFailed):
        return error
    failure = StepFailed(f"the step that computed this request failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure

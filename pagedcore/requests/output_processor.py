"""Turns what happened to sequences into what callers see: text, pending output, finish reasons, errors.

The engine decides when; this module says what. Every way a request can end passes through here. All that the output
side needs to know of a sequence is in one ``PendingOutput``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Protocol

from pagedcore.errors import InvalidLogits, QueueTimeout, StepFailed, TextFailed
from pagedcore.outputs import CompletionOutput, Delta, FinishReason, RequestOutput
from pagedcore.protocols import Clock, Tokenizer
from pagedcore.requests.beam_search import Hypothesis
from pagedcore.requests.candidate_groups import CandidateGroup, CandidateGroups
from pagedcore.requests.request import Request
from pagedcore.requests.stats import Counters
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence
from pagedcore.tokenizer.incremental_text import IncrementalText

if TYPE_CHECKING:
    from pagedcore.execution.sampler import SampledTokens

_NO_LOGITS: Final = "the model returned no usable logits for this request"


class RequestObserver(Protocol):
    """Learns of finished requests."""

    @property
    def observes_requests(self) -> bool:
        """Whether there is any point in describing a request."""

    def request_finished(self, output: RequestOutput) -> None:
        """Note that every completion of a request has finished."""


@dataclass(slots=True, eq=False, repr=False)
class PendingOutput:
    """One completion of a request on the way to its reader.

    Invariant: its text is the concatenation of the texts of all its deltas, taken or not.
    """

    request: Request
    sequence: Sequence
    index: int
    """Which of the request's completions it is."""
    group: CandidateGroup | None
    """Where the sequence is a candidate; ``None``: it is a completion itself."""
    open_stream: Callable[[], IncrementalText] | None = None
    """Makes ``stream`` with the first token; ``None``: there is no tokenizer, or it has been made."""
    stream: IncrementalText | None = None
    """Turns tokens into text until the end."""
    failure: TextFailed | None = None
    """Why there is no further text, where the tokenizer has failed."""
    _parts: list[str] = field(default_factory=list)
    _num_taken_parts: int = 0
    _num_taken_tokens: int = 0

    def begin_turn(self) -> None:
        """Begin with no text."""
        self.open_stream = self.stream = self.failure = None
        self._parts, self._num_taken_parts, self._num_taken_tokens = [], 0, 0

    def add_token(self, token_id: int) -> bool:
        """Add the text that a committed token makes certain; return whether a stop string was met."""
        try:
            if self.open_stream is not None:
                self.stream, self.open_stream = self.open_stream(), None
            if self.stream is None:
                return False
            delta = self.stream.push((token_id,))
            self._add_text(delta.text)
        except Exception as error:  # the tokenizer may be the user's own; its failure is this request's
            self._fail(error)
            return False
        return delta.is_stopped

    def finish_text(self) -> bool:
        """Add the text that was held back until the end; return whether that met a stop string."""
        stream, self.stream, self.open_stream = self.stream, None, None
        if stream is None:
            return False
        try:
            self._add_text(stream.finish())
        except Exception as error:  # as above
            self._fail(error)
            return False
        return stream.is_stopped

    def _add_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"the detokenizer returned {type(text).__name__}, not str")
        self._parts.append(text)

    def _fail(self, error: Exception) -> None:
        self.stream, self.open_stream = None, None
        self.failure = TextFailed(f"the tokenizer failed on the tokens of this request: {type(error).__name__}")
        self.failure.__cause__ = error

    def mark_taken(self) -> None:
        """Count everything there is as taken."""
        self._num_taken_parts = len(self._parts)
        self._num_taken_tokens = self.sequence.num_output_tokens

    def take_delta(self) -> Delta:
        """Return what was added since the last delta, with the end if the completion has ended."""
        sequence, request = self.sequence, self.request
        text = "".join(self._parts[self._num_taken_parts :])
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + self._num_taken_tokens :])
        self._num_taken_parts = len(self._parts)
        self._num_taken_tokens += len(token_ids)
        reason = sequence.finish_reason
        wants_logprobs = sequence.params.logprobs is not None and token_ids
        logprobs = tuple(sequence.logprobs[-len(token_ids) :]) if wants_logprobs else None
        error = request.error if reason == "error" else None
        # Why: by position, because keywords would cost a quarter of the time, for every token of a step loop.
        return Delta(
            request.request_id, self.index, text, token_ids, reason, logprobs, error, sequence.num_prompt_tokens
        )

    def completion(self) -> CompletionOutput:
        """Describe the completion as it stands."""
        sequence = self.sequence
        return CompletionOutput(
            self.index, "".join(self._parts), tuple(sequence.output_token_ids), sequence.finish_reason,
            logprobs=tuple(sequence.logprobs) if sequence.params.logprobs is not None else None,
            error=self.request.error if sequence.finish_reason == "error" else None, score=sequence.score,
        )


class OutputProcessor:
    """The output side of one engine.

    Invariant: a completion has pending output whenever text or tokens were added to it, and when it has ended.
    Invariant: a completion that is chosen at the end has none before all completions of its request are chosen.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, scheduler: Scheduler, sequence_ids: Iterator[int], observer: RequestObserver,
        clock: Clock,
    ) -> None:
        self.by_sequence: dict[int, PendingOutput] = {}
        """By sequence id, from the time that the request was accepted until it is removed."""
        self.groups = CandidateGroups(scheduler, sequence_ids, self.open_text, self.remove_text)
        self.counters = Counters()
        self._tokenizer = tokenizer
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
        tokenizer, params = self._tokenizer, sequence.params
        if tokenizer is not None and (group is None or group.search is None):
            pending.open_stream = lambda: IncrementalText(tokenizer.new_detokenizer(), params.stop, params.min_tokens)
        return pending

    def reopen_text(self, request: Request, sequence: Sequence) -> PendingOutput:
        """Begin a completion that has tokens already, all of them taken, with the text that they make certain."""
        pending = self.open_text(request, sequence)
        for token_id in sequence.output_token_ids:
            pending.add_token(token_id)
        pending.mark_taken()
        return pending

    def pending_of(self, request: Request) -> list[PendingOutput]:
        """Return the pending output of a request's own sequences, in order; without text after their removal."""
        return [
            self.by_sequence.get(sequence.sequence_id) or PendingOutput(request, sequence, index, None)
            for index, sequence in enumerate(request.sequences)
        ]

    def remove_text(self, sequence: Sequence) -> None:
        """Remove a sequence, and with it what was not taken; one that is not here is no error."""
        if (pending := self.by_sequence.pop(sequence.sequence_id, None)) is not None:
            pending.begin_turn()
            pending.mark_taken()

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all completions of a request as they stand."""
        num_preemptions = sum(sequence.num_preemptions for sequence in request.sequences)
        return RequestOutput(
            request.request_id, tuple(request.prompt_token_ids),
            outputs=[pending.completion() for pending in self.pending_of(request)], is_finished=request.is_done,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=replace(request.metrics, num_preemptions=num_preemptions),
            prompt_logprobs=request.prompt_logprobs, client_request_id=request.client_request_id,
        )

    def note_started(self, plan: SchedulePlan, now_s: float) -> None:
        """Stamp the requests that a plan starts."""
        for sequence in plan.admitted:
            request = self.by_sequence[sequence.sequence_id].request
            if request.metrics.first_scheduled_s is None:
                request.metrics = replace(request.metrics, first_scheduled_s=now_s)

    def commit(self, plan: SchedulePlan, sampled: SampledTokens, now_s: float) -> list[PendingOutput]:
        """Make a computed step true and return what has output; rows without usable logits end first, and alone."""
        pending = self._keep_prompt_logprobs(plan, sampled) if sampled.prompts else []
        tokens, groups = dict[int, int | None](), dict[str, CandidateGroup]()
        sequences = [row.sequence for row in plan.rows if row.is_sampled]
        for sequence, token_id, logprobs in zip(sequences, sampled.token_ids.tolist(), sampled.logprobs, strict=True):
            if token_id < 0:
                pending += self._end_all([sequence], "error", InvalidLogits(_NO_LOGITS))
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
        branches = [one for group in groups.values() for one in self.groups.choose_beams(group, tokens)]
        for new in self._scheduler.commit(plan, tokens):
            self._publish(new, now_s, pending)
        if groups:
            self.groups.add_branches(branches)
            for group in groups.values():
                pending += self._deliver_if_decided(group, now_s)
        return self._note_finished(pending)

    def fail(self, plan: SchedulePlan, error: Exception) -> list[PendingOutput]:
        """End every request of a batch that could not be computed; call it after the rollback."""
        failure = StepFailed(f"the step that computed this request failed: {type(error).__name__}")
        failure.__cause__ = error
        return self._note_finished(self._end_all((row.sequence for row in plan.rows), "error", failure))

    def expire_waiting(self, limit_s: float) -> list[PendingOutput]:
        """End the requests that have waited longer than ``limit_s`` seconds for their first start."""
        latest = self._clock.now() - limit_s
        # Why: the oldest comes first, so a step in which none expires looks at one.
        expired = list(takewhile(
            lambda sequence: self.by_sequence[sequence.sequence_id].request.metrics.arrival_s < latest,
            self._scheduler.waiting.never_started(),
        ))
        return self._note_finished(self._end_all(expired, "error", QueueTimeout(limit_s))) if expired else []

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

    def _keep_prompt_logprobs(self, plan: SchedulePlan, sampled: SampledTokens) -> list[PendingOutput]:
        """Keep the log-probabilities of prompts; requests whose logits were unusable end."""
        ended: list[PendingOutput] = []
        for row in plan.rows:
            scored = sampled.prompts.get(row.sequence.sequence_id, [])
            if scored is None:
                ended += self._end_all([row.sequence], "error", InvalidLogits(_NO_LOGITS))
            elif row.sequence.prompt_logprobs is not None:
                row.sequence.prompt_logprobs += scored
        return ended

    def _publish(self, new: NewToken, now_s: float, pending: list[PendingOutput]) -> None:
        """Add a token to its completion; a candidate's is not pending before it is chosen."""
        one = self.by_sequence[new.sequence.sequence_id]
        if one.group is not None and one.group.search is not None:
            return
        self.counters.num_generated_tokens += 1
        if one.add_token(new.token_id):
            self._scheduler.finish_sequence(new.sequence, "stop")
        if new.sequence.finish_reason is not None and one.finish_text():
            # Why: the token that completed a stop string may also have been the last one allowed.
            new.sequence.finish_reason = "stop"
        if one.failure is not None:
            pending += self._end_without_text(one, one.failure)
        elif one.group is None:
            if one.request.metrics.first_token_s is None:
                one.request.metrics = replace(one.request.metrics, first_token_s=now_s)
            pending.append(one)

    def _end_without_text(self, one: PendingOutput, failure: TextFailed) -> list[PendingOutput]:
        """End a completion whose tokens could not be turned into text, even if it has just ended by itself."""
        if one.group is not None:
            self.groups.close_group(one.request, "error")
            return [self._end(own, "error", failure) for own in self.pending_of(one.request)]
        self._end(one, "error", failure)
        # Why: it may have ended with this very token, for another reason.
        one.sequence.finish_reason = "error"
        return [one]

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

    def _note_finished(self, pending: list[PendingOutput]) -> list[PendingOutput]:
        """Note the requests whose last completion is among these, each once."""
        for request in dict.fromkeys(one.request for one in pending if one.sequence.finish_reason is not None):
            if request.is_done:
                request.metrics = replace(request.metrics, finished_s=self._clock.now())
                self.counters.num_finished += 1
                if self._observer.observes_requests:
                    self._observer.request_finished(self.output_of(request))
        return pending

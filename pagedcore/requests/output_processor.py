"""Turns what happened to sequences into what callers see: pending output, finish reasons, errors.

The engine decides when; this module says what. Every way a request can end passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from pagedcore.errors import InvalidLogits, QueueTimeout, StepFailed
from pagedcore.outputs import FinishReason, RequestOutput, TokenLogprobs
from pagedcore.protocols import Clock
from pagedcore.requests.candidate_groups import Beams, CandidateGroup, CandidateGroups, Chosen
from pagedcore.requests.output_text import CompletionTexts, PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.stats import Counters
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    from pagedcore.execution.sampler import SampledTokens

_NO_LOGITS: Final = "the model returned no usable logits for this request"


class RequestObserver(Protocol):
    """Learns of finished requests."""

    @property
    def observes_requests(self) -> bool:
        """Whether there is any point in describing a request."""
        ...

    def request_finished(self, output: RequestOutput) -> None:
        """Note that every completion of a request has finished."""
        ...


class OutputProcessor:
    """The output side of one engine.

    Invariant: a completion has pending output whenever text or tokens were added to it, and when it has ended.
    Invariant: a completion that is chosen at the end has none before all completions of its request are chosen.
    """

    def __init__(
        self, texts: CompletionTexts, scheduler: Scheduler, branch: Callable[[Sequence, int], Sequence],
        observer: RequestObserver, clock: Clock,
    ) -> None:
        self.texts = texts
        self.groups = CandidateGroups(scheduler, branch, self._open_candidate, texts.remove)
        self.counters = Counters()
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock

    def _open_candidate(self, group: CandidateGroup, sequence: Sequence) -> None:
        self.texts.open(group.request, sequence, group=group)

    def note_started(self, plan: SchedulePlan, now_s: float) -> None:
        """Stamp the requests that a plan starts."""
        for sequence in plan.admitted:
            request = self.texts.by_sequence[sequence.sequence_id].request
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
                group = self.texts.by_sequence[sequence.sequence_id].group
                if group is not None:
                    groups[group.request.request_id] = group
                tokens[sequence.sequence_id] = _keep_sampled(group, sequence, token_id, logprobs)
        if groups:
            self.groups.choose_beams(groups.values(), tokens)
        for new in self._scheduler.commit(plan, tokens):
            self._publish(new, now_s, pending)
        if groups:
            self.groups.add_branches(groups.values())
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
        error = QueueTimeout(f"not started within {limit_s} seconds; retry later or raise queue_timeout_s")
        expired = [
            sequence
            for sequence in self._scheduler.waiting.never_started()
            if self.texts.by_sequence[sequence.sequence_id].request.metrics.arrival_s < latest
        ]
        return self._note_finished(self._end_all(expired, "error", error))

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
                pending = self.texts.by_sequence[sequence.sequence_id]
                if pending.group is None:
                    ended.append(self._end(pending, reason, error))
                else:
                    self.groups.close_group(pending.request, reason)
                    ended += [self._end(one, reason, error) for one in self.texts.of(pending.request)]
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
        one = self.texts.by_sequence[new.sequence.sequence_id]
        if isinstance(one.group, Beams):
            return
        self.counters.num_generated_tokens += 1
        if one.add_token(new.token_id):
            self._scheduler.finish_sequence(new.sequence, "stop")
        if new.sequence.finish_reason is not None and one.finish_text():
            # Why: the token that completed a stop string may also have been the last one allowed.
            new.sequence.finish_reason = "stop"
        if one.group is None:
            if one.request.metrics.first_token_s is None:
                one.request.metrics = replace(one.request.metrics, first_token_s=now_s)
            pending.append(one)

    def _deliver_if_decided(self, group: CandidateGroup, now_s: float) -> list[PendingOutput]:
        """Give a request its chosen completions, as soon as they can be chosen."""
        request = group.request
        if self.groups.find_group(request) is not group or not group.is_decided:
            return []
        results, pending = group.results(), self.texts.of(request)
        if len(results) < len(pending):
            error = InvalidLogits("the model allows fewer different completions than this request asks for")
            self.groups.close_group(request, "error")
            return [self._end(one, "error", error) for one in pending]
        self.groups.close_group(request, "stop")
        request.metrics = replace(request.metrics, first_token_s=now_s)
        return [self._deliver(one, chosen) for one, chosen in zip(pending, results, strict=True)]

    def _deliver(self, pending: PendingOutput, chosen: Chosen) -> PendingOutput:
        sequence = pending.sequence
        sequence.score = chosen.score
        sequence.logprobs.extend(chosen.logprobs)
        for token_id in chosen.token_ids:
            sequence.token_ids.append(token_id)
            pending.add_token(token_id)
        pending.finish_text()
        self._scheduler.finish_sequence(sequence, chosen.finish_reason)
        if sequence.params.beam_width > 1:
            self.counters.num_generated_tokens += len(chosen.token_ids)
        return pending

    def _note_finished(self, pending: list[PendingOutput]) -> list[PendingOutput]:
        """Note the requests whose last completion is among these, each once."""
        for request in dict.fromkeys(one.request for one in pending if one.sequence.finish_reason is not None):
            if request.is_done and request.metrics.finished_s is None:
                request.metrics = replace(request.metrics, finished_s=self._clock.now())
                self.counters.num_finished += 1
                if self._observer.observes_requests:
                    self._observer.request_finished(self.texts.output_of(request))
        return pending


def _keep_sampled(
    group: CandidateGroup | None, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
) -> int | None:
    """Keep what was sampled and return the sequence's next token; a beam's is chosen later, by its search."""
    if isinstance(group, Beams):
        group.continuations_of[sequence.sequence_id] = logprobs.top if logprobs is not None else ()
        return None
    if logprobs is not None:
        sequence.logprobs.append(logprobs)
    return token_id

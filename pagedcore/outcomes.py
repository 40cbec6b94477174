"""Turns what happened to sequences into what callers see: deltas, outputs, finish reasons, errors.

The engine decides when; this module says what. Every way a request can end passes through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedcore.answers import AnswerBook
from pagedcore.clock import Clock
from pagedcore.errors import InvalidLogits, QueueTimeout, StepFailed
from pagedcore.outputs import Delta, FinishReason, RequestMetrics, RequestOutput
from pagedcore.request import Request, Sequence
from pagedcore.request_book import RequestBook
from pagedcore.stats import Counters

if TYPE_CHECKING:
    from pagedcore.assembly import EngineParts
    from pagedcore.execution.sampler import SampledTokens
    from pagedcore.scheduling.plan import NewToken, SchedulePlan


class Outcomes:
    """The publishing side of one engine.

    Invariant: a sequence's last delta, and only that, carries its finish reason.
    """

    def __init__(
        self, parts: EngineParts, requests: RequestBook, answers: AnswerBook, counters: Counters, clock: Clock
    ) -> None:
        self._scheduler = parts.scheduler
        self._hooks = parts.hooks
        self._requests = requests
        self._answers = answers
        self._counters = counters
        self._clock = clock

    def note_started(self, plan: SchedulePlan) -> None:
        """Stamp the requests that a plan starts."""
        for sequence in plan.admitted:
            timeline = self._requests.request_of(sequence).timeline
            if timeline.first_scheduled_s is None:
                timeline.first_scheduled_s = self._clock.now()

    def commit(self, plan: SchedulePlan, sampled: SampledTokens) -> list[Delta]:
        """Make a computed step true; rows whose logits were unusable end first, and alone."""
        deltas, tokens = [], {}
        for i, row in enumerate(row for row in plan.rows if row.is_sampled):
            if sampled.is_valid[i]:
                tokens[row.sequence.sequence_id] = int(sampled.token_ids[i])
                if (logprobs := sampled.logprobs[i]) is not None:
                    row.sequence.logprobs.append(logprobs)
            else:
                error = InvalidLogits("the model returned no usable logits for this request")
                deltas.append(self.end(row.sequence, "error", error))
        now = self._clock.now()
        return deltas + [self._publish(new, now) for new in self._scheduler.commit(plan, tokens)]

    def fail(self, plan: SchedulePlan, error: Exception) -> list[Delta]:
        """End every request of a batch that could not be computed; call it after the rollback."""
        failure = StepFailed(f"the step that computed this request failed: {type(error).__name__}")
        failure.__cause__ = error
        return [self.end(row.sequence, "error", failure) for row in plan.rows]

    def expire_waiting(self, limit_s: float | None) -> list[Delta]:
        """End the requests that have waited longer than ``limit_s`` seconds for their first start."""
        if limit_s is None:
            return []
        latest = self._clock.now() - limit_s
        error = QueueTimeout(f"not started within {limit_s} seconds; retry later or raise queue_timeout_s")
        expired = [
            sequence
            for sequence in self._scheduler.never_started()
            if self._requests.request_of(sequence).timeline.arrival_s < latest
        ]
        return [self.end(sequence, "error", error) for sequence in expired]

    def end(self, sequence: Sequence, reason: FinishReason, error: Exception | None = None) -> Delta:
        """Finish a sequence for the engine's or the caller's reason; one that has finished stays as it is."""
        request = self._requests.request_of(sequence)
        text = ""
        if sequence.finish_reason is None:
            request.error = error
            self._scheduler.finish(sequence, reason)
            text, _ = self._answers.finish(sequence)
            self._note_finished(request)
        return self._delta(request, sequence, text, ())

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all answers of a request as they stand."""
        timeline = request.timeline
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            outputs=self._answers.completions(request),
            is_finished=request.is_done,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            metrics=RequestMetrics(
                timeline.arrival_s,
                timeline.first_scheduled_s,
                timeline.first_token_s,
                timeline.finished_s,
                num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
            ),
        )

    def _publish(self, new: NewToken, now: float) -> Delta:
        sequence = new.sequence
        request = self._requests.request_of(sequence)
        self._counters.num_generated_tokens += 1
        if request.timeline.first_token_s is None:
            request.timeline.first_token_s = now
        text, is_stopped = self._answers.add_token(sequence, new.token_id)
        if is_stopped:
            self._scheduler.finish(sequence, "stop")
        if sequence.finish_reason is not None:
            rest, is_stopped = self._answers.finish(sequence)
            text += rest
            if is_stopped:
                # Why: the token that completed a stop string may also have been the last one allowed.
                sequence.finish_reason = "stop"
            self._note_finished(request)
        return self._delta(request, sequence, text, (new.token_id,))

    def _delta(self, request: Request, sequence: Sequence, text: str, token_ids: tuple[int, ...]) -> Delta:
        reason = sequence.finish_reason
        wants_logprobs = sequence.params.logprobs is not None and token_ids
        return Delta(
            request_id=request.request_id,
            index=request.sequences.index(sequence),
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            logprobs=(sequence.logprobs[-1],) if wants_logprobs else None,
            error=request.error if reason == "error" else None,
            num_prompt_tokens=sequence.num_prompt_tokens,
        )

    def _note_finished(self, request: Request) -> None:
        if request.is_done:
            request.timeline.finished_s = self._clock.now()
            self._counters.num_finished += 1
            if self._hooks.observes_requests:
                self._hooks.request_finished(self.output_of(request))

"""Turns what happened to sequences into what callers see: news, outputs, finish reasons, errors.

The engine decides when; this module says what. Every way a request can end passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from pagedcore.errors import InvalidLogits, QueueTimeout, StepFailed
from pagedcore.outputs import Delta, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from pagedcore.protocols import Clock
from pagedcore.requests.candidate_groups import Beams, Chosen, Contest, Contests
from pagedcore.requests.output_text import CompletionTexts, PendingOutput
from pagedcore.requests.request import Request
from pagedcore.requests.request_table import RequestTable
from pagedcore.requests.stats import Counters, EngineStats, StepStats
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    from pagedcore.engine.builder import EngineComponents
    from pagedcore.execution.sampler import SampledTokens
    from pagedcore.scheduler.plan import NewToken, SchedulePlan

_NO_LOGITS: Final = "the model returned no usable logits for this request"


class OutputProcessor:
    """The publishing side of one engine.

    Invariant: an answer has news whenever text or tokens were added to it, and when it has ended.
    Invariant: nothing is published of an answer that is chosen at the end before all answers of its request are.
    """

    def __init__(
        self, parts: EngineComponents, requests: RequestTable, answers: CompletionTexts, counters: Counters,
        clock: Clock,
    ) -> None:
        self._scheduler = parts.scheduler
        self._hooks = parts.hooks
        self._requests = requests
        self._answers = answers
        self._counters = counters
        self._clock = clock
        self.contests = Contests(parts.scheduler, requests, answers)

    def note_started(self, plan: SchedulePlan) -> None:
        """Stamp the requests that a plan starts."""
        for sequence in plan.admitted:
            timeline = self._requests.request_of(sequence).timeline
            if timeline.first_scheduled_s is None:
                timeline.first_scheduled_s = self._clock.now()

    def note_step(self, plan: SchedulePlan, engine_stats: Callable[[], EngineStats]) -> None:
        """Count a step, and tell who observes steps."""
        self._counters.num_steps += 1
        self._counters.num_rows += len(plan.rows)
        self._counters.num_computed_tokens += plan.num_tokens
        if self._hooks.observes_steps:
            self._hooks.step_done(StepStats(
                num_steps=self._counters.num_steps, num_tokens=plan.num_tokens,
                num_running=len(self._scheduler.running), num_waiting=len(self._scheduler.waiting),
                engine_stats=engine_stats,
            ))

    def commit(self, plan: SchedulePlan, sampled: SampledTokens) -> list[PendingOutput]:
        """Make a computed step true; rows whose logits were unusable end first, and alone."""
        news, tokens, contests = self._note_prompts(plan, sampled), dict[int, int | None](), dict[str, Contest]()
        sequences = [row.sequence for row in plan.rows if row.is_sampled]
        for sequence, token_id, logprobs in zip(sequences, sampled.token_ids.tolist(), sampled.logprobs, strict=True):
            if token_id < 0:
                news += self._end_all([sequence], "error", InvalidLogits(_NO_LOGITS))
            elif sequence.finish_reason is None:
                tokens[sequence.sequence_id] = self._note_sampled(sequence, token_id, logprobs, contests)
        self.contests.steer(contests.values(), tokens)
        now = self._clock.now()
        for new in self._scheduler.commit(plan, tokens):
            news += self._publish(new, now)
        self.contests.add_branches(contests.values())
        for contest in contests.values():
            news += self._deliver_if_decided(contest, now)
        return self._note_finished(news)

    def fail(self, plan: SchedulePlan, error: Exception) -> list[PendingOutput]:
        """End every request of a batch that could not be computed; call it after the rollback."""
        failure = StepFailed(f"the step that computed this request failed: {type(error).__name__}")
        failure.__cause__ = error
        return self._note_finished(self._end_all((row.sequence for row in plan.rows), "error", failure))

    def expire_waiting(self, limit_s: float | None) -> list[PendingOutput]:
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
        return self._note_finished(self._end_all(expired, "error", error))

    def abort(self, request: Request) -> None:
        """Finish what of a request has not finished, for the caller's reason."""
        self.contests.close(request, "abort")
        self._note_finished(self._end_all(request.sequences, "abort"))

    def take_delta(self, news: PendingOutput) -> Delta:
        """Tell the news of an answer: all that was added to it since its last delta, with its end if it has ended."""
        request, sequence = news
        text, token_ids = self._answers.take_news(sequence)
        reason = sequence.finish_reason
        wants_logprobs = sequence.params.logprobs is not None and token_ids
        logprobs = tuple(sequence.logprobs[-len(token_ids) :]) if wants_logprobs else None
        error, index = request.error if reason == "error" else None, request.sequences.index(sequence)
        # Why: by position, because names would cost a quarter of the time, for every token of a step loop.
        return Delta(request.request_id, index, text, token_ids, reason, logprobs, error, sequence.num_prompt_tokens)

    def output_of(self, request: Request) -> RequestOutput:
        """Describe all answers of a request as they stand."""
        timeline = request.timeline
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            outputs=self._answers.completions(request),
            is_finished=request.is_done,
            num_cached_tokens=request.sequences[0].num_cached_tokens or 0,
            prompt_logprobs=request.prompt_logprobs,
            metrics=RequestMetrics(
                timeline.arrival_s,
                timeline.first_scheduled_s,
                timeline.first_token_s,
                timeline.finished_s,
                num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
            ),
        )

    def _end_all(
        self, sequences: Iterable[Sequence], reason: FinishReason, error: Exception | None = None
    ) -> list[PendingOutput]:
        """End sequences, and with a contender its whole request; those that have finished stay as they are."""
        news: list[PendingOutput] = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                request = self._requests.request_of(sequence)
                is_contest = self.contests.find(request) is not None
                self.contests.close(request, reason)
                news += [
                    self._end(request, one, reason, error)
                    for one in (request.sequences if is_contest else [sequence])
                ]
        return news

    def _end(
        self, request: Request, sequence: Sequence, reason: FinishReason, error: Exception | None
    ) -> PendingOutput:
        request.error = error
        self._scheduler.finish_sequence(sequence, reason)
        self._answers.finish(sequence)
        return request, sequence

    def _note_prompts(self, plan: SchedulePlan, sampled: SampledTokens) -> list[PendingOutput]:
        """Keep what was learnt of prompts; requests for which that cannot be told end."""
        news: list[PendingOutput] = []
        for row in plan.rows if sampled.prompts else ():
            scored = sampled.prompts.get(row.sequence.sequence_id, [])
            if scored is None:
                news += self._end_all([row.sequence], "error", InvalidLogits(_NO_LOGITS))
            elif row.sequence.prompt_logprobs is not None:
                row.sequence.prompt_logprobs += scored
        return news

    def _note_sampled(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, contests: dict[str, Contest]
    ) -> int | None:
        """Keep what was sampled and return the sequence's next token; a beam's is chosen later, by its search."""
        contest = self.contests.find(self._requests.request_of(sequence))
        if contest is not None:
            contests[contest.request.request_id] = contest
        if isinstance(contest, Beams):
            contest.offers[sequence.sequence_id] = logprobs.top if logprobs is not None else ()
            return None
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        return token_id

    def _publish(self, new: NewToken, now: float) -> list[PendingOutput]:
        sequence = new.sequence
        request = self._requests.request_of(sequence)
        contest = self.contests.find(request)
        if isinstance(contest, Beams):
            return []
        self._counters.num_generated_tokens += 1
        self._extend_text(new)
        if contest is not None:
            return []
        if request.timeline.first_token_s is None:
            request.timeline.first_token_s = now
        return [(request, sequence)]

    def _extend_text(self, new: NewToken) -> None:
        """Add a token's text to its sequence's; end the sequence where a stop string does."""
        sequence = new.sequence
        if self._answers.add_token(sequence, new.token_id):
            self._scheduler.finish_sequence(sequence, "stop")
        if sequence.finish_reason is not None and self._answers.finish(sequence):
            # Why: the token that completed a stop string may also have been the last one allowed.
            sequence.finish_reason = "stop"

    def _deliver_if_decided(self, contest: Contest, now: float) -> list[PendingOutput]:
        """Give a request its chosen answers, as soon as they can be chosen."""
        request = contest.request
        if self.contests.find(request) is not contest or not contest.is_decided:
            return []
        results = contest.results()
        if len(results) < len(request.sequences):
            error = InvalidLogits("the model allows fewer different answers than this request asks for")
            return self._end_all(request.sequences, "error", error)
        self.contests.close(request, "stop")
        request.timeline.first_token_s = now
        return [
            self._deliver(request, sequence, chosen)
            for sequence, chosen in zip(request.sequences, results, strict=True)
        ]

    def _deliver(self, request: Request, sequence: Sequence, chosen: Chosen) -> PendingOutput:
        sequence.score = chosen.score
        sequence.logprobs.extend(chosen.logprobs)
        for token_id in chosen.token_ids:
            sequence.token_ids.append(token_id)
            self._answers.add_token(sequence, token_id)
        self._answers.finish(sequence)
        self._scheduler.finish_sequence(sequence, chosen.finish_reason)
        if sequence.params.beam_width > 1:
            self._counters.num_generated_tokens += len(chosen.token_ids)
        return request, sequence

    def _note_finished(self, news: list[PendingOutput]) -> list[PendingOutput]:
        """Note the requests that these news end, each once, now that all their answers are complete."""
        for request in dict.fromkeys(request for request, sequence in news if sequence.finish_reason is not None):
            if request.is_done and request.timeline.finished_s is None:
                request.timeline.finished_s = self._clock.now()
                self._counters.num_finished += 1
                if self._hooks.observes_requests:
                    self._hooks.request_finished(self.output_of(request))
        return news

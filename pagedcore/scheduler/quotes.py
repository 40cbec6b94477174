"""When a request would start and end: quotes, and what makes their intervals hold.

One plan of the present, then a forecast in closed form (``forecast``). The engine quotes requests that it accepts to
itself; how far off these quotes were is what the intervals of later ones are made of: conformal prediction (Vovk,
Gammerman, Shafer, Algorithmic Learning in a Random World, 2005) over the latest errors. None of this runs before
the first quote is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from pagedcore.outputs import Interval, Quote, RequestMetrics
from pagedcore.scheduler.forecast import Bounds, Forecast, Job
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.policy_queues import least_tokens
from pagedcore.scheduler.step_planner import StepPlanner
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes, work_of
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    from pagedcore.scheduler.scheduler import Scheduler

SHARE: Final = 0.95
"""Share of quotes that are to hold."""
MAX_WATCHED: Final = 8
"""Accepted requests whose own quotes wait for their ends at a time: a bound for memory and for time."""
_NUM_ERRORS: Final = 400
_NUM_NEAR: Final = 150
"""Errors that an interval is made of: of the forecasts that were most like it."""
_NUM_FIRST_STEPS: Final = 64
_NUM_LENGTHS: Final = 400
_RATE: Final = 0.002
"""Weight of one more step in what is usual."""
Moments = tuple[float, float, float]
"""Start, first token, end, in seconds."""


class Errors:
    """How actual moments compare with forecast ones, and the bounds that follow."""

    def __init__(self) -> None:
        self.latest: deque[tuple[float, float]] = deque(maxlen=_NUM_ERRORS)
        """Forecast seconds, and actual ones over them."""

    def interval(self, seconds: float, unit_s: float) -> Interval:
        """Return what a forecast becomes, by the errors of those that were most like it in length."""
        seconds += unit_s
        near = sorted(self.latest, key=lambda one: max(one[0] / seconds, seconds / one[0]))[:_NUM_NEAR]
        ordered, outside = sorted([ratio for _, ratio in near]), (len(near) + 1) * (1.0 - SHARE) / 2.0
        factors = 0.0, 1.0, 2.0 * max([1.0, *ordered])
        if (rank := int(outside)) >= 1:
            factors = ordered[rank - 1], ordered[len(ordered) // 2], ordered[-rank]
        return Interval(*[max(0.0, factor * seconds - unit_s) for factor in factors])


@dataclass(slots=True)
class Watched:
    """A quote of a request that was accepted, until it ends."""

    quote: Quote
    raw: Moments
    unit_s: float


class QuoteBook:
    """What an engine needs for quotes: costs of steps, lengths of completions, errors of quotes.

    Invariant: memory is bounded; the time of a quote is that of one plan and a few operations for each sequence.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        line, self._scheduler = scheduler.costs.step, scheduler
        self.model = StepTimeModel(StepTimes(line.fixed_s, line.per_unit_s, line.per_unit_s, 0.0), forgetting=0.999)
        self.usual_s = 0.0
        """What a step takes on average lately."""
        self.num_quotes = self.num_held = 0
        """Own quotes whose requests have ended, and those of them whose end lay in the interval."""
        self.num_operations = 0
        """Of the latest forecast."""
        self._shares: deque[float] = deque(maxlen=_NUM_LENGTHS)
        self._sorted_shares: list[float] = []
        self._sums: list[float] = [0.0]
        self._errors = {is_known: (Errors(), Errors(), Errors()) for is_known in (False, True)}
        self._watched: dict[str, Watched] = {}

    def observe(self, plan: SchedulePlan, seconds: float) -> None:
        """Learn how long a step took."""
        self.model.observe(*work_of(plan), seconds)
        self.usual_s += (_RATE if self.usual_s else 1.0) * (seconds - self.usual_s)

    def note_length(self, sequence: Sequence) -> None:
        """Learn how long completions are, of one that has ended by itself and might have been shorter."""
        if least_tokens(sequence) < sequence.max_tokens:
            self._shares.append(sequence.num_output_tokens / sequence.max_tokens)
            self._sorted_shares = []

    def quote(self, sequences: ListOf[Sequence]) -> Quote:
        """Say when a request would start and end that has these sequences, which are new and wait nowhere."""
        return self.quote_of(self.forecast(sequences), sequences[0])

    def quote_of(self, raw: Moments, sequence: Sequence, *, is_exact: bool = False) -> Quote:
        """Make intervals of forecast moments."""
        is_known, unit_s = least_tokens(sequence) == sequence.max_tokens, self.unit_s
        errors = self._errors[is_known]
        intervals = [one.interval(moment_s, unit_s) for one, moment_s in zip(errors, raw, strict=True)]
        return Quote(
            start=intervals[0], first_token=intervals[1], end=intervals[2], is_length_known=is_known,
            num_steps=self.model.num_observed, num_lengths=0 if is_known else len(self._shares),
            num_quotes=len(errors[2].latest), is_exact=is_exact,
        )

    def watch(self, request_id: str, sequences: ListOf[Sequence]) -> None:
        """Quote a request to itself that is about to wait."""
        if self.is_learnt and len(self._watched) < MAX_WATCHED:
            raw = self.forecast(sequences)
            self._watched[request_id] = Watched(self.quote_of(raw, sequences[0]), raw, self.unit_s)

    def note_ended(self, request_id: str, metrics: RequestMetrics, *, is_whole: bool) -> None:
        """Learn how far off the quote of a request was that has ended; not of one that did not come to its own end."""
        if (watched := self._watched.pop(request_id, None)) is None or not is_whole:
            return
        quote, unit_s = watched.quote, watched.unit_s
        moments = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
        errors = self._errors[quote.is_length_known]
        for one, moment_s, raw_s in zip(errors, moments, watched.raw, strict=True):
            if moment_s is not None:
                one.latest.append((raw_s + unit_s, (moment_s - metrics.arrival_s + unit_s) / (raw_s + unit_s)))
        if metrics.finished_s is not None:
            self.num_quotes += 1
            self.num_held += quote.end.low <= metrics.finished_s - metrics.arrival_s <= quote.end.high

    def forecast(self, sequences: ListOf[Sequence]) -> Moments:
        """Forecast the moments of new sequences of one request."""
        rules, queues = self._scheduler.rules, self._scheduler.queues
        place = queues.place_of_new(sequences[0])
        waiting = [*queues.waiting.sequences[:place], *sequences, *queues.waiting.sequences[place:]]
        plan = StepPlanner(rules, self._scheduler.kv_cache, queues.running.sequences, waiting, may_wait=True,
                           view=queues.view).plan()
        # Why: where a queue stands, others come behind this request, and steps do not become shorter.
        usual_s = self.usual_s if len(waiting) > len(sequences) else 0.0
        forecast = Forecast(self.model.times, bounds_of(self._scheduler), usual_s)
        started, behind = self._after(plan, waiting, forecast)
        cached = self._scheduler.kv_cache.match(sequences[0]).num_tokens
        numbers = [one.sequence_id for one in sequences]
        for job in behind:
            if job.number in numbers:
                job.num_prefill = max(1, job.num_prefill - cached)
        forecast.run(started, behind, numbers[-1])
        ends = [forecast.end_s[one] for one in numbers if one in forecast.end_s]
        first = numbers[0]
        self.num_operations = forecast.num_operations
        return forecast.start_s[first], forecast.first_s[first], max(ends)

    def _after(
        self, plan: SchedulePlan, waiting: Iterable[Sequence], forecast: Forecast
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs that run and that wait after a planned step, and let its time pass."""
        rows = {row.sequence.sequence_id: row for row in plan.rows}
        started, behind = list[Job](), list[Job]()
        if rows:
            step_s = self.model.predict(*work_of(plan))
        for sequence in (*self._scheduler.running.sequences, *waiting):
            number, num_known = sequence.sequence_id, len(sequence.token_ids)
            num_left, row = self.tokens_left(sequence), rows.get(number)
            is_waiting = sequence.status.value == "waiting"
            if row is None:
                (behind if is_waiting else started).append(job_of(sequence, num_left))
                continue
            if is_waiting:
                forecast.start_s[number] = 0.0
            if row.is_sampled:
                if num_known == sequence.num_prompt_tokens:
                    forecast.first_s[number] = step_s
                if num_left == 1:
                    forecast.end_s[number] = step_s
                    continue
                started.append(Job(number, 0, num_left - 1, num_known + 1))
            else:
                started.append(Job(number, num_known - row.end, num_left, num_known))
        if rows:
            forecast.now_s = step_s
        return started, behind

    @property
    def is_learnt(self) -> bool:
        """Whether enough steps were seen for forecasts to be more than a guess."""
        return self.model.num_observed >= _NUM_FIRST_STEPS

    @property
    def unit_s(self) -> float:
        """One step: what errors of moments that are near are compared with."""
        return max(self.usual_s, self.model.times.fixed_s)

    def tokens_left(self, sequence: Sequence) -> int:
        """Return how many tokens will come, one at least: as many as it must have, or as is usual for its length."""
        num_output, most = sequence.num_output_tokens, sequence.max_tokens
        least = least_tokens(sequence)
        if least == most or not self._shares:
            return max(1, most - num_output)
        if not self._sorted_shares:
            self._sorted_shares = sorted(self._shares)
            self._sums = [0.0, *accumulate(reversed(self._sorted_shares))]
        # Why: what has run for long is longer than most; only lengths beyond the present one are possible.
        num_longer = len(self._sorted_shares) - bisect_right(self._sorted_shares, num_output / most)
        share = self._sums[num_longer] / num_longer if num_longer else 1.0
        return max(1, least - num_output, round(share * most) - num_output)


def job_of(sequence: Sequence, num_left: int) -> Job:
    """Return what is left of a sequence that gets so many tokens."""
    num_prefill = len(sequence.token_ids) - sequence.num_computed_tokens
    is_decoding = sequence.status.value != "waiting" and num_prefill == 1 and sequence.num_output_tokens > 0
    return Job(sequence.sequence_id, 0 if is_decoding else num_prefill, num_left, len(sequence.token_ids))


def bounds_of(scheduler: Scheduler) -> Bounds:
    """Return what a step of this scheduler may hold."""
    rules, device = scheduler.rules, scheduler.kv_cache.device
    return Bounds(
        max_num_seqs=rules.max_num_seqs, max_num_batched_tokens=rules.max_num_batched_tokens,
        num_positions=device.num_blocks * device.block_size, prefill_share=rules.prefill_share,
        is_guaranteed=rules.is_guaranteed, is_static=not rules.policy.admits_while_running,
    )

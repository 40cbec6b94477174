"""When a request would start and end: quotes, and what makes their intervals hold.

One plan of the present, then a forecast in closed form (``forecast``). The engine quotes requests that it accepts to
itself; how far off these quotes were is what the intervals of later ones are made of (``Errors``). None of this runs
before the first quote is asked for; what steps cost, the scheduler has learned by then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from pagedcore.analysis.quotes.forecast import Bounds, Forecast, Job
from pagedcore.outputs import Interval, Quote
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request
from pagedcore.scheduler.chunk_ends import kind_of_plan
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.policy_queues import least_tokens
from pagedcore.scheduler.step_planner import StepPlanner
from pagedcore.sequence import Sequence

if TYPE_CHECKING:
    from pagedcore.scheduler.scheduler import Scheduler

SHARE: Final = 0.95
"""Share of quotes that are to hold."""
MAX_WATCHED: Final = 32
"""Accepted requests whose own quotes wait for their ends at a time: a bound for memory and for time."""
NUM_LEAST: Final = 39
"""Errors before which an interval is a guess."""
_NUM_ERRORS: Final = 2000
_NUM_NEAR: Final = 150
"""Errors that an interval is made of at least, as far as there are so many: of the forecasts that were most like it."""
_NEAR: Final = math.log(2.0)
"""Forecasts whose logarithms differ by less are alike."""
_MOST_ERROR: Final = math.log(20.0)
"""A worse error counts as this one, so that one request moves no interval far."""
_ADAPTING: Final = 0.001
"""Weight of one more quote in the share that an interval leaves out: a few hundred change it."""
_FIRST_OUTSIDE: Final = 0.025
"""Less than may fail in the end: errors have longer tails than a normal distribution."""
_LEAST_OUTSIDE: Final = 0.005
_MOST_OUTSIDE: Final = 0.15
_NORMAL: Final = NormalDist()
_DOUBT: Final = 0.6
"""Sum of squares that levels must exceed before forecasts follow them by more than half of what they seem to say."""
_NUM_FIRST_STEPS: Final = 64
_NUM_LENGTHS: Final = 2000
_RATE: Final = 0.002
"""Weight of one more step in what is usual."""
Moments = tuple[float, float, float]
"""Start, first token, end, in seconds."""
Floats = npt.NDArray[np.float64]


class Errors:
    """How actual moments compare with forecast ones, and the intervals that follow: adaptive conformal prediction.

    An error is the logarithm of actual over forecast seconds, less what the slowness of the steps before the forecast
    explains (by least squares). An interval is the median error, plus and minus as many spreads (mean absolute
    deviations, as of a normal distribution) as leave out a share a. After each watched quote, a := a + 0.001 * (0.05 -
    1 if the quote failed else 0), whatever the errors' distribution: so 95 % hold in the long run (Gibbs, Candes,
    Adaptive Conformal Inference Under Distribution Shift, NeurIPS 2021, section 2).

    Invariant: memory and the time of a call do not grow with the number of errors seen.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self.outside = _FIRST_OUTSIDE
        """The share of errors that an interval leaves out if they are distributed normally."""
        self.slope = 0.0
        """What of the level of steps (logarithm) lasts until the moment: 0 to 1."""
        self._ring = np.zeros((3, _NUM_ERRORS))

    @property
    def latest(self) -> Floats:
        """Logarithms of forecast seconds, of actual over forecast seconds, and of levels: float64 [3, errors]."""
        return self._ring[:, : min(self.num_seen, _NUM_ERRORS)]

    def note(self, forecast_s: float, actual_s: float, level: float, *, has_held: bool) -> None:
        """Learn what became of a forecast, in seconds with one step added to both, and of its interval."""
        error = min(_MOST_ERROR, max(-_MOST_ERROR, math.log(max(actual_s, 1e-9) / forecast_s)))
        self._ring[:, self.num_seen % _NUM_ERRORS] = math.log(forecast_s), error, level
        if self.num_seen >= NUM_LEAST:
            outside = self.outside + _ADAPTING * (1.0 - SHARE - (not has_held))
            self.outside = min(_MOST_OUTSIDE, max(_LEAST_OUTSIDE, outside))
        self.num_seen += 1
        _, errors, levels = self.latest
        far = levels - levels.mean()
        self.slope = min(1.0, max(0.0, float(far @ errors) / (float(far @ far) + _DOUBT)))

    def interval(self, seconds: float, unit_s: float, level: float) -> Interval:
        """Return what a forecast becomes, by the errors of those that were about as long.

        Args:
            seconds: the forecast.
            unit_s: one step, which is added to forecast and actual seconds before they are compared.
            level: logarithm of how slow steps are just now beside what is usual.
        """
        forecasts, errors, levels = self.latest
        seconds += unit_s
        if len(errors) < NUM_LEAST:
            most = 2.0 * max(1.0, math.exp(errors.max(initial=0.0)))
            return Interval(0.0, seconds - unit_s, most * seconds - unit_s)
        rest = errors - self.slope * levels
        if len(rest) > _NUM_NEAR:
            distances = np.abs(forecasts - math.log(seconds))
            rest = rest[distances <= max(_NEAR, np.partition(distances, _NUM_NEAR - 1)[_NUM_NEAR - 1])]
        median = float(np.median(rest))
        spread = math.sqrt(math.pi / 2.0) * float(np.abs(rest - median).mean())
        half, center = _NORMAL.inv_cdf(1.0 - self.outside / 2.0) * spread, median + self.slope * level
        return Interval(*[max(0.0, math.exp(center + one) * seconds - unit_s) for one in (-half, 0.0, half)])


@dataclass(slots=True)
class Watched:
    """A quote of a request that was accepted, until it ends."""

    quote: Quote
    raw: Moments
    unit_s: float
    level: float
    tenant: str


class QuoteBook(EngineObserver):
    """What an engine needs for quotes: costs of steps, lengths of completions, errors of quotes.

    Invariant: memory is bounded; the time of a quote is that of one plan and a few operations for each sequence.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.model = scheduler, scheduler.costs.steps
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

    def step_timed(self, plan: SchedulePlan, seconds: float) -> None:
        """Learn how long steps are; what they cost by their work, the scheduler's model learns."""
        self.usual_s += (_RATE if self.usual_s else 1.0) * (seconds - self.usual_s)

    def completion_ended(self, sequence: Sequence) -> None:
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
        intervals = [one.interval(moment_s, unit_s, self.level) for one, moment_s in zip(errors, raw, strict=True)]
        return Quote(
            start=intervals[0], first_token=intervals[1], end=intervals[2], is_length_known=is_known,
            num_steps=self.model.num_observed, num_lengths=0 if is_known else len(self._shares),
            num_quotes=min(errors[2].num_seen, _NUM_ERRORS), is_exact=is_exact,
        )

    def request_comes(self, request: Request) -> None:
        """Quote a request to itself that is about to wait."""
        tenant = request.options.tenant
        if self.is_learnt and self._may_watch(tenant):
            raw = self.forecast(request.sequences)
            quote = self.quote_of(raw, request.sequences[0])
            self._watched[request.request_id] = Watched(quote, raw, self.unit_s, self.level, tenant)

    def _may_watch(self, tenant: str) -> bool:
        """Say whether there is room for one more; the newest of the tenant with most makes room for one with fewer."""
        if len(self._watched) < MAX_WATCHED:
            return True
        nums = Counter([one.tenant for one in self._watched.values()])
        [(greedy, most)] = nums.most_common(1)
        if most <= nums[tenant] + 1:
            return False
        # Why the newest: how long it takes is not known yet, so the errors that are left are of all kinds.
        del self._watched[next(name for name, one in reversed(self._watched.items()) if one.tenant == greedy)]
        return True

    def request_ended(self, request: Request) -> None:
        """Learn how far off the quote of a request was that has ended; not of one that did not come to its own end."""
        is_whole = request.is_done and request.error is None and not request.was_aborted
        if (watched := self._watched.pop(request.request_id, None)) is None or not is_whole:
            return
        quote, unit_s, metrics = watched.quote, watched.unit_s, request.metrics
        moments = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
        errors = self._errors[quote.is_length_known]
        intervals = quote.start, quote.first_token, quote.end
        for one, moment_s, raw_s, interval in zip(errors, moments, watched.raw, intervals, strict=True):
            if moment_s is not None:
                actual_s = moment_s - metrics.arrival_s
                has_held = interval.low <= actual_s <= interval.high
                one.note(raw_s + unit_s, actual_s + unit_s, watched.level, has_held=has_held)
        if metrics.finished_s is not None:
            self.num_quotes += 1
            self.num_held += quote.end.low <= metrics.finished_s - metrics.arrival_s <= quote.end.high

    def statistics(self) -> dict[str, int]:
        """Return how many own quotes there were, and how many held."""
        return {"num_quotes": self.num_quotes, "num_quotes_held": self.num_held}

    def forecast(self, sequences: ListOf[Sequence]) -> Moments:
        """Forecast the moments of new sequences of one request."""
        rules, queues = self._scheduler.rules, self._scheduler.queues
        place = queues.place_of_new(sequences[0])
        waiting = [*queues.waiting.sequences[:place], *sequences, *queues.waiting.sequences[place:]]
        numbers, opens_s = [one.sequence_id for one in sequences], self._opens_s(sequences)
        gated = frozenset((*queues.waiting.gated, *numbers) if opens_s > 0.0 else ())
        startable = [one for one in waiting if one.sequence_id not in gated]
        kv_cache = self._scheduler.kv_cache
        state = kind_of_plan(kv_cache)(rules, kv_cache, queues.running.sequences, startable)
        plan = StepPlanner(state, may_wait=True, view=queues.view).plan()
        # Why: where a queue stands, others come behind this request, and steps do not become shorter.
        usual_s = self.usual_s if len(waiting) > len(sequences) else 0.0
        forecast = Forecast(self.model.times, bounds_of(self._scheduler), usual_s, gated=gated, opens_s=opens_s)
        started, behind = self._after(plan, waiting, forecast)
        cached = self._scheduler.kv_cache.match(sequences[0]).num_tokens
        for job in behind:
            if job.number in numbers:
                job.num_prefill = max(1, job.num_prefill - cached)
        forecast.run(started, behind, numbers[-1])
        ends = [forecast.end_s[one] for one in numbers if one in forecast.end_s]
        first, adapters = numbers[0], self._scheduler.adapters
        self.num_operations = forecast.num_operations
        # Why at all: files of adapters take as long as the latest ones did.
        load_s = 0.0 if sequences[0].adapter in {None, *adapters.slot_of} else adapters.load_s
        return forecast.start_s[first] + load_s, forecast.first_s[first] + load_s, max(ends) + load_s

    def _opens_s(self, sequences: ListOf[Sequence]) -> float:
        """Return in how many seconds the gate opens once these wait too; 0 or less: at once."""
        waiting = self._scheduler.waiting
        oldest = next(waiting.never_started()) if waiting.gated else sequences[0]
        num_new = waiting.num_never_started + len(sequences)
        return self._scheduler.gate.opens_s(num_new, oldest.arrival_s) - sequences[0].arrival_s

    def _after(
        self, plan: SchedulePlan, waiting: Iterable[Sequence], forecast: Forecast
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs that run and that wait after a planned step, and let its time pass."""
        rows = {row.sequence.sequence_id: row for row in plan.rows}
        started, behind = list[Job](), list[Job]()
        if rows:
            step_s = self.model.predict(*plan.work)
        for sequence in (*self._scheduler.running.sequences, *waiting):
            number, num_known = sequence.sequence_id, len(sequence.token_ids)
            num_left, row = self.tokens_left(sequence), rows.get(number)
            is_waiting = sequence.status.value == "waiting"
            if row is None:
                (behind if is_waiting else started).append(job_of(sequence, num_left))
                continue
            if is_waiting:
                forecast.start_s[number] = 0.0
            if row.end == num_known:
                if num_known == sequence.num_prompt_tokens:
                    forecast.first_s[number] = step_s
                if num_left == 1:
                    forecast.end_s[number] = step_s
                    continue
                started.append(_job(sequence, 0, num_left - 1, num_known + 1))
            else:
                started.append(_job(sequence, num_known - row.end, num_left, num_known))
        if rows:
            forecast.now_s = step_s
        return started, behind

    @property
    def is_learnt(self) -> bool:
        """Whether enough steps were seen for forecasts to be more than a guess."""
        return self.model.num_observed >= _NUM_FIRST_STEPS

    @property
    def level(self) -> float:
        """How slow the latest steps were beside what they cost usually, as a logarithm."""
        return math.log(self.model.level)

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
    return _job(sequence, 0 if is_decoding else num_prefill, num_left, len(sequence.token_ids))


def _job(sequence: Sequence, num_prefill: int, num_left: int, num_known: int) -> Job:
    """Return a job, in two parts if all of it is computed again on the way."""
    short, number = sequence.num_short_tokens, sequence.sequence_id
    before = num_left if short is None or sequence.is_long else short + 1 - num_known
    if before <= 0:
        return Job(number, num_known, num_left, num_known)
    return Job(number, num_prefill, min(before, num_left), num_known, max(0, num_left - before))


def bounds_of(scheduler: Scheduler) -> Bounds:
    """Return what a step of this scheduler may hold."""
    rules, device = scheduler.rules, scheduler.kv_cache.device
    return Bounds(
        max_num_seqs=rules.max_num_seqs, max_num_batched_tokens=rules.max_num_batched_tokens,
        num_positions=device.num_blocks * device.block_size, prefill_share=rules.prefill_share,
        is_guaranteed=rules.is_guaranteed, is_static=not rules.policy.admits_while_running,
    )

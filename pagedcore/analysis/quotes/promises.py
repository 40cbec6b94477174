"""Promises: a request with a deadline is accepted if it will end in time, and refused at the door if not.

Every request that comes is forecast together with all that wait and run, each at its longest, in the order in which
they will start; it is taken only if each promise still holds by the worst error of earlier forecasts. So nothing that
comes later can break a promise, and what ends early only makes others earlier.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import asdict, dataclass
from typing import Final

from pagedcore.analysis.quotes.forecast import Forecast, Job
from pagedcore.analysis.quotes.quote_book import QuoteBook, bounds_of, job_of
from pagedcore.errors import InvalidRequest, InvalidSampling, PromiseRefused
from pagedcore.requests.observers import EngineObserver
from pagedcore.requests.request import Request
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

_NUM_ERRORS: Final = 1000
"""Errors of each order of magnitude: the worst of so many is exceeded once in so many times and one."""
_FIRST_FACTOR: Final = 1.5
"""What a forecast is stretched by until ``_NUM_FIRST`` promises of about its length have ended."""
_NUM_FIRST: Final = 20


@dataclass(slots=True, kw_only=True)
class PromiseCounters:
    """What became of deadlines that were promised; all 0 unless the policy promises them."""

    num_promises: int = 0
    """Requests with a deadline that were accepted."""
    num_promises_kept: int = 0
    num_promises_broken: int = 0
    """Those that ended late, or failed; aborted ones are neither."""
    num_promises_refused: int = 0


class PromiseBook(EngineObserver):
    """The promises of one scheduler.

    Invariant: when a request was taken, every open promise held in a forecast stretched by the worst error so far.
    """

    def __init__(self, scheduler: Scheduler, quotes: QuoteBook) -> None:
        self.counters = PromiseCounters()
        self.quotes = quotes
        self._scheduler = scheduler
        self._latest: dict[int, tuple[float, float]] = {}
        """For each open promise, by sequence: when it was forecast last, and how many seconds after that it ends."""
        self._errors: dict[int, deque[float]] = {}
        """Actual over forecast seconds, by the binary order of magnitude of the forecast in steps."""
        self._worst: dict[int, float] = {}
        self._learnt_s = -math.inf
        """Forecasts before were made of a guess of what steps cost, and teach nothing of later ones."""

    def require(self, sequences: ListOf[Sequence]) -> None:
        """Take new sequences of one request, or refuse them with nothing changed.

        Raises:
            PromiseRefused: they would end too late, or make others do so; it says when to ask again.
            InvalidRequest: not even an idle engine would end them in time.
            InvalidSampling: beam search, whose rows cannot be forecast.
        """
        first, now_s = sequences[0], sequences[0].arrival_s
        if first.params.beam_width > 1:
            raise InvalidSampling("beam_width", first.params.beam_width, "1 with an engine that promises deadlines")
        queues = self._scheduler.queues
        waiting, place = queues.waiting.sequences, queues.place_of_new(first)
        order = [*waiting[:place], *sequences, *waiting[place:]]
        ends_s = self._ends(queues.running.sequences, order)
        promised = [one for one in (*queues.running.sequences, *order) if one.deadline_s < math.inf]
        if any(self._latest_end_s(ends_s[one.sequence_id]) > one.deadline_s - now_s for one in promised):
            self.counters.num_promises_refused += first.deadline_s < math.inf
            raise self._refusal(sequences, [ends_s[one.sequence_id] for one in promised])
        self.counters.num_promises += first.deadline_s < math.inf
        if not self.quotes.is_learnt:
            self._learnt_s = math.nextafter(now_s, math.inf)
        self._latest = {one.sequence_id: (now_s, ends_s[one.sequence_id]) for one in promised}

    def request_ended(self, request: Request) -> None:
        """Learn what became of a request; one that its caller ended, or removed, teaches nothing."""
        was_ended_by_caller = request.was_aborted or not request.is_done
        is_whole, now_s = request.error is None and not was_ended_by_caller, request.metrics.finished_s or 0.0
        late, was_promised = False, False
        for one in request.sequences:
            since_s, forecast_s = self._latest.pop(one.sequence_id, (0.0, math.nan))
            if math.isnan(forecast_s):
                continue
            was_promised, late = True, late or now_s > one.deadline_s
            if is_whole and since_s >= self._learnt_s:
                unit_s = self.quotes.unit_s
                kind = self._kind(forecast_s)
                errors = self._errors.setdefault(kind, deque(maxlen=_NUM_ERRORS))
                errors.append((now_s - since_s + unit_s) / (forecast_s + unit_s))
                self._worst[kind] = max(errors)
        if was_promised and not was_ended_by_caller:
            is_kept = is_whole and not late
            self.counters.num_promises_kept += is_kept
            self.counters.num_promises_broken += not is_kept

    def statistics(self) -> dict[str, int]:
        """Return what became of promises."""
        return asdict(self.counters)

    def _refusal(self, sequences: ListOf[Sequence], ends_s: ListOf[float]) -> Exception:
        within_s = sequences[0].options.deadline_s
        if within_s is None:
            return PromiseRefused(None, max(ends_s))
        numbers, queues = [one.sequence_id for one in sequences], self._scheduler.queues
        alone_s = self._latest_end_s(max(self._ends((), sequences).values()))
        if alone_s > within_s:
            return InvalidRequest(
                "deadline_s", within_s, f"at least {alone_s:.3g} seconds for this prompt and max_tokens",
                "Ask for fewer tokens, or for a later deadline.",
            )
        # Why behind all others: a later deadline comes later, and there it delays none of them.
        behind_s = self._ends(queues.running.sequences, (*queues.waiting.sequences, *sequences))
        latest_s = self._latest_end_s(max([behind_s[one] for one in numbers]))
        return PromiseRefused(within_s, max(self.quotes.unit_s, latest_s - within_s))

    def _ends(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[int, float]:
        forecast = Forecast(self.quotes.model.times, bounds_of(self._scheduler))
        return forecast.run(map(_longest, running), map(_longest, waiting)).end_s

    def _latest_end_s(self, forecast_s: float) -> float:
        """Stretch a forecast by the worst error of those that were about as long."""
        kind, unit_s = self._kind(forecast_s), self.quotes.unit_s
        near = [one for one in (kind - 1, kind, kind + 1) if one in self._errors]
        is_known = sum([len(self._errors[one]) for one in near]) >= _NUM_FIRST
        worst = max([self._worst[one] for one in near]) if is_known else _FIRST_FACTOR
        return worst * (forecast_s + unit_s) - unit_s

    def _kind(self, forecast_s: float) -> int:
        return math.frexp(forecast_s / self.quotes.unit_s)[1]


def promise_deadlines(scheduler: Scheduler) -> tuple[EngineObserver, ...]:
    """Let a scheduler without sequences keep promises, and return what watches its engine for that."""
    quotes = QuoteBook(scheduler)
    promises = scheduler.queues.gatekeeper = PromiseBook(scheduler, quotes)
    return quotes, promises


def _longest(sequence: Sequence) -> Job:
    return job_of(sequence, max(1, sequence.max_tokens - sequence.num_output_tokens))

"""What statistics, promises and quotes learn of a request that has ended."""

from __future__ import annotations

from pagedcore.analysis.quotes.quote_book import QuoteBook
from pagedcore.requests.request import Request
from pagedcore.requests.stats import Counters
from pagedcore.scheduler.scheduler import Scheduler


def note_ended(request: Request, scheduler: Scheduler, quotes: QuoteBook | None, counters: Counters) -> None:
    """Count a request, and compare what was asked, promised or quoted with what became of it."""
    counters.num_finished += 1
    if request.options.has_targets and not request.was_aborted:
        counters.num_targeted += 1
        counters.num_on_target += request.is_on_target
    if (promises := scheduler.queues.promises) is not None:
        ended = None if request.was_aborted else request.error is None
        promises.note_ended(request.sequences, request.metrics.finished_s or 0.0, is_whole=ended)
    if quotes is not None:
        is_whole = request.error is None and not request.was_aborted
        quotes.note_ended(request.request_id, request.metrics, is_whole=is_whole)

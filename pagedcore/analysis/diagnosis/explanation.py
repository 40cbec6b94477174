"""Why a request waits: who holds what it lacks, since when, and for which reasons it has waited so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pagedcore.errors import InternalError
from pagedcore.requests.request import Request
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus

_MAX_CHANGES: Final = 1024
_MOST_HOLDERS: Final = 8
_TEXTS: Final = {
    "company": "it waits for company (min_batch_size)",
    "prefix": "another request computes the beginning that both share",
    "transfer": "KV blocks are on their way between host and device",
    "rows": "all rows of the batch are taken (max_num_seqs)",
    "tokens": "the token budget of a step is used up (max_num_batched_tokens)",
    "blocks": "too few KV blocks are free",
    "stall": "it runs, lacks a KV block, and waits for another sequence to end",
    "phase": "the present step has decode rows only (phases)",
    "tenant": "its tenant has as many rows or blocks as it may (policy_options)",
    "batch": "a static batch has to end first",
    "new": "it starts with the next step",
    "stuck": "no plan can be made",
}


class Holder(NamedTuple):
    """A request that holds KV blocks."""

    request_id: str
    num_blocks: int
    since_s: float
    """Seconds since it first started."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request stands; ``str`` gives one line. For operators: it names other requests by the engine's ids."""

    request_id: str
    state: str
    """"waiting", "prefill", "decode", "finished" or "unknown"; "held": an ``AsyncEngine``'s queue has no room yet."""
    reason: str = ""
    """Why it does not compute now, as the keys of ``StepStats.waits``, or "stuck"; empty if it does."""
    waited_s: float = 0.0
    """Seconds since it arrived, or since it was preempted last, if it waits."""
    waits_s: tuple[tuple[str, float], ...] = ()
    """These seconds by reason, longest first, as far back as is known."""
    num_before: int = 0
    """Sequences that wait before it."""
    num_preemptions: int = 0
    num_blocks: int = 0
    """KV blocks that it holds."""
    num_lacking: int = 0
    """KV blocks that it would need now beyond those."""
    num_available: int = 0
    """KV blocks without a holder."""
    num_pool_blocks: int = 0
    holders: tuple[Holder, ...] = ()
    """Who holds blocks, most first, at most eight."""

    def __str__(self) -> str:
        if not self.reason:
            return f"{self.state}, {self.num_blocks} KV blocks"
        parts = [f"{self.state} {self.waited_s:.1f} s: {_TEXTS.get(self.reason, self.reason)}"]
        if self.holders:
            held = sum(one.num_blocks for one in self.holders)
            oldest_s = max(one.since_s for one in self.holders)
            parts.append(
                f"{len(self.holders)} requests hold {held} of {self.num_pool_blocks} blocks, for up to "
                f"{oldest_s:.1f} s; {self.num_available} are available, it lacks {self.num_lacking}"
            )
        if self.num_before:
            parts.append(f"{self.num_before} sequences wait before it")
        if self.num_preemptions:
            parts.append(f"it was preempted {self.num_preemptions} times")
        if len(self.waits_s) > 1:
            parts.append("so far " + ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in self.waits_s))
        return "; ".join(parts)


@dataclass(slots=True)
class WaitLog:
    """For which reason the head of the queue was not admitted, over time; the last thousand changes.

    Why one for all: admission is in order, so that what stops the head stops everyone behind it.
    """

    reason: str = ""
    _changes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))

    def note(self, now_s: float, reason: str) -> None:
        """Note what stops the queue from now on; empty: nothing does."""
        self.reason = reason
        self._changes.append((now_s, reason))

    def since(self, start_s: float, now_s: float) -> tuple[tuple[str, float], ...]:
        """Return the seconds of each reason between two times, longest first; "new" where nothing stopped the queue."""
        found: dict[str, float] = {}
        end_s = now_s
        for began_s, reason in reversed(self._changes):
            seconds = end_s - max(began_s, start_s)
            if seconds > 0:
                found[reason or "new"] = found.get(reason or "new", 0.0) + seconds
            end_s = min(end_s, began_s)
            if began_s <= start_s:
                break
        return tuple(sorted(found.items(), key=lambda item: -item[1]))


def explain(request: Request, requests: Iterable[Request], scheduler: Scheduler, log: WaitLog, now_s: float
            ) -> Explanation:
    """Say where a request stands; no step may be in flight."""
    live = [one for one in request.sequences if one.finish_reason is None]
    # Why: of several completions the one that is furthest behind keeps the request.
    sequence = next((one for one in live if one.status is SequenceStatus.WAITING), live[0] if live else None)
    if sequence is None:
        return Explanation(request.request_id, "finished")
    blocks = scheduler.kv_cache.device
    num_held = blocks.num_blocks_of(sequence.sequence_id)
    reason, state = _reason(sequence, scheduler), _state(sequence)
    if not reason:
        return Explanation(request.request_id, state, num_blocks=num_held, num_pool_blocks=blocks.num_blocks)
    metrics = request.metrics
    start_s = metrics.pauses_s[-1][0] if metrics.pauses_s else metrics.arrival_s
    waits_s = ((reason, now_s - start_s),) if reason in ("company", "transfer") else log.since(start_s, now_s)
    waiting = scheduler.waiting.sequences
    return Explanation(
        request.request_id, state, reason, now_s - start_s, waits_s,
        waiting.index(sequence) if sequence in scheduler.waiting else 0,
        sum(one.num_preemptions for one in request.sequences), num_held,
        blocks.num_blocks_needed(sequence.sequence_id, len(sequence.token_ids)), blocks.num_available_blocks,
        blocks.num_blocks, _holders(request, requests, scheduler, now_s),
    )


def _state(sequence: Sequence) -> str:
    if sequence.status is SequenceStatus.WAITING:
        return "waiting"
    return "decode" if sequence.num_computed_tokens >= sequence.num_prompt_tokens else "prefill"


def _reason(sequence: Sequence, scheduler: Scheduler) -> str:
    number, waiting = sequence.sequence_id, scheduler.waiting
    if number in waiting.gated:
        return "company"
    if scheduler.kv_cache.host.is_moving(number):
        return "transfer"
    try:
        plan = scheduler.schedule()
    except InternalError:
        return "stuck"
    if any(row.sequence is sequence for row in plan.rows):
        return "new" if sequence in waiting else ""
    if sequence not in waiting:
        return "stall"
    return _stopped_by(sequence, plan, scheduler)


def _stopped_by(sequence: Sequence, plan: SchedulePlan, scheduler: Scheduler) -> str:
    """Return why a plan does not admit a waiting sequence: as its queue's head, or because its prefix is computed."""
    if sequence.sequence_id in plan.capped:
        return "tenant"
    passed = plan.num_deferred + len(plan.admitted) + len(plan.capped)
    is_passed = scheduler.waiting.startable().index(sequence) < passed
    if plan.num_deferred and (is_passed or not plan.stopped_by):
        return "prefix"
    return plan.stopped_by or "blocks"


def _holders(request: Request, requests: Iterable[Request], scheduler: Scheduler, now_s: float) -> tuple[Holder, ...]:
    found = []
    for one in requests:
        num_blocks = sum(scheduler.kv_cache.device.num_blocks_of(each.sequence_id) for each in one.sequences)
        if num_blocks and one is not request:
            started_s = one.metrics.first_scheduled_s
            found.append(Holder(one.request_id, num_blocks, now_s - (now_s if started_s is None else started_s)))
    return tuple(sorted(found, key=lambda holder: -holder.num_blocks)[:_MOST_HOLDERS])

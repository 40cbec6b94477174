"""Why a request waits: who holds what it lacks, since when, and for which reasons it has waited so far."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from pagedcore.engine.engine import Engine
from pagedcore.engine.wait_log import STALL_S
from pagedcore.errors import InternalError
from pagedcore.outputs import Explanation, Holder
from pagedcore.requests.request import Request
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus

_MOST_HOLDERS: Final = 8
_log = logging.getLogger("pagedcore")


def explain(engine: Engine, request_id: str) -> Explanation:
    """As ``Engine.explain``."""
    with engine.exclusive():
        request = engine.requests.find(request_id) or next(
            (one for one in engine.requests if one.client_request_id == request_id), None
        )
        return Explanation(request_id, "unknown") if request is None else _explain(request, engine)


def report_stall(engine: Engine) -> None:
    """Say in the log that no step computes anything although there is work, and why the first request waits."""
    scheduler = engine.scheduler
    head = next(iter(scheduler.waiting), None) or next(iter(scheduler.running))
    request = next((one for one in engine.requests if head in one.sequences), None)
    text = str(explain(engine, request.request_id)) if request is not None else "a candidate waits"
    _log.warning("no step has computed anything for %g s although there is work. The first request: %s", STALL_S, text)


def _explain(request: Request, engine: Engine) -> Explanation:
    """Say where a request stands; no step may be in flight."""
    scheduler, now_s = engine.scheduler, engine.clock.now()
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
    has_own_reason = reason in ("company", "transfer", "adapter")
    waits_s = ((reason, now_s - start_s),) if has_own_reason else engine.wait_log.since(start_s, now_s)
    waiting = scheduler.waiting.sequences
    return Explanation(
        request.request_id, state, reason, now_s - start_s, waits_s,
        waiting.index(sequence) if sequence in scheduler.waiting else 0,
        sum(one.num_preemptions for one in request.sequences), num_held,
        blocks.num_blocks_needed(sequence.sequence_id, len(sequence.token_ids)), blocks.num_available_blocks,
        blocks.num_blocks, _holders(request, engine.requests, scheduler, now_s),
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
    if sequence.sequence_id in plan.awaiting:
        return "adapter"
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

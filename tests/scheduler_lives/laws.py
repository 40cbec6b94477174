"""What a simulation demands besides the state laws: of every plan, and of what the memories really hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np

from pagedcore.analysis.diagnosis.invariants import Snapshot
from pagedcore.execution.ragged_batch import RaggedBatch
from pagedcore.kv_cache.memory_snapshot import Known
from pagedcore.scheduler import chunk_ends
from pagedcore.scheduler.chunk_ends import kind_of_plan
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_planner import StepPlanner
from pagedcore.sequence import Sequence, long_root
from support.doubles import LONG, KeepsToyStates, ToyStore, toy_digest


class SimulationFailure(AssertionError):
    """A law, a completion or the progress of one seed is not as it has to be."""


def failure_of(error: Exception, when: str, module: str, seed: int, *, has_faults: bool) -> SimulationFailure:
    """Describe the end of a life: when it came, why, and the command that shows it again."""
    command = f"PYTHONPATH=.:kernels:tests python -m {module} {seed}{' --faults' if has_faults else ''}"
    return SimulationFailure(f"{when}, {type(error).__name__}: {error}\n  again with: {command}")


def require(holds: bool, message: str) -> None:
    """Fail with ``message`` unless it holds; unlike ``assert`` also under ``python -O``."""
    if not holds:
        raise SimulationFailure(message)


def require_true_contents(now: Snapshot, store: ToyStore) -> None:
    """All that can be found in a cache is in that memory, token by token, from the first position on."""
    device, host = store.contents
    _require_true(now.blocks.device.registered, device, "device")
    if now.blocks.host is not None:
        _require_true(now.blocks.host.registered, host, "host")


def require_true_states(now: Snapshot, backend: KeepsToyStates) -> None:
    """All states that can be found are those of the tokens that they are found by."""
    blocks = now.blocks
    for states, memory, contents in ((blocks.states, blocks.device, backend.states),
                                     (blocks.host_states, blocks.host, backend.host_states)):
        for key, one in states.kept.items() if states is not None and memory is not None else ():
            tokens, known = list[int](), memory.registered[key]
            while not known.is_first:
                tokens, known = [*known.token_ids, *tokens], memory.registered[known.parent_key]
            tokens = [*known.token_ids, *tokens]
            digest, count = contents[one.state_id].tolist()
            is_true = count == len(tokens) and digest == toy_digest(np.array(tokens))
            require(is_true, f"state {one.state_id} is not that of the tokens it is found by")


def require_same_batch(batch: RaggedBatch, fresh: RaggedBatch) -> None:
    """The arrays of a step that follows another are those made from nothing."""
    for one in fields(RaggedBatch):
        found, wanted = getattr(batch, one.name), getattr(fresh, one.name)
        require((found is None) == (wanted is None) and (found is None or np.array_equal(found, wanted)),
                f"{one.name} of a step differs from the one made from nothing")


def _require_true(registered: Mapping[bytes, Known], memory: np.ndarray, where: str) -> None:
    held = memory.tolist()
    for known in registered.values():
        tokens, positions = held[known.block_id]
        start, parent, num_known = 0, known, len(known.token_ids)
        while not parent.is_first:
            parent = registered[parent.parent_key]
            start += len(parent.token_ids)
        is_true = tuple(tokens[:num_known]) == known.token_ids
        start += LONG * parent.parent_key.endswith(long_root(b""))
        is_true = is_true and positions[:num_known] == list(range(start, start + num_known))
        require(is_true, f"{where} block {known.block_id} does not hold what it is known for")


def require_lawful_plan(plan: SchedulePlan, scheduler: Scheduler) -> None:
    """What every plan has to respect in every state."""
    rules, running = scheduler.rules, list(scheduler.running)
    can_rest = scheduler.kv_cache.host.has_awaited or scheduler.kv_cache.host.withholds_blocks or not scheduler.has_work
    can_rest = can_rest or (not running and set(scheduler.waiting) == _gated(scheduler))
    require(bool(plan.rows) or plan.moves_blocks or can_rest, "nothing is planned although there is work")
    require(plan.num_tokens <= rules.max_num_batched_tokens, f"{plan.num_tokens} tokens are over the budget")
    require(len(running) + len(plan.admitted) <= rules.max_num_seqs, "more sequences than rows")
    require(not plan.admitted or not plan.preempted, "admitted and preempted in one plan")
    require(not plan.admitted or rules.policy.admits_while_running or not running, "a static batch was joined")
    if rules.policy.is_dynamic:
        again = [one.sequence.sequence_id for one in plan.preempted if one.sequence.is_protected]
        require(not again, f"{again} are preempted before they have regained what they had, and a token")
    planned = {row.sequence.sequence_id for row in plan.rows}
    lost = {one.sequence.sequence_id for one in plan.preempted} | {one.sequence_id for one in plan.freed}
    require(not planned & lost, "computed and freed in one plan")
    _require_formation(plan, scheduler)
    _require_fair_order(plan, scheduler)
    if not plan.moves_blocks:
        _require_next_tokens(plan, scheduler, planned)


def _gated(scheduler: Scheduler) -> set[Sequence]:
    return {one for one in scheduler.waiting if one.sequence_id in scheduler.waiting.gated}


def _require_formation(plan: SchedulePlan, scheduler: Scheduler) -> None:
    """Gated sequences were never started, hold nothing and are not planned; phases and shares are kept."""
    rules, gated = scheduler.rules, _gated(scheduler)
    require(len(gated) == len(scheduler.waiting.gated), "what does not wait is gated")
    require(gated <= set(scheduler.waiting.never_started()), "a sequence that was started is gated")
    held = [one for one in gated if scheduler.kv_cache.device.num_blocks_of(one.sequence_id)]
    require(not held, "a gated sequence holds blocks")
    planned = {*plan.admitted, *plan.freed, *(one.sequence for one in plan.swap_ins)}
    require(not planned & gated, "a gated sequence is planned")
    num_decode = sum(row.is_decode for row in plan.rows)
    num_prefill_tokens = plan.num_tokens - num_decode
    require(len(scheduler._phases) == 1 or not (num_decode and num_prefill_tokens), "a step has rows of both phases")
    most_tokens = max(1, rules.prefill_share * rules.max_num_batched_tokens)
    # Why not those that start: one that comes back after a preemption may follow prompts that came before it.
    is_shared = any(row.is_decode and row.sequence not in plan.admitted for row in plan.rows)
    if is_shared and rules.prefill_share < 1.0:
        require(num_prefill_tokens <= most_tokens, f"{num_prefill_tokens} tokens of prefill are over their share")


def require_alternation(plan: SchedulePlan, scheduler: Scheduler, last_phase: str) -> None:
    """With separate phases, a phase is computed twice in a row only if the other one can do nothing."""
    phase = "decode" if plan.rows[0].is_decode else "prefill"
    if len(scheduler._phases) == 1 or phase != last_phase:
        return
    other = replace(scheduler.rules, phase="prefill" if phase == "decode" else "decode")
    queues = scheduler.running.sequences, scheduler.waiting.startable()
    state = kind_of_plan(scheduler.kv_cache)(other, scheduler.kv_cache, *queues)
    missed = StepPlanner(state, may_wait=True, view=scheduler.queues.view).plan()
    require(not missed.rows and not missed.moves_blocks, f"{phase} twice in a row, although {other.phase} was possible")


def _require_next_tokens(plan: SchedulePlan, scheduler: Scheduler, planned: set[int]) -> None:
    """A running sequence gets its next token, unless it needs a block for it and there is none, or others prefill."""
    blocks = scheduler.kv_cache.device
    if len(scheduler._phases) > 1 and plan.rows and not plan.rows[0].is_decode:
        return
    is_split = len(scheduler._phases) > 1 or scheduler.rules.prefill_share < 1.0
    for sequence in scheduler.running:
        is_prompt = is_split and sequence.num_computed_tokens < sequence.num_prompt_tokens
        is_last = len(sequence.token_ids) - sequence.num_computed_tokens == 1 and not is_prompt
        if is_last and sequence.sequence_id not in planned:
            needed = blocks.num_blocks_needed(sequence.sequence_id, len(sequence.token_ids))
            require(needed == 1, f"sequence {sequence.sequence_id} misses its next token")


def _require_fair_order(plan: SchedulePlan, scheduler: Scheduler) -> None:
    """No request is overtaken by one that came more than the bonus later, except at the gate, while others compute its
    prefix, and while its tenant has as much as it may."""
    waiting, bonus = scheduler.waiting.startable(), scheduler.rules.policy.cache_bonus
    started = [*plan.admitted, *(one.sequence for one in plan.swap_ins)]
    host = scheduler.kv_cache.host
    for later in plan.admitted:
        for earlier in waiting[: waiting.index(later)]:
            is_excused = host.is_moving(earlier.sequence_id) or _is_capped(earlier, plan, scheduler)
            if earlier in started or is_excused or is_prefix_under_way(earlier, plan, scheduler):
                continue
            distance = later.arrival - earlier.arrival
            is_fair = later.priority == earlier.priority and 0 <= distance <= bonus
            require(is_fair, f"{later.sequence_id} overtook {earlier.sequence_id}, {distance} arrivals before it")


def _is_capped(candidate: Sequence, plan: SchedulePlan, scheduler: Scheduler) -> bool:
    """Whether the tenant of a candidate has as many rows, or as large a share of the pool, as it may."""
    policy, blocks = scheduler.rules.policy, scheduler.kv_cache.device
    own = [one for one in (*scheduler.running, *plan.admitted) if one.options.tenant == candidate.options.tenant]
    longest = sum(blocks.blocks_for(one.max_total_tokens) for one in (*own, candidate))
    return bool(own) and (
        (policy.max_tenant_rows is not None and len(own) >= policy.max_tenant_rows)
        or (policy.max_tenant_share is not None and longest > policy.max_tenant_share * blocks.num_blocks)
    )


def is_prefix_under_way(candidate: Sequence, plan: SchedulePlan, scheduler: Scheduler) -> bool:
    """Whether a running sequence is about to complete the block that a candidate would compute next, or to leave
    a state further on.
    """
    size = scheduler.kv_cache.device.block_size
    # Why both memories: what the host holds is loaded, and the block after it is the next to compute.
    first = size * (scheduler.kv_cache.match(candidate).num_tokens // size + 1)
    last = len(candidate.token_ids) if scheduler.kv_cache.device.keeps_states else first + 1
    return any(
        end < len(candidate.token_ids)
        and other.block_root == candidate.block_root
        and other.token_ids[:end] == candidate.token_ids[:end]
        and other.num_computed_tokens < end
        for other in (*scheduler.running, *plan.admitted) for end in range(first, last, size)
    )


@contextmanager
def short_prompts_leave_states(*, is_wanted: bool) -> Iterator[None]:
    """Let a state be worth a cut from two tokens on, as the prompts of a life are short."""
    before = chunk_ends.LEAST_SAVED
    chunk_ends.LEAST_SAVED = 2 if is_wanted else before  # type: ignore[misc]
    try:
        yield
    finally:
        chunk_ends.LEAST_SAVED = before  # type: ignore[misc]


def describe(plan: SchedulePlan) -> str:
    """One line that says what a plan does."""
    rows = " ".join(f"{row.sequence.sequence_id}:{row.start}+{row.num_tokens}" for row in plan.rows)
    preempted = ",".join(f"{one.sequence.sequence_id}:{one.kind.value}" for one in plan.preempted)
    loaded = ",".join(str(one.sequence.sequence_id) for one in plan.swap_ins)
    admitted, freed = (",".join(str(s.sequence_id) for s in some) for some in (plan.admitted, plan.freed))
    return "|".join([rows, admitted, preempted, freed, loaded])

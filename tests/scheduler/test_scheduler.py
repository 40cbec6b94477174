"""The transaction: what moves, when, and what stays when it is undone or a sequence leaves half-way."""

from __future__ import annotations

from itertools import count

import pytest

from pagedcore.analysis.diagnosis.invariants import Snapshot, check, snapshot
from pagedcore.errors import EngineOverloaded, InternalError, RequestTooLarge
from pagedcore.outputs import FinishReason
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus
from support.doubles import make_scheduler, make_sequence, next_plan, run_step

_tokens = count(1000)
WAITING, RUNNING, FINISHED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED


def reserved_step(scheduler: Scheduler) -> SchedulePlan:
    plan = next_plan(scheduler)
    scheduler.reserve(plan)
    return plan


def own(prompt: int = 3, max_tokens: int = 3, **more: int) -> Sequence:
    """A sequence whose prompt has nothing in common with any other one."""
    return make_sequence([next(_tokens) for _ in range(prompt)], max_tokens, **more)


def add(scheduler: Scheduler, prompt: int = 3, max_tokens: int = 3, **more: int) -> Sequence:
    sequence = own(prompt, max_tokens, **more)
    scheduler.add_sequences(sequence)
    return sequence


def run_until_preempted(scheduler: Scheduler, sequence: Sequence) -> None:
    for _ in range(50):
        if sequence.num_preemptions:
            return
        run_step(scheduler)
    raise AssertionError("no sequence was preempted")


def without_order(state: Snapshot) -> tuple[object, ...]:
    """A snapshot without the order of the free list, which means nothing."""
    device = state.blocks.device
    return (
        sorted(device.free_blocks), device.idle_blocks, device.reference_counts, dict(device.registered),
        dict(state.blocks.tables), state.waiting, state.running, dict(state.reserved), state.num_never_started,
    )


def test_reserve_gives_every_row_its_slots_and_moves_no_sequence() -> None:
    """After reserve the tables hold every position of the step; the admitted still wait."""
    scheduler = make_scheduler()
    sequence = add(scheduler, prompt=5)
    plan = reserved_step(scheduler)
    assert scheduler.kv_cache.device.table(sequence.sequence_id).num_blocks == 3
    assert sequence.status is WAITING
    assert [row.sequence for row in scheduler.rows_in_flight] == [sequence]
    assert check(snapshot(scheduler)) == []
    scheduler.rollback(plan)


def test_commit_computes_appends_and_starts() -> None:
    """A committed first step leaves a running sequence with one token more than it has computed."""
    scheduler = make_scheduler()
    sequence = add(scheduler, prompt=5)
    plan = reserved_step(scheduler)
    (new,) = scheduler.commit(plan, {sequence.sequence_id: 9})
    assert (new.sequence, new.token_id, new.finish_reason) == (sequence, 9, None)
    assert (sequence.status, sequence.num_computed_tokens, sequence.output_token_ids) == (RUNNING, 5, [9])
    assert list(scheduler.running) == [sequence]
    assert len(scheduler.waiting) == 0
    assert scheduler.rows_in_flight == []


def test_commit_reports_how_a_turn_ended() -> None:
    """A stop token and the last allowed token finish the sequence in the step that made them."""
    scheduler = make_scheduler()
    stopping, longest = make_sequence([1, 2], 5, stop_token_ids=[9]), own(2, 1)
    scheduler.add_sequences(stopping)
    scheduler.add_sequences(longest)
    plan = reserved_step(scheduler)
    results = scheduler.commit(plan, {stopping.sequence_id: 9, longest.sequence_id: 1})
    assert [new.finish_reason for new in results] == ["stop", "length"]
    assert (stopping.status, stopping.finish_reason) == (FINISHED, "stop")
    assert not scheduler.has_work
    assert scheduler.stats().num_blocks_used == 0


def test_a_chunk_that_does_not_reach_the_end_yields_no_token() -> None:
    """Tokens come only from rows that reach the last known position, also if tokens were sampled for others."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = add(scheduler, prompt=6)
    plan = reserved_step(scheduler)
    assert scheduler.commit(plan, {sequence.sequence_id: 9}) == []
    assert sequence.num_computed_tokens == 4


def test_rollback_leaves_the_state_before_the_step() -> None:
    """Tables, queues and sequences are as before, and the same plan can be made and carried out again."""
    scheduler = make_scheduler(num_blocks=16)
    add(scheduler)
    run_step(scheduler)
    add(scheduler)
    before = snapshot(scheduler)
    plan = reserved_step(scheduler)
    scheduler.rollback(plan)
    assert without_order(snapshot(scheduler)) == without_order(before)
    assert scheduler.schedule() == plan
    run_step(scheduler)
    assert check(snapshot(scheduler)) == []


def test_rollback_keeps_preemptions() -> None:
    """Blocks that were given to the step may be overwritten, so their old owners do not get them back."""
    scheduler = make_scheduler(num_blocks=4, preemption="recompute")
    first, last = add(scheduler, 2, 5), add(scheduler, 2, 5)
    while not last.num_preemptions:
        plan = reserved_step(scheduler)
        if last.num_preemptions:
            break
        scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows})
    scheduler.rollback(plan)
    assert (last.status, last.num_computed_tokens, last.num_preemptions) == (WAITING, 0, 1)
    assert list(scheduler.running) == [first]
    assert check(snapshot(scheduler)) == []


def test_room_is_made_before_anything_is_reserved() -> None:
    """A plan that asks for room is not computed, and one that asks for none moves nothing."""
    scheduler = make_scheduler(num_blocks=4, preemption="recompute")
    add(scheduler, 2, 5)
    victim = add(scheduler, 2, 5)
    plan = scheduler.schedule()
    while not plan.moves_blocks:
        run_step(scheduler)
        plan = scheduler.schedule()
    with pytest.raises(InternalError, match="room has to be made first"):
        scheduler.reserve(plan)
    assert scheduler.make_room(plan) == []
    assert (victim.status, victim.num_computed_tokens) == (WAITING, 0)
    with pytest.raises(InternalError, match="out of date"):
        scheduler.make_room(plan)
    assert check(snapshot(scheduler)) == []


KINDS = [("recompute", 0, 0), ("shrink", 0, 1), ("swap", 8, 2)]


@pytest.mark.parametrize(("mode", "num_host_blocks", "num_found"), KINDS)
def test_what_is_found_again_after_each_kind_of_preemption(mode: str, num_host_blocks: int, num_found: int) -> None:
    """Recomputing evicts all, shrinking leaves the beginning on the device, swapping leaves everything on the host."""
    scheduler = make_scheduler(num_blocks=5, preemption=mode, num_host_blocks=num_host_blocks)
    first, victim = add(scheduler, 4, 5), add(scheduler, 4, 3)
    run_step(scheduler)
    run_until_preempted(scheduler, victim)
    assert (victim.status, victim.num_preemptions) == (WAITING, 1)
    match = scheduler.kv_cache.match(victim)
    assert len(match.device_blocks) + len(match.host_blocks) >= num_found
    assert scheduler.stats().num_swapped == (mode == "swap")
    kinds = {kind.value: times for kind, times in scheduler.counters.num_preemptions.items()}
    assert kinds == {**dict.fromkeys(kinds, 0), mode: 1}
    while scheduler.has_work:
        run_step(scheduler)
        assert check(snapshot(scheduler)) == []
    assert (first.finish_reason, victim.finish_reason) == ("length", "length")


def test_a_finished_sequence_goes_to_the_host_and_its_next_turn_comes_back() -> None:
    """What others push off the device is loaded for the next turn and counted as found."""
    scheduler = make_scheduler(num_blocks=4, num_host_blocks=8)
    sequence = add(scheduler, 3, 2)
    while scheduler.has_work:
        run_step(scheduler)
    add(scheduler, 7, 1)
    run_step(scheduler)
    sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=10**6)
    scheduler.add_sequences(sequence)
    while scheduler.has_work:
        run_step(scheduler)
    assert sequence.num_cached_tokens == 4
    assert scheduler.counters.num_blocks_swapped_in == 2


def test_only_the_plan_in_flight_can_be_closed_and_once() -> None:
    """Commit and rollback refuse a plan that is not in flight, and a second closing."""
    scheduler = make_scheduler()
    sequence = add(scheduler)
    plan = scheduler.schedule()
    for close in (lambda: scheduler.commit(plan, {sequence.sequence_id: 1}), lambda: scheduler.rollback(plan)):
        with pytest.raises(InternalError, match="not in flight"):
            close()
    scheduler.reserve(plan)
    scheduler.rollback(plan)
    with pytest.raises(InternalError, match="not in flight"):
        scheduler.rollback(plan)


def test_one_step_at_a_time() -> None:
    """While a step is in flight there is no planning and no second reservation."""
    scheduler = make_scheduler()
    add(scheduler)
    plan = reserved_step(scheduler)
    with pytest.raises(InternalError, match="schedule: the step before"):
        scheduler.schedule()
    with pytest.raises(InternalError, match="reserve: the step before"):
        scheduler.reserve(plan)


def test_a_plan_that_is_out_of_date_is_refused_and_changes_nothing() -> None:
    """A request is aborted between planning and reserving: plan again."""
    scheduler = make_scheduler()
    aborted = add(scheduler)
    add(scheduler)
    plan = scheduler.schedule()
    scheduler.finish_sequence(aborted, "abort")
    before = snapshot(scheduler)
    with pytest.raises(InternalError, match="out of date"):
        scheduler.reserve(plan)
    assert snapshot(scheduler) == before
    assert run_step(scheduler).rows


def test_a_missing_token_is_refused_and_changes_nothing() -> None:
    """Commit checks everything before it moves a sequence; the step can still be rolled back."""
    scheduler = make_scheduler()
    first, second = add(scheduler), add(scheduler)
    plan = reserved_step(scheduler)
    before = snapshot(scheduler)
    with pytest.raises(InternalError, match=f"no token for sequence {second.sequence_id}"):
        scheduler.commit(plan, {first.sequence_id: 1})
    assert snapshot(scheduler) == before
    scheduler.rollback(plan)


def test_a_reservation_that_fails_leaves_the_laws_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pool refuses what was planned, the step did not begin and the next one can."""
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 2, 4)
    add(scheduler, 2, 4)
    for _ in range(3):
        run_step(scheduler)
    plan = next_plan(scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(type(scheduler.kv_cache.device), "reserve", lambda *_: None)
        with pytest.raises(InternalError, match="too few for the plan"):
            scheduler.reserve(plan)
    assert check(snapshot(scheduler)) == []
    assert run_step(scheduler).rows


def sequence_in(place: str, scheduler: Scheduler) -> Sequence:
    """A sequence in one of the places it can be finished from."""
    sequence = add(scheduler, 3, 1 if place in ("finished", "removed") else 4)
    if place != "waiting":
        run_step(scheduler)
    if place == "preempted":
        other = add(scheduler, 2, 6, arrival=-1)
        run_until_preempted(scheduler, sequence)
        scheduler.finish_sequence(other, "abort")
    if place == "continued":
        scheduler.finish_sequence(sequence, "stop")
        sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=99)
        scheduler.add_sequences(sequence)
    if place == "removed":
        scheduler.remove_sequence(sequence)
    return sequence


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("place", ["waiting", "running", "preempted", "continued"])
def test_aborting_frees_every_block_at_once_wherever_the_sequence_is(place: str, reason: FinishReason) -> None:
    """After abort or error nothing of the sequence is left, and twice is the same as once."""
    scheduler = make_scheduler(num_blocks=4)
    sequence = sequence_in(place, scheduler)
    for _ in range(2):
        scheduler.finish_sequence(sequence, reason)
        assert (sequence.status, sequence.finish_reason) == (FINISHED, reason)
        assert scheduler.stats().num_blocks_used == 0
        assert not scheduler.has_work
        assert check(snapshot(scheduler)) == []


@pytest.mark.parametrize("place", ["finished", "removed"])
def test_what_has_finished_stays_as_it_is(place: str) -> None:
    """A late abort changes neither the reason nor the kept blocks."""
    scheduler = make_scheduler()
    sequence = sequence_in(place, scheduler)
    before = snapshot(scheduler)
    scheduler.finish_sequence(sequence, "abort")
    assert sequence.finish_reason == "length"
    assert snapshot(scheduler) == before


@pytest.mark.parametrize(("reason", "num_found"), [("stop", 3), ("abort", 3), ("error", 0)])
def test_what_a_sequence_computed_can_be_found_unless_it_failed(reason: FinishReason, num_found: int) -> None:
    """A stop or an abort leaves its blocks cached; after an error nothing that it computed is found."""
    scheduler = make_scheduler()
    sequence = add(scheduler)
    run_step(scheduler)
    scheduler.finish_sequence(sequence, reason)
    assert (scheduler.stats().num_blocks_used, sequence.num_computed_tokens) == (0, 0)
    assert scheduler.kv_cache.match(sequence).num_tokens == num_found
    assert check(snapshot(scheduler)) == []


def test_a_sequence_that_never_ran_leaves_no_trace() -> None:
    """It is finished, and nothing can be found of it."""
    scheduler = make_scheduler()
    sequence = add(scheduler)
    scheduler.finish_sequence(sequence, "stop")
    assert (sequence.status, scheduler.has_work, scheduler.stats().num_blocks_cached) == (FINISHED, False, 0)


@pytest.mark.parametrize("reason", ["abort", "error", "stop"])
@pytest.mark.parametrize("close", ["commit", "rollback"])
def test_finishing_in_flight_frees_at_once_and_the_others_continue(close: str, reason: FinishReason) -> None:
    """A sequence removed while the step runs takes no part in its result; its blocks are free before it is closed."""
    scheduler = make_scheduler()
    running, admitted, staying = add(scheduler), own(2, 3), own(2, 3)
    run_step(scheduler)
    scheduler.add_sequences(admitted)
    scheduler.add_sequences(staying)
    plan = reserved_step(scheduler)
    for sequence in (running, admitted):
        scheduler.finish_sequence(sequence, reason)
        assert scheduler.kv_cache.device.num_blocks_of(sequence.sequence_id) == 0
    assert check(snapshot(scheduler)) == []
    if close == "rollback":
        scheduler.rollback(plan)
    else:
        assert [new.sequence for new in scheduler.commit(plan, {staying.sequence_id: 1})] == [staying]
    assert [running.finish_reason, admitted.finish_reason] == [reason, reason]
    assert check(snapshot(scheduler)) == []
    assert scheduler.stats().num_running + scheduler.stats().num_waiting == 1


def test_a_sequence_that_left_in_flight_and_came_back_has_nothing_of_that_step() -> None:
    """The step's result for its former turn does not count for the new one."""
    scheduler = make_scheduler()
    sequence = add(scheduler)
    plan = reserved_step(scheduler)
    scheduler.finish_sequence(sequence, "stop")
    sequence.begin_turn([1], sequence.params, max_tokens=2, stop_token_ids=frozenset(), arrival=99)
    scheduler.add_sequences(sequence)
    assert scheduler.commit(plan, {sequence.sequence_id: 1}) == []
    assert (sequence.status, sequence.num_computed_tokens) == (WAITING, 0)
    assert check(snapshot(scheduler)) == []
    run_step(scheduler)
    assert sequence.output_token_ids == [1]


def test_adding_in_flight_waits_for_the_next_plan() -> None:
    """A sequence that is added during a step disturbs neither its commit nor the order."""
    scheduler = make_scheduler()
    first = add(scheduler)
    plan = reserved_step(scheduler)
    second = add(scheduler)
    scheduler.commit(plan, {first.sequence_id: 1})
    assert scheduler.schedule().admitted == (second,)


def test_only_a_finished_sequence_can_be_removed_and_twice_is_once() -> None:
    """After its removal nothing is kept for the sequence, also not on the host, where it was parked."""
    scheduler = make_scheduler(num_host_blocks=4)
    sequence = add(scheduler, max_tokens=2)
    run_step(scheduler)
    with pytest.raises(InternalError, match="running -> removed"):
        scheduler.remove_sequence(sequence)
    run_step(scheduler)
    assert scheduler.moves.park(sequence) > 0
    for transfer in scheduler.moves.take_due():
        scheduler.moves.complete_transfer(transfer.transfer_id, 0.1, is_ok=True)
    assert scheduler.stats().num_host_blocks_used > 0
    scheduler.remove_sequence(sequence)
    scheduler.remove_sequence(sequence)
    assert sequence.status is SequenceStatus.REMOVED
    stats = scheduler.stats()
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)


def test_a_finished_sequence_cannot_be_added_without_a_new_turn() -> None:
    """Only a waiting sequence can be added, and only once."""
    scheduler = make_scheduler()
    sequence = add(scheduler, max_tokens=1)
    with pytest.raises(InternalError, match="already in this queue"):
        scheduler.add_sequences(sequence)
    run_step(scheduler)
    with pytest.raises(InternalError, match="is finished"):
        scheduler.add_sequences(sequence)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    """A sequence of exactly the pool is accepted, one token more is refused and leaves no trace."""
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    assert scheduler.can_ever_fit(6)
    assert not scheduler.can_ever_fit(7)
    with pytest.raises(RequestTooLarge, match="got 7, allowed is at most the 6 positions"):
        add(scheduler, prompt=5, max_tokens=2)
    assert not scheduler.has_work
    add(scheduler, prompt=5, max_tokens=1)


def test_a_full_queue_refuses_new_sequences_and_takes_back_preempted_ones() -> None:
    """Overload is an error at the call, never the loss of what was accepted."""
    scheduler = make_scheduler(num_blocks=4, max_num_waiting=1)
    add(scheduler, 2, 4)
    run_step(scheduler)
    preempted = add(scheduler, 2, 4)
    run_step(scheduler)
    add(scheduler, 1, 1)
    with pytest.raises(EngineOverloaded):
        add(scheduler, 1, 1)
    with pytest.raises(EngineOverloaded):
        scheduler.require_room(2)
    run_until_preempted(scheduler, preempted)
    assert scheduler.stats().num_waiting == 2
    assert check(snapshot(scheduler)) == []


def test_a_refused_continuation_changes_nothing() -> None:
    """A full queue that refuses a new turn leaves what can be found where it was."""
    scheduler = make_scheduler(max_num_waiting=1)
    kept = add(scheduler, max_tokens=1)
    run_step(scheduler)
    waiting = add(scheduler)
    kept.begin_turn([1], kept.params, max_tokens=1, stop_token_ids=frozenset(), arrival=99)
    with pytest.raises(EngineOverloaded):
        scheduler.add_sequences(kept)
    assert scheduler.kv_cache.match(kept).num_tokens == 3
    assert list(scheduler.waiting) == [waiting]


def test_never_started_leaves_out_what_was_preempted() -> None:
    """Queue time-outs concern new sequences; one that has run once stays until it ends."""
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 2, 6)
    preempted = add(scheduler, 2, 4)
    run_until_preempted(scheduler, preempted)
    new = add(scheduler)
    assert list(scheduler.waiting) == [preempted, new]
    assert list(scheduler.waiting.never_started()) == [new]


def test_a_rolled_back_admission_was_never_started() -> None:
    """It waits as before and counts against the bound as before."""
    scheduler = make_scheduler(max_num_waiting=1)
    sequence = add(scheduler)
    plan = reserved_step(scheduler)
    scheduler.rollback(plan)
    assert list(scheduler.waiting.never_started()) == [sequence]
    assert scheduler.waiting.num_free_slots == 0


def test_stats_count_prompts_and_generated_tokens_apart() -> None:
    """Prompt tokens and recomputed tokens count as prefill, fresh ones as decode; steps count when committed."""
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, prompt=3, max_tokens=3)
    while scheduler.has_work:
        run_step(scheduler)
    stats, counters = scheduler.stats(), scheduler.counters
    assert (counters.num_steps, counters.num_prefill_tokens, counters.num_decode_tokens) == (3, 3, 2)
    assert (stats.num_blocks, stats.num_blocks_used, scheduler.kv_cache.device.num_available_blocks) == (4, 0, 4)
    assert stats.num_blocks_cached == 3
    add(scheduler)
    scheduler.rollback(reserved_step(scheduler))
    assert scheduler.counters.num_steps == 3


def test_a_prompt_of_one_token_counts_as_prompt() -> None:
    """Decode tokens are generated ones, also in a row of one prompt token."""
    scheduler = make_scheduler()
    add(scheduler, prompt=1, max_tokens=1)
    run_step(scheduler)
    counters = scheduler.counters
    assert (counters.num_prefill_tokens, counters.num_decode_tokens) == (1, 0)


def test_stats_count_what_was_looked_up_and_found_once_a_turn() -> None:
    """Every turn looks its known tokens up once, also when it is preempted and starts again."""
    scheduler = make_scheduler(num_blocks=4, preemption="recompute")
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 5]):
        scheduler.add_sequences(make_sequence(prompt, 1))
        while scheduler.has_work:
            run_step(scheduler)
    counters = scheduler.counters
    assert (counters.num_looked_up_tokens, counters.num_cached_tokens) == (8, 3)


def test_a_snapshot_of_the_counters_stays() -> None:
    """Stats that were taken before do not change."""
    scheduler = make_scheduler()
    add(scheduler)
    before = scheduler.stats()
    run_step(scheduler)
    assert (before.num_looked_up_tokens, scheduler.stats().num_looked_up_tokens) == (0, 3)

"""What one step decides: budget, admission, reuse, and which sequences make room."""

from __future__ import annotations

from itertools import count

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.errors import InternalError
from pagedcore.kv_cache.reservation import Demand
from pagedcore.scheduler.plan import PreemptionKind, SchedulePlan
from pagedcore.scheduler.policies import fcfs
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence, SequenceStatus
from support.doubles import make_scheduler, make_sequence, next_plan, run_step

_tokens = count(1000)
BONUS = fcfs().cache_bonus


def own(num_tokens: int, max_tokens: int = 1, **more: int) -> Sequence:
    """A sequence whose prompt has nothing in common with any other one."""
    return make_sequence([next(_tokens) for _ in range(num_tokens)], max_tokens, **more)


def start(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add_sequences(sequence)


def tokens_of(plan: SchedulePlan) -> dict[int, int]:
    return {row.sequence.sequence_id: row.num_tokens for row in plan.rows}


def preempted(plan: SchedulePlan) -> list[Sequence]:
    return [one.sequence for one in plan.preempted]


def give_blocks(scheduler: Scheduler, sequence: Sequence, num_computed: int) -> None:
    reservation = scheduler.kv_cache.device.reserve([Demand(sequence.sequence_id, num_computed)])
    assert reservation is not None
    reservation.commit()
    sequence.num_computed_tokens = num_computed
    scheduler.kv_cache.device.register(sequence, num_computed)


def put_running(scheduler: Scheduler, sequence: Sequence, num_computed: int) -> Sequence:
    """Let a sequence run that has computed so much already."""
    give_blocks(scheduler, sequence, num_computed)
    sequence.move_to(SequenceStatus.RUNNING)
    scheduler.running.add_sequence(sequence)
    return sequence


def put_waiting(scheduler: Scheduler, sequence: Sequence, num_computed: int) -> Sequence:
    """Let a sequence wait that holds blocks, as one that was loaded from the host does."""
    scheduler.add_sequences(sequence)
    give_blocks(scheduler, sequence, num_computed)
    return sequence


def keep(scheduler: Scheduler, tokens: list[int]) -> None:
    """Leave the blocks of a sequence that has computed these tokens and is gone."""
    sequence = make_sequence(tokens)
    give_blocks(scheduler, sequence, len(tokens))
    scheduler.kv_cache.device.free_blocks(sequence)


# Budget and rows ------------------------------------------------------------------------------------------------------


def test_an_idle_scheduler_plans_nothing() -> None:
    """No work, empty plan."""
    plan = make_scheduler().schedule()
    assert not plan.rows
    assert plan.num_tokens == 0
    assert not plan.moves_blocks


@pytest.mark.parametrize("preemption", ["auto", "swap", "shrink", "recompute", "wait"])
def test_schedule_changes_nothing_and_repeats_itself(preemption: str) -> None:
    """The plan is a pure function of the state, even when it preempts, loads, frees and admits."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=4, preemption=preemption, num_host_blocks=4)
    keep(scheduler, [1, 2])
    start(scheduler, own(3, 5), own(2, 4), own(6, 1), make_sequence([1, 2, 3], 2))
    while scheduler.has_work:
        before = snapshot(scheduler)
        assert scheduler.schedule() == scheduler.schedule()
        assert snapshot(scheduler) == before
        run_step(scheduler)


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """No row is sampled before its prompt is complete, and the chunks add up to the prompt."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = own(10, 2)
    start(scheduler, sequence)
    chunks = []
    while not sequence.output_token_ids:
        (row,) = scheduler.schedule().rows
        chunks.append((row.start, row.end, row.num_sampled))
        run_step(scheduler)
    assert chunks == [(0, 4, 0), (4, 8, 0), (8, 10, 1)]


def test_decode_rows_get_their_token_before_prompts_expand() -> None:
    """A long prompt that came first does not cost a later sequence its next token."""
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=4)
    long = put_running(scheduler, own(20, 2), 4)
    short = put_running(scheduler, own(3, 8), 2)
    assert tokens_of(scheduler.schedule()) == {short.sequence_id: 1, long.sequence_id: 3}


def test_the_step_never_exceeds_its_token_budget() -> None:
    """Decode rows, chunks and admissions share one budget."""
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=5)
    start(scheduler, *(own(prompt, 3) for prompt in (7, 1, 9, 4, 2)))
    while scheduler.has_work:
        assert 0 < run_step(scheduler).num_tokens <= 5


def test_running_sequences_are_at_most_max_num_seqs() -> None:
    """Room and tokens for more do not help when the rows are taken."""
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=2)
    start(scheduler, *(own(1, 3) for _ in range(5)))
    assert len(run_step(scheduler).admitted) == 2
    assert run_step(scheduler).admitted == ()


# Admission ------------------------------------------------------------------------------------------------------------


def test_admission_needs_room_for_the_whole_prompt() -> None:
    """A small first chunk does not let in a prompt whose rest would not fit beside the others."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=3)
    first, second = own(5), own(4)
    start(scheduler, first, second)
    assert run_step(scheduler).admitted == (first,)
    assert scheduler.kv_cache.device.num_available_blocks == 2
    assert run_step(scheduler).admitted == ()


def test_a_prompt_in_progress_counts_with_all_of_its_blocks() -> None:
    """Free blocks that a running prompt will still need are not given to a new sequence."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=3)
    first, second, third = own(8), own(2), own(1)
    start(scheduler, first, second, third)
    assert run_step(scheduler).admitted == (first,)
    assert run_step(scheduler).admitted == ()
    assert run_step(scheduler).admitted == (second,)


@pytest.mark.parametrize(("admission", "num_admitted"), [("optimistic", 2), ("guaranteed", 1)])
def test_guaranteed_admission_counts_the_longest_completion(admission: str, num_admitted: int) -> None:
    """Optimistic admission counts what is known now, guaranteed what may come."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, admission=admission)
    start(scheduler, own(2, 4), own(2, 4))
    assert len(scheduler.schedule().admitted) == num_admitted


def test_guaranteed_admission_uses_the_pool_up_to_the_last_block() -> None:
    """Two sequences whose longest completions fill the pool exactly run together."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, admission="guaranteed")
    start(scheduler, own(2, 4), own(2, 4))
    assert len(scheduler.schedule().admitted) == 2


def test_a_preempted_sequence_is_admitted_with_room_to_grow() -> None:
    """After each preemption admission counts one block more for it, so that it is not preempted again at once."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    put_running(scheduler, own(4, 4), 3)
    candidate = own(4, 4)
    start(scheduler, candidate)
    assert scheduler.schedule().admitted == (candidate,)
    candidate.num_preemptions = 1
    assert scheduler.schedule().admitted == ()


def test_no_sequence_overtakes_a_head_that_lacks_room() -> None:
    """Strict order: a small request behind a blocked large one waits as well, so the large one cannot starve."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    start(scheduler, own(4, 3), own(6), own(1))
    assert len(run_step(scheduler).admitted) == 1
    assert run_step(scheduler).admitted == ()


def test_priority_decides_the_order_of_admission() -> None:
    """The latest arrival with the highest priority comes first."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    ordinary, urgent = own(1), own(1, priority=5)
    start(scheduler, ordinary, urgent)
    assert scheduler.schedule().admitted == (urgent,)


# What is in the cache -------------------------------------------------------------------------------------------------


def test_what_is_cached_is_not_computed() -> None:
    """Full blocks are shared, the beginning of the next is copied, and the last position is always computed."""
    scheduler = make_scheduler(num_blocks=8, block_size=2)
    keep(scheduler, [1, 2, 3, 4, 5])
    start(scheduler, make_sequence([1, 2, 3, 4, 5, 6, 7]))
    (row,) = scheduler.schedule().rows
    assert (row.start, row.num_tokens, len(row.match.device_blocks), row.match.tail is not None) == (5, 2, 2, True)


def test_cached_blocks_never_stop_a_waiting_sequence() -> None:
    """For waiting sequences a pool full of cached blocks is an empty one."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    keep(scheduler, [1, 2, 3, 4])
    keep(scheduler, [5, 6, 7, 8])
    start(scheduler, own(7))
    plan = run_step(scheduler)
    assert (plan.num_tokens, plan.freed, plan.preempted) == (7, (), ())


def test_a_prefix_that_others_hold_costs_no_room() -> None:
    """Admission counts what is shared with the running once; a stranger of the same length has to wait."""
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    put_running(scheduler, make_sequence([1, 2, 3, 4, 5, 6, 7], 2), 6)
    start(scheduler, make_sequence([1, 2, 3, 4, 5, 6, 8], 1))
    assert len(scheduler.schedule().admitted) == 1
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    put_running(scheduler, make_sequence([1, 2, 3, 4, 5, 6, 7], 2), 6)
    start(scheduler, own(7))
    assert scheduler.schedule().admitted == ()


def test_an_idle_prefix_costs_its_room_once_in_a_plan() -> None:
    """Two sequences that start together on the same cached blocks fit where two copies of them would not."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    keep(scheduler, [1, 2, 3, 4])
    start(scheduler, make_sequence([1, 2, 3, 4, 5], 1), make_sequence([1, 2, 3, 4, 6], 1))
    plan = run_step(scheduler)
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(4, 1), (4, 1)]
    assert check(snapshot(scheduler)) == []


def test_where_the_block_to_copy_from_would_have_to_go_its_tokens_are_computed() -> None:
    """A pool of exactly the sequence cannot hold source and copy at once: the full blocks are shared, the rest not."""
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    keep(scheduler, [1, 2, 3])
    start(scheduler, make_sequence([1, 2, 3], 1))
    (row,) = scheduler.schedule().rows
    assert (row.start, row.match.tail) == (2, None)
    run_step(scheduler)


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    """Equal prompts in one batch are computed once: the second starts when the first has what it needs."""
    scheduler = make_scheduler(num_blocks=20, block_size=2, max_num_batched_tokens=5)
    first, second, other = make_sequence([1, 2, 3, 4, 5, 6]), make_sequence([1, 2, 3, 4, 5, 7]), own(1)
    start(scheduler, first, second, other)
    assert run_step(scheduler).admitted == (first,)
    plan = run_step(scheduler)
    assert (plan.admitted, tokens_of(plan)) == ((second, other), {
        first.sequence_id: 1, second.sequence_id: 2, other.sequence_id: 1
    })
    assert second.num_cached_tokens == 4


def test_a_deferred_request_lets_others_pass_and_starts_when_its_leader_is_gone() -> None:
    """Waiting for a prefix ends with the sequence that computes it, and delays no other sequence."""
    scheduler = make_scheduler(num_blocks=20, block_size=2, max_num_batched_tokens=6)
    first, second, other = make_sequence([1, 2, 3, 4, 5, 6]), make_sequence([1, 2, 3, 4, 5, 7]), own(1)
    put_running(scheduler, first, 1)
    start(scheduler, second, other)
    assert scheduler.schedule().admitted == (other,)
    scheduler.finish_sequence(first, "error")
    assert scheduler.schedule().admitted == (second,)


def test_only_whole_blocks_of_the_same_tenant_are_waited_for() -> None:
    """Prompts that share less than a full block, or that may not share, are computed side by side."""
    scheduler = make_scheduler(num_blocks=20, block_size=4)
    start(scheduler, make_sequence([1, 2, 3, 4]), make_sequence([1, 2, 3, 4]))
    assert len(scheduler.schedule().admitted) == 2
    scheduler = make_scheduler(num_blocks=20, block_size=2)
    start(scheduler, make_sequence([1, 2, 3, 4, 5]), make_sequence([1, 2, 3, 4, 5], cache_root=b"other"))
    assert len(scheduler.schedule().admitted) == 2


@pytest.mark.parametrize("distance", range(1, BONUS + 4))
@pytest.mark.parametrize("num_cached", [0, 1, 4, BONUS, BONUS + 3])
def test_a_cached_prefix_gains_one_arrival_for_each_block_and_eight_at_most(distance: int, num_cached: int) -> None:
    """A request that came d arrivals later starts first exactly if d < min(bonus, its cached blocks)."""
    scheduler = make_scheduler(num_blocks=40, block_size=1, max_num_seqs=1)
    prompt = [next(_tokens) for _ in range(num_cached + 1)]
    if num_cached:
        keep(scheduler, prompt[:-1])
    earlier, later = own(2, arrival=100), make_sequence(prompt, 1, arrival=100 + distance)
    start(scheduler, earlier, later)
    assert (scheduler.schedule().admitted == (later,)) == (distance < min(BONUS, num_cached))


def test_no_request_is_overtaken_by_more_than_the_bonus() -> None:
    """An uncached request among any number of later, fully cached ones starts as the ninth at the latest."""
    scheduler = make_scheduler(num_blocks=64, block_size=1, max_num_seqs=1, max_num_waiting=100)
    prefix = list(range(20))
    keep(scheduler, prefix)
    unlucky = own(2, arrival=0)
    start(scheduler, unlucky, *(make_sequence([*prefix, 50 + i], 1, arrival=i) for i in range(1, 40)))
    num_before = 0
    while unlucky.finish_reason is None:
        num_before += run_step(scheduler).admitted != (unlucky,)
    assert 0 < num_before <= BONUS


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_bonus_never_reorders_across_priorities(policy: str) -> None:
    """Where priorities are mixed, no request passes one of another priority, cached or not."""
    scheduler = make_scheduler(num_blocks=40, block_size=1, policy=policy, max_num_seqs=1)
    keep(scheduler, [1, 2, 3, 4, 5])
    first, second = own(2, priority=1), own(2, priority=0)
    third = make_sequence([1, 2, 3, 4, 5, 6], 1, priority=1 if policy == "fcfs" else 0)
    start(scheduler, first, second, third)
    order = []
    while scheduler.has_work:
        order += run_step(scheduler).admitted
    assert order == ([first, second, third] if policy == "fcfs" else [first, third, second])


# Loading from the host ------------------------------------------------------------------------------------------------


def swapped(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Preempt running sequences to the host, and evict them from the device."""
    kv_cache = scheduler.kv_cache
    for sequence in sequences:
        put_running(scheduler, sequence, len(sequence.token_ids) - 1)
        scheduler.running.remove_sequence(sequence)
        transfer = kv_cache.begin_swap_out(sequence, is_pinned=True)
        assert transfer is not None
        kv_cache.complete_transfer(transfer.transfer_id, is_ok=True)
        sequence.reset_computed()
        sequence.move_to(SequenceStatus.WAITING)
        scheduler.waiting.push_preempted(sequence)
    every = kv_cache.device.reserve([Demand(10**6, kv_cache.device.num_available_blocks * 2)])
    assert every is not None
    every.cancel()


def test_a_swapped_sequence_is_loaded_and_starts_when_it_is_there() -> None:
    """First a plan that loads; nothing to compute while the transfer is in flight; then the row that is left."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, num_host_blocks=4)
    sequence = own(5, 2)
    swapped(scheduler, sequence)
    plan = scheduler.schedule()
    assert ([one.sequence for one in plan.swap_ins], plan.rows, plan.admitted) == ([sequence], (), ())
    (transfer,) = scheduler.make_room(plan)
    assert not scheduler.schedule().rows
    assert scheduler.kv_cache.host.has_awaited
    assert check(snapshot(scheduler)) == []
    scheduler.moves.complete_transfer(transfer.transfer_id, 0.1, is_ok=True)
    assert tokens_of(scheduler.schedule()) == {sequence.sequence_id: 1}


def test_others_run_while_one_is_loaded() -> None:
    """A load delays no sequence that there is room for besides."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, num_host_blocks=4)
    sequence, other = own(5, 1), own(2)
    swapped(scheduler, sequence)
    start(scheduler, other)
    scheduler.make_room(scheduler.schedule())
    assert scheduler.schedule().admitted == (other,)


def test_a_load_that_fails_is_computed_instead() -> None:
    """The sequence starts from nothing; what was sampled for it stays."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, num_host_blocks=4)
    sequence = own(5, 2)
    swapped(scheduler, sequence)
    (transfer,) = scheduler.make_room(scheduler.schedule())
    scheduler.moves.complete_transfer(transfer.transfer_id, 0.1, is_ok=False)
    assert tokens_of(scheduler.schedule()) == {sequence.sequence_id: 5}
    assert check(snapshot(scheduler)) == []


# Making room ----------------------------------------------------------------------------------------------------------


def test_a_holder_starts_where_it_left_off() -> None:
    """A waiting sequence with blocks computes only what it has not."""
    scheduler = make_scheduler(num_blocks=8, block_size=2)
    holder = put_waiting(scheduler, own(7, 1), 5)
    assert tokens_of(scheduler.schedule()) == {holder.sequence_id: 2}


def test_idle_holders_are_freed_before_a_running_sequence_is_preempted() -> None:
    """Waiting sequences with blocks make room first, the last one first and no more than needed."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2, preemption="recompute")
    put_running(scheduler, own(3, 3), 2)
    put_running(scheduler, own(2, 3), 1)
    first, last = (put_waiting(scheduler, own(3, 1), 2) for _ in range(2))
    plan = scheduler.schedule()
    assert (plan.freed, plan.preempted, plan.swap_ins) == ((last,), (), ())
    scheduler.make_room(plan)
    assert (last.num_computed_tokens, first.num_computed_tokens) == (0, 2)
    assert check(snapshot(scheduler)) == []


def test_each_running_sequence_that_lacks_room_gets_it_from_another_holder() -> None:
    """The blocks of a holder are promised once: two askers free two holders, and neither has to wait a step longer."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2, preemption="recompute")
    for _ in range(2):
        put_running(scheduler, own(3, 3), 2)
    first, last = (put_waiting(scheduler, own(3, 1), 2) for _ in range(2))
    plan = scheduler.schedule()
    assert (plan.freed, plan.preempted) == ((last, first), ())


def test_a_waiting_head_takes_blocks_of_those_behind_it() -> None:
    """A head without room takes the blocks of a holder behind it, and starts in the plan after."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    head = own(6)
    start(scheduler, head)
    holder = put_waiting(scheduler, own(4), 3)
    assert scheduler.schedule().freed == (holder,)
    assert next_plan(scheduler).admitted == (head,)


def test_an_admitted_holder_keeps_its_blocks_in_the_same_plan() -> None:
    """A candidate that lacks room for a moment does not rob one that was admitted just before it."""
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    keep(scheduler, [1, 2, 3])
    holder = put_waiting(scheduler, own(4), 3)
    sharer, last = make_sequence([1, 2, 3, 9]), own(1)
    start(scheduler, sharer, last)
    plan = scheduler.schedule()
    assert (set(plan.admitted), plan.freed) == ({holder, sharer}, ())


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 1), ("priority", 0)])
def test_the_last_in_order_is_preempted(policy: str, victim: int) -> None:
    """The last or least urgent sequence makes room and waits at its place in the queue."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, policy=policy, preemption="recompute")
    pair = [put_running(scheduler, own(5, 3, priority=priority), 4) for priority in (0, 1)]
    plan = scheduler.schedule()
    assert (preempted(plan), plan.rows, plan.admitted) == ([pair[victim]], (), ())
    assert tokens_of(next_plan(scheduler)) == {pair[1 - victim].sequence_id: 1}
    assert list(scheduler.waiting) == [pair[victim]]
    assert (pair[victim].num_computed_tokens, pair[victim].num_preemptions) == (0, 1)


def test_a_victim_that_was_already_planned_frees_its_tokens() -> None:
    """Tokens of a decode row that is preempted for a prompt before it go to the rows that stay."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=2, max_num_seqs=2,
                               preemption="recompute")
    first, decoding = put_running(scheduler, own(6), 4), put_running(scheduler, own(4, 4), 3)
    plan = scheduler.schedule()
    assert preempted(plan) == [decoding]
    assert tokens_of(next_plan(scheduler)) == {first.sequence_id: 2}


def test_a_victim_frees_the_blocks_planned_for_it_too() -> None:
    """A block planned for the victim counts as room, so that no other sequence is preempted for it."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, preemption="recompute")
    first = put_running(scheduler, own(8), 4)
    middle = put_running(scheduler, own(2, 2), 1)
    last = put_running(scheduler, own(3, 2), 2)
    assert preempted(scheduler.schedule()) == [last]
    assert tokens_of(next_plan(scheduler)) == {middle.sequence_id: 1, first.sequence_id: 4}


def test_the_last_running_sequence_waits_in_place() -> None:
    """With no sequence behind it to make room, it keeps its blocks and runs when another one has finished."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first, last = put_running(scheduler, own(4, 1), 3), put_running(scheduler, own(5, 2), 4)
    plan = run_step(scheduler)
    assert (tokens_of(plan), plan.preempted) == ({first.sequence_id: 1}, ())
    assert last.num_computed_tokens == 4
    assert tokens_of(run_step(scheduler)) == {last.sequence_id: 1}


def test_no_sequence_is_admitted_while_a_running_one_lacks_room() -> None:
    """The blocks that a starved sequence waits for do not go to a smaller one."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first = put_running(scheduler, own(3, 4), 2)
    put_running(scheduler, own(7), 2)
    start(scheduler, own(1))
    plan = scheduler.schedule()
    assert (tokens_of(plan), plan.admitted) == ({first.sequence_id: 1}, ())


def test_sequences_behind_a_starved_prompt_run_in_what_is_free() -> None:
    """A prompt without room for its next chunk does not stop one behind it that has room; it can take it back."""
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=7, preemption="wait")
    first = put_running(scheduler, own(7, 3), 6)
    starved = put_running(scheduler, own(14), 4)
    behind = put_running(scheduler, own(4), 1)
    assert tokens_of(scheduler.schedule()) == {first.sequence_id: 1, behind.sequence_id: 3}
    scheduler.finish_sequence(first, "abort")
    assert starved.sequence_id in tokens_of(scheduler.schedule())


def test_waiting_never_stops_all_sequences() -> None:
    """In mode "wait" rows stall while another one runs; when none could, the last one is preempted."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, preemption="wait")
    first, last = put_running(scheduler, own(4, 3), 3), put_running(scheduler, own(5, 3), 4)
    plan = run_step(scheduler)
    assert (tokens_of(plan), plan.preempted) == ({first.sequence_id: 1}, ())
    plan = scheduler.schedule()
    assert preempted(plan) == [last]
    assert plan.preempted[0].kind is PreemptionKind.SHRINK
    assert tokens_of(next_plan(scheduler)) == {first.sequence_id: 1}


def test_what_is_already_coming_free_is_waited_for() -> None:
    """Blocks in outgoing transfers count as room: no other sequence is preempted for the same need."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, preemption="swap", num_host_blocks=8)
    first = put_running(scheduler, own(3, 5), 2)
    for _ in range(2):
        put_running(scheduler, own(3, 5), 2)
    put_running(scheduler, own(2, 5), 1)
    plan = scheduler.schedule()
    assert plan.preempted
    transfers = scheduler.make_room(plan)
    again = scheduler.schedule()
    assert (again.preempted, scheduler.kv_cache.host.has_awaited) == ((), True)
    for transfer in transfers:
        scheduler.moves.complete_transfer(transfer.transfer_id, 0.1, is_ok=True)
    assert first.sequence_id in tokens_of(next_plan(scheduler))


def test_a_sequence_without_blocks_is_not_preempted() -> None:
    """Preempting a sequence of the batch that has no blocks yet would free nothing."""
    scheduler = make_scheduler(policy="static", num_blocks=4, block_size=2, preemption="recompute")
    first, second = (put_running(scheduler, own(5, 2), 4) for _ in range(2))
    put_running(scheduler, own(2, 2), 0)
    assert preempted(scheduler.schedule()) == [second]
    assert first.sequence_id in tokens_of(next_plan(scheduler))


# Static batches -------------------------------------------------------------------------------------------------------


def test_static_batches_start_only_when_the_last_one_ended() -> None:
    """Newcomers wait for the slowest of the batch."""
    scheduler = make_scheduler(policy="static", num_blocks=20)
    slow, quick, late = own(1, 4), own(1), own(1)
    start(scheduler, slow, quick)
    assert run_step(scheduler).admitted == (slow, quick)
    start(scheduler, late)
    assert [run_step(scheduler).admitted for _ in range(4)] == [(), (), (), (late,)]


def test_a_static_batch_is_filled_whatever_the_token_budget() -> None:
    """Sequences without tokens in the first step belong to the batch and are computed in the next ones."""
    scheduler = make_scheduler(policy="static", num_blocks=20, max_num_batched_tokens=4)
    sequences = [own(3, 2) for _ in range(3)]
    start(scheduler, *sequences)
    plan = run_step(scheduler)
    assert plan.admitted == tuple(sequences)
    assert tokens_of(plan) == {sequences[0].sequence_id: 3, sequences[1].sequence_id: 1}
    assert len(scheduler.running) == 3
    assert check(snapshot(scheduler)) == []


def test_a_static_batch_defers_no_sequence() -> None:
    """Equal prompts belong to one batch even if the second computes the same again."""
    scheduler = make_scheduler(policy="static", num_blocks=20)
    start(scheduler, make_sequence([1, 2, 3, 4, 5]), make_sequence([1, 2, 3, 4, 5]))
    assert len(scheduler.schedule().admitted) == 2


def test_a_stall_is_reported_with_the_numbers() -> None:
    """If blocks were ever lost, the step says so at once where an endless wait would say nothing."""
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    scheduler.kv_cache.device.reserve([Demand(10**9, 4)])
    scheduler.add_sequences(own(2))
    with pytest.raises(InternalError, match="no progress: 0 running, 1 waiting, 0 of 2 blocks available"):
        scheduler.schedule()

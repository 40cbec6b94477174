"""What one step decides: budget, admission, and who makes room for whom."""

from __future__ import annotations

import pytest

from doubles import make_scheduler, make_sequence, run_step
from pagedcore.errors import InternalError
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.invariants import check, snapshot
from pagedcore.scheduling.plan import SchedulePlan
from pagedcore.scheduling.scheduler import Scheduler


def start(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def tokens_of(plan: SchedulePlan) -> dict[int, int]:
    return {row.sequence.sequence_id: row.num_tokens for row in plan.rows}


def extend(scheduler: Scheduler, sequence: Sequence, num_tokens: int, max_tokens: int) -> None:
    sequence.begin_turn(
        [3] * num_tokens, sequence.params, max_tokens=max_tokens, stop_token_ids=frozenset(), arrival=10**6
    )
    scheduler.add(sequence)


def put_running(scheduler: Scheduler, sequence: Sequence, num_computed: int) -> Sequence:
    """Let a sequence run that has computed so much already."""
    reservation = scheduler.block_manager.reserve([(sequence.sequence_id, num_computed)])
    assert reservation is not None
    sequence.num_computed_tokens = num_computed
    sequence.move_to(SequenceStatus.RUNNING)
    scheduler.running.add(sequence)
    return sequence


def finish_one(scheduler: Scheduler, prompt: int, max_tokens: int = 1) -> Sequence:
    """Run one sequence to its end on an idle scheduler; its blocks stay kept."""
    sequence = make_sequence(prompt, max_tokens)
    scheduler.add(sequence)
    while sequence.finish_reason is None:
        run_step(scheduler)
    return sequence


def test_an_idle_scheduler_plans_nothing() -> None:
    """No work, empty plan."""
    plan = make_scheduler().schedule()
    assert plan.is_empty
    assert plan.num_tokens == 0


def test_schedule_changes_nothing_and_repeats_itself() -> None:
    """The plan is a pure function of the state, even when it preempts, releases and admits."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=4)
    finish_one(scheduler, 2)
    start(scheduler, make_sequence(3, 5), make_sequence(2, 4), make_sequence(6, 1))
    while scheduler.has_work:
        before = snapshot(scheduler)
        assert scheduler.schedule() == scheduler.schedule()
        assert snapshot(scheduler) == before
        run_step(scheduler)


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """No row is sampled before its prompt is complete, and the chunks add up to the prompt."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = make_sequence(10, 2)
    start(scheduler, sequence)
    chunks = []
    while not sequence.output_token_ids:
        (row,) = scheduler.schedule().rows
        chunks.append((row.start, row.end, row.is_sampled))
        run_step(scheduler)
    assert chunks == [(0, 4, False), (4, 8, False), (8, 10, True)]


def test_decode_rows_get_their_token_before_prompts_expand() -> None:
    """A long prompt that came first does not cost a later sequence its next token."""
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=4)
    long = put_running(scheduler, make_sequence(20, 2), 4)
    short = put_running(scheduler, make_sequence(3, 8), 2)
    assert tokens_of(scheduler.schedule()) == {short.sequence_id: 1, long.sequence_id: 3}


def test_the_step_never_exceeds_its_token_budget() -> None:
    """Decode rows, chunks and admissions share one budget."""
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=5)
    start(scheduler, *(make_sequence(prompt, 3) for prompt in (7, 1, 9, 4, 2)))
    while scheduler.has_work:
        assert 0 < run_step(scheduler).num_tokens <= 5


def test_running_sequences_are_at_most_max_num_seqs() -> None:
    """Room and tokens for more do not help when the rows are taken."""
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=2)
    start(scheduler, *(make_sequence(1, 3) for _ in range(5)))
    assert len(run_step(scheduler).admitted) == 2
    assert run_step(scheduler).admitted == ()


def test_admission_needs_room_for_the_whole_prompt() -> None:
    """A small first chunk does not let in a prompt whose rest would not fit beside the others."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=3)
    first, second = make_sequence(5, 1), make_sequence(4, 1)
    start(scheduler, first, second)
    assert run_step(scheduler).admitted == (first,)
    assert scheduler.block_manager.num_free_blocks == 2
    assert run_step(scheduler).admitted == ()


def test_a_prompt_in_progress_counts_with_all_of_its_blocks() -> None:
    """Free blocks that a running prompt will still need are not given to a newcomer."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=3)
    first, second, third = make_sequence(8, 1), make_sequence(2, 1), make_sequence(1, 1)
    start(scheduler, first, second, third)
    assert run_step(scheduler).admitted == (first,)
    assert run_step(scheduler).admitted == ()
    assert run_step(scheduler).admitted == (second,)


@pytest.mark.parametrize(("admission", "num_admitted"), [("optimistic", 2), ("guaranteed", 1)])
def test_guaranteed_admission_counts_the_longest_answer(admission: str, num_admitted: int) -> None:
    """Optimistic admission counts what is known now, guaranteed what may come."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, admission=admission)
    start(scheduler, make_sequence(2, 4), make_sequence(2, 4))
    assert len(scheduler.schedule().admitted) == num_admitted


def test_guaranteed_admission_uses_the_pool_up_to_the_last_block() -> None:
    """Two sequences whose longest answers fill the pool exactly run together."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, admission="guaranteed")
    start(scheduler, make_sequence(2, 4), make_sequence(2, 4))
    assert len(scheduler.schedule().admitted) == 2


def test_nobody_overtakes_a_head_that_lacks_room() -> None:
    """Strict order: a small request behind a blocked large one waits as well, so the large one cannot starve."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    start(scheduler, make_sequence(4, 3), make_sequence(6, 1), make_sequence(1, 1))
    assert len(run_step(scheduler).admitted) == 1
    assert run_step(scheduler).admitted == ()


def test_priority_decides_who_is_admitted_first() -> None:
    """The latest arrival with the highest priority comes first."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    ordinary, urgent = make_sequence(1, 1), make_sequence(1, 1, priority=5)
    start(scheduler, ordinary, urgent)
    assert scheduler.schedule().admitted == (urgent,)


def test_a_full_pool_first_releases_the_longest_finished_sequence() -> None:
    """Blocks kept for a further turn go before anybody running is preempted, and no more of them than needed."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    oldest, newest = finish_one(scheduler, 2), finish_one(scheduler, 2)
    start(scheduler, make_sequence(4, 3))
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan.released == (oldest,)
    assert plan.preempted == ()
    run_step(scheduler)
    assert scheduler.kept == (newest,)
    assert oldest.num_computed_tokens == 0


def test_kept_blocks_never_stop_a_waiting_sequence() -> None:
    """A pool full of kept blocks is an empty pool to those who wait."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first, second = finish_one(scheduler, 4), finish_one(scheduler, 4)
    start(scheduler, make_sequence(7, 1))
    plan = run_step(scheduler)
    assert plan.released == (first, second)
    assert plan.num_tokens == 7


def test_kept_blocks_are_released_when_used_not_when_promised() -> None:
    """Admission counts kept blocks as available, but takes only what the step itself needs."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=4)
    finish_one(scheduler, 4)
    start(scheduler, make_sequence(7, 1))
    assert scheduler.schedule().released == ()
    run_step(scheduler)
    assert len(scheduler.schedule().released) == 1


def test_a_continued_sequence_that_waits_gives_up_its_blocks_before_a_running_one() -> None:
    """Whoever is not running comes first among those who make room; its turn then starts from nothing."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    continued = finish_one(scheduler, 2)
    start(scheduler, make_sequence(2, 5), make_sequence(2, 2))
    run_step(scheduler)
    extend(scheduler, continued, 1, 1)
    assert continued.num_cached_tokens == 2
    plan = run_step(scheduler)
    assert plan.released == (continued,)
    assert plan.preempted == ()
    assert (continued.num_computed_tokens, continued.num_cached_tokens) == (0, 0)
    assert check(snapshot(scheduler)) == []


def test_a_continued_sequence_computes_only_what_is_new() -> None:
    """While its blocks are there, the next turn starts at the first position that was never computed."""
    scheduler = make_scheduler(num_blocks=8, block_size=2)
    sequence = finish_one(scheduler, 5, max_tokens=3)
    extend(scheduler, sequence, 2, 2)
    assert tokens_of(scheduler.schedule()) == {sequence.sequence_id: 3}


def test_a_waiting_head_takes_blocks_of_those_behind_it_only() -> None:
    """A head without room takes the blocks of a continued sequence behind it, which then is not admitted too."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_num_seqs=2)
    continued = finish_one(scheduler, 3)
    head = make_sequence(6, 1)
    start(scheduler, head)
    extend(scheduler, continued, 1, 1)
    plan = scheduler.schedule()
    assert (plan.admitted, plan.released) == ((head,), (continued,))


def test_the_last_in_order_is_preempted() -> None:
    """When nothing idle is left, the running sequence that came last makes room, and waits where it came from."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first, second, third = make_sequence(2, 4), make_sequence(2, 3), make_sequence(2, 3)
    start(scheduler, first, second, third)
    run_step(scheduler)
    waiting = make_sequence(1, 1)
    start(scheduler, waiting)
    plan = run_step(scheduler)
    assert plan.preempted == (third,)
    assert tokens_of(plan) == {first.sequence_id: 1, second.sequence_id: 1}
    assert plan.admitted == ()
    assert list(scheduler.waiting) == [third, waiting]
    assert (third.num_computed_tokens, third.num_preemptions, len(third.token_ids)) == (0, 1, 3)


def test_under_priority_the_least_urgent_is_preempted() -> None:
    """The victim is the last in policy order, not the last to arrive."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, policy="priority")
    ordinary, urgent = make_sequence(4, 4), make_sequence(4, 4, priority=1)
    start(scheduler, ordinary, urgent)
    run_step(scheduler)
    assert scheduler.schedule().preempted == (ordinary,)


def test_a_victim_that_was_already_planned_gives_back_its_tokens() -> None:
    """Tokens and blocks of a decode row that is preempted for a prompt before it go to the rows that stay."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=4)
    first = put_running(scheduler, make_sequence(6, 1), 4)
    second = put_running(scheduler, make_sequence(6, 1), 2)
    decoding = put_running(scheduler, make_sequence(4, 4), 3)
    plan = run_step(scheduler)
    assert plan.preempted == (decoding,)
    assert tokens_of(plan) == {first.sequence_id: 2, second.sequence_id: 2}
    assert check(snapshot(scheduler)) == []


def test_a_victim_gives_back_what_was_planned_for_it_too() -> None:
    """A block planned for the victim counts as room, so that nobody else has to go for it."""
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    first = put_running(scheduler, make_sequence(8, 1), 4)
    second = put_running(scheduler, make_sequence(2, 2), 1)
    last = put_running(scheduler, make_sequence(3, 2), 2)
    plan = run_step(scheduler)
    assert plan.preempted == (last,)
    assert tokens_of(plan) == {second.sequence_id: 1, first.sequence_id: 4}


def test_every_victim_makes_room_once() -> None:
    """Two sequences that each lack a block preempt two others, the last one first."""
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    first, second = (put_running(scheduler, make_sequence(5, 2), 4) for _ in range(2))
    third, fourth = (put_running(scheduler, make_sequence(2, 2), 1) for _ in range(2))
    plan = run_step(scheduler)
    assert plan.preempted == (fourth, third)
    assert tokens_of(plan) == {first.sequence_id: 1, second.sequence_id: 1}


def test_the_last_running_sequence_waits_in_place() -> None:
    """With nobody behind it to make room, it keeps its blocks and goes on when somebody has finished."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first, last = make_sequence(3, 2), make_sequence(4, 3)
    start(scheduler, first, last)
    run_step(scheduler)
    plan = run_step(scheduler)
    assert tokens_of(plan) == {first.sequence_id: 1}
    assert plan.preempted == ()
    assert last.num_computed_tokens == 4
    plan = run_step(scheduler)
    assert plan.released == (first,)
    assert tokens_of(plan) == {last.sequence_id: 1}


def test_no_newcomer_is_admitted_while_a_running_sequence_lacks_room() -> None:
    """What the starved sequence waits for does not go to somebody smaller."""
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    first = put_running(scheduler, make_sequence(3, 4), 2)
    put_running(scheduler, make_sequence(7, 1), 2)
    start(scheduler, make_sequence(1, 1))
    plan = scheduler.schedule()
    assert tokens_of(plan) == {first.sequence_id: 1}
    assert plan.admitted == ()


def test_those_behind_a_starved_prompt_go_on_in_what_is_free() -> None:
    """A prompt without room for its next chunk does not stop one behind it that has room; it can take it back."""
    scheduler = make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=7)
    first = put_running(scheduler, make_sequence(7, 3), 6)
    starved = put_running(scheduler, make_sequence(14, 1), 4)
    behind = put_running(scheduler, make_sequence(4, 1), 1)
    assert tokens_of(scheduler.schedule()) == {first.sequence_id: 1, behind.sequence_id: 3}
    scheduler.finish(first, "abort")
    assert starved.sequence_id in tokens_of(scheduler.schedule())


def test_blocks_are_given_up_once_in_a_step() -> None:
    """Two sequences that need a block are not both helped by the same idle holder."""
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_num_seqs=3)
    continued = finish_one(scheduler, 2)
    first, second, third = (put_running(scheduler, make_sequence(5, 2), 4) for _ in range(3))
    extend(scheduler, continued, 1, 1)
    plan = run_step(scheduler)
    assert plan.released == (continued,)
    assert plan.preempted == (third,)
    assert tokens_of(plan) == {first.sequence_id: 1, second.sequence_id: 1}


def test_nobody_gives_up_blocks_for_a_sequence_that_they_cannot_help() -> None:
    """Room is made completely or not at all: kept blocks stay kept when they would not be enough."""
    scheduler = make_scheduler(num_blocks=5, block_size=2, max_num_batched_tokens=4)
    kept = finish_one(scheduler, 2)
    first = put_running(scheduler, make_sequence(4, 4), 3)
    put_running(scheduler, make_sequence(8, 1), 4)
    plan = scheduler.schedule()
    assert plan.released == ()
    assert scheduler.kept == (kept,)
    assert tokens_of(plan) == {first.sequence_id: 1}


def test_static_batches_start_only_when_the_last_one_ended() -> None:
    """Newcomers wait for the slowest of the batch."""
    scheduler = make_scheduler(policy="static", num_blocks=20)
    slow, quick, late = make_sequence(1, 4), make_sequence(1, 1), make_sequence(1, 1)
    start(scheduler, slow, quick)
    assert run_step(scheduler).admitted == (slow, quick)
    start(scheduler, late)
    admissions = [run_step(scheduler).admitted for _ in range(4)]
    assert admissions == [(), (), (), (late,)]


def test_a_static_batch_is_filled_whatever_the_token_budget() -> None:
    """Sequences without tokens in the first step belong to the batch and are computed in the next ones."""
    scheduler = make_scheduler(policy="static", num_blocks=20, max_num_batched_tokens=4)
    sequences = [make_sequence(3, 2) for _ in range(3)]
    start(scheduler, *sequences)
    plan = run_step(scheduler)
    assert plan.admitted == tuple(sequences)
    assert tokens_of(plan) == {sequences[0].sequence_id: 3, sequences[1].sequence_id: 1}
    assert len(scheduler.running) == 3
    assert check(snapshot(scheduler)) == []


def test_whoever_holds_nothing_is_not_preempted() -> None:
    """Preempting a sequence of the batch that has no blocks yet would help nobody."""
    scheduler = make_scheduler(policy="static", num_blocks=4, block_size=2)
    first = put_running(scheduler, make_sequence(5, 2), 4)
    second = put_running(scheduler, make_sequence(5, 2), 4)
    put_running(scheduler, make_sequence(2, 2), 0)
    plan = scheduler.schedule()
    assert plan.preempted == (second,)
    assert first.sequence_id in tokens_of(plan)


def test_a_stall_is_reported_with_the_numbers() -> None:
    """If blocks were ever lost, the step says so at once where an endless wait would say nothing."""
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    scheduler.block_manager.reserve([(10**9, 4)])
    scheduler.add(make_sequence(2, 1))
    with pytest.raises(InternalError, match="no progress: 0 running, 1 waiting, 0 kept, 0 of 2 blocks free"):
        scheduler.schedule()

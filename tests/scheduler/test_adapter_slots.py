"""Which adapters come into the slots of a model, which leave, and who may start meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.config.limits import MAX_LOADING_ADAPTERS, MAX_OVERTAKING
from pagedcore.errors import InternalError
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.scheduler.adapter_slots import AdapterSlots
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence
from support.doubles import make_policy, make_sequence


def with_adapter(number: int | None, **fields: object) -> Sequence:
    """A sequence that is computed with an adapter."""
    sequence = make_sequence(**fields, cache_root=b"adapter %d" % (number or 0))  # type: ignore[arg-type]
    sequence.adapter = number
    return sequence


def make_slots(sizes: Iterable[int], num_slots: int = 2, num_bytes: int = 100) -> AdapterSlots:
    """Slots of which all are empty, and adapters 1, 2, ... of these sizes."""
    slots = AdapterSlots(num_slots, num_bytes)
    for number, size in enumerate(sizes, 1):
        slots.add_adapter(number, size)
    return slots


def make_scheduler(slots: AdapterSlots, policy: str = "fcfs", **settings: int) -> Scheduler:
    """A scheduler over a small pool."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_num_waiting": 1000, "max_scored_tokens": 64}
    return Scheduler(KVCacheManager(settings.pop("num_blocks", 12), 2), make_policy(policy), adapters=slots,
                     **{**defaults, **settings})


def step(scheduler: Scheduler) -> list[int | None]:
    """Let all moves happen at once, run one step, and return the adapters of its rows."""
    scheduler.adapters.carry_out(scheduler.adapter_moves())
    plan = scheduler.schedule()
    while plan.moves_blocks:
        scheduler.make_room(plan)
        plan = scheduler.schedule()
    if plan.rows:
        scheduler.reserve(plan)
        scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows if row.num_sampled})
    return [row.sequence.adapter for row in plan.rows]


def test_a_sequence_without_its_adapter_holds_no_row_and_no_block_and_stops_nobody() -> None:
    """Others behind it start at once, and it starts when its adapter is there."""
    slots = make_slots([10])
    scheduler = make_scheduler(slots)
    first, second = with_adapter(1), with_adapter(None)
    scheduler.add_sequences(first, second)
    slots.begin_load(1)
    plan = scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [second]
    assert plan.awaiting == (first.sequence_id,)
    assert plan.stopped_by == "adapter"
    slots.end_load(1, True)
    assert {row.sequence for row in scheduler.schedule().rows} == {first, second}


def test_a_step_in_which_all_wait_for_adapters_is_empty_and_no_defect() -> None:
    """An empty plan is no lack of progress while files are read."""
    slots = make_slots([10])
    scheduler = make_scheduler(slots)
    scheduler.add_sequences(with_adapter(1))
    slots.begin_load(1)
    assert not scheduler.schedule().rows
    scheduler.add_sequences(with_adapter(None, prompt=2))
    assert len(scheduler.schedule().rows) == 1


def test_the_least_recently_used_leaves_and_none_that_runs() -> None:
    """A running sequence keeps its adapter, whoever waits."""
    slots = make_slots([10, 10, 10])
    scheduler = make_scheduler(slots)
    long, short = with_adapter(2, max_tokens=8), with_adapter(1, max_tokens=1)
    scheduler.add_sequences(long, short)
    step(scheduler)
    assert list(slots.slot_of) == [2, 1]
    scheduler.add_sequences(with_adapter(3))
    moves = scheduler.adapter_moves()
    # Why 1: 2 was used as late, but runs.
    assert (moves.take_out, moves.load) == ((1,), (3,))


def test_what_an_earlier_sequence_waits_for_does_not_leave_for_a_later_one() -> None:
    """Claims are in the order of the queue, so none comes and leaves again unused."""
    slots = make_slots([10, 10, 10], num_slots=1)
    scheduler = make_scheduler(slots)
    scheduler.add_sequences(with_adapter(1), with_adapter(2), with_adapter(1))
    assert scheduler.adapter_moves().load == (1,)
    scheduler.adapters.carry_out(scheduler.adapter_moves())
    assert scheduler.adapter_moves().load == ()


def test_bytes_bound_what_is_in_slots_and_a_large_one_is_not_overtaken_for_ever() -> None:
    """A small adapter does not take the bytes that the head of the queue waits for."""
    slots = make_slots([60, 60, 10], num_slots=3)
    scheduler = make_scheduler(slots)
    running = with_adapter(1, max_tokens=8)
    scheduler.add_sequences(running)
    step(scheduler)
    scheduler.add_sequences(with_adapter(2), with_adapter(3))
    assert scheduler.adapter_moves().load == ()
    scheduler.finish_sequence(running, "abort")
    assert scheduler.adapter_moves() == ((1,), (2, 3))


def test_requests_of_adapters_in_slots_cannot_keep_another_one_out() -> None:
    """With new requests for what is in the only slot, the head of the queue starts all the same."""
    slots = make_slots([10, 10], num_slots=1)
    scheduler = make_scheduler(slots, num_blocks=64)
    scheduler.add_sequences(with_adapter(1, prompt=2, max_tokens=3))
    step(scheduler)
    other = with_adapter(2, prompt=2, max_tokens=3)
    scheduler.add_sequences(other)
    for _ in range(MAX_OVERTAKING + 20):
        scheduler.add_sequences(with_adapter(1, prompt=2, max_tokens=3))
        step(scheduler)
        if other.num_output_tokens:
            return
    raise AssertionError("it never started")


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_keep_the_bounds_and_all_end(seed: int) -> None:
    """At every step: distinct adapters within the slots, bytes within the memory, and each row's adapter in a slot."""
    random = Random(seed)
    slots = make_slots([random.randint(5, 60) for _ in range(6)], num_slots=random.randint(1, 4))
    policy = random.choice(["fcfs", "priority", "fair", "cache-aware"])
    scheduler, live = make_scheduler(slots, policy), list[Sequence]()
    for number in range(200):
        if number < 150 and random.random() < 0.5:
            one = with_adapter(random.choice([None, 1, 2, 3, 4, 5, 6]), prompt=random.randint(1, 9),
                               max_tokens=random.randint(1, 9))
            scheduler.add_sequences(one)
            live.append(one)
        if live and random.random() < 0.05:
            scheduler.finish_sequence(random.choice(live), "abort")
        if scheduler.queues.is_dynamic:
            scheduler.begin_step(float(number))
        used = set(step(scheduler)) - {None}
        assert used <= slots.slot_of.keys()
        assert len(slots.slot_of) + len(slots.loading) <= slots.num_slots
        assert slots.num_held_bytes <= slots.num_bytes
        assert not check(snapshot(scheduler))
    while scheduler.has_work:
        step(scheduler)
    assert all(one.finish_reason for one in live)


def test_no_more_are_read_at_a_time_than_may_be() -> None:
    """Further ones are read when these are there."""
    slots = make_slots([1] * 6, num_slots=6)
    scheduler = make_scheduler(slots)
    scheduler.add_sequences(*(with_adapter(number) for number in range(1, 7)))
    assert len(scheduler.adapter_moves().load) == MAX_LOADING_ADAPTERS


def test_a_slot_is_never_promised_twice() -> None:
    """What has no room, or is in a slot, is a defect to ask for."""
    slots = make_slots([10, 10], num_slots=1)
    slots.begin_load(1)
    for number in (1, 2):
        with pytest.raises(InternalError):
            slots.begin_load(number)
    with pytest.raises(InternalError):
        slots.add_adapter(3, 101)


def test_a_restored_scheduler_goes_on_with_the_same_moves() -> None:
    """A snapshot has slots, loads and pins."""
    slots = make_slots([10, 10, 10])
    slots.begin_load(2)
    slots.end_load(2, True)
    slots.begin_load(1)
    slots.pin_adapter(2)
    other = AdapterSlots(2, 100)
    other.restore(slots.snapshot())
    assert vars(other) == vars(slots)

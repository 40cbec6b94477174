"""Policy order, and the bounded queue that keeps what it has accepted."""

from __future__ import annotations

import random

import pytest

from pagedcore.errors import EngineOverloaded, InternalError
from pagedcore.scheduler import policies
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence
from support.doubles import make_sequence


def by_arrival(sequence: Sequence) -> int:
    return sequence.arrival


def test_sequences_come_in_the_order_of_the_key() -> None:
    """Whatever the order of arrival at the queue, iteration follows the key; ties go by sequence id."""
    sequences = [make_sequence(sequence_id=i, arrival=i // 3) for i in range(12)]
    order = PolicyOrder(by_arrival)
    for sequence in random.Random(1).sample(sequences, 12):
        order.add_sequence(sequence)
    assert list(order) == sequences


def test_a_sequence_can_be_removed_from_any_place() -> None:
    """Removal is by identity, returns whether it was there, and keeps the order of the rest."""
    first, second, third = (make_sequence(arrival=i) for i in range(3))
    order = PolicyOrder(by_arrival)
    for sequence in (third, first, second):
        order.add_sequence(sequence)
    assert order.remove_sequence(second)
    assert not order.remove_sequence(second)
    assert list(order) == [first, third]
    assert (first in order, second in order, len(order)) == (True, False, 2)


def test_adding_twice_is_a_broken_law() -> None:
    """A sequence is in a queue once."""
    order, sequence = PolicyOrder(by_arrival), make_sequence()
    order.add_sequence(sequence)
    with pytest.raises(InternalError, match="already in this queue"):
        order.add_sequence(sequence)


def test_the_queue_refuses_new_sequences_at_its_bound() -> None:
    """The error carries both numbers, and nothing was taken."""
    queue = WaitingQueue(by_arrival, limit=2)
    queue.push(make_sequence())
    assert queue.num_free_slots == 1
    queue.push(make_sequence())
    with pytest.raises(EngineOverloaded) as refused:
        queue.push(make_sequence())
    assert (refused.value.num_waiting, refused.value.limit) == (2, 2)
    assert (len(queue), queue.num_free_slots) == (2, 0)


def test_room_is_for_all_or_for_none() -> None:
    """A request of several sequences is refused before its first one was taken."""
    queue = WaitingQueue(by_arrival, limit=3)
    queue.push(make_sequence())
    queue.require_room(2)
    with pytest.raises(EngineOverloaded):
        queue.require_room(3)


def test_preempted_sequences_are_never_refused() -> None:
    """A full queue takes them back, in their order, and they leave its bound alone."""
    queue = WaitingQueue(by_arrival, limit=1)
    new, preempted = make_sequence(arrival=5), make_sequence(arrival=1)
    queue.push(new)
    queue.push_preempted(preempted)
    assert list(queue) == [preempted, new]
    assert queue.num_never_started == 1
    queue.remove_sequence(new)
    queue.push(make_sequence(arrival=9))


def test_preempted_sequences_are_not_among_those_that_never_started() -> None:
    """Queue time-outs look at these only."""
    queue = WaitingQueue(by_arrival, limit=9)
    late, early, preempted = make_sequence(arrival=3), make_sequence(arrival=2), make_sequence(arrival=1)
    queue.push(late)
    queue.push(early)
    queue.push_preempted(preempted)
    assert list(queue.never_started()) == [late, early], "in the order of their pushes"


def test_fcfs_orders_by_arrival_alone() -> None:
    """Priorities mean nothing under first come, first served."""
    policy = policies.fcfs()
    assert policy.order(make_sequence(priority=9, arrival=2)) > policy.order(make_sequence(arrival=1))
    assert policy.admits_while_running


def test_priority_orders_by_priority_then_arrival() -> None:
    """A higher priority comes first; among equals the earlier one."""
    order = policies.priority().order
    urgent, early, late = make_sequence(priority=1, arrival=9), make_sequence(arrival=1), make_sequence(arrival=2)
    assert sorted([late, early, urgent], key=order) == [urgent, early, late]


def test_static_admits_only_when_nothing_runs() -> None:
    """Static batching differs from first come, first served in this alone."""
    assert not policies.static().admits_while_running
    assert policies.static().order is policies.fcfs().order


def test_removing_costs_a_few_comparisons_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand sequences are taken out, last first: each takes as many comparisons of keys as a bisection does, and
    none of sequences, unless the policy's keys fail."""
    num_compared = 0

    def is_same(one: Sequence, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return one is other

    monkeypatch.setattr(Sequence, "__eq__", is_same)

    class Key(int):
        raises = False

        def __lt__(self, other: int) -> bool:
            nonlocal num_compared
            num_compared += 1
            if Key.raises:
                raise ZeroDivisionError
            return int(self) < int(other)

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    order = PolicyOrder(lambda sequence: Key(sequence.arrival))
    sequences = [make_sequence(arrival=number) for number in range(1024)]
    for sequence in sequences:
        order.add_sequence(sequence)
    num_compared = 0
    for sequence in reversed(sequences[100:]):
        assert order.remove_sequence(sequence)
    assert num_compared <= 924 * 3 * 11
    Key.raises = True
    assert order.remove_sequence(sequences[50])
    assert list(order) == [*sequences[:50], *sequences[51:100]]

"""Every order of events on tiny pools: nothing is ever runnable without being run.

States are explored breadth first and told apart by what decisions depend on: status, known and computed counts and
order of every sequence, not block numbers. Every reachable state of each world is visited once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from doubles import make_scheduler, make_sequence, run_step
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.invariants import check, snapshot

Event = tuple[str, int]
Requests = tuple[tuple[int, int, int], ...]
World = tuple[int, int, str, str, Requests]

#: (prompt, max_tokens, priority) of the three requests of each world.
REQUESTS: list[Requests] = [
    ((1, 2, 0), (2, 2, 0), (1, 1, 1)),
    ((3, 1, 0), (1, 3, 1), (2, 2, 0)),
    ((2, 2, 1), (2, 2, 0), (2, 2, 1)),
]
#: Pools of 4 positions quickly, one pool of 6 with the most telling requests, the rest when there is time.
POOLS = [((2, 2), REQUESTS), ((4, 1), REQUESTS), ((6, 1), REQUESTS[1:2])]
SLOW_POOLS = [((3, 2), REQUESTS), ((6, 1), REQUESTS[::2]), ((6, 2), REQUESTS)]


class Life:
    """One world after a list of events; lives are short, so a state is reached by living it again."""

    def __init__(self, world: World, events: tuple[Event, ...]) -> None:
        num_blocks, block_size, policy, admission, requests = world
        self.scheduler = make_scheduler(
            num_blocks, block_size, policy, max_num_seqs=2, max_num_batched_tokens=2, admission=admission
        )
        self.sequences = [
            make_sequence(prompt, max_tokens, sequence_id=i, priority=priority, arrival=i)
            for i, (prompt, max_tokens, priority) in enumerate(requests)
        ]
        self.num_arrived = 0
        for name, index in events:
            getattr(self, f"_{name}")(self.sequences[index])

    def key(self) -> tuple[object, ...]:
        """What decisions depend on."""
        of_sequences = tuple(
            (s.status, len(s.token_ids), s.num_computed_tokens, s.max_total_tokens, s.arrival) for s in self.sequences
        )
        kept = tuple(sequence.sequence_id for sequence in self.scheduler.kept)
        return of_sequences, kept, self.num_arrived, self.scheduler.waiting.num_newcomers

    def next_events(self) -> Iterator[Event]:
        """Everything that can happen now."""
        if self.scheduler.has_work:
            yield "step", 0
            yield "fail", 0
        if self.num_arrived < len(self.sequences):
            yield "arrive", self.num_arrived
        for index, sequence in enumerate(self.sequences[: self.num_arrived]):
            if sequence.status in (SequenceStatus.WAITING, SequenceStatus.RUNNING):
                yield "abort", index
            elif sequence.num_computed_tokens and sequence.arrival < 100:
                yield "continue", index

    def _step(self, _: Sequence) -> None:
        run_step(self.scheduler)

    def _fail(self, _: Sequence) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.reserve(plan)
        assert check(snapshot(self.scheduler)) == []
        self.scheduler.rollback(plan)

    def _arrive(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.num_arrived += 1

    def _abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, "abort")

    def _continue(self, sequence: Sequence) -> None:
        if self.scheduler.can_ever_fit(len(sequence.token_ids) + 2):
            arrival = 100 + sequence.arrival
            sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=arrival)
            self.scheduler.add(sequence)


def explore(world: World) -> int:
    """Visit every reachable state; return how many there are."""
    seen = {Life(world, ()).key()}
    queue: deque[tuple[Event, ...]] = deque([()])
    while queue:
        events = queue.popleft()
        for event in Life(world, events).next_events():
            life = Life(world, (*events, event))
            if life.key() not in seen:
                seen.add(life.key())
                queue.append((*events, event))
                assert check(snapshot(life.scheduler)) == []
                assert life.scheduler.schedule().is_empty != life.scheduler.has_work
    return len(seen)


def explore_pools(pools: list[tuple[tuple[int, int], list[Requests]]], policy: str, admission: str) -> None:
    for (num_blocks, block_size), worlds in pools:
        for requests in worlds:
            assert explore((num_blocks, block_size, policy, admission, requests)) > 50


@pytest.mark.parametrize("admission", ["optimistic", "guaranteed"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
def test_every_reachable_state_keeps_the_laws_and_goes_on(policy: str, admission: str) -> None:
    """Whatever arrives, fails, is aborted or continued, and when: a plan is empty only when there is no work."""
    explore_pools(POOLS, policy, admission)


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["optimistic", "guaranteed"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
def test_every_reachable_state_of_larger_pools(policy: str, admission: str) -> None:
    """The same with more room, where more sequences meet."""
    explore_pools(SLOW_POOLS, policy, admission)

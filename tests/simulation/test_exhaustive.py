"""Every order of events on tiny pools: nothing is ever runnable without being run.

States are explored breadth first and distinguished by what decisions depend on: status, known and computed counts and
order of every sequence, and what can be found in which memory; not by block numbers. Every reachable state of each
world is visited once. On the host, transfers take as long as they like: their ends are events like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.scheduler import policies
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.invariants import check, snapshot
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.sequence import Sequence, SequenceStatus
from support.doubles import make_scheduler, make_sequence

Event = tuple[str, int]
Requests = tuple[tuple[int, int, int], ...]
World = tuple[int, int, int, str | Policy, str, Requests]

#: (prompt, max_tokens, priority) of the three requests of each world.
REQUESTS: list[Requests] = [
    ((1, 2, 0), (2, 2, 0), (1, 1, 1)),
    ((3, 1, 0), (1, 3, 1), (2, 2, 0)),
    ((2, 2, 1), (2, 2, 0), (2, 2, 1)),
]
FOUR_REQUESTS: Requests = ((1, 2, 0), (2, 2, 1), (1, 1, 1), (2, 1, 0))
#: (blocks, block size, host blocks): pools of 4 positions quickly, the rest when there is time.
POOLS = [((2, 2, 0), REQUESTS), ((4, 1, 0), REQUESTS), ((6, 1, 0), REQUESTS[1:2])]
HOST_POOLS = [((2, 2, 2), REQUESTS[1:2])]
SLOW_POOLS = [
    ((3, 2, 0), REQUESTS), ((6, 1, 0), REQUESTS[::2]), ((6, 2, 0), REQUESTS), ((2, 2, 4), REQUESTS),
    ((4, 1, 4), REQUESTS[1:2]),
]


#: Seconds that a request may grow old while it waits or runs: those of these worlds are late after one, aged after two.
MOST_TICKS = 4
MOST_TICKS_WHEN_CALM = 2
LIVE = (SequenceStatus.WAITING, SequenceStatus.RUNNING)


def fickle() -> Policy:
    """A policy that turns its order round with every tick, and lets any sequence take any other one's place."""
    def order(sequence: Sequence, view: PolicyView) -> float:
        return (1 if view.now_s % 2 else -1) * sequence.sequence_id

    return Policy("fickle", order, cache_bonus=0, is_dynamic=True, has_priorities=True, preempts=lambda *_: True)


#: Those whose order depends on the time, on what was computed, or that preempt to admit.
MOVING_POLICIES = {
    "ageing": policies.priority(ageing_s=2.0, preemption_gap=1.0),
    "preempting": policies.priority(preemption_gap=1.0),
    "deadline": policies.deadline(),
    "fair": policies.fair(),
    "capped": policies.fair(max_rows=1, max_share=0.5),
    "fickle": fickle(),
    "shortest-first": policies.shortest_first(ageing_tokens_per_s=1.0),
    "cache-aware": policies.cache_aware(),
}


class Life:
    """One world after a list of events; lives are short, so a state is reached by living it again."""

    def __init__(
        self, world: World, events: tuple[Event, ...], formation: Mapping[str, Any], *, is_calm: bool = False
    ) -> None:
        num_blocks, block_size, num_host_blocks, policy, admission, requests = world
        self.scheduler = make_scheduler(
            num_blocks, block_size, policy, max_num_seqs=2, max_num_batched_tokens=2, admission=admission,
            num_host_blocks=num_host_blocks, preemption="swap" if num_host_blocks else "auto",
            **formation,
        )
        self.host = self.scheduler.kv_cache.host
        self.sequences = [
            make_sequence(
                prompt, max_tokens, sequence_id=i, priority=priority, arrival=i, tenant="ab"[i % 2], weight=1.0 + i,
                deadline_s=[1.0, None, 2.5][i % 3],
            )
            for i, (prompt, max_tokens, priority) in enumerate(requests)
        ]
        self.has_time = not isinstance(policy, str)
        self.is_fickle = isinstance(policy, Policy) and policy.name == "fickle"
        self.is_calm = is_calm
        """Whether no step fails and no request is aborted or continued."""
        self.num_arrived, self.now_s = 0, 0.0
        for name, index in events:
            getattr(self, f"_{name}")(index)

    def key(self) -> tuple[Any, ...]:
        """What decisions depend on."""
        of_sequences = tuple(
            None if self._is_over(s)
            else (s.status, len(s.token_ids), s.num_computed_tokens, s.max_total_tokens, s.arrival)
            for s in self.sequences
        )
        now = snapshot(self.scheduler).blocks
        found = tuple(frozenset(memory.registered) for memory in (now.device, now.host) if memory is not None)
        moving = tuple((one.sequence_id, one.direction, one.num_tokens) for one in self._transfers())
        num_new = self.scheduler.waiting.num_never_started
        gate = frozenset(self.scheduler.waiting.gated), self.scheduler._phases
        return of_sequences, found, moving, frozenset(now.pins), self.num_arrived, num_new, gate, self._moving_key()

    def _moving_key(self) -> object:
        """What else the decisions of a moving policy depend on: ages, protection, and who has had more.

        Not the time: it has no bound, and only what waits or runs has an age. So states at different times are one.
        """
        ledger = self.scheduler.queues.ledger
        if not self.has_time:
            return None
        protected = [0 if self._is_over(one) else max(0, one.num_protected_tokens - one.num_computed_tokens)
                     for one in self.sequences]
        ages = [self.now_s - one.arrival_s if one.status in LIVE else None for one in self._arrived()]
        had = {} if ledger is None else {one: round(tokens - ledger.floor, 6) for one, tokens in ledger.virtual.items()}
        return self.is_fickle and self.now_s % 2, tuple(protected), tuple(ages), tuple(sorted(had.items()))

    def _arrived(self) -> list[Sequence]:
        return self.sequences[: self.num_arrived]

    def _is_over(self, sequence: Sequence) -> bool:
        """Whether nothing can happen to a sequence any more, so that nothing depends on what it was."""
        return (sequence in self._arrived() and sequence.status not in LIVE
                and (self.is_calm or sequence.finish_reason == "abort" or sequence.arrival >= 100))

    def _may_tick(self) -> bool:
        most = MOST_TICKS_WHEN_CALM if self.is_calm else MOST_TICKS
        return all(self.now_s - one.arrival_s < most for one in self._arrived() if one.status in LIVE)

    def _transfers(self) -> tuple[Transfer, ...]:
        return tuple(self.host.in_flight.values())

    def next_events(self) -> Iterator[Event]:
        """Everything that can happen now."""
        if self.scheduler.has_work:
            yield "step", 0
            if not self.is_calm:
                yield "fail", 0
        if self.scheduler.waiting.gated:
            yield "wait", 0
        if self.has_time and self.scheduler.has_work and self._may_tick():
            yield "tick", 0
        for place in range(len(self._transfers())):
            yield "arrive_transfer", place
            yield "lose_transfer", place
        if self.num_arrived < len(self.sequences):
            yield "arrive", self.num_arrived
        for index, sequence in enumerate(() if self.is_calm else self.sequences[: self.num_arrived]):
            if sequence.status in LIVE:
                yield "abort", index
            elif sequence.finish_reason != "abort" and sequence.arrival < 100:
                yield "continue", index

    def _wait(self, _: int) -> None:
        """The oldest has waited long enough."""
        self.scheduler.waiting.open_gate()

    def _tick(self, _: int) -> None:
        self.now_s += 1.0

    def _plan(self) -> SchedulePlan:
        self.scheduler.begin_step(self.now_s)
        waiting = self.scheduler.waiting
        if waiting.gated and self.scheduler.gate.opens_s(waiting.num_never_started, 0.0) < 0.0:
            waiting.open_gate()
        self.scheduler.moves.take_due()
        plan, num_rooms = self.scheduler.schedule(), 0
        while plan.moves_blocks:
            num_rooms += 1
            assert num_rooms < 20, "room is made without end"
            self.scheduler.make_room(plan)
            assert check(snapshot(self.scheduler)) == []
            plan = self.scheduler.schedule()
        return plan

    def _step(self, _: int) -> None:
        plan = self._plan()
        if plan.rows:
            self.scheduler.reserve(plan)
            self.scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows if row.is_sampled})

    def _fail(self, _: int) -> None:
        plan = self._plan()
        if plan.rows:
            self.scheduler.reserve(plan)
            assert check(snapshot(self.scheduler)) == []
            self.scheduler.rollback(plan)

    def _arrive_transfer(self, place: int) -> None:
        self.scheduler.moves.complete_transfer(self._transfers()[place].transfer_id, 0.0, is_ok=True)

    def _lose_transfer(self, place: int) -> None:
        self.scheduler.moves.complete_transfer(self._transfers()[place].transfer_id, 0.0, is_ok=False)

    def _arrive(self, index: int) -> None:
        self.sequences[index].arrival_s = self.now_s
        self.scheduler.add_sequences(self.sequences[index])
        self.num_arrived += 1

    def _abort(self, index: int) -> None:
        self.scheduler.finish_sequence(self.sequences[index], "abort")

    def _continue(self, index: int) -> None:
        sequence = self.sequences[index]
        if self.scheduler.can_ever_fit(len(sequence.token_ids) + 2):
            arrival = 100 + sequence.arrival
            sequence.begin_turn([1], sequence.params, max_tokens=1, stop_token_ids=frozenset(), arrival=arrival,
                                arrival_s=self.now_s)
            self.scheduler.add_sequences(sequence)


def explore(world: World, formation: Mapping[str, Any], *, is_calm: bool = False) -> int:
    """Visit every reachable state; return how many there are."""
    first = Life(world, (), formation, is_calm=is_calm).key()
    seen, after = {first}, dict[object, object]()
    queue: deque[tuple[tuple[Event, ...], tuple[Any, ...]]] = deque([((), first)])
    while queue:
        events, before = queue.popleft()
        for event in Life(world, events, formation, is_calm=is_calm).next_events():
            life = Life(world, (*events, event), formation, is_calm=is_calm)
            if event[0] == "step":
                after[before] = life.key()
                is_held_up = bool(before[2] or before[6][0])  # a transfer is in flight, or the gate is closed
                assert is_held_up or life.key() != before, "a step changes nothing"
            if life.key() not in seen:
                seen.add(life.key())
                queue.append(((*events, event), life.key()))
                assert check(snapshot(life.scheduler)) == []
                plan, scheduler = life.scheduler.schedule(), life.scheduler
                is_active = bool(plan.rows) or plan.moves_blocks or scheduler.kv_cache.host.has_awaited
                is_all_gated = {one.sequence_id for one in scheduler.waiting} == scheduler.waiting.gated
                assert is_active or not scheduler.has_work or (is_all_gated and not scheduler.running)
    assert_no_circle(after)
    return len(seen)


def assert_no_circle(after: Mapping[object, object]) -> None:
    """Steps alone never lead back to a state: all work ends. A step that waits for a transfer may change nothing."""
    done = set[object]()
    for state in after:
        path = dict[object, None]()
        while state in after and state not in done and after[state] != state:
            assert state not in path, "steps lead back to a state"
            path[state] = None
            state = after[state]
        done.update(path)


def explore_pools(
    pools: list[tuple[tuple[int, int, int], list[Requests]]], policy: str | Policy, admission: str, *,
    is_calm: bool = False, **formation: Any,
) -> None:
    for (num_blocks, block_size, num_host_blocks), worlds in pools:
        for requests in worlds:
            world = num_blocks, block_size, num_host_blocks, policy, admission, requests
            assert explore(world, formation, is_calm=is_calm) > 50


@pytest.mark.parametrize(
    ("policy", "admission"),
    [
        ("fcfs", "optimistic"),
        ("priority", "guaranteed"),
        pytest.param("priority", "optimistic", marks=pytest.mark.slow),
        pytest.param("fcfs", "guaranteed", marks=pytest.mark.slow),
        pytest.param("static", "optimistic", marks=pytest.mark.slow),
        pytest.param("static", "guaranteed", marks=pytest.mark.slow),
    ],
)
def test_every_reachable_state_keeps_the_laws_and_makes_progress(policy: str, admission: str) -> None:
    """After any arrivals, failures, aborts and continuations a sequence advances, or a needed transfer is in flight."""
    explore_pools(POOLS, policy, admission)


@pytest.mark.parametrize("name", [
    "ageing", "preempting", "deadline", "fair", *(pytest.param(name, marks=pytest.mark.slow)
                                                  for name in ("capped", "fickle", "shortest-first", "cache-aware")),
])
def test_every_reachable_state_under_an_order_that_changes(name: str) -> None:
    """With a clock that may advance between any two events, and under every policy whose order follows it, or that
    preempts to admit: the laws hold, something advances, and steps alone end all work."""
    explore_pools([((2, 2, 0), REQUESTS[1:2])], MOVING_POLICIES[name], "optimistic", is_calm=True)


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["optimistic", "guaranteed"])
@pytest.mark.parametrize("name", MOVING_POLICIES)
def test_every_reachable_state_of_more_pools_under_an_order_that_changes(name: str, admission: str) -> None:
    """The same with more room, other requests, and a host."""
    explore_pools([*POOLS, *HOST_POOLS], MOVING_POLICIES[name], admission)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [(2, 2, 0), (4, 1, 0), (6, 1, 0)], ids=str)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "static", *MOVING_POLICIES])
def test_every_reachable_state_of_four_requests(policy: str, pool: tuple[int, int, int]) -> None:
    """The same with four requests, none of which is aborted or continued."""
    world = *pool, MOVING_POLICIES.get(policy, policy), "optimistic", FOUR_REQUESTS
    assert explore(world, {}, is_calm=True) > 20


@pytest.mark.parametrize("formation", [
    {"phases": "separate"}, {"gate": BatchGate(2, 1.0)},
    pytest.param({"phases": "separate", "gate": BatchGate(2, 1.0)}, marks=pytest.mark.slow),
    pytest.param({"prefill_share": 0.5}, marks=pytest.mark.slow),
], ids=str)
@pytest.mark.parametrize("policy", ["fcfs", pytest.param("static", marks=pytest.mark.slow)])
def test_every_reachable_state_with_batch_formation(policy: str, formation: dict[str, Any]) -> None:
    """The same with phases of their own, a share of prefill, or a gate that time opens whenever it likes: as long as
    something runs or may start, a sequence advances."""
    explore_pools(POOLS[:1], policy, "optimistic", **formation)


@pytest.mark.slow
@pytest.mark.parametrize("formation", [{"phases": "separate"}, {"gate": BatchGate(2, 1.0)}], ids=str)
def test_every_reachable_state_of_a_swapping_pool_with_batch_formation(formation: dict[str, Any]) -> None:
    """The same with a host."""
    explore_pools([*POOLS, *HOST_POOLS], "priority", "optimistic", **formation)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_reachable_state_of_a_swapping_pool(policy: str) -> None:
    """The same with a host, whose transfers end at any time or fail."""
    explore_pools(HOST_POOLS, policy, "optimistic")


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["optimistic", "guaranteed"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
def test_every_reachable_state_of_larger_pools(policy: str, admission: str) -> None:
    """The same with more room, where more sequences meet."""
    explore_pools(SLOW_POOLS, policy, admission)

"""Visits every state of a tiny world, and finds runs that never end.

A run that goes on for ever has only finitely many arrivals, aborts and continuations, and a failing step changes
nothing that a request needs. From some point on it consists of steps, ends of transfers, the gate's opening and the
clock. In a finite graph such a run has a circle of these events; so all work ends if there is none, if a step that
changes nothing has a reason, and if that reason goes away.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from scheduler_lives.tiny_worlds import LIVE, Event, Key, Life, World

CLOCK = frozenset({"tick", "learn"})
"""What may happen for ever without a step: a clock that runs while none is taken is no livelock."""
PROGRESS = frozenset({"step", "wait", "arrive_transfer", "lose_transfer"}) | CLOCK


class Endless(AssertionError):
    """Work that need not end: a livelock, or a request that starves."""


@dataclass
class Exploration:
    """All states of one world, numbered as they were found, and how each leads to others."""

    world: World
    keys: list[bytes] = field(default_factory=list)
    """A digest of the key of each state: 128 bits, so that two keys with one digest are not to be expected."""
    edges: list[list[tuple[Event, int]]] = field(default_factory=list)
    outcomes: set[tuple[int, str | None, int]] = field(default_factory=set)
    """How requests have ended: which one, why, and with how many tokens."""
    held_up: list[bool] = field(default_factory=list)
    """Whether a step may change nothing, as a transfer is in flight or the gate is closed."""
    late: list[bool] = field(default_factory=list)
    """Whether the last request waits or runs."""
    found_by: list[tuple[int, Event] | None] = field(default_factory=list)

    @property
    def num_transitions(self) -> int:
        """Events that were tried."""
        return sum(map(len, self.edges))

    def trail(self, state: int) -> list[str]:
        """Say how a state was reached."""
        events = list[str]()
        while (before := self.found_by[state]) is not None:
            state, (name, index) = before
            events.append(f"{name} {index}")
        return events[::-1]

    def require_ends(self) -> None:
        """Raise ``Endless`` if steps, ends of transfers, the gate and the clock may go round in a circle."""
        for circle in self._circles(PROGRESS, range(len(self.edges))):
            if any(name not in CLOCK for name in circle.values()):
                raise Endless(f"livelock: {sorted(set(circle.values()))} lead back to the state after "
                              f"{self.trail(min(state for state, _ in circle))} in {self.world}")

    def require_service(self) -> None:
        """Raise ``Endless`` if the last request may wait for ever while those before it come again and again.

        Infinitely many arrivals within one second are no reason to serve a request by its age: under a policy that
        looks at the time, a circle counts only if the clock runs in it.
        """
        needed = {"step", "return", *({"tick"} if Life(self.world).policy.clock else ())}
        among = [state for state, is_late in enumerate(self.late) if is_late]
        for circle in self._circles(PROGRESS | {"return"}, among):
            if needed <= set(circle.values()):
                raise Endless(f"starvation: the last request waits for ever after "
                              f"{self.trail(min(state for state, _ in circle))} in {self.world}")

    def _circles(self, names: frozenset[str], among: Iterable[int]) -> list[dict[tuple[int, Event], str]]:
        """Return the edges of every strongly connected part; steps that had to change nothing are left out."""
        inside = set(among)
        after = {
            state: [(event, to) for event, to in self.edges[state] if event[0] in names and to in inside
                    and not (to == state and event[0] == "step" and self.held_up[state])]
            for state in inside
        }
        part = _parts({state: [to for _, to in edges] for state, edges in after.items()})
        circles = dict[int, dict[tuple[int, Event], str]]()
        for state, edges in after.items():
            for event, to in edges:
                if part[state] == part[to]:
                    circles.setdefault(part[state], {})[state, event] = event[0]
        return list(circles.values())


def explore(world: World, *, is_merged: bool = True) -> Exploration:
    """Visit every reachable state, and check the laws in each.

    Args:
        world: what may happen.
        is_merged: whether states with the same ``Life.key`` are one; else only those that are equal byte for byte.
    """
    found = Exploration(world)
    number_of = dict[bytes, int]()
    queue = deque[bytes]()

    def visit(life: Life, by: tuple[int, Event] | None) -> int:
        state = b"" if is_merged else life.state()
        digest = digest_of(life.key()) if is_merged else blake2b(state, digest_size=16).digest()
        found.outcomes.update(
            (role, one.finish_reason, len(one.token_ids)) for role, one in enumerate(life.arrived)
            if one.status not in LIVE
        )
        number = number_of.setdefault(digest, len(number_of))
        if number == len(found.keys):
            found.keys.append(digest if is_merged else digest_of(life.key()))
            found.found_by.append(by)
            found.held_up.append(life.is_held_up)
            found.late.append(life.num_arrived == len(life.sequences) and life.sequences[-1].status in LIVE)
            queue.append(state or life.state())
            _require_laws(life, found)
        return number

    visit(Life(world), None)
    while queue:
        state, number = queue.popleft(), len(found.edges)
        life = Life.copy_of(state, world)
        edges = list[tuple[Event, int]]()
        for event in list(life.next_events()):
            after = Life.copy_of(state, world)
            after.happen(event)
            to = visit(after, (number, event))
            edges.append((event, to))
            is_idle = to == number and (event[0] == "wait" or (event[0] == "step" and not found.held_up[number]))
            assert not is_idle, f"a {event[0]} changes nothing after {found.trail(number)} in {world}"
        found.edges.append(edges)
    return found


def digest_of(key: Key) -> bytes:
    """Return 16 bytes that are the same for equal keys."""
    # Why version 2: later ones write how objects are shared, and not their values alone.
    return blake2b(marshal.dumps(key, 2), digest_size=16).digest()


def _require_laws(life: Life, found: Exploration) -> None:
    scheduler, number = life.scheduler, len(found.keys) - 1
    broken = check(snapshot(scheduler))
    assert not broken, f"{broken} after {found.trail(number)} in {life.world}"
    for role, one in enumerate(life.arrived):
        is_queued = one in scheduler.waiting or one in scheduler.running
        assert is_queued == (one.status in LIVE), (
            f"request {role} is {one.status.value} and neither waits nor runs after {found.trail(number)}")
    if not scheduler.has_work:
        if not life.transfers:
            assert not scheduler.kv_cache.device.num_used_blocks, f"blocks are lost after {found.trail(number)}"
            assert not scheduler.kv_cache.host.num_used_blocks, f"host blocks are lost after {found.trail(number)}"
        return
    plan = scheduler.schedule()
    is_active = bool(plan.rows) or plan.moves_blocks or scheduler.kv_cache.host.has_awaited
    assert is_active or scheduler.is_gated, f"nothing is planned after {found.trail(number)} in {life.world}"


def _parts(after: dict[int, list[int]]) -> dict[int, int]:
    """Number the strongly connected parts of a graph. Source: Tarjan 1972, without recursion."""
    index, low, part = dict[int, int](), dict[int, int](), dict[int, int]()
    stack = list[int]()
    for root in after:
        path = [(root, iter(after[root]))] if root not in index else []
        while path:
            state, rest = path[-1]
            if state not in index:
                index[state] = low[state] = len(index)
                stack.append(state)
            to = next(rest, None)
            if to is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[state])
                if low[state] == index[state]:
                    while stack:
                        one = stack.pop()
                        part[one] = state
                        if one == state:
                            break
            elif to not in index:
                path.append((to, iter(after[to])))
            elif to not in part:
                low[state] = min(low[state], index[to])
    return part

"""States that the exhaustive search merges have the same future: compared with a search that merges only equal bytes.

The other search tells states apart by all that their objects hold: numbers of blocks, times, counters, what is left in
heaps. It selects nothing, so it can forget nothing. The sets of what is reachable have to be equal, and every event has
to lead from states with one key to states with one key, so that by induction over events their futures are the same.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from pagedcore.scheduler.cost_model import CostModel
from scheduler_lives.exploration import Exploration, explore
from scheduler_lives.test_exhaustive import EQUAL, FOUR, MIXED, NOISY, QUICK, SEPARATE, SLOW, name_of
from scheduler_lives.tiny_worlds import POLICIES, Key, Life, Requests, World, _Names

TWO_UNEQUAL: Requests = (3, 1, 0), (1, 3, 1)
TWO_MIXED: Requests = (1, 2, 0), (2, 2, 1)
SWAPPING: Final = World((2, 2, 2), "preempting", MIXED)
ABORTING: Final = World((2, 2, 2), "fcfs", ((2, 2, 0), (2, 2, 0)), has_faults=True, most_failures=0)
SHARING: Final = World((4, 1, 0), "fair", ((1, 3, 0), (1, 2, 0), (2, 2, 0), (1, 2, 0)))
WORLDS = [
    *(World((2, 2, 0), policy, MIXED) for policy in ("fcfs", "ageing", "fair", "capped", "shortest-first")),
    *(World((2, 2, 0), policy, TWO_UNEQUAL, has_faults=True, most_failures=1) for policy in ("fcfs", "preempting")),
    World((4, 1, 0), "fickle", TWO_MIXED, has_faults=True, most_failures=1),
    World((4, 1, 0), "deadline", TWO_MIXED, most_ticks=2),
    World((2, 2, 2), "priority", TWO_UNEQUAL),
    World((2, 2, 0), "fcfs", MIXED, formation=SEPARATE),
    World((2, 2, 0), "fair", FOUR), SHARING, SWAPPING, ABORTING,
]
SLOW_WORLDS = [
    *(World(pool, policy, EQUAL, most_ticks=2) for pool in ((2, 2, 0), (4, 1, 0))
      for policy in POLICIES if policy != "noisy deadline"),
    *(World((4, 1, 0), policy, TWO_MIXED, has_faults=True, most_failures=1, most_ticks=2) for policy in POLICIES),
    # Why no dynamic policy: it counts its views, also while a transfer is awaited, so that no two states are equal.
    *(World((2, 2, 2), policy, TWO_UNEQUAL) for policy in ("fcfs", "preempting")),
    World((6, 1, 0), "fcfs", FOUR), NOISY,
]


def compare(world: World) -> tuple[Exploration, Exploration]:
    """Explore a world merged and unmerged; check that both reach the same, in the same way."""
    merged, whole = explore(world), explore(world, is_merged=False)
    assert set(whole.keys) == set(merged.keys)
    assert whole.outcomes == merged.outcomes
    future = {key: _future(merged, state) for state, key in enumerate(merged.keys)}
    for state, key in enumerate(whole.keys):
        assert _future(whole, state) == future[key], f"after {whole.trail(state)} in {world}"
    return merged, whole


def _future(found: Exploration, state: int) -> Any:
    return [(event, found.keys[to]) for event, to in found.edges[state]]


@pytest.mark.parametrize("world", [
    # Why slow: it has the most states, and the test of keys without a part explores it too.
    pytest.param(world, marks=pytest.mark.slow) if world is SWAPPING else world for world in WORLDS
], ids=name_of)
def test_merged_states_have_the_same_future(world: World) -> None:
    """What can be reached, how requests end and where each event leads is as without merging."""
    compare(world)


def _without(place: int) -> Any:
    """A part of a life's key by its place in it."""
    whole = Life.key
    return Life, "key", lambda life: _left_out(whole(life), place)


def _left_out(key: Key, place: int) -> Key:
    return key[:place] + key[place + 1 :]


def _without_tenants() -> Any:
    whole = Life._of_policy
    return Life, "_of_policy", lambda life: _left_out(whole(life), 1)


def _without_eviction_order() -> Any:
    whole = _Names.cached
    return _Names, "cached", lambda names: [tuple(sorted(part)) for part in whole(names)]


def _without_idleness() -> Any:
    whole = _Names.cached
    return _Names, "cached", lambda names: tuple(sorted(sum(whole(names), ())))


@pytest.mark.parametrize(("part", "world"), [
    (_without(5), ABORTING), (_without_eviction_order(), SWAPPING), (_without_idleness(), SWAPPING),
    (_without_tenants(), SHARING), (_without(9), World((2, 2, 0), "shortest-first", MIXED)),
], ids=["moving", "eviction order", "idle apart from held", "tenants", "policy"])
def test_a_key_without_a_part_is_noticed(
    part: tuple[type, str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that leaves out what decisions depend on merges states that the other search tells apart."""
    monkeypatch.setattr(*part)
    with pytest.raises(AssertionError):
        compare(world)


@pytest.mark.slow
@pytest.mark.parametrize("world", SLOW_WORLDS, ids=name_of)
def test_merged_states_have_the_same_future_in_more_worlds(world: World) -> None:
    """The same for every policy, also with failures, aborts and continuations."""
    compare(world)


def test_no_cost_decides_in_a_tiny_pool() -> None:
    """Preempting the one sequence that may be preempted always beats waiting, whatever shrunk ones lose."""
    costs = CostModel()
    for world in (*QUICK, *SLOW):
        longest = max(prompt + most for prompt, most, _ in world.requests) + 2 * world.has_faults
        assert costs.wait_s(1, 2, world.pool[1]) > costs.compute_s(longest), name_of(world)

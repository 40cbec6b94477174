"""Every order of events on tiny pools: laws hold, nothing that can run stands still, and every accepted request ends.

What can happen and why states may be merged is in ``tiny_worlds``, what counts as an end in ``exploration``. All that
``make slow`` visits, as a table with the numbers of states: ``python -m scheduler_lives.test_exhaustive``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Final

import pytest

from pagedcore.scheduler import policies
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.swapping import Swapping
from pagedcore.scheduler.waiting_queue import WaitingQueue
from pagedcore.sequence import Sequence
from scheduler_lives import tiny_worlds
from scheduler_lives.exploration import Endless, explore
from scheduler_lives.tiny_worlds import POLICIES, Requests, World

Patch = pytest.MonkeyPatch

#: (prompt, max_tokens, priority) of the requests of a world.
MIXED: Final[Requests] = (1, 2, 0), (2, 2, 0), (1, 1, 1)
UNEQUAL: Final[Requests] = (3, 1, 0), (1, 3, 1), (2, 2, 0)
EQUAL: Final[Requests] = (2, 2, 1), (2, 2, 0), (2, 2, 1)
FOUR: Final[Requests] = (1, 2, 0), (2, 2, 1), (1, 1, 1), (2, 1, 0)
TWO: Final[Requests] = (5, 1, 0), (3, 2, 0)

PLAIN: Final = "fcfs", "priority", "static"
MOVING: Final = tuple(name for name in POLICIES if name not in (*PLAIN, "noisy deadline", "shortest-first for ever"))
"""Those whose order depends on the time or on what was computed, or that preempt to admit."""
SEPARATE: Final = {"phases": "separate"}
GATED: Final = {"gate": BatchGate(2, 1.0)}
NOISY: Final = World(
    (6, 1, 0), "noisy deadline", TWO, deadlines_s=(2.5, 3.5), shares_prefixes=False,
    formation={"preemption": "recompute", "max_num_seqs": 1},
)
"""Two requests for one row, each of which measurements call late while the other one runs."""


def _worlds(
    policies: tuple[str, ...], pools: list[tuple[int, int, int]], requests: list[Requests],
    admissions: tuple[str, ...] = ("optimistic",), formations: tuple[Mapping[str, Any], ...] = ({},), **more: Any,
) -> list[World]:
    return [
        World(pool, policy, some, admission, formation=formation, **more)
        for policy, admission, pool, some, formation in product(policies, admissions, pools, requests, formations)
    ]


BOTH: Final = "optimistic", "guaranteed"
QUICK: Final = [
    *_worlds(PLAIN, [(2, 2, 0), (4, 1, 0)], [MIXED, UNEQUAL, EQUAL], has_faults=True),
    *_worlds(MOVING, [(2, 2, 0)], [UNEQUAL], most_ticks=2),
    *_worlds(("fcfs",), [(2, 2, 0)], [MIXED, UNEQUAL], formations=(SEPARATE, GATED), has_faults=True),
    *_worlds(("fcfs",), [(2, 2, 2)], [UNEQUAL]),
    NOISY,
]
SLOW: Final = [
    *_worlds(PLAIN, [(2, 2, 0), (4, 1, 0)], [MIXED, UNEQUAL, EQUAL], ("guaranteed",), has_faults=True),
    *_worlds(PLAIN, [(3, 2, 0), (6, 1, 0), (6, 2, 0)], [MIXED, UNEQUAL, EQUAL], BOTH, has_faults=True),
    *_worlds(PLAIN, [(2, 2, 4), (4, 1, 4)], [UNEQUAL], BOTH),
    *_worlds(MOVING, [(2, 2, 0), (4, 1, 0)], [MIXED, UNEQUAL, EQUAL], BOTH, has_faults=True),
    *_worlds(MOVING, [(2, 2, 2)], [UNEQUAL]),
    *_worlds((*PLAIN, *MOVING), [(2, 2, 0), (4, 1, 0), (6, 1, 0)], [FOUR]),
    *_worlds(("fcfs", "static"), [(2, 2, 0)], [MIXED, UNEQUAL, EQUAL], formations=(
        SEPARATE, GATED, {**SEPARATE, **GATED}, {"prefill_share": 0.5}), has_faults=True),
    *_worlds(("priority",), [(2, 2, 2)], [UNEQUAL], formations=(SEPARATE, GATED)),
    *(replace(NOISY, pool=pool, formation=formation, shares_prefixes=shares) for pool, formation, shares in product(
        [(6, 1, 0), (3, 2, 0)], ({}, {"max_num_seqs": 1}, {"preemption": "recompute"}), (False, True))),
]
ENDLESS: Final[Requests] = (1, 1, 1), (2, 2, 0)
THREE_ENDLESS: Final[Requests] = (1, 1, 1), (1, 1, 1), (2, 2, 0)
ONE_ROW: Final = {"max_num_seqs": 1}
#: Under these policies, requests that come for ever do not keep out the last one.
SERVING: Final = [
    *(World((4, 1, 0), policy, ENDLESS, num_endless=1, formation=ONE_ROW)
      for policy in ("fcfs", "ageing", "fair", "shortest-first")),
    World((4, 1, 0), "fcfs", THREE_ENDLESS, num_endless=2),
]
SLOW_SERVING: Final = [World((4, 1, 0), "ageing", THREE_ENDLESS, num_endless=2)]
#: Under these, they do.
STARVING: Final = [
    *(World((4, 1, 0), policy, THREE_ENDLESS, num_endless=2)
      for policy in ("priority", "preempting", "shortest-first for ever")),
    World((4, 1, 0), "priority", ENDLESS, num_endless=1, formation=ONE_ROW),
]


def name_of(world: World) -> str:
    """Say which world it is, on one line."""
    pool = "x".join(map(str, world.pool))
    formation = ",".join(f"{name}={getattr(value, 'min_batch_size', value)}" for name, value in world.formation.items())
    extras = ["faults"] * world.has_faults + [f"{world.num_endless} endless"] * (world.num_endless > 0)
    requests = " ".join("/".join(map(str, one)) for one in world.requests)
    extras += ["apart"] * (not world.shares_prefixes) + [formation] * bool(formation)
    return "; ".join([world.policy, world.admission, pool, requests, *extras])


def visit(world: World) -> tuple[int, int]:
    """Explore a world whose work has to end; return the numbers of states and of transitions."""
    found = explore(world)
    found.require_ends()
    if world.num_endless:
        found.require_service()
    assert len(found.keys) > 10
    return len(found.keys), found.num_transitions


@pytest.mark.parametrize("world", QUICK, ids=name_of)
def test_all_work_ends(world: World) -> None:
    """After any arrivals, failures, aborts and continuations the laws hold, something advances or a transfer or the
    gate is awaited, and steps, ends of transfers, the gate and the clock end all work."""
    visit(world)


@pytest.mark.slow
@pytest.mark.parametrize("world", SLOW, ids=name_of)
def test_all_work_ends_in_more_worlds(world: World) -> None:
    """The same with every policy, more room, other requests, four of them, and a host."""
    visit(world)


@pytest.mark.parametrize("world", [
    *SERVING, *(pytest.param(world, marks=pytest.mark.slow) for world in SLOW_SERVING),
], ids=name_of)
def test_requests_that_come_for_ever_keep_none_out(world: World) -> None:
    """However often the others come again, from some age on the last request is served."""
    visit(world)


@pytest.mark.parametrize("world", STARVING, ids=name_of)
def test_the_search_sees_a_request_that_starves(world: World) -> None:
    """Without ageing they may wait for ever: so a search that finds no starvation has looked for it."""
    found = explore(world)
    found.require_ends()
    with pytest.raises(Endless, match="starvation"):
        found.require_service()


def no_protection(patch: Patch) -> None:
    """A resumed sequence may be preempted by order again at once."""
    patch.setattr(Sequence, "is_protected", False)


def ageing_inverted(patch: Patch) -> None:
    """The longer a request waits, the later it comes."""
    aged = policies.priority(ageing_s=2.0, preemption_gap=1.0)
    patch.setitem(tiny_worlds._made, "ageing", replace(
        aged, order=lambda one: (-one.arrival_s / 2.0 - one.priority, one.arrival), preempts=None))


def gated_for_ever(patch: Patch) -> None:
    """Time opens no gate."""
    patch.setattr(WaitingQueue, "open_gate", lambda self, *sequences: None)


def leak_on_abort(patch: Patch) -> None:
    """A sequence that is aborted keeps its blocks."""
    free_finished = Swapping.free_finished

    def leaking(self: Swapping, sequence: Sequence, **how: bool) -> None:
        if sequence.finish_reason == "abort":
            sequence.reset_computed()
        else:
            free_finished(self, sequence, **how)

    patch.setattr(Swapping, "free_finished", leaking)


def preempted_lost(patch: Patch) -> None:
    """A preempted sequence does not come back to the queue."""
    patch.setattr(WaitingQueue, "push_preempted", lambda self, sequence: None)


#: Bugs put in by hand, a world in which the search has to find each, and what it says then.
MUTANTS: Final[list[tuple[Callable[[Patch], None], World, str]]] = [
    (no_protection, NOISY, "livelock"),
    (no_protection, World((2, 2, 0), "fickle", UNEQUAL), "a step changes nothing|livelock"),
    (ageing_inverted, SERVING[1], "starvation"),
    (gated_for_ever, World((2, 2, 0), "fcfs", MIXED, formation=GATED), "a wait changes nothing"),
    (leak_on_abort, World((2, 2, 0), "fcfs", MIXED, has_faults=True), "S6"),
    (preempted_lost, World((2, 2, 0), "fickle", UNEQUAL), "neither waits nor runs"),
]


@pytest.mark.parametrize(("mutant", "world", "what"), MUTANTS, ids=lambda one: getattr(one, "__name__", ""))
def test_the_search_finds_every_mutant(
    mutant: Callable[[Patch], None], world: World, what: str, monkeypatch: Patch
) -> None:
    """What the search would not find by these worlds, nobody would know to be absent."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=what):
        visit(world)


def test_constant_estimates_need_no_protection_under_deadline(monkeypatch: Patch) -> None:
    """With step times that stay, the policy ends all work without it: late is then late for good.

    A waiting request that can still end in time takes the place of one that cannot. Its slack falls while it waits and
    does not fall by its own computing, so the exchange is never undone. Estimates that are learned may undo it at every
    step, which is why the search lets them change (``NOISY``).
    """
    no_protection(monkeypatch)
    visit(World((2, 2, 0), "deadline", UNEQUAL, most_ticks=2))


def main() -> None:
    """Visit all worlds of ``make slow``, or a part of them, and print their sizes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--part", type=int, default=0, help="which part, from 0")
    parser.add_argument("--of", type=int, default=1, help="how many parts there are")
    args = parser.parse_args()
    for world in [*QUICK, *SLOW, *SERVING, *SLOW_SERVING][args.part :: args.of]:
        start_s = time.process_time()
        num_states, num_transitions = visit(world)
        print(f"| {name_of(world)} | {num_states:,} | {num_transitions:,} | {time.process_time() - start_s:.2f} |",
              flush=True)


if __name__ == "__main__":
    main()

"""Which way to use threads is chosen: the fastest one, found by short trials that become rare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from pagedcore.execution.compute_threads import (
    FIRST_STEPS,
    LONGEST_WAIT_ALONE_S,
    ThreadChoice,
    Way,
)

ALL, ONE = Way(4), Way(1)
Cost = Callable[[Way, float], float]


def simulate(choice: ThreadChoice, cost: Cost, until_s: float, start_s: float = 0.0, *, num_tokens: int = 8,
             core_share: Callable[[Way], float] = lambda way: 1.0) -> list[tuple[float, Way]]:
    """Let steps follow each other on a clock of their own; return when each began, and its way."""
    now_s, used = start_s, []
    while now_s < until_s:
        way = choice.choose(num_tokens, now_s)
        used.append((now_s, way))
        cost_s = cost(way, now_s)
        now_s += cost_s
        choice.observe(num_tokens, now_s, cost_s, core_share(way))
    return used


def share(used: list[tuple[float, Way]], way: Way, after_s: float = 0.0) -> float:
    late = [one for begin_s, one in used if begin_s >= after_s]
    return Counter(late)[way] / len(late)


def test_the_first_way_is_used_before_anything_is_known() -> None:
    """Nothing is tried before the present way has been measured."""
    used = simulate(ThreadChoice((ALL, ONE)), lambda way, now: 0.01, 0.01 * FIRST_STEPS)
    assert {way for _, way in used} == {ALL}


@pytest.mark.parametrize(("all_s", "one_s", "best"), [(0.01, 0.018, ALL), (0.02, 0.01, ONE), (0.002, 0.0015, ONE)])
def test_the_faster_way_wins(all_s: float, one_s: float, best: Way) -> None:
    """After a while nearly all steps are computed the faster way."""
    used = simulate(ThreadChoice((ALL, ONE)), lambda way, now: all_s if way == ALL else one_s, 20)
    assert share(used, best, after_s=5) > 0.9


def test_a_small_advantage_changes_nothing() -> None:
    """Two ways that cost about the same are not exchanged again and again."""
    used = simulate(ThreadChoice((ALL, ONE)), lambda way, now: 0.01 if way == ALL else 0.0097, 30)
    assert share(used, ALL, after_s=1) > 0.9


def test_trials_cost_little_on_a_machine_that_stays_as_it_is() -> None:
    """In a minute of steps of 40 ms, trials of a way that takes twice as long cost less than one per cent."""
    choice = ThreadChoice((ALL, ONE))
    simulate(choice, lambda way, now: 0.04 if way == ALL else 0.08, 5)
    used = simulate(choice, lambda way, now: 0.04 if way == ALL else 0.08, 65, 5)
    assert 0.04 * Counter(way for _, way in used)[ONE] < 0.01 * 60


def test_a_way_that_is_fast_for_a_moment_is_not_chosen() -> None:
    """Beside neighbours a thread has its core for some milliseconds and then not: a trial does not end at its best."""

    def cost(way: Way, now_s: float) -> float:
        # One thread: 0.1 s at 10 ms a step, then 0.1 s at 40 ms; together slower than 20 ms.
        return 0.02 if way == ALL else 0.01 if now_s % 0.2 < 0.1 else 0.04

    used = simulate(ThreadChoice((ALL, ONE)), cost, 60)
    assert share(used, ALL) > 0.9


def test_trials_that_decide_nothing_take_a_tenth_of_the_time_at_most() -> None:
    """Long steps make long trials, and after a long trial the next one is far, while the machine stays as it is."""
    used = simulate(ThreadChoice((ALL, ONE)), lambda way, now: 0.05 if way == ALL else 0.055, 5)
    assert 0.055 * Counter(way for _, way in used)[ONE] < 0.1 * 5


def test_a_neighbour_that_comes_and_goes_is_noticed() -> None:
    """One thread computes while it is the faster way, and all of them soon after it no longer is."""

    def cost(way: Way, now_s: float) -> float:
        return 0.01 if way == ALL and not 20 <= now_s < 40 else 0.018 if way == ONE else 0.05

    choice = ThreadChoice((ALL, ONE))
    used = simulate(choice, cost, 20)
    used += simulate(choice, cost, 40, 20, core_share=lambda way: 0.5 if way == ALL else 1.0)
    used += simulate(choice, cost, 60, 40)
    assert share([one for one in used if 22 <= one[0] < 40], ONE) > 0.9
    assert share([one for one in used if one[0] >= 40 + 2 * LONGEST_WAIT_ALONE_S], ALL) > 0.9


def test_sizes_are_judged_apart() -> None:
    """A prompt of many tokens and a step of a few may be computed in different ways."""
    choice = ThreadChoice((ALL, ONE))
    small = simulate(choice, lambda way, now: 0.002 if way == ALL else 0.001, 10, num_tokens=4)
    large = simulate(choice, lambda way, now: 0.1 if way == ALL else 0.3, 30, 10, num_tokens=500)
    assert share(small, ONE, after_s=5) > 0.9
    assert share(large, ALL, after_s=12) > 0.9


def test_a_single_way_is_never_judged() -> None:
    """With one core, or where the number of threads may not change, there is nothing to try."""
    used = simulate(ThreadChoice((ONE,)), lambda way, now: 0.01, 5)
    assert {way for _, way in used} == {ONE}

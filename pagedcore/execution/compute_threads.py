"""The threads that one engine computes with: how many there may be, and how many the next step gets.

Owns the engine's slot in the process-wide thread team; ``pagedcore_kernels/cpu/runtime/team.py`` owns the threads.

Of several ways to use threads the fastest is chosen, by the measured cost of the last steps. Beside busy programs one
thread that keeps its core can be faster than two that wait for each other, and so it can for steps that take
microseconds. Every size of a step has a choice of its own; sizes are powers of two of its tokens. The way in use is
measured at every step, the others in trials of a few steps. Trials become rare as long as the calling thread has about
the same share of its core, and come soon after a change of that share.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Final

from pagedcore_kernels.cpu.runtime.cores import num_usable_cores
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.team_memory import NUM_SLOTS
from pagedcore_kernels.cpu.runtime.threads import Computing, num_threads_of_torch

_engine_numbers: Final = itertools.count()

ADVANTAGE: Final = 0.93
"""Another way has to be so much faster, as a share of the present cost, to be chosen."""
HOPELESS: Final = 1.25
"""A trial ends early when its steps cost so many times what they do now."""
HOPELESS_FACTOR: Final = 8
"""After such a trial the wait for the next one becomes so many times as long, instead of twice."""
TRIAL_STEPS: Final = 3
"""A trial is at least so many steps and so long, in seconds: shorter ones measure a neighbour's slices of time."""
TRIAL_S: Final = 0.05
WINNING_S: Final = 0.2
"""A way that looks faster is chosen after so many seconds only: beside neighbours the cost of 50 ms varies by a third.
"""
WARM_UP_STEPS: Final = 1
"""The first steps of a trial do not count, and neither do later ones for so long: threads that slept begin slowly."""
WARM_UP_S: Final = 0.01
FIRST_STEPS: Final = 32
"""Steps of a size before its first trial."""
SHORTEST_WAIT_S: Final = 0.25
"""Seconds to the next trial: after a change, and at most."""
LONGEST_WAIT_S: Final = 60.0
LONGEST_WAIT_ALONE_S: Final = 2.0
"""The same for a way that cannot see that a neighbour has left, because it waits for no other thread."""
CHANGE: Final = 0.1
"""Such a change in the share of the time that the thread had its core is a change of the machine."""
AVERAGE_S: Final = 0.1
"""The last steps are averaged over about so many seconds, or three steps: many slices of a neighbour's time."""
LEAST_KEPT: Final = 0.7
SHARE_AVERAGE_S: Final = 0.4
"""The share of the core over so many, because it varies more and a change of it leads to a trial."""
WAIT_PER_TRIAL: Final = 10
"""The wait after a trial is at least so many times as long as the trial."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use threads."""

    num_threads: int
    uses_openmp: bool = False
    """Whether torch and the kernels both use torch's threads."""


class ThreadChoice:
    """The choice for all sizes of steps; used by one thread at a time."""

    def __init__(self, ways: tuple[Way, ...]) -> None:
        """Choose between ``ways``; the first one is used until another one proves faster."""
        self.ways = ways
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int, now_s: float) -> Way:
        """Return the way for a step of so many tokens that begins now, in seconds of any clock."""
        if len(self.ways) == 1:
            return self.ways[0]
        return self.ways[self._size(num_tokens).choose(now_s)]

    def observe(self, num_tokens: int, now_s: float, cost_s: float, core_share: float) -> None:
        """Observe the step of the last choice.

        Args:
            num_tokens: as for ``choose``.
            now_s: when it ended.
            cost_s: how long it took.
            core_share: the part of that during which the calling thread had a core, 0 to 1.
        """
        if len(self.ways) > 1:
            self._size(num_tokens).observe(now_s, cost_s, core_share)

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(self.ways))


class _Mean:
    """The mean over the last seconds: a ratio of two sums that fade.

    Why not a mean of ratios: one whose weights are durations would exceed the mean cost of a trial.
    """

    def __init__(self, over_s: float) -> None:
        self._over_s, self._weight, self._sum = over_s, 0.0, 0.0

    def begin(self, weight: float, amount: float) -> None:
        self._weight, self._sum = weight, amount

    def add(self, weight: float, amount: float, elapsed_s: float) -> None:
        kept = max(LEAST_KEPT, 1 - elapsed_s / self._over_s)
        self._weight, self._sum = kept * self._weight + weight, kept * self._sum + amount

    def mean(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class _Size:
    """The choice for one size."""

    def __init__(self, ways: tuple[Way, ...]) -> None:
        self._ways = ways
        self._current, self._trial, self._next_trial = 0, -1, 1
        self._cost, self._core_share = _Mean(AVERAGE_S), _Mean(SHARE_AVERAGE_S)
        self._core_share_at_trial = 0.0
        self._num_steps = 0
        self._trial_costs: list[float] = []
        self._num_warm = 0
        self._wait_s, self._trial_at_s = SHORTEST_WAIT_S, 0.0

    def choose(self, now_s: float) -> int:
        if self._trial < 0 and self._num_steps >= FIRST_STEPS and now_s >= self._trial_at_s:
            self._trial, self._trial_costs = self._next_trial, []
        return self._current if self._trial < 0 else self._trial

    def observe(self, now_s: float, cost_s: float, core_share: float) -> None:
        if self._trial >= 0:
            self._observe_trial(now_s, cost_s)
            return
        self._num_steps += 1
        self._cost.add(1, cost_s, cost_s)
        self._core_share.add(cost_s, cost_s * core_share, cost_s)
        if abs(self._core_share.mean() - self._core_share_at_trial) > CHANGE and self._wait_s > SHORTEST_WAIT_S:
            self._wait_s = SHORTEST_WAIT_S
            self._trial_at_s = min(self._trial_at_s, now_s + self._wait_s)
            self._cost.begin(1, cost_s)
            self._core_share.begin(cost_s, cost_s * core_share)

    def _observe_trial(self, now_s: float, cost_s: float) -> None:
        if len(self._trial_costs) < WARM_UP_STEPS or sum(self._trial_costs) < WARM_UP_S:
            self._trial_costs.append(cost_s)
            self._num_warm = len(self._trial_costs)
            return
        self._trial_costs.append(cost_s)
        total_s, num_steps = sum(self._trial_costs[self._num_warm :]), len(self._trial_costs) - self._num_warm
        is_hopeless = total_s > HOPELESS * self._cost.mean() * num_steps and total_s >= TRIAL_S
        needed_s = WINNING_S if total_s < ADVANTAGE * self._cost.mean() * num_steps else TRIAL_S
        if is_hopeless or (num_steps >= TRIAL_STEPS and total_s >= needed_s):
            self._end_trial(now_s, total_s, num_steps, is_hopeless)

    def _end_trial(self, now_s: float, total_s: float, num_steps: int, is_hopeless: bool) -> None:
        self._core_share_at_trial = self._core_share.mean()
        least_wait_s = WAIT_PER_TRIAL * sum(self._trial_costs)
        if total_s < ADVANTAGE * self._cost.mean() * num_steps:
            self._current, self._num_steps = self._trial, FIRST_STEPS
            self._cost.begin(num_steps, total_s)
            self._wait_s, least_wait_s = SHORTEST_WAIT_S, 0
        elif self._ways[self._current].num_threads == 1:
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_ALONE_S)
        else:
            self._wait_s = min(self._wait_s * (HOPELESS_FACTOR if is_hopeless else 2), LONGEST_WAIT_S)
        others = [number for number in range(len(self._ways)) if number != self._current]
        self._next_trial = next((number for number in others if number > self._trial), others[0])
        self._trial = -1
        self._trial_at_s = now_s + max(self._wait_s, least_wait_s)


class ComputeThreads:
    """How many threads one engine computes with, step by step; used by one thread at a time."""

    def __init__(self, most_threads: int | None = None, *, computes_in_torch: bool = False) -> None:
        """Take a place in the team.

        Args:
            most_threads: at most so many; ``None``: as many as torch uses. Never more than the cores there are.
            computes_in_torch: whether torch does enough of a step's work to need its own threads; then all steps run on
                those, kernels too, and their number does not change.
        """
        # Slot 0 is for kernels that run outside of any engine.
        self._slot = 1 + next(_engine_numbers) % (NUM_SLOTS - 1)
        self._most_threads, self._num_cores = most_threads, num_usable_cores()
        self._computes_in_torch = computes_in_torch
        self._choice = ThreadChoice((Way(1),))
        self._contexts: dict[Way, Computing] = {}
        self._present_most = self._num_tokens = 0
        self._begin_s = self._begin_cpu_s = 0.0
        self.last_way = self._choice.ways[0]
        """How the last step was computed."""
        self.floats = DefaultFloatState()
        """A context for what the present step computes, on threads of torch too where they do. Code of the host may
        have changed the state of this one since the step began."""

    def step(self, num_tokens: int) -> ComputeThreads:
        """Return a context for one step of so many tokens, which gets the threads that suit it."""
        self._num_tokens = num_tokens
        return self

    def __enter__(self) -> None:
        self._follow_host()
        self._begin_s, self._begin_cpu_s = time.monotonic(), time.thread_time()
        self.last_way = self._choice.choose(self._num_tokens, self._begin_s)
        self._context = self._contexts[self.last_way]
        self._context.__enter__()

    def __exit__(self, kind: object, *rest: object) -> None:
        self._context.__exit__()
        # Why: a step that failed says nothing about the cost of a step.
        if kind is None:
            end_s = time.monotonic()
            cost_s = end_s - self._begin_s
            core_share = min(1.0, (time.thread_time() - self._begin_cpu_s) / cost_s) if cost_s > 0 else 1.0
            self._choice.observe(self._num_tokens, end_s, cost_s, core_share)

    def _follow_host(self) -> None:
        """Start the choice anew when the application has changed how many threads torch uses."""
        most = self._most_threads if self._most_threads is not None else num_threads_of_torch()
        most = max(1, min(most, self._num_cores))
        if most == self._present_most:
            return
        if self._computes_in_torch:
            # Invariant: products of other libraries may have other bits with another number of threads.
            ways = [Way(most, uses_openmp=True)]
        else:
            ways = [Way(most), Way(1)] if most > 1 else [Way(1)]
        self.floats = DefaultFloatState(most if self._computes_in_torch else 1)
        self._choice = ThreadChoice(tuple(ways))
        self._contexts = {
            way: Computing(way.num_threads, slot=self._slot, uses_openmp=way.uses_openmp) for way in ways
        }
        # Why last: if this is interrupted, the next step begins it anew.
        self._present_most = most

"""The threads that one engine computes with: how many there may be, and how many the next step gets.

Owns the engine's slot in the process-wide thread team. ``thread_choice`` chooses the number for each step, and
``pagedcore_kernels/cpu/runtime/team.py`` owns the threads.
"""

from __future__ import annotations

import itertools
import time
from typing import Final

from pagedcore.execution.thread_choice import ThreadChoice, Way
from pagedcore_kernels.cpu.runtime.cores import num_usable_cores
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.team_memory import NUM_SLOTS
from pagedcore_kernels.cpu.runtime.threads import Computing, num_threads_of_torch

_engine_numbers: Final = itertools.count()


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

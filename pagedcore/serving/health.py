"""Whether an engine's thread is healthy: ready, degraded or dead, judged by its progress, not by its existence.

Owns the marks that the thread leaves and what is read from them, by callers and by the watchdog; it never looks at a
request, and asking never waits for the thread. Who leaves the marks is in ``engine_loop``, who asks is
``AsyncEngine.health``.

Law: an engine is dead exactly when it takes no calls any more, which silence makes it by the watchdog's verdict only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pagedcore.protocols import Clock, MonotonicClock

HealthStatus = Literal["ready", "degraded", "dead"]

IDLE_CHECK_S: Final = 1.0
"""How often an idle engine thread looks around, in seconds: often enough that silence means something."""
MAX_FAILED_STEPS: Final = 3
"""Failed steps in a row from which on the model, not a request, is at fault."""
TICK_S: Final = 1.0
"""The longest time between two looks of the watchdog, in seconds, and the fewest looks before it gives an engine up."""
MIN_TICKS: Final = 10


@dataclass(frozen=True, slots=True)
class Health:
    """One moment's verdict on an engine."""

    status: HealthStatus
    """"ready": send requests; "degraded": send them elsewhere; "dead": make a new engine, as this one refuses them."""
    reason: str
    """Why, in words made of numbers and names only."""
    silent_s: float
    """Seconds since the last step or idle check ended."""
    num_failed_steps: int
    """Steps that failed since the last one that did not."""


class Progress:
    """The marks an engine thread leaves, written by it alone and read from any thread.

    Invariant: every mark is one plain assignment, so that a reader needs no lock and a step pays for no lock.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._last_s = self._clock.now()
        self._num_failed_steps = 0
        self.is_idle = False
        """Whether the thread has nothing to do and sleeps until a command comes."""
        self.has_ended = False
        """Whether the thread is about to end, for whatever reason."""
        self.is_given_up = False
        """Whether the thread was left to itself, because it hung."""

    @property
    def mark(self) -> float:
        """What changes with every step and every look around."""
        return self._last_s

    def step_ended(self, *, has_output: bool, has_failed: bool) -> None:
        """Note that a step, or a look around without one, is over, and what it brought."""
        if has_failed:
            self._num_failed_steps += 1
        elif has_output:
            self._num_failed_steps = 0
        self._last_s = self._clock.now()

    def judge(self, *, is_alive: bool, degraded_after_s: float) -> Health:
        """Say how the thread does, if it exists (``is_alive``); the limit as for ``AsyncEngine.health``."""
        silent_s, num_failed = self._clock.now() - self._last_s, self._num_failed_steps
        if self.is_given_up:
            return Health("dead", "the engine thread hangs and was given up", silent_s, num_failed)
        if self.has_ended or not is_alive:
            return Health("dead", "the engine thread has ended", silent_s, num_failed)
        if silent_s > degraded_after_s:
            return Health("degraded", f"no step or idle check has ended for {silent_s:.1f} s", silent_s, num_failed)
        if num_failed >= MAX_FAILED_STEPS:
            return Health("degraded", f"the last {num_failed} steps failed", silent_s, num_failed)
        return Health("ready", "steps are being made", silent_s, num_failed)


def watch(
    progress: Progress, is_over: threading.Event, dead_after_s: float, give_up: Callable[[float], None]
) -> None:
    """Call ``give_up(dead_after_s)`` once a thread that has work has left no mark for that many seconds.

    Runs on a thread of its own until ``is_over`` is set. It counts its own ticks, not the time: in a process that is
    stopped or suspended it ticks as little as the engine steps. While a kernel compiles it does not count.
    """
    # Why here: it imports the compiler.
    from pagedcore_kernels.cpu.runtime import compiled

    tick_s = min(TICK_S, dead_after_s / MIN_TICKS)
    num_silent, last_mark = 0, progress.mark
    while num_silent < math.ceil(dead_after_s / tick_s):
        if is_over.wait(tick_s):
            return
        if progress.is_idle or progress.mark != last_mark:
            num_silent, last_mark = 0, progress.mark
        elif compiled.present_kernel() is None:
            num_silent += 1
    give_up(dead_after_s)

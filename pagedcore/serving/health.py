"""Whether an engine's thread is healthy: ready, degraded or dead, judged by its progress, not by its existence.

Owns the marks that the thread leaves and what is read from them; it never looks at a request, and asking never waits
for the thread. Who leaves the marks is in ``engine_loop``, who asks is ``AsyncEngine.health``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagedcore.protocols import Clock, MonotonicClock

HealthStatus = Literal["ready", "degraded", "dead"]

#: How often an idle engine thread looks around, in seconds: often enough that silence means something.
IDLE_CHECK_S: Final = 1.0
#: Failed steps in a row from which on the model, not a request, is at fault.
MAX_FAILED_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Health:
    """One moment's verdict on an engine."""

    status: HealthStatus
    """"ready": send requests; "degraded": send them elsewhere; "dead": make a new engine."""
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
        self.has_ended = False
        """Whether the thread is about to end, for whatever reason."""

    def step_ended(self, *, has_output: bool, has_failed: bool) -> None:
        """Note that a step, or a look around without one, is over, and what it brought."""
        if has_failed:
            self._num_failed_steps += 1
        elif has_output:
            self._num_failed_steps = 0
        self._last_s = self._clock.now()

    def judge(self, *, is_alive: bool, degraded_after_s: float, dead_after_s: float) -> Health:
        """Say how the thread does, if it exists (``is_alive``); limits as for ``AsyncEngine.health``."""
        silent_s, num_failed = self._clock.now() - self._last_s, self._num_failed_steps
        if self.has_ended or not is_alive:
            return Health("dead", "the engine thread has ended", silent_s, num_failed)
        if silent_s > degraded_after_s:
            status: HealthStatus = "dead" if silent_s > dead_after_s else "degraded"
            return Health(status, f"no step or idle check has ended for {silent_s:.1f} s", silent_s, num_failed)
        if num_failed >= MAX_FAILED_STEPS:
            return Health("degraded", f"the last {num_failed} steps failed", silent_s, num_failed)
        return Health("ready", "steps are being made", silent_s, num_failed)

"""When sequences that were never started may start: the gate of batch formation. Pure; its users bring the time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class BatchGate:
    """Open while enough new sequences wait, or the oldest of them has waited long enough.

    Invariant: with a ``min_batch_size`` of 1 the gate is always open.
    """

    min_batch_size: int = 1
    max_wait_s: float = 0.0

    def opens_s(self, num_waiting: int, oldest_s: float) -> float:
        """Return when the gate opens if no further sequence comes; minus infinity: enough wait.

        Args:
            num_waiting: sequences that wait and were never started, at least one.
            oldest_s: when the oldest of them arrived, in seconds.
        """
        return -math.inf if num_waiting >= self.min_batch_size else oldest_s + self.max_wait_s


ALWAYS_OPEN: Final = BatchGate()

"""Time as a thing that is passed in: nothing in the core reads a clock it was not given."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go backwards; the origin means nothing."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        """Return ``time.monotonic()``, in seconds."""
        return time.monotonic()

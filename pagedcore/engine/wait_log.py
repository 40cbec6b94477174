"""What stops the waiting queue, since when, and whether an engine stands still although there is work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

_MAX_CHANGES: Final = 1024
STALL_S: Final = 5.0
"""Seconds without a computed step, although there is work that waits for no company, after which the log says why."""


@dataclass(slots=True)
class WaitLog:
    """For which reason the head of the queue was not admitted, over time; the last thousand changes.

    Why one for all: admission is in order, so that what stops the head stops everyone behind it.
    """

    reason: str = ""
    is_idle: bool = False
    """Whether the last step that ``stands_still`` was told of computed nothing; not for changing."""
    _idle_since_s: float | None = None
    _changes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))

    def note(self, now_s: float, reason: str) -> None:
        """Note what stops the queue from now on; empty: nothing does."""
        self.reason = reason
        self._changes.append((now_s, reason))

    def since(self, start_s: float, now_s: float) -> tuple[tuple[str, float], ...]:
        """Return the seconds of each reason between two times, longest first; "new" where nothing stopped the queue."""
        found: dict[str, float] = {}
        end_s = now_s
        for began_s, reason in reversed(self._changes):
            seconds = end_s - max(began_s, start_s)
            if seconds > 0:
                found[reason or "new"] = found.get(reason or "new", 0.0) + seconds
            end_s = min(end_s, began_s)
            if began_s <= start_s:
                break
        return tuple(sorted(found.items(), key=lambda item: -item[1]))

    def stands_still(self, now_s: float, *, is_idle: bool) -> bool:
        """Note whether the last step computed nothing although it should; say whether that has been so for long, once
        in each ``STALL_S``.
        """
        self.is_idle = is_idle
        if not is_idle:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s >= STALL_S:
            self._idle_since_s = now_s
            return True
        return False

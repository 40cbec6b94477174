"""A few places for work of several owners, of whom none takes the last one."""

from __future__ import annotations

from collections import Counter


class Shares:
    """Places, each for one piece of work at a time. Not for several threads at once: its user has a lock."""

    def __init__(self, num_places: int) -> None:
        self._num_left, self._share = num_places, max(1, num_places - 1)
        self._taken: Counter[bytes] = Counter()

    def take(self, owner: bytes) -> bool:
        """Take a place, if there is one and the owner does not have its share of them; return whether it was."""
        if not self._num_left or self._taken[owner] >= self._share:
            return False
        self._num_left -= 1
        self._taken[owner] += 1
        return True

    def give_back(self, owner: bytes) -> None:
        """Leave a place that was taken."""
        self._num_left += 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            # Why: owners are never forgotten otherwise.
            del self._taken[owner]

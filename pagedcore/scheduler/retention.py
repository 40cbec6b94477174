"""How often the blocks of finished sequences are asked for again, which decides whether the host gets a copy of them.

A copy pays only if a later sequence needs it. The keys of all finished blocks are remembered, copied or not, so that
returning requests are noticed while nothing is copied. Source: the ghost entries of ARC (Megiddo and Modha 2003) and
the ageing of TinyLFU (Einziger, Friedman and Manes 2017).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

_FIRST_GUESS: Final = 0.5
_FIRST_WEIGHT: Final = 16.0
"""Blocks that the first guess counts for: so few that a burst without returning requests is noticed within it."""
_WINDOW: Final = 1024.0
"""Blocks after which all that was learned before counts half."""


class ReuseRate:
    """The share of finished blocks that is asked for again, learned over the last thousand or so.

    Invariant: at most ``capacity`` keys are remembered, the last ones: with the blocks of the host for it, those that
        the host would not have evicted either.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._left: OrderedDict[bytes, None] = OrderedDict()
        self._num_left = _FIRST_WEIGHT
        self._num_wanted = _FIRST_GUESS * _FIRST_WEIGHT

    @property
    def share(self) -> float:
        """How likely it is that a block is asked for again, 0 to 1."""
        return min(1.0, self._num_wanted / self._num_left)

    def leave(self, keys: Iterable[bytes]) -> None:
        """Note the keys of full blocks that a finished sequence leaves."""
        for key in keys:
            self._num_left += key not in self._left
            self._left[key] = None
            self._left.move_to_end(key)
        while len(self._left) > self._capacity:
            self._left.popitem(last=False)
        if self._num_left > _WINDOW:
            self._num_left /= 2
            self._num_wanted /= 2

    def want(self, keys: Iterable[bytes]) -> None:
        """Note the keys that a starting sequence does not find on the device, from the first such one on."""
        for key in keys:
            if key not in self._left:
                return
            del self._left[key]
            self._num_wanted += 1

    def snapshot(self) -> dict[str, Any]:
        """Copy what was learned; the keys are those of the cache."""
        return {"left": list(self._left), "num_left": self._num_left, "num_wanted": self._num_wanted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        self._left = OrderedDict.fromkeys(state["left"])
        self._num_left, self._num_wanted = state["num_left"], state["num_wanted"]

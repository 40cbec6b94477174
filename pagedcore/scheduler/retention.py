"""Decides which blocks of a finished sequence are worth a copy on the host: by their price, and by how often such
blocks are asked for again.

A copy pays only if a later sequence needs it. The keys of all finished blocks are remembered, copied or not, so that
returning requests are noticed while nothing is copied. Source: the ghost entries of ARC (Megiddo and Modha 2003) and
the ageing of TinyLFU (Einziger, Friedman and Manes 2017).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.sequence import Sequence

_FIRST_GUESS: Final = 0.5
_FIRST_WEIGHT: Final = 16.0
"""Blocks that the first guess counts for: so few that a burst without returning requests is noticed within it."""
_WINDOW: Final = 1024.0
"""Blocks after which all that was learned before counts half."""


class ReuseRate:
    """The share of finished blocks that is asked for again, learned over the last thousand or so.

    Invariant: at most ``capacity`` keys are remembered, the last ones.
    """

    __slots__ = ("_capacity", "_left", "_num_left", "_num_wanted")

    def __init__(self, capacity: int) -> None:
        """Remember nothing yet.

        Args:
            capacity: blocks of the host, since it would have evicted the others too.
        """
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


class Retention:
    """The decisions of one engine; without a host nothing is copied."""

    __slots__ = ("_kv_cache", "_reuse", "_rules")

    def __init__(self, kv_cache: KVCacheManager, rules: PreemptionRules) -> None:
        self._kv_cache = kv_cache
        self._rules = rules
        self._reuse = ReuseRate(kv_cache.host.num_blocks if kv_cache.host is not None else 0)

    def num_tokens_worth_it(self, sequence: Sequence) -> int:
        """Return how many of a finished sequence's first positions to copy; call it once when it ends."""
        kv_cache, num_computed = self._kv_cache, sequence.num_computed_tokens
        if kv_cache.host is None:
            return 0
        size = kv_cache.device.block_size
        num_proven = min(num_computed, sequence.num_cached_tokens or 0) // size * size
        share = 1.0 if sequence.is_in_session else self._reuse.share
        self._reuse.leave(sequence.block_keys[num_proven // size : num_computed // size])
        if self._rules.is_worth_keeping(kv_cache.num_blocks_to_copy(sequence, num_computed), share):
            return num_computed
        # Why: the prefix that it found itself has been asked for twice by now.
        is_worth_it = self._rules.is_worth_keeping(kv_cache.num_blocks_to_copy(sequence, num_proven), 1.0)
        return num_proven if is_worth_it else 0

    def note_wanted(self, sequence: Sequence, first_block: int) -> None:
        """Note that a starting sequence asks for its known full blocks, from the first that the device lacks."""
        self._reuse.want(sequence.block_keys[first_block:])

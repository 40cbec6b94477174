"""What of a finished sequence is worth a copy on the host: judged by its price, and by what is asked for again.

Copies nothing; ``block_moves`` asks and acts. Read ``reuse_rate`` for how it is learned what is asked for again.
"""

from __future__ import annotations

from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.scheduler.reuse_rate import ReuseRate
from pagedcore.sequence import Sequence


class Retention:
    """The judgement of one engine; without a host tier nothing is worth anything."""

    __slots__ = ("_kv_cache", "_reuse", "_rules")

    def __init__(self, kv_cache: KVCacheManager, rules: PreemptionRules) -> None:
        self._kv_cache = kv_cache
        self._rules = rules
        self._reuse = ReuseRate(kv_cache.host.num_blocks if kv_cache.host is not None else 0)

    def num_tokens_worth_it(self, sequence: Sequence) -> int:
        """Say how many of a finished sequence's positions, from the first on, to copy; call it once when it ends."""
        kv_cache, num_computed = self._kv_cache, sequence.num_computed_tokens
        if kv_cache.host is None:
            return 0
        size = kv_cache.device.block_size
        num_proven = min(num_computed, sequence.num_cached_tokens or 0) // size * size
        share = 1.0 if sequence.is_in_session else self._reuse.share
        self._reuse.leave(sequence.block_keys[num_proven // size : num_computed // size])
        if self._rules.is_worth_keeping(kv_cache.num_blocks_to_copy(sequence, num_computed), share):
            return num_computed
        # Why: what it found itself has been asked for twice by now; beginnings that many share are.
        is_worth_it = self._rules.is_worth_keeping(kv_cache.num_blocks_to_copy(sequence, num_proven), 1.0)
        return num_proven if is_worth_it else 0

    def note_wanted(self, sequence: Sequence, first_block: int) -> None:
        """Take note that a sequence starts and asks for its known full blocks, from the first that the device lacks."""
        self._reuse.want(sequence.block_keys[first_block:])

"""What a scheduler counts. Plain numbers; exporters live elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, field

from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.scheduler.plan import PreemptionKind
from pagedcore.sequence import Sequence


@dataclass(slots=True)
class SchedulerCounters:
    """What was done since the start."""

    num_steps: int = 0
    """Committed steps; so are the tokens and rows below."""
    num_prefill_tokens: int = 0
    """Computed tokens of prompts, and of anything that had to be computed again."""
    num_decode_tokens: int = 0
    """Computed tokens that had just been generated."""
    num_looked_up_tokens: int = 0
    """Tokens of sequences that started, each of which might have been found in the cache."""
    num_cached_tokens: int = 0
    """Tokens that were found there."""
    num_preemptions: dict[PreemptionKind, int] = field(default_factory=lambda: dict.fromkeys(PreemptionKind, 0))
    num_released: int = 0
    """Times that the blocks of a sequence that was not running were needed by others."""
    num_stalled_rows: int = 0
    """Rows that stood still for a step because waiting for blocks was cheaper than taking them from somebody."""
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_failed_transfers: int = 0
    """Transfers that failed or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Where sequences and blocks are now, and what was done since the start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    """Waiting sequences whose blocks are kept on the host."""
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Blocks that nobody holds and whose contents can be found."""
    num_available_blocks: int
    """Free blocks and cached ones."""
    num_evicted_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_cached_host_blocks: int
    num_moving_blocks: int
    """Blocks in transfers that have not completed."""
    estimate_error: float
    """Mean relative error of the estimates that preemptions were chosen by, 0 to 1."""
    counters: SchedulerCounters


def describe(
    kv_cache: KVCacheManager,
    running: Collection[Sequence],
    waiting: Collection[Sequence],
    counters: SchedulerCounters,
    estimate_error: float,
) -> SchedulerStats:
    """Put the present together from who is where and who holds what."""
    blocks, host = kv_cache.device, kv_cache.host
    pinned = host.pins if host is not None else {}
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(waiting),
        num_swapped=sum(sequence.sequence_id in pinned for sequence in waiting),
        num_blocks=blocks.num_blocks,
        num_used_blocks=blocks.num_used_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_available_blocks=blocks.num_available_blocks,
        num_evicted_blocks=blocks.cache.num_evictions,
        num_host_blocks=host.num_blocks if host is not None else 0,
        num_used_host_blocks=host.num_used_blocks if host is not None else 0,
        num_cached_host_blocks=host.num_cached_blocks if host is not None else 0,
        num_moving_blocks=sum(len(one.moves) for one in host.in_flight) if host is not None else 0,
        estimate_error=estimate_error,
        counters=copy(counters),
    )

"""What a scheduler counts, and the part of an engine's statistics that it fills."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedcore.scheduler.plan import PreemptionKind


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
    num_cached_tokens: int = 0
    num_preemptions: dict[PreemptionKind, int] = field(default_factory=lambda: dict.fromkeys(PreemptionKind, 0))
    num_stalled_rows: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_failed_transfers: int = 0


@dataclass(slots=True, kw_only=True)
class PromiseCounters:
    """What became of deadlines that were promised; all 0 unless the policy promises them."""

    num_promises: int = 0
    """Requests with a deadline that were accepted."""
    num_promises_kept: int = 0
    num_promises_broken: int = 0
    """Those that ended late, or failed; aborted ones are neither."""
    num_promises_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences, blocks and counters of one moment: the part of ``EngineStats`` that a scheduler knows."""

    num_running: int
    num_waiting: int
    num_swapped: int
    """Waiting sequences whose blocks are kept on the host."""
    num_blocks: int
    num_blocks_used: int
    """Blocks with a reference."""
    num_blocks_cached: int
    """Blocks without a reference whose contents can be found by a sequence with the same prefix."""
    num_blocks_evicted: int
    """Cached blocks that were evicted since the start."""
    num_blocks_recomputed: int
    """Blocks that were computed again after they had been evicted: what a larger pool, or a host tier, would save. Only
    the last 16 evicted blocks for each block of the pool are remembered for it."""
    num_host_blocks: int
    num_host_blocks_used: int
    num_host_blocks_cached: int
    num_preemptions: int
    num_preemptions_by_kind: dict[str, int]
    """"swap", "shrink" and "recompute"."""
    num_stalled_rows: int
    """Rows that stalled for a step because waiting for blocks was cheaper than preempting a sequence."""
    num_looked_up_tokens: int
    """Tokens of sequences that started, each of which might have been found in the cache."""
    num_cached_tokens: int
    """Tokens that were found there."""
    num_failed_transfers: int
    """Transfers that failed or took too long."""
    preemption_estimate_error: float
    """Mean relative error of the estimates that preemptions were chosen by, 0 to 1."""

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens that were found in the cache, 0 to 1."""
        return self.num_cached_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0

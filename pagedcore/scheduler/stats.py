"""What a scheduler counts, and the part of an engine's statistics that it fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pagedcore.scheduler.plan import PreemptionKind, SchedulePlan

if TYPE_CHECKING:
    from pagedcore.kv_cache.host_cache import HostCache
    from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
    from pagedcore.scheduler.cost_model import CostModel
    from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue


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
    num_states_swapped_out: int = 0
    num_states_swapped_in: int = 0
    num_failed_transfers: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def snapshot(self) -> dict[str, Any]:
        """Copy all counts as plain values; those of moved states if there are any."""
        counts = asdict(self) | {"num_preemptions": {kind.value: num for kind, num in self.num_preemptions.items()}}
        return {name: count for name, count in counts.items() if count or not name.startswith("num_states")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied."""
        by_kind = {PreemptionKind(kind): num for kind, num in state["num_preemptions"].items()}
        for name, value in {**state, "num_preemptions": by_kind}.items():
            setattr(self, name, value)


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
    num_drafted_tokens: int
    """Positions that were computed of tokens that might follow."""
    num_accepted_tokens: int
    """Those of them that did follow: each is a token of a completion beyond the one that a row has in any case."""
    preemption_estimate_error: float
    """Mean relative error of the estimates that preemptions were chosen by, 0 to 1."""
    num_states: int = 0
    """State blocks of a model with recurrent layers; so are the next six, and 0 for others."""
    num_states_used: int = 0
    """Those of sequences that run."""
    num_states_kept: int = 0
    """Those from which a sequence with the same beginning can start."""
    num_states_evicted: int = 0
    """Kept ones that were evicted for others since the start."""
    num_host_states: int = 0
    """State blocks of the host tier."""
    num_host_states_used: int = 0
    num_host_states_kept: int = 0
    num_windows: int = 0
    """Window blocks of a model whose layers give up what has left their window; so are the next three, and 0 for
    others."""
    num_windows_used: int = 0
    """Those of sequences that run."""
    num_windows_kept: int = 0
    """Those behind which a sequence with the same beginning may start."""
    num_windows_evicted: int = 0
    """Kept ones that were evicted for others since the start."""

    @classmethod
    def of(
        cls, kv_cache: KVCacheManager, running: PolicyOrder, waiting: WaitingQueue, counters: SchedulerCounters,
        costs: CostModel,
    ) -> Self:
        """Describe one scheduler now."""
        device, host = kv_cache.device, kv_cache.host
        return cls(
            num_running=len(running), num_waiting=len(waiting),
            num_swapped=sum(sequence.sequence_id in host.pins for sequence in waiting),
            num_blocks=device.num_blocks, num_blocks_used=device.num_used_blocks,
            num_blocks_cached=device.num_cached_blocks, num_blocks_evicted=device.cache.num_evictions,
            num_blocks_recomputed=device.cache.num_recomputed,
            num_host_blocks=host.num_blocks, num_host_blocks_used=host.num_used_blocks,
            num_host_blocks_cached=host.num_cached_blocks, num_preemptions=sum(counters.num_preemptions.values()),
            num_preemptions_by_kind={kind.value: count for kind, count in counters.num_preemptions.items()},
            num_stalled_rows=counters.num_stalled_rows, num_failed_transfers=counters.num_failed_transfers,
            num_looked_up_tokens=counters.num_looked_up_tokens, num_cached_tokens=counters.num_cached_tokens,
            num_drafted_tokens=counters.num_drafted_tokens, num_accepted_tokens=counters.num_accepted_tokens,
            preemption_estimate_error=costs.mean_relative_error, **device.state_counts(),
            num_host_states=host.states.num_states, num_host_states_used=host.states.num_used,
            num_host_states_kept=host.states.num_kept,
        )

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens that were found in the cache, 0 to 1."""
        return self.num_cached_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0


def waits_after(plan: SchedulePlan, waiting: WaitingQueue, host: HostCache) -> dict[str, int]:
    """Count the sequences that wait after a step, and running ones that stalled in it, by reason.

    Reasons are "company" (the gate), "prefix" (another sequence computes it), "transfer", "stall", "tenant" (it has as
    much as it may), "adapter" (its own is in no slot), "new" (it came with this step), or those of
    ``SchedulePlan.stopped_by``.
    """
    num_gated = len(waiting.gated)
    num_moving = sum(map(host.is_moving, [one.sequence_id for one in waiting])) if host.in_flight else 0
    counts = {"company": num_gated, "prefix": plan.num_deferred, "transfer": num_moving,
              "stall": plan.num_stalled_rows, "tenant": len(plan.capped), "adapter": len(plan.awaiting)}
    num_named = num_gated + plan.num_deferred + num_moving + len(plan.capped) + len(plan.awaiting)
    reason = plan.stopped_by if plan.stopped_by not in ("", "adapter") else "new"
    counts[reason] = counts.get(reason, 0) + len(waiting) - num_named
    return {name: count for name, count in counts.items() if count > 0}

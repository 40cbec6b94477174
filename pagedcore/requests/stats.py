"""What an engine has done and how full it is: counters it keeps, and one frozen snapshot of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment of one engine. Sizes are in bytes, times in seconds of the engine's clock."""

    num_running: int
    num_waiting: int
    num_swapped: int
    """Waiting sequences whose blocks are kept on the host."""
    num_blocks: int
    num_blocks_used: int
    """Blocks that somebody holds."""
    num_blocks_cached: int
    """Blocks that nobody holds and whose contents can be found by whoever asks the same."""
    num_blocks_evicted: int
    """Cached blocks that were forgotten for room, since the start."""
    num_host_blocks: int
    num_host_blocks_used: int
    num_host_blocks_cached: int
    block_size: int
    kv_bytes: int
    num_steps: int
    num_rows: int
    """Rows computed, summed over all steps."""
    num_computed_tokens: int
    """Positions computed, summed over all steps; recomputed ones count again."""
    num_prompt_tokens: int
    """Prompt tokens accepted, counted once however many answers there are to a prompt."""
    num_generated_tokens: int
    num_finished: int
    """Requests that ended, whatever the reason."""
    num_preemptions: int
    num_preemptions_by_kind: dict[str, int]
    """"swap", "shrink" and "recompute"."""
    num_stalled_rows: int
    """Rows that stood still for a step because waiting for blocks was cheaper than taking them from somebody."""
    num_looked_up_tokens: int
    """Tokens of sequences that started, each of which might have been found in the cache."""
    num_cached_tokens: int
    """Tokens that were found there."""
    swapped_out_bytes: int
    swapped_in_bytes: int
    num_failed_transfers: int
    preemption_estimate_error: float
    """Mean relative error of the estimates that preemptions were chosen by, 0 to 1."""
    max_num_seqs: int
    max_model_len: int
    attention_backend: str
    dtype: str
    is_schedule_invariant: bool

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up tokens that were found in the cache, 0 to 1."""
        return self.num_cached_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class StepStats:
    """What one step did: what is cheap to say every time."""

    num_steps: int
    """Steps since the start, this one among them."""
    num_tokens: int
    """Positions that it computed."""
    num_running: int
    """Sequences that run after it."""
    num_waiting: int
    engine_stats: Callable[[], EngineStats]
    """Puts everything else together, as it stands now. Call it inside of the hook, and not at every step: it takes ten
    times as long as all of the above."""


@dataclass(slots=True)
class Counters:
    """The engine's running totals."""

    num_steps: int = 0
    num_rows: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0

"""What an engine has done and how full it is: counters it keeps, and one frozen snapshot of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment of one engine. Sizes are in bytes, times in seconds of the engine's clock."""

    num_running: int
    num_waiting: int
    num_kept: int
    """Finished requests whose blocks are kept for ``extend``."""
    num_blocks: int
    num_blocks_used: int
    block_size: int
    kv_bytes: int
    num_steps: int
    num_rows: int
    """Rows computed, summed over all steps."""
    num_computed_tokens: int
    """Positions computed, summed over all steps; recomputed ones count again."""
    num_prompt_tokens: int
    """Prompt tokens accepted."""
    num_generated_tokens: int
    num_finished: int
    """Requests that ended, whatever the reason."""
    num_preemptions: int
    max_num_seqs: int
    max_model_len: int
    attention_backend: str
    dtype: str
    is_schedule_invariant: bool


@dataclass(slots=True)
class Counters:
    """The engine's running totals."""

    num_steps: int = 0
    num_rows: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0

"""What a scheduler counts. Plain numbers; exporters live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore.scheduling.plan import ScheduledRow


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Where sequences and blocks are now, and what was done since the start."""

    num_running: int
    num_waiting: int
    num_kept: int
    """Finished sequences whose blocks are kept for a further turn."""
    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_steps: int
    """Committed steps; so are the tokens and rows below."""
    num_prefill_tokens: int
    """Computed tokens of prompts, and of anything that had to be computed again."""
    num_decode_tokens: int
    """Computed tokens that had just been generated."""
    num_preemptions: int
    num_released: int
    """Times that the blocks of a sequence that was not running were needed by others."""


@dataclass(slots=True)
class SchedulerCounters:
    """The counting half of ``SchedulerStats``."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_released: int = 0

    def count_row(self, row: ScheduledRow) -> None:
        """Count a row that is about to be committed."""
        if row.is_decode:
            self.num_decode_tokens += 1
        else:
            self.num_prefill_tokens += row.num_tokens

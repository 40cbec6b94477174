"""Plans over window blocks: every running sequence is promised those that its window takes, and chunks get the rest.

What a sequence holds between steps is bounded by its window, so it is promised when it starts, and no sequence is ever
preempted for window blocks. A chunk of a prompt holds those of all its tokens for the time of its step; it is cut where
what nobody was promised ends, and one token has always room.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Demand
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.sequence import Sequence


def most_windows(window: int, block_size: int) -> int:
    """Return the window blocks that are promised to one sequence at most: those that one token reads and writes, and
    one for the source of a copy, or for a draft that begins a block.
    """
    return -(-window // block_size) + 2


class WindowPlanState(PlanState):
    """A ``PlanState`` that cuts rows where their window blocks end.

    Invariant: the window blocks that rows get together with those that are held are at most what there are.
    """

    def __init__(self, *arguments: Any, **further: Any) -> None:
        super().__init__(*arguments, **further)
        assert isinstance(self.blocks, WindowedBlocks)
        self._blocks: WindowedBlocks = self.blocks
        num_windows = self._blocks.windows.num_windows
        self._spare = num_windows - sum(map(self._promised, self.running))
        """Window blocks that are promised to nobody."""
        self._num_for_chunks = min(self.blocks.blocks_for(self.rules.max_num_batched_tokens), num_windows // 4)
        self._started = {one.sequence_id for one in self.running}

    def has_room_for(self, candidate: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether a waiting sequence can be promised its window blocks, without some of those that run."""
        is_alone = len(without) == len(self.running) and not self.admitted
        num_free = self._spare + sum(map(self._promised, without)) - (0 if is_alone else self._num_for_chunks)
        return self._promised(candidate) <= num_free

    def add_row(
        self, sequence: Sequence, start: int, num_tokens: int, num_blocks: int, match: PrefixMatch = NO_MATCH
    ) -> None:
        """Plan a row as ``PlanState`` does, cut where its window blocks end."""
        if sequence.sequence_id not in self._started:
            self._started.add(sequence.sequence_id)
            self._spare -= self._promised(sequence)
        is_copied, end = match.tail is not None, start + num_tokens
        if end > (limit := self._limit(sequence, start) - is_copied * self._blocks.block_size):
            end = limit
            num_blocks = self.blocks.num_new_blocks(Demand(sequence.sequence_id, end, match))
        self._spare -= self._num_beyond(sequence, start, end + is_copied * self._blocks.block_size)
        super().add_row(sequence, start, end - start, num_blocks, match)

    def add_drafts(self, row: ScheduledRow, drafts: tuple[int, ...]) -> None:
        """Add drafts as ``PlanState`` does, as many as have window blocks."""
        sequence, start = row.sequence, row.start
        taken = self._num_beyond(sequence, start, row.end)
        self._spare += taken
        drafts = drafts[: max(0, self._limit(sequence, start) - row.end)]
        self._spare -= self._num_beyond(sequence, start, row.end + len(drafts))
        if drafts:
            super().add_drafts(row, drafts)

    def _promised(self, sequence: Sequence) -> int:
        most = most_windows(self._blocks.window, self._blocks.block_size)
        return min(self._blocks.blocks_for(sequence.max_total_tokens) + 1, most)

    def _limit(self, sequence: Sequence, start: int) -> int:
        """Return where a row from ``start`` on ends at the latest."""
        num_windows = self._promised(sequence) + max(0, self._spare)
        return (self._blocks.first_read(start - 1) + num_windows) * self._blocks.block_size

    def _num_beyond(self, sequence: Sequence, start: int, end: int) -> int:
        """Return how many window blocks a row takes that its sequence was not promised."""
        num_windows = self._blocks.blocks_for(end) - self._blocks.first_read(start - 1)
        return max(0, num_windows - self._promised(sequence))

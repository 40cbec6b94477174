"""The ordered blocks of one sequence.

A table holds numbers only: ``block_manager`` allocates the blocks and frees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from pagedcore.protocols import Int32Array

_FIRST_ROOM: Final = 8


class BlockTable:
    """Block ids of one sequence, in the order of its positions.

    Invariant: committed entries never change; only blocks at the end are removed.
    """

    __slots__ = ("_ids", "_view", "block_ids", "num_blocks", "num_changes", "num_registered")

    def __init__(self) -> None:
        self.num_blocks = self.num_changes = 0
        self.num_registered = 0
        """Leading blocks whose contents the prefix cache knows."""
        self._grow(_FIRST_ROOM)
        self.block_ids: Int32Array = self._view[:0]
        """Shape [num_blocks], a read-only view that is valid until the table changes."""

    def append(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        start, end = self.num_blocks, self.num_blocks + len(block_ids)
        if end > len(self._ids):
            self._grow(max(end, 2 * len(self._ids)))
        self._ids[start:end] = block_ids
        self.num_changes += 1
        self.num_blocks, self.block_ids = end, self._view[:end]

    def truncate(self, num_blocks: int) -> list[int]:
        """Keep the first ``num_blocks`` blocks and return the others, last first."""
        self.num_changes += 1
        removed: list[int] = self._ids[num_blocks : self.num_blocks][::-1].tolist()
        self.num_blocks, self.block_ids = num_blocks, self._view[:num_blocks]
        return removed

    def _grow(self, room: int) -> None:
        ids = np.full(room, -1, dtype=np.int32)
        if self.num_blocks:
            ids[: self.num_blocks] = self._ids[: self.num_blocks]
        self._ids: Int32Array = ids
        self._view: Int32Array = ids.view()
        self._view.flags.writeable = False

"""Tensors that stay where they are from step to step, so that recorded calls write to what is still theirs.

Owns the memory of one decoder's steps. Read ``recorded_calls.py`` for why it has to stay.
"""

from __future__ import annotations

import torch


class Workspace:
    """Room for the rows of a step, by what it is for.

    Invariant: a tensor keeps its address as long as ``version`` stays.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self.version = 0
        """How often memory was replaced by larger memory, or made."""

    def take(self, purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [num_rows, size], contiguous: the same memory for the same purpose, size and number format.

        It has what was written there last, unless it had to grow.
        """
        key = purpose, size, dtype
        room = self._rooms.get(key)
        if room is None or len(room) < num_rows:
            room = self._rooms[key] = torch.empty(self.capacity(num_rows), size, dtype=dtype)
            self.version += 1
        return room[:num_rows]

    @staticmethod
    def capacity(num_rows: int) -> int:
        """Return how many rows there is room for at least where so many were taken."""
        return 1 << (num_rows - 1).bit_length()

"""Tensors that stay where they are from step to step, so that recorded calls write to what is still theirs.

Owns the memory of one decoder's steps. Read ``recorded_calls.py`` for why it has to stay.
"""

from __future__ import annotations

import torch


class Workspace:
    """Room for the rows of a step, by what it is for.

    Invariant: a tensor keeps its address until ``reserve`` returns True.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._rooms: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def reserve(self, num_rows: int) -> bool:
        """Have room for so many rows; return whether all tensors that were taken are void now."""
        if num_rows <= self._num_rows:
            return False
        self._num_rows = 1 << (num_rows - 1).bit_length()
        self._rooms.clear()
        return True

    def take(self, purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [num_rows, size], contiguous, with what was written there last; ``num_rows`` as reserved at most.

        The same purpose, size and number format are the same memory.
        """
        key = purpose, size, dtype
        if key not in self._rooms:
            self._rooms[key] = torch.empty(self._num_rows, size, dtype=dtype)
        return self._rooms[key][:num_rows]

"""Getting a step's numbers onto the device: one buffer, one copy, from memory that the copy engine can read.

Owns the buffers that grow with the batch. It never waits for the device: torch keeps staging memory alive until the
copy out of it has been made, and the stream keeps kernels of the last step ahead of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch

from pagedcore_kernels.interface import Int32Array

_ALIGN = 4
"""Parts start at multiples of so many int32, 16 bytes, so that kernels read them in vectors."""


class StepBuffer:
    """An int32 buffer on the device that one step's arrays are copied into together.

    Args:
        device: where it is.
        room: int32 numbers that it has room for from the start; it grows if more come.

    Invariant: views that ``upload`` returned are valid until the next ``upload``.
    """

    def __init__(self, device: torch.device, room: int = 0) -> None:
        self._device = device
        self._buffer = torch.empty(room, dtype=torch.int32, device=device)
        self._views: tuple[list[int], list[torch.Tensor]] = [], []

    @property
    def address(self) -> int:
        """Where it is; it stays there until an upload is larger than all before, and than its room."""
        return self._buffer.data_ptr()

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy arrays of integers to the device in one piece, as int32; returns one flat tensor for each."""
        sizes = [array.size for array in arrays]
        starts = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        staging = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        numbers: Int32Array = staging.numpy()
        for start, size, array in zip(starts, sizes, arrays, strict=False):
            numbers[start : start + size] = array.reshape(-1)
        if self._buffer.numel() < len(numbers):
            self._buffer, self._views = torch.empty(2 * len(numbers), dtype=torch.int32, device=self._device), ([], [])
        self._buffer[: len(numbers)].copy_(staging, non_blocking=True)
        # Why kept: to make them takes longer than to fill the buffer, and steps of one size are alike.
        if self._views[0] != sizes:
            views = [self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]
            self._views = sizes, views
        return self._views[1]


class Scratch:
    """Memory for partial results, and counters that every launch leaves at zero.

    Invariant: between launches every counter is 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, num_floats: int, num_counters: int) -> None:
        """Make room; what is there is kept unless it has to grow."""
        # Why at least twice as much: it grows seldom then.
        if (had := self.partials.numel()) < num_floats:
            self.partials = torch.empty(max(num_floats, 2 * had), dtype=torch.float32, device=self._device)
        if (had := self.counters.numel()) < num_counters:
            self.counters = torch.zeros(max(num_counters, 2 * had), dtype=torch.int32, device=self._device)

"""Getting a step's numbers onto the device: one buffer, one copy, from memory that the copy engine can read.

Owns the buffers that grow with the batch. It never waits for the device: torch keeps staging memory alive until the
copy out of it has been made, and the stream keeps kernels of the last step ahead of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.interface import Int32Array

_ALIGN = 4
"""Parts start at multiples of so many int32, 16 bytes, so that kernels read them in vectors."""


class StepBuffer:
    """An int32 buffer on the device that one step's arrays are copied into together.

    Invariant: views that ``upload`` returned are valid until the next ``upload``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int32, device=device)

    @property
    def address(self) -> int:
        """Where it is; it stays there until an upload is larger than all before."""
        return self._buffer.data_ptr()

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy int32 arrays to the device in one piece; returns one flat tensor for each."""
        starts = np.cumsum([0, *(-(-array.size // _ALIGN) * _ALIGN for array in arrays)])
        total = int(starts[-1])
        staging = torch.empty(total, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        numbers: Int32Array = staging.numpy()
        for start, array in zip(starts, arrays, strict=False):
            numbers[start : start + array.size] = array.reshape(-1)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(2 * total, dtype=torch.int32, device=self._device)
        self._buffer[:total].copy_(staging, non_blocking=True)
        return [self._buffer[start : start + array.size] for start, array in zip(starts.tolist(), arrays, strict=False)]


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
        if self.partials.numel() < num_floats:
            self.partials = torch.empty(2 * num_floats, dtype=torch.float32, device=self._device)
        if self.counters.numel() < num_counters:
            self.counters = torch.zeros(2 * num_counters, dtype=torch.int32, device=self._device)

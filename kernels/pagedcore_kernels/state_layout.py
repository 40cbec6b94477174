"""Where everything lies that the recurrent layers of a model keep of one sequence; the only place that knows.

Owns the arithmetic of a pool of states: offsets, alignment and the views that tests use. It computes no recurrence and
imports no compiler. Read ``cpu/recurrence/states.py`` next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from pagedcore_kernels.errors import InvalidConfig
from pagedcore_kernels.layout import ALIGNMENT


@dataclass(frozen=True)
class StatePart:
    """One tensor that a layer keeps of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise InvalidConfig(f"shape of a state: got {self.shape}, allowed are positive integers.")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidConfig(f"dtype of a state: got {self.dtype}, allowed are float32, bfloat16 and float16.")

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """One state: per recurrent layer its parts, in the order in which its operator names them.

    Moves of whole states (swap, fork, export) need ``state_bytes`` alone.

    Invariant: the byte ranges of all parts are disjoint, in order, and lie inside ``state_bytes``.
    Invariant: ``state_bytes`` and all offsets are multiples of ``ALIGNMENT``.
    """

    layers: tuple[tuple[StatePart, ...], ...]

    def __post_init__(self) -> None:
        if not any(self.layers):
            raise InvalidConfig("layers of a state: got no part in any, allowed is at least one StatePart.")

    @property
    def state_bytes(self) -> int:
        """Bytes of one state over all layers, padding included."""
        return self._offsets[-1][-1]

    def offset(self, layer: int, part: int) -> int:
        """Bytes from the start of a state to the layer's part."""
        return self._offsets[layer][part]

    def allocate(self, num_states: int) -> torch.Tensor:
        """Return a uint8 pool [num_states, state_bytes] whose rows start on cache lines, content undefined.

        The memory is not touched: pages of states that are never used cost nothing.

        Raises:
            InvalidConfig: ``num_states`` is less than 1.
        """
        if num_states < 1:
            raise InvalidConfig(f"num_states: got {num_states}, allowed is a positive integer.")
        size = num_states * self.state_bytes
        raw = torch.empty(size + ALIGNMENT - 1, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size].view(num_states, self.state_bytes)

    def view(self, pool: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        """View the layer's part as [num_states, *shape]."""
        one, offset = self.layers[layer][part], self.offset(layer, part)
        return pool[:, offset : offset + one.num_bytes].view(one.dtype).view(len(pool), *one.shape)

    @cached_property
    def _offsets(self) -> tuple[tuple[int, ...], ...]:
        """Of every layer: where its parts start, and where the last one of them ends."""
        offsets, end = [], 0
        for parts in self.layers:
            of_layer = [end]
            for part in parts:
                end += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
                of_layer.append(end)
            offsets.append(tuple(of_layer))
        return tuple(offsets)

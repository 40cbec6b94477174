"""A weight as a product reads it, which packing makes, or which somebody has mapped from a file that holds one.

Owns the checks of what a file says: kernels read raw memory, so that every tensor has the shape and the number format
that its product computes addresses by. What the numbers are, nothing here depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pagedcore_kernels.errors import InternalError

Fact = int | str


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight [out, in]; no product writes to it."""

    layout: str
    """What kind of product reads it; each of these modules has its ``LAYOUT`` and its version."""
    num_outputs: int
    num_inputs: int
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the tensors' shapes do not say."""
    is_mapped: bool = False
    """Whether its memory is a file's, which is shared and is not moved."""

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one of its tensors.

        Raises:
            InternalError: it is not there, or not of this format and shape, or has gaps.
        """
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape or not found.is_contiguous():
            is_like = "missing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            raise InternalError(f"{self.layout} weight: its {name} is {is_like}, expected {dtype} {shape}")
        return found

    def fact(self, name: str, *allowed: Fact) -> Fact:
        """Return one of its facts. Raises ``InternalError`` for a value that is none of those allowed."""
        value = self.facts.get(name)
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise InternalError(f"{self.layout} weight: its {name} is {value!r}, expected one of {allowed}")
        return value  # type: ignore[return-value]

    def memory(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return address and bytes of a tensor that may be moved into huge pages; no bytes if it is mapped."""
        return (0, 0) if self.is_mapped else (tensor.data_ptr(), tensor.nbytes)

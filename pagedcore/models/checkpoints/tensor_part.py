"""A matrix that is a part of a tensor in a file: has what slices of safetensors have, and reads as lazily."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A matrix [out, in] in the tensor ``whole``, of which ``place`` says where it lies, and ``is_turned`` that it lies
    there as [in, out].
    """

    whole: Any
    place: tuple[int | slice, ...]
    shape: tuple[int, int]
    is_turned: bool

    def get_shape(self) -> list[int]:
        """Return the shape [out, in]; nothing is read."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the name of the number format in safetensors."""
        return str(self.whole.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the matrix, and return a part of it."""
        found: torch.Tensor = self.whole[self.place]
        return (found.t().contiguous() if self.is_turned else found)[index]

"""What products with packed weights have in common: where their outputs go, or the candidates of the largest ones.

Owns the checks of what a kernel reads and writes. Read ``packed.py``, ``packed_int8.py`` and ``packed_grouped.py`` for
the products, and ``largest.py`` for candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch

from pagedcore_kernels.cpu.matmul.packed_weight import PackedWeight
from pagedcore_kernels.cpu.matmul.tiles import PANEL
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import RowRoom


class PackedProduct(ABC):
    """``rows @ weight.T + bias``, see ``RecordableMatmul`` and ``PicksLargest``.

    Invariant: the packed weight is read and never written, for it may be a file's.
    """

    weight: torch.Tensor
    """As packed, or empty, in the format of rows and outputs, which is what modules ask a weight for."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed
        """The weight, for a file that holds it."""
        self._num_outputs, self._num_inputs = packed.num_outputs, packed.num_inputs
        self._num_panels = -(-self._num_outputs // PANEL)

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the packed weight; no bytes if it is mapped."""

    @classmethod
    def of_packed(cls, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Self:
        """Make the product of a weight that is packed already, with its bias [out], for rows of a number format.

        Raises:
            InternalError: the weight is none of this product, or the product does not run here.
        """
        product = cls.__new__(cls)
        product._take(packed, bias, dtype)
        return product

    @abstractmethod
    def _take(self, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Set the product up."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [M, in], contiguous, of the format of ``weight``; return [M, out]."""
        out = rows.new_empty(len(rows), self._num_outputs)
        self.multiply_to(out, rows)
        return out

    def multiply_to(self, out: torch.Tensor, rows: torch.Tensor, workspace: RowRoom | None = None) -> None:
        """Write the product to ``out`` [M, out], contiguous; see ``RecordableMatmul``."""
        self._require_rows(rows)
        _require("out", out, self.weight.dtype, (len(rows), self._num_outputs))
        self._run(rows, out.data_ptr(), 0, 0, workspace)

    def pick_to(
        self, candidates: torch.Tensor, rows: torch.Tensor, barred: torch.Tensor, workspace: RowRoom | None = None
    ) -> None:
        """Write the candidates of the largest outputs, and no outputs; see ``PicksLargest``."""
        self._require_rows(rows)
        _require("candidates", candidates, torch.int64, (self._num_panels, len(rows)))
        is_list = barred.dtype == torch.int64 and barred.ndim == 1 and barred.is_contiguous() and len(barred) > 0
        if not is_list or not 0 <= barred[0] <= (len(barred) - 1) // 2:
            raise InternalError(f"barred: {barred.dtype} of shape {tuple(barred.shape)}, expected how many, then pairs")
        self._run(rows, 0, candidates.data_ptr(), barred.data_ptr(), workspace)

    def _require_rows(self, rows: torch.Tensor) -> None:
        _require("rows", rows, self.weight.dtype, (len(rows), self._num_inputs))

    @abstractmethod
    def _run(self, rows: torch.Tensor, out: int, candidates: int, barred: int, workspace: RowRoom | None) -> None:
        """Run the kernel; all numbers are addresses: that of ``out`` alone, or the others."""


def _require(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    # Safety: kernels read and write raw memory.
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise InternalError(f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)}, expected {dtype} {shape}")

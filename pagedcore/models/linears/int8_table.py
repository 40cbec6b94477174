"""Looks tokens up in int8 rows with a scale for each, wherever these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from pagedcore.errors import InternalError


@runtime_checkable
class ShowsRows(Protocol):
    """A product that can say what its weight's rows are."""

    def weight_rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, int64 [n]: float32 [n, in], ``float(value) * scale``."""


class Int8Table:
    """Rows of tokens, ``float(value) * scale`` rounded to a number format.

    Invariant: the bits are the same before and after ``share``.
    """

    @classmethod
    def of_product(cls, product: object, dtype: torch.dtype) -> Int8Table:
        """Return the table that a product has."""
        table = cls(torch.empty(0, 0, dtype=torch.int8), torch.empty(0), dtype)
        table.share(product)
        return table

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        """Take int8 [tokens, size] and float32 [tokens], and the number format of rows."""
        self.tensors = [values, scales]
        """The table, until a product has it."""
        self.dtype = dtype
        self.product: object = None
        """What it shares, or nothing."""
        self._rows: Callable[[torch.Tensor], torch.Tensor] = self._own_rows

    @property
    def values(self) -> torch.Tensor:
        """int8 [tokens, size], before ``share``."""
        if not self.tensors:
            raise InternalError("the table is packed already")
        return self.tensors[0]

    @property
    def scales(self) -> torch.Tensor:
        """float32 [tokens], before ``share``."""
        if not self.tensors:
            raise InternalError("the table is packed already")
        return self.tensors[1]

    def share(self, product: object) -> None:
        """Read rows from a product of this table from now on, and keep no other copy."""
        if not isinstance(product, ShowsRows):
            raise InternalError(f"{type(product).__name__} does not show its rows")
        self._rows, self.product = product.weight_rows, product
        self.tensors.clear()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., size] of tokens int64 [...]."""
        rows = self._rows(token_ids.flatten())
        return rows.to(self.dtype).view(*token_ids.shape, rows.shape[1])

    def _own_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.values[token_ids].float() * self.scales[token_ids, None]

"""Matrix products that torch's libraries compute on a GPU: with which numbers of rows a row has the same bits.

Which kernel they choose depends on the number of rows, the GPU and the version, and nobody promises anything about it.
So what is found here is said, with the sizes that were tried, and nothing relies on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import torch
from torch import nn

from pagedcore.models.linears.packed_linear import holders_of_matrices


class TorchProduct(Protocol):
    """Multiplies rows with a weight."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in]."""

    def __call__(self, rows: torch.Tensor, /) -> torch.Tensor:
        """Return [T, out] of rows [T, in]."""


_SIZES: Final = tuple(2**power for power in range(10))
"""Rows that are tried: those that decode steps are padded to, but for the most rows of an engine."""
_WIDE: Final = 32768
_MOST_ROWS_WIDE: Final = 256
"""Wider weights are output layers: they see one row per sequence."""


@torch.inference_mode()
def describe_rows(products: Iterable[TorchProduct], dtype: torch.dtype) -> str:
    """Try one product of each shape and format with its own weights and rows of a format; say what was found, in one
    sentence.
    """
    of_shape = {(*one.weight.shape, one.weight.dtype): one for one in products}
    apart, moved = list[str](), list[str]()
    for (num_outputs, num_inputs, _), product in of_shape.items():
        groups, is_placed = _tried(product, dtype)
        name = f"{num_outputs} x {num_inputs}"
        if len(groups) > 1:
            apart.append(f"{name} with {' and with '.join(map(_listed, groups))}")
        if not is_placed:
            moved.append(name)
    tried = f"{_SIZES[0]} to {_SIZES[-1]} rows, powers of two"
    if not (apart or moved):
        return (f"torch's products of {len(of_shape)} shapes gave a row the same bits among {tried}, on this GPU; "
                "other numbers of rows were not tried, and torch promises nothing")
    found = [f"a row has other bits by their number: {'; '.join(apart)}"] if apart else []
    found += [f"a row has other bits by its place: {', '.join(moved)}"] if moved else []
    return f"in torch's products (out x in) among {tried}, on this GPU, {'; '.join(found)}"


def describe_products(
    model: nn.Module, products: Iterable[TorchProduct], dtype: torch.dtype, is_reproducible: bool
) -> str:
    """Say more of a model that is multiplied with: whether its logits were seen to be the same bits in any company, and
    which of its modules multiply by themselves.
    """
    logits = f"the self-test's logits were{'' if is_reproducible else ' not'} the same bits in each company"
    kinds = {type(one) for one in holders_of_matrices(model)} - {nn.Linear}
    untried = sorted(f"{one.__name__} was not tried" for one in kinds)
    return "; ".join((describe_rows(products, dtype), logits, *untried))


def _tried(product: TorchProduct, dtype: torch.dtype) -> tuple[list[list[int]], bool]:
    """Return the numbers of rows in groups that give the first row the same bits, and whether the place of a row
    made no difference.
    """
    num_outputs, num_inputs = product.weight.shape
    sizes = [size for size in _SIZES if num_outputs <= _WIDE or size <= _MOST_ROWS_WIDE]
    rows = torch.randn(sizes[-1], num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows, is_placed = rows.to(product.weight.device), True
    groups = list[tuple[torch.Tensor, list[int]]]()
    for size in sizes:
        found, turned = product(rows[:size]), product(rows[:size].roll(1, 0))
        is_placed = is_placed and torch.equal(turned, found.roll(1, 0))
        same = next((one for first, one in groups if torch.equal(first, found[:1])), None)
        if same is None:
            groups.append((found[:1].clone(), [size]))
        else:
            same.append(size)
    return [one for _, one in groups], is_placed


def _listed(sizes: list[int]) -> str:
    """Say powers of two as a range where none is left out."""
    is_range = len(sizes) > 2 and sizes[-1] == sizes[0] * 2 ** (len(sizes) - 1)
    return f"{sizes[0]} to {sizes[-1]}" if is_range else ", ".join(map(str, sizes))

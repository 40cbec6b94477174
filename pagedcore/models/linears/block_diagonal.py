"""Matrices of blocks, one for each head, with packed products: the gates of RecurrentGemma.

Owns ``BlockDiagonalWeight``, which takes the place of such a parameter, so that the module's own ``forward`` goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from pagedcore.models.linears.packed_linear import OnUnused, PackedLinear
from pagedcore.protocols import LinearFactory

_GATES: Final = ("input_gate", "recurrent_gate")


class BlockDiagonalWeight:
    """What a module has in the place of a weight [heads, in, out]: ``torch.baddbmm`` with it is a packed product for
    each head, which has the bias in it.

    Every other function of torch raises ``TypeError``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, factory: LinearFactory) -> None:
        """Pack a weight, and a bias [heads, out] that goes with it; the weight is not kept."""
        self.products = [PackedLinear(one.T, own, factory) for one, own in zip(weight, bias, strict=True)]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply; torch calls this in the place of its own functions."""
        if function is not torch.baddbmm:
            return NotImplemented
        _, rows, weight = args
        return torch.stack([product(share) for product, share in zip(weight.products, rows, strict=True)])


def has_blocks(module: nn.Module, factory: LinearFactory) -> bool:
    """Whether a module is one whose matrices ``pack_blocks`` replaces."""
    kind = type(module)
    if kind.__name__ != "RecurrentGemmaRglru" or not kind.__module__.startswith("transformers.models."):
        return False
    weights = [vars(module)["_parameters"].get(f"{gate}_weight") for gate in _GATES]
    return all(one is not None and factory.supports(one.dtype, one.shape[1]) for one in weights)


def pack_blocks(module: Any, factory: LinearFactory, on_unused: OnUnused) -> Iterator[PackedLinear]:
    """Replace the matrices of a module, one after the other, and yield the products of them."""
    for gate in _GATES:
        name = f"{gate}_weight"
        weight = module.get_parameter(name)
        delattr(module, name)
        packed = BlockDiagonalWeight(weight, module.get_parameter(f"{gate}_bias"), factory)
        setattr(module, name, packed)
        on_unused(weight)
        yield from packed.products

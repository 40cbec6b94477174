"""Checks that a matrix product gives a row the same bits in any batch.

Our own product adds up in one order by construction. oneDNN chooses its path by shape, processor and number of threads;
on those tried, packed products of two rows or more add up in one order. That is an observation, not a promise, so every
product is checked on the machine that will run the model.
The result holds for the number of threads that was set while checking. Read ``packed_linear.py`` for the products.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pagedcore.models.cpu.packed_linear import PackedLinear

#: Rows per product: the smallest, odd ones, and both sides of the sizes at which libraries change their blocking.
_NUM_ROWS = (2, 3, 8, 17, 33, 64, 256, 512)
#: Wider layers are output layers: they see one row per sequence, never a whole prompt.
_WIDE, _NUM_ROWS_WIDE = 32768, (2, 3, 8, 17, 33, 64)

Shape = tuple[int, int, torch.dtype]


@torch.inference_mode()
def probe_invariance(layers: Iterable[PackedLinear]) -> tuple[Shape, ...]:
    """Return the shapes (out, in, dtype) whose rows depend on the number of rows or on their place; empty is good.

    One layer of each shape is tried, with its own weights.
    """
    of_shape = {(layer.out_features, layer.in_features, layer.weight.dtype): layer for layer in layers}
    return tuple(shape for shape, layer in of_shape.items() if not _is_invariant(layer))


def _is_invariant(layer: PackedLinear) -> bool:
    sizes = _NUM_ROWS_WIDE if layer.out_features > _WIDE else _NUM_ROWS
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(sizes), layer.in_features, generator=generator).to(layer.weight.dtype)
    expected = layer(rows)
    # Shape: the first rows, the last rows, and all of them in another order
    in_company = all(
        torch.equal(layer(rows[:n].contiguous()), expected[:n])
        and torch.equal(layer(rows[-n:].contiguous()), expected[-n:])
        for n in sizes[:-1]
    )
    return in_company and torch.equal(layer(rows.roll(1, 0)), expected.roll(1, 0))

"""What kernels call torch's dtypes, and how pools lie in memory for them. Not for machines without torch."""

from __future__ import annotations

from typing import Final

import torch

from pagedcore_kernels.checks import check_pool
from pagedcore_kernels.cuda.shapes import Format
from pagedcore_kernels.errors import InvalidConfig
from pagedcore_kernels.layout import BlockLayout, ScaledKVLayout, TokenMajorLayout

FORMATS: Final = {
    torch.bfloat16: Format.BF16, torch.float16: Format.F16, torch.float8_e4m3fn: Format.E4M3, torch.int8: Format.INT8,
}
_FEWEST_SCALED: Final = 16
"""Tokens of a block of 8 bits at least: copies take 16 bytes."""


def layer_views(layout: BlockLayout, pool: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each layer's K and each layer's V of all blocks, scales included, as uint8 [blocks, bytes]."""
    layers = range(len(layout.layers))
    keys = [pool[:, (start := layout.key_offset(i)) : start + layout.key_bytes(i)] for i in layers]
    return keys, [pool[:, (start := layout.value_offset(i)) : start + layout.value_bytes(i)] for i in layers]


def check_kernel_layout(layout: BlockLayout, pool: torch.Tensor) -> None:
    """Refuse pools that kernels cannot address.

    Raises:
        InternalError: the pool is not one of this layout.
        InvalidConfig: the layout is that of another backend, or its blocks have another size than a power of two.
    """
    check_pool(layout, pool)
    if not isinstance(layout, TokenMajorLayout | ScaledKVLayout):
        raise InvalidConfig(
            f"KV layout: got {type(layout).__name__}, allowed for CUDA kernels are TokenMajorLayout and ScaledKVLayout."
        )
    size, fewest = layout.block_size, _FEWEST_SCALED if isinstance(layout, ScaledKVLayout) else 1
    if size & (size - 1) or size < fewest:
        of_scaled = f" from {fewest} on, with KV of 8 bits" if fewest > 1 else ""
        raise InvalidConfig(f"block_size: got {size}, allowed for CUDA kernels is a power of two{of_scaled}.")

"""What kernels call torch's dtypes, and the scales of pools of 8 bits. Not for machines without torch."""

from __future__ import annotations

from typing import Final

import torch

from pagedcore_kernels.cuda.shapes import Format
from pagedcore_kernels.errors import InvalidConfig
from pagedcore_kernels.layout import TokenMajorLayout

FORMATS: Final = {
    torch.bfloat16: Format.BF16, torch.float16: Format.F16, torch.float8_e4m3fn: Format.E4M3, torch.int8: Format.INT8,
}


def layer_scales(
    layout: TokenMajorLayout, given: torch.Tensor | None, device: torch.device
) -> list[torch.Tensor | None]:
    """One float32 [2, KVH] per layer, contiguous on the device; nothing for pools that need none.

    Raises:
        InvalidConfig: the pool needs scales, and there are none or of another shape than [layers, 2, most KV heads].
    """
    if layout.dtype.itemsize == 2:
        return [None] * len(layout.layers)
    most = max(shape.num_kv_heads for shape in layout.layers)
    if given is None or tuple(given.shape) != (len(layout.layers), 2, most):
        raise InvalidConfig(
            f"kv_scales: got {'none' if given is None else tuple(given.shape)}, a KV pool of {layout.dtype} needs "
            f"positive numbers of shape {(len(layout.layers), 2, most)}."
        )
    scales = given.to(torch.float32)
    return [scales[i, :, : shape.num_kv_heads].contiguous().to(device) for i, shape in enumerate(layout.layers)]

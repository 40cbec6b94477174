"""Quantisation schemes by name, each a factory of the products of linear layers.

Owns how a float weight is quantised. The products are in ``pagedcore_kernels/cpu/matmul``; ``packed_linear`` and
``packed_experts`` put them in the place of a model's layers, and a weight leaves memory before the next one is read.
"""

from __future__ import annotations

from typing import Final

import torch

from pagedcore.models.cpu.packed_linear import FASTEST, can_pack
from pagedcore.protocols import Matmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul, form_of_int8_product

_LARGEST: Final = 127
#: Numbers that are converted to float32 at a time, so that quantising a matrix takes 16 MiB besides it.
_AT_ONCE: Final = 2**22


class W8A8Linears:
    """Symmetric int8 weights with a scale for each output; rows in int8 too, each with a scale of its own.

    Layers whose number of inputs is no multiple of 16 keep their number format.
    """

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether layers of this format and number of inputs become products; see ``LinearFactory``."""
        return can_pack(dtype, num_inputs)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
        """Quantise a weight [out, in] and pack it, with its bias [out]."""
        if form_of_int8_product(weight.shape[1]) is None or weight.dtype not in (torch.float32, torch.bfloat16):
            return FASTEST(weight, bias)
        values, scales = quantize_per_output(weight)
        return PackedInt8Matmul(values, scales, bias, weight.dtype)


SCHEMES: Final = {"w8a8": W8A8Linears}
"""By the name that ``EngineConfig.quantization`` has."""


def quantize_per_output(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] and float32 scales [out] of a float weight [out, in].

    A scale is a 127th of the output's largest magnitude, and a value the nearest integer to ``weight / scale``, ties to
    even. An output with an infinity or a NaN gets the scale NaN, so that its products are NaN.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    num_rows = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), num_rows):
        part = weight[start : start + num_rows].float()
        largest = part.abs().amax(dim=1)
        scale = largest / _LARGEST
        scales[start : start + num_rows] = torch.where(largest.isfinite(), scale, torch.nan)
        divisor = torch.where(largest.isfinite() & (scale > 0), scale, torch.inf)
        values[start : start + num_rows] = (part / divisor[:, None]).nan_to_num(0.0).round().to(torch.int8)
    return values, scales

"""What quantises by each scheme of ``config/schemes.py``, as factories of the products of linear layers.

Owns how a float weight is quantised, and the check that a product computes what its quantised weight says. The products
are in ``pagedcore_kernels/cpu/matmul``; ``packed_linear`` and ``packed_experts`` put them in the place of a model's
layers, and a weight leaves memory before the next one is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from pagedcore.config.schemes import SCHEMES, Scheme
from pagedcore.models.linears.packed_linear import FASTEST, can_pack, checked_outputs, require_right
from pagedcore.protocols import Matmul
from pagedcore_kernels.cpu.matmul import packed_grouped, packed_int8
from pagedcore_kernels.cpu.matmul.grouped_tiles import CODEBOOKS, UNIT
from pagedcore_kernels.cpu.matmul.quantize_weights import quantize_groups

_GROUP_SIZES: Final = (128, 64, 32, *range(120, 8, -8))
"""Inputs of a group with a scale of its own, in int4: the first of these that divides a layer's."""
_AT_ONCE: Final = 2**22
"""Numbers of other formats that are converted to float32 at a time, which takes 16 MiB."""


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """Quantises float weights while a model is loaded: symmetric, and a bias is kept."""

    scheme: Scheme
    """Where it quantises rows, layers with more than 65,536 inputs keep their number format; see ``group_size`` too."""

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether layers of this format and number of inputs become products; see ``LinearFactory``."""
        return can_pack(dtype, num_inputs)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
        """Quantise a weight [out, in] and pack it, with its bias [out].

        Raises:
            ModelNotSupported: the product is not what the quantised weight says.
        """
        if not self.can_quantize(weight.shape[1]):
            return FASTEST(weight, bias)
        return packed_product(self.scheme, *self.quantize(weight), None, bias, weight.dtype)

    def weight_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packed weight of a format ``dtype``, scales included, without the bias."""
        if not self.can_quantize(num_inputs):
            return num_outputs * num_inputs * dtype.itemsize
        if self.scheme.sums_whole_rows:
            return packed_int8.packed_bytes(num_outputs, num_inputs)
        return packed_grouped.packed_bytes(num_outputs, num_inputs, self.num_groups(num_inputs), self.scheme.bits)

    def can_quantize(self, num_inputs: int) -> bool:
        """Whether layers with so many inputs are quantised; others keep their number format."""
        return fits(self.scheme, num_inputs, self.num_groups(num_inputs))

    def num_groups(self, num_inputs: int) -> int:
        """Return how many scales an output has."""
        return num_inputs // group_size(num_inputs) if self.scheme.has_groups else 1

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 [out, in] and float32 scales [out, groups] of a float weight [out, in]."""
        return _quantize(weight, self.num_groups(weight.shape[1]), self.scheme.bits)


QUANTIZERS: Final = {name: QuantizedLinears(scheme) for name, scheme in SCHEMES.items() if not scheme.is_chosen}
"""By the name that ``EngineConfig.quantization`` has."""


def fits(scheme: Scheme, num_inputs: int, num_groups: int) -> bool:
    """Whether there are products of a scheme with so many inputs in so many groups."""
    if scheme.sums_whole_rows:
        return packed_int8.form_of_int8_product(num_inputs) is not None
    is_whole = num_groups == 1 or num_inputs % (UNIT * num_groups) == 0
    size = -(-num_inputs // num_groups)
    return is_whole and (
        not scheme.quantizes_rows or packed_grouped.form_of_byte_groups(size, scheme.bits) is not None
    )


def group_size(num_inputs: int) -> int:
    """Return how many inputs share a scale in int4: all, where none of the sizes divides their number."""
    return next((size for size in _GROUP_SIZES if num_inputs % size == 0), num_inputs)


def quantize_per_output(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] and float32 scales [out, 1] of a float weight [out, in].

    A scale is a 127th of the output's largest magnitude, and a value the nearest integer to ``weight / scale``, ties to
    even. An output with an infinity or a NaN gets the scale NaN, so that its products are NaN.
    """
    return _quantize(weight, 1, 8)


def quantize_by_group(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] from -8 to 7 and float32 scales [out, groups] of a float weight [out, in].

    A scale is a -8th of the group's number of largest magnitude, whose sign it turns, so that all sixteen values are
    of use. A value is the nearest integer to ``weight / scale``, ties to even, 7 at most. A group with an infinity or a
    NaN gets the scale NaN.
    """
    return _quantize(weight, weight.shape[1] // group_size(weight.shape[1]), 4)


def _quantize(weight: torch.Tensor, num_groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    if weight.dtype in (torch.float32, torch.bfloat16):
        return quantize_groups(weight, num_groups, bits)
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), num_groups)
    num_rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), num_rows):
        part = slice(start, start + num_rows)
        values[part], scales[part] = quantize_groups(weight[part].float(), num_groups, bits)
    return values, scales


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, codebook: str = ""
) -> torch.Tensor:
    """Return float32 [out, in]: ``scales * (values - zeros)``, or ``scales * values - zeros`` if zeros are no integers.

    Args:
        values: int8 [out, in].
        scales: float32 or float16 [out, groups].
        zeros: int8, or the format of the scales, [out, groups]; ``None``: 0.
        codebook: whose numbers are in the place of values; "": none.
    """
    numbers = torch.tensor(CODEBOOKS[codebook])[values.int() & 15] if codebook else values.float()
    numbers, offsets = numbers.reshape(*scales.shape, -1), None if zeros is None else zeros[..., None]
    if offsets is not None and not offsets.is_floating_point():
        numbers = numbers - offsets
    numbers = numbers * scales[..., None]
    if offsets is not None and offsets.is_floating_point():
        numbers = numbers - offsets
    return numbers.flatten(1)


def packed_product(
    scheme: Scheme, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    bias: torch.Tensor | None, dtype: torch.dtype, codebook: str = "",
) -> Matmul:  # fmt: skip
    """Pack a quantised weight for rows of a number format; arguments are those of ``dequantize``, and a bias [out].

    Raises:
        ModelNotSupported: the product is not what the quantised weight says.
    """
    product: Matmul = (
        packed_int8.PackedInt8Matmul(values, scales[:, 0], bias, dtype) if scheme.sums_whole_rows
        else packed_grouped.PackedGroupedMatmul(
            values, scales, zeros, scheme.bits, bias, dtype, codebook, quantizes_rows=scheme.quantizes_rows
        )
    )  # fmt: skip
    _require_quantized(product, values, scales, bias, scheme.quantizes_rows, zeros, codebook)
    return product


@torch.inference_mode()
def _require_quantized(
    product: Matmul, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, quantizes_rows: bool,
    zeros: torch.Tensor | None, codebook: str,
) -> None:  # fmt: skip
    """Compare a product with its weight [out, in], as ``dequantize`` has it; see ``require_right``.

    With a codebook its numbers are in the place of values, and may be rounded to bfloat16.
    """
    some = checked_outputs(len(values))
    weight = dequantize(values[some], scales[some], None if zeros is None else zeros[some], codebook)
    is_rounded = bool(codebook) and product.weight.dtype == torch.bfloat16
    # Why more with a least weight: products of scales and values may be larger than what is left of them.
    has_least = zeros is not None and zeros.is_floating_point()
    relative = 2**-8 if is_rounded else 2**-12 if has_least else 2**-14
    require_right(product, weight, some, bias, quantizes_rows, relative=relative)

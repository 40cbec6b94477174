"""Linear layers whose weights stay in e4m3 on a GPU, by torch's scaled product (``torch._scaled_mm``).

Owns the layer, which weights of a checkpoint it takes, and how rows become e4m3 where no kernel does that. Every row
and every output has a scale: the product's form that torch has for all GPUs with the format. A row's scale is its own,
or the one that the files give for all rows, so that company never changes a row's codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from pagedcore.models.linears.stored_weight import StoredWeight, stored_weights
from pagedcore_kernels import reference

_MULTIPLE: Final = 16
"""Of which inputs and outputs have to be multiples."""
_LARGEST: Final = reference.LARGEST[torch.float8_e4m3fn]

Quantize = Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""``(rows, scale) -> codes, scales`` as of ``quantize_rows``."""


def quantize_rows(rows: torch.Tensor, scale: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [T, in] of rows [T, in], and their scales, float32 [T, 1]; nothing waits for a GPU.

    A scale is a 448th of its row's largest magnitude, or the one that is given if it is not 0; numbers beyond 448 times
    that become 448. A row with an infinity or a NaN has the scale NaN. ``RowQuantizer`` does the same in one launch.
    """
    if not scale:
        codes, scales = reference.quantize_rows(rows, torch.float8_e4m3fn)
        return codes, scales.unsqueeze(1)
    rows = rows.float()
    is_finite = rows.isfinite().all(1, keepdim=True)
    scales = torch.full_like(rows[:, :1], scale)
    numbers = torch.where(is_finite, rows * (1.0 / scales), 0.0).clamp(-_LARGEST, _LARGEST)
    return numbers.to(torch.float8_e4m3fn), torch.where(is_finite, scales, torch.nan)


class Float8Linear(nn.Module):
    """A linear layer with a weight in e4m3.

    Args:
        weight: float8_e4m3fn [out, in], whole rows; both are multiples of 16.
        scale: float32 [1, out], what each output's numbers are multiplied by.
        bias: [out] in the format of rows, or none.
        row_scale: of all rows; 0.0: each row has its own.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, row_scale: float = 0.0
    ) -> None:
        super().__init__()
        # Why buffers: a parameter's number format would be taken for that of the model.
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.row_scale = row_scale
        self.quantize: Quantize = quantize_rows
        self.out_features, self.in_features = weight.shape

    @classmethod
    def joined(cls, parts: Sequence[Float8Linear]) -> Float8Linear:
        """Return one layer of all outputs of several, of whose weight and scales theirs become parts.

        Rows have the largest of the scales that are given for them, as vLLM has it: files have one for each part, of
        the same rows.
        """
        first, scales = parts[0], [one.row_scale for one in parts]
        biases = [one.bias.detach() for one in parts if one.bias is not None]
        if len(parts) == 1:
            return first
        whole = cls(
            torch.cat([one.weight for one in parts]), torch.cat([one.scale for one in parts], 1),
            torch.cat(biases) if biases else None, 0.0 if 0.0 in scales else max(scales))
        end = 0
        for one in parts:
            begin, end = end, end + one.out_features
            one.weight, one.scale = whole.weight[begin:end], whole.scale[:, begin:end]
        return whole

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [..., in], bfloat16 or float16; return [..., out] in their format."""
        codes, scales = self.quantize(rows.reshape(-1, self.in_features).contiguous(), self.row_scale)
        # Why no fast sums: on Hopper they are not those of float32.
        product = torch._scaled_mm(
            codes, self.weight.t(), scale_a=scales, scale_b=self.scale, bias=self.bias, out_dtype=rows.dtype,
            use_fast_accum=False)
        return product.view(*rows.shape[:-1], self.out_features)


def launch_quantizers(products: Iterable[object], dtype: torch.dtype, driver: Any) -> None:
    """Let a kernel, which a ``Driver`` launches, make rows in ``dtype`` e4m3 for those products that are
    ``Float8Linear``; it is loaded if there are any.
    """
    if found := [one for one in products if isinstance(one, Float8Linear)]:
        # Why here: without a GPU nothing of its kernels is imported.
        from pagedcore_kernels.cuda.elementwise import RowQuantizer

        quantize = RowQuantizer(dtype, driver)
        for one in found:
            one.quantize = quantize


@torch.no_grad()
def why_no_float8(device: torch.device) -> str:
    """Try a product on a GPU; return why this torch has none there, "" if it has."""
    ones, scale = torch.ones(_MULTIPLE, _MULTIPLE, device=device), torch.ones(_MULTIPLE, 1, device=device)
    layer = Float8Linear(ones.to(torch.float8_e4m3fn), scale.t(), None)
    try:
        found = layer(ones.to(torch.bfloat16))
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return "" if bool((found == _MULTIPLE).all()) else "torch._scaled_mm is wrong on this GPU"


@torch.no_grad()
def keep_float8(model: Any) -> tuple[int, list[str]]:
    """Put a ``Float8Linear`` in the place of every linear layer whose stored weight can be one.

    Returns:
        How many there are, and why other stored weights are none, each reason once.
    """
    num_kept, refused, head = 0, dict[str, None](), model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        weights = [*stored_weights(module)]
        reasons = [_why_not(module, weight, is_head=module is head) for weight in weights]
        if not any(reasons):
            for weight in weights:
                model.set_submodule(name, _made(module, weight))
                num_kept += 1
        refused |= dict.fromkeys(filter(None, reasons))
    return num_kept, [*refused]


def _made(linear: nn.Linear, weight: StoredWeight) -> Float8Linear:
    assert weight.float8 is not None  # Invariant: asked before
    values, scales, row_scale = weight.float8
    scale = scales.reshape(1, -1).expand(1, len(values)).contiguous()
    return Float8Linear(values, scale, None if linear.bias is None else linear.bias.detach(), row_scale)


def _why_not(module: nn.Module, weight: StoredWeight, *, is_head: bool) -> str:
    if type(module) is not nn.Linear or is_head:
        return "experts and output layers are computed in numbers"
    if weight.float8 is None:
        return "there is no product here of scales by blocks, and none with rows that are not FP8"
    if any(size % _MULTIPLE for size in weight.shape):
        return f"a product's sizes are multiples of {_MULTIPLE}, and one has {weight.shape[0]} x {weight.shape[1]}"
    return ""

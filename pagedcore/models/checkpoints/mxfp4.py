"""Checkpoints with experts in MXFP4, as gpt-oss is published: four bits that count a codebook, and powers of two.

Owns what their configuration may say and what their tensors are. Of a parameter of all experts, whose matrices are
[out, in]:

    gate_up_proj_blocks   uint8 [experts, out, in / 32, 16], the first of two values in a byte's lower half
    gate_up_proj_scales   uint8 [experts, out, in / 32], the exponent of two plus 127 for each 32 inputs

The same goes for ``down_proj``. Everything else, biases of the experts too, is stored as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.schemes import scheme_of
from pagedcore.models.checkpoints.stored_experts import expert_parts, put_experts
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredMatrices, StoredWeight, refusal

_FIELDS: Final = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
_BLOCK: Final = 32
"""Inputs that share a scale."""
_BIAS: Final = 127
_CODEBOOK: Final = "e2m1"
_LARGEST: Final = 252
"""The largest stored exponent; with the next one the codebook's 6 is no finite number of 32 bits."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts in MXFP4; which ones, the files say."""

    @property
    def scheme(self) -> str:
        """Name of the scheme."""
        return scheme_of(4)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Mxfp4:
        """Read a ``quantization_config``.

        Raises:
            ModelNotSupported: it says something that is not understood.
        """
        if others := sorted(map(str, config.keys() - _FIELDS)):
            raise refusal(f"mxfp4 with {others[0]}={config.get(others[0])!r}")
        return cls()

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return ``None``: linear layers outside of experts are numbers."""

    def replace_experts(self, model: nn.Module, files: TensorFiles, dtype: torch.dtype) -> int:
        """Put what files hold in the place of the parameters of experts; return how many. Nothing is decoded.

        Args:
            model: a tree without memory.
            files: its tensors.
            dtype: number format of rows.

        Raises:
            ModelNotSupported: the tensors have other shapes than the model.
        """
        num_replaced = 0
        for name, module in model.named_modules():
            for kind, matrices in zip(expert_parts(module), matrices_of_experts(module), strict=False):
                if f"{name}.{kind}_blocks" in files:
                    put_experts(module, kind, _stored(files, f"{name}.{kind}", tuple(matrices.shape), dtype))
                    num_replaced += 1
        return num_replaced


def _stored(files: TensorFiles, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredMatrices:
    num_experts, num_outputs, num_inputs = shape
    if num_inputs % _BLOCK:
        raise refusal(f"{name} has {num_inputs} inputs, which are no blocks of {_BLOCK}")
    num_blocks = num_inputs // _BLOCK
    blocks = files.expect(f"{name}_blocks", (num_experts, num_outputs, num_blocks, _BLOCK // 2), "U8")
    exponents = files.expect(f"{name}_scales", (num_experts, num_outputs, num_blocks), "U8")
    if int(exponents.amax()) > _LARGEST:
        raise refusal(f"{name}_scales has values above {_LARGEST}, with which weights are not finite")
    return StoredMatrices(_expert(*pair, (num_outputs, num_inputs), dtype)
                          for pair in zip(blocks, exponents, strict=True))


def _expert(blocks: torch.Tensor, exponents: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
    def read() -> QuantizedWeight:
        signed = blocks.view(torch.int8)
        values = torch.stack((signed << 4 >> 4, signed >> 4), dim=-1).view(shape)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS)
        return QuantizedWeight(values, scales, None, _CODEBOOK)

    return StoredWeight(scheme_of(4), shape, dtype, exponents.shape[1], [blocks, exponents], read, codebook=_CODEBOOK)

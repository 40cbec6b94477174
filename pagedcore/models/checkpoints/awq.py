"""Checkpoints of AWQ (AutoAWQ's version "gemm"): 4 bits from 0 up, a scale and a zero point for each group of inputs.

Owns what their configuration may say and what their tensors are. Of a layer [out, in], 8 outputs a word, and in a word
in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on:

    qweight  int32 [in, out / 8]    qzeros  int32 [groups, out / 8]    scales  float [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from pagedcore.config.schemes import scheme_of
from pagedcore.models.checkpoints.packed_integers import num_words, unpack
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredWeight, refusal

_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of outputs 0 to 7."""
_BITS: Final = 4
_BACKENDS: Final = frozenset({
    "autoawq", "auto", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm", "gemm_triton",
    "torch_awq", "torch_fused_awq",
})
"""Kernels that read the layout "gemm", which a file may name; others ("gemv", "llm-awq") have layouts of their own."""


@dataclass(frozen=True, slots=True)
class AWQ:
    """How the layers of one checkpoint are quantised."""

    group_size: int
    """-1: one group for each output."""
    scheme: ClassVar[str] = scheme_of(_BITS)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AWQ:
        """Read a ``quantization_config``.

        Raises:
            ModelNotSupported: it says something that cannot be computed here, or that is not understood.
        """
        bits = config.get("bits", config.get("w_bit"))
        size = config.get("group_size", config.get("q_group_size"))
        # Why two names: transformers 5 writes "format" too, as GPTQModel does.
        layouts = {str(config.get(name) or "gemm").lower() for name in ("version", "format")}
        has_zeros, backend = config.get("zero_point", True), config.get("backend") or "auto"
        if bits != _BITS or type(size) is not int or size == 0 or size < -1:
            raise refusal(f"AWQ with {bits!r} bits in groups of {size!r}")
        if others := sorted(layouts - {"gemm"}):
            raise refusal(f"AWQ of version {others[0]!r}")
        if has_zeros is not True:
            raise refusal(f"AWQ with zero_point {has_zeros!r}")
        if not isinstance(backend, str) or backend not in _BACKENDS:
            raise refusal(f"AWQ for the backend {backend!r}")
        return cls(size)

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the files hold it as numbers.

        Raises:
            ModelNotSupported: its tensors are not what the configuration says.
        """
        if f"{name}.qweight" not in files:
            return None
        num_outputs, num_inputs = shape
        size = num_inputs if self.group_size == -1 else self.group_size
        if num_inputs % size or num_outputs * _BITS % 32:
            raise refusal(f"{name} of shape {list(shape)} cannot be whole words in groups of {size}")
        num_groups, width = num_inputs // size, num_words(num_outputs, _BITS)
        words = files.expect(f"{name}.qweight", (num_inputs, width), "I32")
        zeros = files.expect(f"{name}.qzeros", (num_groups, width), "I32")
        scales = files.scales(f"{name}.scales", (num_groups, num_outputs))
        return StoredWeight(
            self.scheme, shape, dtype, num_groups, [words, zeros, scales],
            lambda: QuantizedWeight(_by_output(words), scales.t().float().contiguous(), _by_output(zeros)),
            has_zeros=True,
        )


def _by_output(words: torch.Tensor) -> torch.Tensor:
    """Return int8 [out, n] less half of the range, of int32 [n, out / 8]."""
    values = unpack(words, _BITS).view(len(words), -1, 8)
    return values[..., _PLACES].flatten(1).t().contiguous()

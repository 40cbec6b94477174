"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel): values from 0 up with a scale and a zero point for each group of inputs.

Owns what their configuration may say and what their tensors are. Of a layer [out, in], 8 integers of 4 bits a word:

    qweight  int32 [in * bits / 32, out]        scales  float [groups, out]
    qzeros   int32 [groups, out * bits / 32]    g_idx   int32 [in]

The format "gptq" (v1) holds a zero point less one, "gptq_v2" holds it as it is. Zero points of symmetric files are half
of the range, so that what they hold tells the format, whichever they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedcore.config.schemes import scheme_of
from pagedcore.models.checkpoints.input_order import order_of
from pagedcore.models.checkpoints.packed_integers import num_words, unpack
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredWeight, refusal


@dataclass(frozen=True, slots=True)
class GPTQ:
    """How the layers of one checkpoint are quantised."""

    bits: int
    group_size: int
    """-1: one group for each output."""
    zero_offset: int
    """What a stored zero point lacks."""
    is_symmetric: bool

    @property
    def scheme(self) -> str:
        """Name of the scheme."""
        return scheme_of(self.bits)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GPTQ:
        """Read a ``quantization_config``.

        Raises:
            ModelNotSupported: it says something that cannot be computed here, or that is not understood.
        """
        bits, size = config.get("bits"), config.get("group_size")
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if bits not in (4, 8) or type(size) is not int or size == 0 or size < -1:
            raise refusal(f"GPTQ with {bits!r} bits in groups of {size!r}")
        if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
            raise refusal(f"GPTQ in the format {'marlin' if config.get('is_marlin_format') else layout!r}")
        if str(config.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
            raise refusal(f"GPTQ with words of {config['pack_dtype']!r}")
        # GPTQModel's rules by names of layers: "-:" leaves layers as they are, which the files show too; others give
        # them bits or groups of their own.
        rules = config.get("dynamic") or {}
        if not isinstance(rules, Mapping) or not all(str(name).startswith("-:") for name in rules):
            raise refusal("GPTQ with settings of single layers (dynamic)")
        return cls(bits, size, int(layout == "gptq"), config.get("sym") is True)

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the files hold it as numbers.

        Raises:
            ModelNotSupported: its tensors are not what the configuration says.
        """
        if f"{name}.qweight" not in files:
            return None
        (num_outputs, num_inputs), bits = shape, self.bits
        size = num_inputs if self.group_size == -1 else self.group_size
        if num_inputs % size or num_inputs * bits % 32 or num_outputs * bits % 32:
            raise refusal(f"{name} of shape {list(shape)} cannot be whole words in groups of {size}")
        num_groups, order = num_inputs // size, None
        words = files.expect(f"{name}.qweight", (num_words(num_inputs, bits), num_outputs), "I32")
        packed = files.expect(f"{name}.qzeros", (num_groups, num_words(num_outputs, bits)), "I32")
        scales = files.scales(f"{name}.scales", (num_groups, num_outputs))
        if f"{name}.g_idx" in files:
            order = order_of(files.expect(f"{name}.g_idx", (num_inputs,), "I32", "I64"), num_groups, name)
        zeros = self._zeros(packed, name)

        def read() -> QuantizedWeight:
            values = unpack(words.t(), bits)
            values = values if order is None else values[:, order]
            return QuantizedWeight(values, scales.t().float().contiguous(), zeros)

        tensors = [words, packed, scales, *([] if order is None else [order])]
        return StoredWeight(self.scheme, shape, dtype, num_groups, tensors, read, order,
                            has_zeros=zeros is not None)

    def _zeros(self, packed: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return int8 [out, groups] less half of the range, or ``None`` if all are then 0, as in symmetric files."""
        zeros, largest = unpack(packed, self.bits).t(), 2 ** (self.bits - 1) - 1
        if self.is_symmetric:
            if not ((zeros == 0).all() or (zeros == -1).all()):
                raise refusal(f"{name} has zero points that are not half of the range, and the file says sym: true")
            return None
        if self.zero_offset and (zeros == largest).any():
            raise refusal(
                f"{name} has zero points out of the range of the format 'gptq', which libraries read in different "
                "ways; save it as 'gptq_v2'"
            )
        zeros = (zeros + self.zero_offset).contiguous()
        return zeros if zeros.any() else None

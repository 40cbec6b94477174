"""Checkpoints of bitsandbytes: int8 with a scale for each output ("LLM.int8()"), and 4 bits that count a codebook.

Owns what their configuration may say and what their tensors are. Of a layer [out, in]:

    8 bits   weight                   int8 [out, in]        SCB            float32 [out], the largest magnitudes
             weight_format            uint8 [], 0: rows
    4 bits   weight                   uint8 [out * in / 2, 1], row by row, the first value in a byte's upper half
             weight.absmax            float32 [blocks], a scale for each ``blocksize`` values of the flat weight
             weight.quant_map         float32 [16]          weight.quant_state.bitsandbytes__nf4  uint8, JSON
    nested   weight.absmax            uint8 [blocks]        weight.nested_absmax     float32 [blocks / 256]
                                                            weight.nested_quant_map  float32 [256]

Rows keep their number format with 8 bits too. So nothing that large activations need is lost, and the library's split,
which multiplies those above a threshold by weights in 16 bits, has no place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch

from pagedcore.config.schemes import scheme_of
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredWeight, refusal
from pagedcore_kernels.cpu.matmul.grouped_tiles import CODEBOOKS

_STORAGE: Final = {"uint8": (1, "U8"), "int8": (1, "I8"), "float16": (2, "F16"), "bfloat16": (2, "BF16"),
                   "float32": (4, "F32")}  # fmt: skip
"""Number formats that a file may say 4 bits are: bytes and name, by the name in the configuration."""
_TYPES: Final = ("nf4", "fp4")
"""Those of ``CODEBOOKS`` that the library writes."""
_MOST_STATE: Final = 4096
"""Most bytes of the JSON of a layer; the library writes about 200."""
_MOST_BLOCK: Final = 2**16
"""Most values that share a scale; the library's largest block has 4096."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """How the layers of one checkpoint are quantised."""

    codebook: str
    """What 4 bits stand for, of ``CODEBOOKS``; with 8 bits ""."""
    storage: str

    @property
    def scheme(self) -> str:
        """Name of the scheme."""
        return scheme_of(4 if self.codebook else 8)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BitsAndBytes:
        """Read a ``quantization_config``.

        Raises:
            ModelNotSupported: it says something that cannot be computed here, or that is not understood.
        """
        eight, four = (config.get(f"load_in_{bits}bit", config.get(f"_load_in_{bits}bit")) or False for bits in (8, 4))
        if (eight, four) not in ((True, False), (False, True)):
            raise refusal(f"bitsandbytes with load_in_8bit={eight!r} and load_in_4bit={four!r}")
        kind, storage = (config.get(name) or default for name, default in
                         (("bnb_4bit_quant_type", "fp4"), ("bnb_4bit_quant_storage", "uint8")))
        if four and not (isinstance(kind, str) and kind in _TYPES and str(storage) in _STORAGE):
            raise refusal(f"bitsandbytes with 4 bits of the type {kind!r}, stored as {storage!r}")
        return cls(str(kind) if four else "", str(storage))

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the files hold it as numbers.

        Raises:
            ModelNotSupported: its tensors are not what the configuration says.
        """
        if self.codebook:
            return self._four_bits(files, f"{name}.weight", shape, dtype) if f"{name}.weight.absmax" in files else None
        if f"{name}.SCB" not in files:
            return None
        values, largest = files.expect(f"{name}.weight", shape, "I8"), files.scales(f"{name}.SCB", shape[:1])
        layout = f"{name}.weight_format"
        if layout in files and files.expect(layout, (), "U8").item():
            raise refusal(f"{name} is laid out for a GPU (weight_format)")
        return StoredWeight(self.scheme, shape, dtype, 1, [values, largest],
                            lambda: QuantizedWeight(values, largest.float()[:, None] / 127, None))

    def _four_bits(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        state, octets = _state(files, f"{name}.quant_state.bitsandbytes__{self.codebook}")
        block, given = state.get("blocksize"), (state.get("quant_type"), state.get("shape"))
        if given != (self.codebook, [*shape]) or not _is_size(block):
            raise refusal(f"{name} is {given[0]!r} of shape {given[1]!r} in blocks of {block!r}, needed is "
                          f"{self.codebook!r} of shape {[*shape]}")  # fmt: skip
        (num_outputs, num_inputs), (number_bytes, layout) = shape, _STORAGE[self.storage]
        num_values = num_outputs * num_inputs
        packed = files.expect(name, (-(-num_values // (2 * number_bytes)), 1), layout)
        numbers = files.expect(f"{name}.quant_map", (16,), "F32")
        if not torch.allclose(numbers, torch.tensor(CODEBOOKS[self.codebook]), rtol=0, atol=1e-6):
            raise refusal(f"{name}.quant_map is another one than that of {self.codebook!r}")
        make_scales, sources = _scales(files, name, -(-num_values // block), state)
        # Why: where a row is no multiple of a block, blocks end within rows, and such parts of them have one scale.
        size = math.gcd(num_inputs, block)

        def read() -> QuantizedWeight:
            signed = packed.view(torch.uint8).flatten().view(torch.int8)
            values = torch.stack((signed >> 4, signed << 4 >> 4), dim=1).view(-1)[:num_values].view(shape)
            block_of = torch.arange(0, num_values, size) // block
            return QuantizedWeight(values, make_scales()[block_of].view(num_outputs, -1), None, self.codebook)

        return StoredWeight(self.scheme, shape, dtype, num_inputs // size, [packed, numbers, octets, *sources], read,
                            codebook=self.codebook)


def _state(files: TensorFiles, name: str) -> tuple[Mapping[str, Any], torch.Tensor]:
    """Return the JSON of a layer, and the tensor that it is in."""
    (size,) = files.shape_of(name) if name in files and len(files.shape_of(name)) == 1 else (0,)
    if size > _MOST_STATE:
        raise refusal(f"{name} has {size} bytes, allowed are {_MOST_STATE}")
    octets = files.expect(name, (size,), "U8")
    try:
        state = json.loads(bytes(octets.tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise refusal(f"{name} is no JSON object")
    return state, octets


def _scales(
    files: TensorFiles, name: str, num_blocks: int, state: Mapping[str, Any]
) -> tuple[Callable[[], torch.Tensor], Sequence[torch.Tensor]]:
    """Return what makes the scales of all blocks, float32 [blocks], and the tensors that it makes them of."""
    if f"{name}.nested_absmax" not in files:
        scales = files.scales(f"{name}.absmax", (num_blocks,))
        return scales.float, [scales]
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not _is_size(block) or type(offset) is not float:
        raise refusal(f"{name} has scales in blocks of {block!r} with an offset of {offset!r}")
    codes = files.expect(f"{name}.absmax", (num_blocks,), "U8")
    numbers = files.scales(f"{name}.nested_quant_map", (256,))
    largest = files.scales(f"{name}.nested_absmax", (-(-num_blocks // block),))

    def make() -> torch.Tensor:
        return numbers.float()[codes.int()] * largest.float()[torch.arange(num_blocks) // block] + offset

    if not make().isfinite().all():
        raise refusal(f"{name} has scales that are not finite")
    return make, [codes, numbers, largest]


def _is_size(number: Any) -> TypeGuard[int]:
    return type(number) is int and 0 < number <= _MOST_BLOCK

"""ggml's types of tensors: how many numbers a block has, in how many bytes, and which integers and scales these are.

Owns the arithmetic of bits of one block; rows of blocks become a ``QuantizedWeight``, whose numbers are those of the
format: scales of one level in float16, as they are; scales of two levels are multiplied in float32, which is exact for
all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pagedcore.models.linears.stored_weight import QuantizedWeight, refusal

Blocks = torch.Tensor
"""uint8 [..., bytes of a block]."""
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Integers [..., numbers], scales [..., groups], and what is subtracted from their product, as in
``QuantizedWeight.zeros``."""
_AT_ONCE: Final = 2**22
"""Numbers that are decoded at a time, so that a matrix takes little memory besides its integers."""
_LARGEST_EXPONENT: Final = 252
"""As files have it, 127 more than that of two."""
_ONE_LEVEL: Final = 32
"""Numbers of a block whose scale is one of its own; larger blocks have scales of two levels."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors."""

    name: str
    size: int
    """Numbers of a block."""
    num_bytes: int
    dtype: torch.dtype | None = None
    """Of tensors that hold numbers as they are; they have no ``decode``."""
    bits: int = 8
    """Of the integers in our products."""
    num_groups: int = 1
    """Scales of a block."""
    has_least: bool = False
    """Whether something is subtracted from products of scales and integers."""
    decode: Callable[[Blocks], _Parts] | None = None
    codebook: str = ""
    """What integers of 4 bits count, of ``CODEBOOKS``; "": themselves."""
    has_exponents: bool = False
    """Whether scales are powers of two."""

    @property
    def has_halves(self) -> bool:
        """Whether scales, and what is subtracted, are float16."""
        return self.decode is not None and self.size == _ONE_LEVEL and not self.has_exponents

    def weight(self, rows: torch.Tensor, name: str) -> QuantizedWeight:
        """Return what uint8 [rows, bytes of a row] hold; ``name`` is for the error.

        Raises:
            ModelNotSupported: a scale is not finite.
        """
        assert self.decode is not None
        values = torch.empty(len(rows), rows.shape[1] // self.num_bytes * self.size, dtype=torch.int8)
        all_scales, all_least = [], []
        at_once = max(1, _AT_ONCE // values.shape[1])
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            integers, scales, least = self.decode(part.reshape(len(part), -1, self.num_bytes))
            values[start : start + at_once] = integers.flatten(1)
            all_scales.append(scales.flatten(1))
            all_least += [] if least is None else [least.flatten(1)]
        if not all(part.isfinite().all() for part in (*all_scales, *all_least)):
            raise refusal(f"{name} has scales that are not finite")
        least = torch.cat(all_least) if self.has_least else None
        return QuantizedWeight(values, torch.cat(all_scales), least, self.codebook)


def _halves(blocks: Blocks, begin: int) -> torch.Tensor:
    """Return the float16 at a place, [..., 1]."""
    half: torch.Tensor = blocks[..., begin : begin + 2].contiguous().view(torch.float16)
    return half


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return the low halves of [..., n] bytes, then the high ones: [..., 2 * n]."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _counts(octets: torch.Tensor) -> torch.Tensor:
    """Return the low halves of [..., n] bytes, then the high ones, as what counts a codebook: from -8 to 7."""
    low, high = octets.view(torch.int8) << 4 >> 4, octets.view(torch.int8) >> 4
    return torch.cat((low, high), dim=-1)


def _split(octets: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Return [..., count, size] of [..., count * size] bytes."""
    return octets.reshape(*octets.shape[:-1], count, size)


def _bits(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bits of [..., n] bytes, ``count`` of them at a time: [..., 8 / count, n], the lowest first."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
    bits: torch.Tensor = (octets[..., None, :] >> shifts) & (2**count - 1)
    return bits


def _fifth_bits(blocks: Blocks, begin: int) -> torch.Tensor:
    """Return 32 bits, one for each number, as 0 or 16."""
    return _bits(blocks[..., begin : begin + 4], 1).transpose(-1, -2).flatten(-2) << 4


def _q4_0(blocks: Blocks) -> _Parts:
    return _nibbles(blocks[..., 2:]).view(torch.int8) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Blocks) -> _Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _q5_0(blocks: Blocks) -> _Parts:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return values.view(torch.int8) - 16, _halves(blocks, 0), None


def _q5_1(blocks: Blocks) -> _Parts:
    return _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), -_halves(blocks, 2)


def _q8_0(blocks: Blocks) -> _Parts:
    return blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _scales_of_k(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 scales and 8 least numbers, of 6 bits each, times those of the block."""
    first, second, third = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), dim=-1)
    least = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), dim=-1)
    return _halves(blocks, 0).float() * scales, _halves(blocks, 2).float() * least


def _q4_k(blocks: Blocks) -> _Parts:
    return _nibbles(_split(blocks[..., 16:], 4, 32)).flatten(-2), *_scales_of_k(blocks)


def _q5_k(blocks: Blocks) -> _Parts:
    low, high = _nibbles(_split(blocks[..., 48:], 4, 32)), _bits(blocks[..., 16:48], 1)
    return low.flatten(-2) | high.flatten(-2) << 4, *_scales_of_k(blocks)


def _q6_k(blocks: Blocks) -> _Parts:
    low = _nibbles(_split(blocks[..., :128], 2, 64)).flatten(-2)
    high = _bits(_split(blocks[..., 128:192], 2, 32), 2).flatten(-3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return (low | high << 4).view(torch.int8) - 32, _halves(blocks, 208).float() * scales, None


def _two_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return 256 numbers of two bits of [..., 64] bytes, in the order of the k-types."""
    return _bits(_split(octets, 2, 32), 2).flatten(-3)


def _q2_k(blocks: Blocks) -> _Parts:
    scales, least = blocks[..., :16] & 15, blocks[..., :16] >> 4
    values = _two_bits(blocks[..., 16:80])
    return values, _halves(blocks, 80).float() * scales, _halves(blocks, 82).float() * least


def _q3_k(blocks: Blocks) -> _Parts:
    low, high = _nibbles(blocks[..., 96:104]), _bits(blocks[..., 104:108], 2).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    values = _two_bits(blocks[..., 32:96]) | _bits(blocks[..., :32], 1).flatten(-2) << 2
    return values.view(torch.int8) - 4, _halves(blocks, 108).float() * scales, None


def _iq4_nl(blocks: Blocks) -> _Parts:
    return _counts(blocks[..., 2:].contiguous()), _halves(blocks, 0), None


def _iq4_xs(blocks: Blocks) -> _Parts:
    low = _bits(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    values = _counts(_split(blocks[..., 8:].contiguous(), 8, 16)).flatten(-2)
    return values, _halves(blocks, 0).float() * ((low | high << 4).view(torch.int8) - 32), None


def _mxfp4(blocks: Blocks) -> _Parts:
    exponents = blocks[..., :1].int()
    scales = torch.ldexp(torch.ones(exponents.shape), exponents - 127)
    # Why: with larger ones the codebook's 6 is no finite number of 32 bits.
    return _counts(blocks[..., 1:].contiguous()), scales.masked_fill(exponents > _LARGEST_EXPONENT, math.inf), None


TYPES: Final = {
    0: BlockType("f32", 1, 4, torch.float32), 1: BlockType("f16", 1, 2, torch.float16),
    30: BlockType("bf16", 1, 2, torch.bfloat16),
    2: BlockType("q4_0", 32, 18, bits=4, decode=_q4_0), 3: BlockType("q4_1", 32, 20, None, 4, 1, True, _q4_1),
    6: BlockType("q5_0", 32, 22, decode=_q5_0), 7: BlockType("q5_1", 32, 24, None, 8, 1, True, _q5_1),
    8: BlockType("q8_0", 32, 34, decode=_q8_0), 12: BlockType("q4_k", 256, 144, None, 4, 8, True, _q4_k),
    13: BlockType("q5_k", 256, 176, None, 8, 8, True, _q5_k),
    10: BlockType("q2_k", 256, 84, None, 4, 16, True, _q2_k),
    11: BlockType("q3_k", 256, 110, None, 4, 16, False, _q3_k),
    14: BlockType("q6_k", 256, 210, num_groups=16, decode=_q6_k),
    20: BlockType("iq4_nl", 32, 18, bits=4, decode=_iq4_nl, codebook="iq4_nl"),
    23: BlockType("iq4_xs", 256, 136, None, 4, 8, False, _iq4_xs, "iq4_nl"),
    39: BlockType("mxfp4", 32, 17, bits=4, decode=_mxfp4, codebook="e2m1", has_exponents=True),
}
"""By number."""
OTHER_TYPES: Final = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    21: "iq3_s", 22: "iq2_s", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 40: "nvfp4", 41: "q1_0",
}
"""Types that there are and that cannot be computed here."""

"""Number formats that NumPy lacks, as bits: bf16, e4m3, e5m2, tf32, and directed rounding to f16 and f32.

Every function is vectorised, takes and returns arrays, and is exact for every input including NaN, infinities,
denormals and negative zero. Sources: the OCP 8-bit floating point specification (E4M3: no infinity, 0x7F is NaN;
E5M2: as IEEE) and the conversion rules of the PTX ISA.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedcore_ptxsim.scalar_types import Array

F32 = NDArray[np.float32]
ROUNDINGS = ("rn", "rz", "rm", "rp")


def bf16_to_f32(bits: Array) -> F32:
    """The float32 of bf16 bits (uint16)."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array, rounding: str = "rn") -> NDArray[np.uint16]:
    """bf16 bits of float32 values, to nearest even (``rn``) or toward zero (``rz``); NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)) if rounding == "rn" else np.uint32(0)
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def f32_to_tf32(values: Array) -> NDArray[np.uint32]:
    """Bits of float32 rounded to 10 bits of mantissa, to nearest with ties away from zero (``cvt.rna.tf32``)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded, bits)


def _table(exponent_bits: int, bias: int) -> F32:
    """The value of each of the 256 codes of an 8-bit format, with IEEE infinities left to the caller."""
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    tiny = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    value = np.where(exponent == 0, tiny, normal)
    return np.where(code & 128, -value, value).astype(np.float32)


def _e4m3_table() -> F32:
    table = _table(4, 7)
    table[[127, 255]] = np.nan
    return table


def _e5m2_table() -> F32:
    table = _table(5, 15)
    table[[124, 252]] = np.inf, -np.inf
    table[[125, 126, 127, 253, 254, 255]] = np.nan
    return table


E4M3, E5M2 = _e4m3_table(), _e5m2_table()
_FP8 = {"e4m3": (E4M3, 126), "e5m2": (E5M2, 123)}  # table, code of the largest finite value


def fp8_to_f32(bits: Array, kind: str = "e4m3") -> F32:
    """The float32 of 8-bit codes (uint8) of ``kind`` e4m3 or e5m2."""
    values: F32 = _FP8[kind][0][bits]
    return values


def f32_to_fp8(values: Array, kind: str = "e4m3") -> NDArray[np.uint8]:
    """8-bit codes to nearest even, saturating to the largest finite value; NaN becomes 0x7F (``cvt.rn.satfinite``)."""
    table, largest = _FP8[kind]
    steps = table[: largest + 1].astype(np.float64)
    size = np.minimum(np.nan_to_num(np.abs(np.asarray(values, np.float64)), nan=0.0), steps[-1])
    above = np.clip(np.searchsorted(steps, size), 1, largest)
    to_low, to_high = size - steps[above - 1], steps[above] - size
    code = np.where((to_low < to_high) | ((to_low == to_high) & (above % 2 == 1)), above - 1, above)
    return np.where(np.isnan(values), 127, code | (np.signbit(values) << 7)).astype(np.uint8)


def round_float(values: Array, to: np.dtype[np.floating], rounding: str) -> Array:
    """``values`` in the narrower float type ``to``, rounded ``rn``, ``rz``, ``rm`` (down) or ``rp`` (up)."""
    nearest = values.astype(to)
    if rounding == "rn":
        return nearest
    wide = nearest.astype(np.float64)
    exact = values.astype(np.float64)
    too_high = (wide > exact) & ((rounding == "rm") | ((rounding == "rz") & (exact > 0)))
    too_low = (wide < exact) & ((rounding == "rp") | ((rounding == "rz") & (exact < 0)))
    down, up = np.nextafter(nearest, to.type(-np.inf)), np.nextafter(nearest, to.type(np.inf))
    return np.where(too_high, down, np.where(too_low, up, nearest))


def flush(values: F32) -> F32:
    """Denormal float32 values as zero of the same sign, the rest as they are (``.ftz``)."""
    bits = values.view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000)).view(np.float32)


_ONE = np.uint32(1)
_TINY = 0x00FFFFFF


def has_denormal(values: Array) -> bool:
    """Whether a 32-bit array holds a denormal float: shifted left, its exponent is zero and its mantissa is not."""
    shifted = np.left_shift(values.view(np.uint32), _ONE)
    return bool(np.minimum.reduce(np.subtract(shifted, _ONE), axis=None) < _TINY)


def pack_halves(low: Array, high: Array) -> NDArray[np.uint32]:
    """uint32 words of two uint16 arrays."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

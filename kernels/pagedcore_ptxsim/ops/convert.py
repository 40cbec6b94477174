"""Conversions: cvt between every pair of types, and the packed forms that kernels use.

Integer results saturate, float to integer turns NaN into 0 (or the top bit for 64-bit results and f64 sources), and
integers narrow by keeping their low bits. Source: PTX ISA, ``cvt``. Read next: ``formats`` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.errors import UnsupportedPtx
from pagedcore_ptxsim.formats import (
    ROUNDINGS,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_fp8,
    f32_to_tf32,
    flush,
    fp8_to_f32,
    pack_halves,
    round_float,
)
from pagedcore_ptxsim.ops.registry import Function, assign, operation
from pagedcore_ptxsim.scalar_types import Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_TO_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_U16, _F32 = np.dtype(np.uint16), np.dtype(np.float32)
_FLOATS = ("f16", "bf16", "tf32", "f32", "f64")


def _rounding(instruction: Instruction) -> str:
    return next((part for part in instruction.parts if part in ROUNDINGS), "rn")


@operation("cvt")
def _cvt(bind: Binder, instruction: Instruction, position: int) -> Step:
    to, source = instruction.types[-2:]
    if to.endswith("x2") or source.endswith("x2"):
        return _packed(bind, instruction, to, source)
    convert = _conversion(instruction, to, source)
    from_type = numpy_type(source)
    if instruction.has("ftz") and source == "f32":
        inner = convert
        convert = lambda x: inner(flush(x))  # noqa: E731
    values = bind.source(instruction.operands[1], from_type)
    return assign(bind, instruction.operands[0], numpy_type(to), convert, [values])


def _conversion(instruction: Instruction, to: str, source: str) -> Function:
    result = numpy_type(to)
    if source in _FLOATS:
        widen = bf16_to_f32 if source == "bf16" else np.asarray
        if to not in _FLOATS:
            integral = next(_TO_INTEGRAL[part] for part in instruction.parts if part in _TO_INTEGRAL)
            return lambda x: to_integer(integral(widen(x)), result, source)
        return _between_floats(instruction, to, widen)
    if to in _FLOATS:
        return _from_integer(to, _rounding(instruction))
    if instruction.has("sat"):
        return lambda x: _clamp(x, result)
    return lambda x: x.astype(result)


def _clamp(values: Array, result: np.dtype[Any]) -> Array:
    limits, own = np.iinfo(result), np.iinfo(values.dtype)
    return np.clip(values, max(limits.min, own.min), min(limits.max, own.max)).astype(result)


def to_integer(values: Array, result: np.dtype[Any], source: str = "f32") -> Array:
    """Integral floats as integers, saturated; NaN is 0, or the top bit for 64-bit results and f64 sources."""
    limits = np.iinfo(result)
    exact = values.astype(np.float64)
    over, under = exact >= float(limits.max) + (result.itemsize < 8), exact < float(limits.min)
    wrong = over | under | np.isnan(exact)
    inside = np.where(wrong, 0, exact).astype(result)
    nan = 1 << (8 * result.itemsize - 1) if result.itemsize == 8 or source == "f64" else 0
    not_a_number = np.array(nan, f"u{result.itemsize}").view(result)
    return np.where(np.isnan(exact), not_a_number, np.where(over, limits.max, np.where(under, limits.min, inside))
                    ).astype(result)


def _from_integer(to: str, rounding: str) -> Function:
    if to == "bf16":
        return lambda x: f32_to_bf16(_odd_f32(x))
    result = numpy_type(to)
    if rounding == "rn":
        return lambda x: x.astype(result)
    return lambda x: _directed_integer(x, result, rounding)


def _odd_f32(values: Array) -> Array:
    """Integers as float32 rounded to odd, so that rounding again to bf16 is right."""
    near = _directed_integer(values, _F32, "rz")
    inexact = near.astype(np.longdouble) != values.astype(np.longdouble)
    return (near.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)


def _directed_integer(values: Array, result: np.dtype[Any], rounding: str) -> Array:
    near = values.astype(result)
    wide, exact = near.astype(np.longdouble), values.astype(np.longdouble)
    high = (wide > exact) & ((rounding == "rm") | ((rounding == "rz") & (exact > 0)))
    low = (wide < exact) & ((rounding == "rp") | ((rounding == "rz") & (exact < 0)))
    return np.where(high, np.nextafter(near, result.type(-np.inf)),
                    np.where(low, np.nextafter(near, result.type(np.inf)), near))


def _between_floats(instruction: Instruction, to: str, widen: Callable[[Array], Array]) -> Function:
    integral = next((_TO_INTEGRAL[part] for part in instruction.parts if part in _TO_INTEGRAL), None)
    narrow = _narrowing(to, _rounding(instruction))
    flushes = instruction.has("ftz") and to == "f32"

    def apply(values: Array) -> Array:
        wide = widen(values)
        wide = integral(wide) if integral else wide
        if instruction.has("relu"):
            wide = np.where(np.isnan(wide), wide, np.maximum(wide, wide.dtype.type(0)))
        if instruction.has("sat"):
            wide = np.where(wide > 0, np.minimum(wide, wide.dtype.type(1)), wide.dtype.type(0))
        result = narrow(wide)
        return flush(result) if flushes else result
    return apply


def _narrowing(to: str, rounding: str) -> Function:
    if to == "bf16":
        return lambda x: f32_to_bf16(x.astype(np.float32), rounding)
    if to == "tf32":
        return lambda x: f32_to_tf32(x)
    result = numpy_type(to)

    def apply(values: Array) -> Array:
        if values.dtype.itemsize <= result.itemsize:
            return values.astype(result)
        return round_float(values, result, rounding)
    return apply


def _packed(bind: Binder, instruction: Instruction, to: str, source: str) -> Step:
    """Two values of one or two registers; the first source operand becomes the high half."""
    kind = source.removesuffix("x2")
    if kind in ("e4m3", "e5m2"):
        return _unpack_fp8(bind, instruction, kind)
    if source == "f16x2":
        words = bind.source(instruction.operands[1], np.dtype(np.uint32))
        narrow = _half_narrowing(instruction, to.removesuffix("x2"))

        def pair(packed: Array) -> Array:
            both = np.ascontiguousarray(packed).reshape(-1, 1).view(np.float16).astype(np.float32)
            return narrow(both[:, 0]).astype(np.uint16) | (narrow(both[:, 1]).astype(np.uint16) << np.uint16(8))
        return assign(bind, instruction.operands[0], _U16, pair, [words])
    if source != "f32" or len(instruction.operands) != 3:
        raise UnsupportedPtx(f"no packed conversion from .{source} to .{to}")
    high, low = (bind.source(operand, _F32) for operand in instruction.operands[1:3])
    narrow = _half_narrowing(instruction, to.removesuffix("x2"))
    if to in ("e4m3x2", "e5m2x2"):
        return assign(bind, instruction.operands[0], _U16, lambda h, lo: narrow(lo).astype(np.uint16) |
                      (narrow(h).astype(np.uint16) << np.uint16(8)), [high, low])
    return assign(bind, instruction.operands[0], np.dtype(np.uint32),
                  lambda h, lo: pack_halves(narrow(lo), narrow(h)), [high, low])


def _half_narrowing(instruction: Instruction, kind: str) -> Function:
    """float32 to the bits of a half or quarter type."""
    rounding = _rounding(instruction)

    def narrow(values: Array) -> Array:
        if instruction.has("relu"):
            values = np.where(np.isnan(values), values, np.maximum(values, np.float32(0)))
        if kind in ("e4m3", "e5m2"):
            return f32_to_fp8(values, kind)
        if kind == "bf16":
            return f32_to_bf16(_finite(values, instruction, 3.3895313892515355e38), rounding)
        return round_float(_finite(values, instruction, 65504), np.dtype(np.float16), rounding).view(np.uint16)
    return narrow


def _finite(values: Array, instruction: Instruction, largest: float) -> Array:
    return np.clip(values, np.float32(-largest), np.float32(largest)) if instruction.has("satfinite") else values


def _unpack_fp8(bind: Binder, instruction: Instruction, kind: str) -> Step:
    packed = bind.source(instruction.operands[1], _U16)

    def apply(pair: Array) -> Array:
        low, high = (fp8_to_f32(part & np.uint16(255), kind) for part in (pair, pair >> np.uint16(8)))
        if instruction.has("relu"):
            low, high = (np.where(np.isnan(x), x, np.maximum(x, np.float32(0))) for x in (low, high))
        return pack_halves(low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16))
    return assign(bind, instruction.operands[0], np.dtype(np.uint32), apply, [packed])

"""Floating-point arithmetic: f32, f64, f16, bf16 and the packed pairs, fused multiply-add, approximations.

Sums, products and fused operations are correctly rounded (to nearest even, or as ``.rz``/``.rm``/``.rp`` say);
``.ftz`` flushes denormal inputs and results; ``.sat`` clamps to [0, 1]. The approximate functions (``ex2.approx`` and
its like) are computed exactly and rounded, which is within their documented error but not the bits of a device, and
the payload of a NaN is not modelled. Source: PTX ISA, Floating Point Instructions; the fused operation rounds to odd
before the last rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.formats import ROUNDINGS, bf16_to_f32, f32_to_bf16, flush, has_denormal, round_float
from pagedcore_ptxsim.ops.registry import Function, assign, operation
from pagedcore_ptxsim.scalar_types import Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2")
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)


def is_float(instruction: Instruction) -> bool:
    """Whether the operation is one of floating point."""
    return instruction.types[-1] in _FLOATS


def _minimum(x: Array, y: Array) -> Array:
    return _ordered_zero(np.fmin(x, y), x, y, np.bitwise_or)


def _maximum(x: Array, y: Array) -> Array:
    return _ordered_zero(np.fmax(x, y), x, y, np.bitwise_and)


def _ordered_zero(result: Array, x: Array, y: Array, combine: np.ufunc) -> Array:
    """-0 is less than +0, which NumPy does not promise."""
    zero = result == 0
    if not zero.any():
        return result
    bits = f"u{result.dtype.itemsize}"
    both = (x == 0) & (y == 0)
    signed = combine(np.asarray(x).view(bits), np.asarray(y).view(bits)).view(result.dtype)
    return np.where(both, signed, result)


def _nan_aware(function: Function) -> Function:
    return lambda x, y: np.where(np.isnan(x) | np.isnan(y), x.dtype.type(np.nan), function(x, y))


_BASIC: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": _minimum, "max": _maximum,
    "neg": np.negative, "abs": np.absolute,
}


def arithmetic(bind: Binder, instruction: Instruction) -> Step:
    """add, sub, mul, div, min, max, neg, abs of any float type."""
    function = _BASIC[instruction.name]
    if instruction.name in ("min", "max") and instruction.has("NaN"):
        function = _nan_aware(function)
    if instruction.name in ("min", "max") and len(instruction.operands) == 4:
        pair = function
        function = lambda x, y, z: pair(pair(x, y), z)  # noqa: E731
    exact = instruction.name in ("neg", "abs", "min", "max")
    return _float_step(bind, instruction, function if exact else _rounded(function, instruction))


def _rounded(function: Function, instruction: Instruction) -> Function:
    """``function`` with the rounding that the instruction asks for; to nearest is what NumPy does."""
    mode = next((part for part in instruction.parts if part in ROUNDINGS), "rn")
    if mode == "rn" or instruction.types[-1] != "f32":
        return function

    def apply(*values: Array) -> Array:
        wide = [value.astype(np.float64) for value in values]
        return round_float(_odd(function(*wide), _error_sign(instruction.name, wide)), _F32, mode)
    return apply


def _error_sign(name: str, values: list[Array]) -> Array:
    """Sign of (exact result - float64 result); products of float32 are exact, quotients are judged by their residue."""
    x, y = values
    if name == "mul":
        return np.zeros(np.broadcast_shapes(x.shape, y.shape))
    if name == "div":
        quotient = x / y
        head = np.float64(2**27 + 1) * quotient
        high = head - (head - quotient)
        return np.nan_to_num(np.sign(x - high * y - (quotient - high) * y) * np.sign(y))
    y = -y if name == "sub" else y
    total = x + y
    back = total - x
    return np.sign((x - (total - back)) + (y - back))


def _odd(values: Array, error: Array) -> Array:
    """float64 values rounded to odd, given the sign of what their rounding to nearest lost."""
    bits = values.view(np.int64)
    even = (bits & 1 == 0) & (error != 0) & np.isfinite(values)
    outward = np.sign(error) == np.where(np.signbit(values), -1, 1)
    return np.where(even, bits + np.where(outward, 1, -1), bits).view(np.float64)


def _float_step(bind: Binder, instruction: Instruction, function: Function) -> Step:
    """Bind operands of any float type; half types go through arrays of their values and are packed again."""
    kind = instruction.types[-1]
    for modifier, clamp in (("sat", _saturate), ("relu", _relu)):
        if instruction.has(modifier):
            function = _then(clamp, function)
    if kind in ("f32", "f64"):
        dtype = numpy_type(kind)
        if instruction.has("ftz"):
            function = flushing(function, [bind.may_be_denormal(operand) for operand in instruction.operands[1:]])
    else:
        dtype = numpy_type("b32" if kind.endswith("x2") else "b16")
        function = _on_halves(function, kind.startswith("bf16"))
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:]]
    return assign(bind, instruction.operands[0], dtype, function, sources)


def _then(clamp: Callable[[Array], Array], function: Function) -> Function:
    return lambda *values: clamp(function(*values))


def _saturate(values: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))


def _relu(values: Array) -> Array:
    return np.where(np.isnan(values), values, np.maximum(values, values.dtype.type(0)))


def flushing(function: Function, dirty: list[bool]) -> Function:
    """``.ftz``: denormal inputs and results are zeros of their sign. ``dirty`` says which inputs may be denormal."""
    def apply(*values: Array) -> Array:
        result: Array = function(*(flush(value) if looks and has_denormal(value) else value
                                   for looks, value in zip(dirty, values, strict=True)))
        return flush(result) if has_denormal(result) else result

    def clean(*values: Array) -> Array:
        result: Array = function(*values)
        return flush(result) if has_denormal(result) else result
    return apply if any(dirty) else clean


def _on_halves(function: Function, brain: bool) -> Function:
    """Apply a function of float arrays to 16-bit values, one or two in a word."""
    def apply(*words: Array) -> Array:
        dtype = words[0].dtype
        parts = [np.ascontiguousarray(word).reshape(-1).view(np.uint16) for word in words]
        if brain:
            return _to_bf16(function(*(bf16_to_f32(part) for part in parts))).view(dtype)
        return np.ascontiguousarray(function(*(part.view(np.float16) for part in parts)).astype(np.float16)).view(dtype)
    return apply


def _to_bf16(values: Array) -> Array:
    """bf16 bits of float32 results, or of float64 results that were rounded to odd."""
    if values.dtype == np.float64:
        single = round_float(values, _F32, "rz")
        inexact = single.astype(np.float64) != values
        values = np.where(inexact & np.isfinite(values), single.view(np.uint32) | 1, single.view(np.uint32))
        values = values.astype(np.uint32).view(np.float32)
    return f32_to_bf16(values)


@operation("fma")
def _fma(bind: Binder, instruction: Instruction, position: int) -> Step:
    return fused(bind, instruction)


def fused(bind: Binder, instruction: Instruction) -> Step:
    """a * b + c, rounded once."""
    kind = instruction.types[-1]
    mode = next((part for part in instruction.parts if part in ROUNDINGS), "rn")
    if kind == "f64":
        return _float_step(bind, instruction, _fused_f64)
    if kind == "f32":
        if mode != "rn":
            return _float_step(bind, instruction, lambda a, b, c: round_float(_fused_odd(a, b, c), _F32, mode))
        return _float_step(bind, instruction, _fused_flushed if instruction.has("ftz") else fused_f32)
    if kind.startswith("bf16"):
        return _float_step(bind, instruction, _fused_odd)
    return _float_step(bind, instruction, lambda a, b, c: _fused_odd(a, b, c).astype(np.float16))


def _fused_odd(a: Array, b: Array, c: Array) -> Array:
    """The exact value of a * b + c as float64 rounded to odd; a, b, c have at most 24 bits of mantissa."""
    product = a.astype(np.float64) * b
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    return _odd(total, np.nan_to_num(error))


def _fused_flushed(a: Array, b: Array, c: Array) -> Array:
    """As ``fused_f32``, for results that are flushed: how a tiny one rounds does not matter."""
    total = np.asarray(a.astype(np.float64) * b + c)
    ties = np.equal(np.bitwise_and(total.view(np.uint64), _LOW_BITS), _TIE)
    return (_fused_odd(a, b, c) if np.logical_or.reduce(ties, axis=None) else total).astype(np.float32)


_TIE, _LOW_BITS = np.uint64(1 << 28), np.uint64((1 << 29) - 1)
_SMALLEST_NORMAL = np.float64(2.0**-126)


def fused_f32(a: Array, b: Array, c: Array) -> Array:
    """float32 fused multiply-add. The float64 sum decides unless it lies half way between two floats or is tiny."""
    total = np.asarray(a.astype(np.float64) * b + c)
    # Why: rounding twice errs only where the first rounding lands on a tie of the second.
    doubtful = ((total.view(np.uint64) & _LOW_BITS) == _TIE) | (np.abs(total) < _SMALLEST_NORMAL)
    if not doubtful.any():
        return total.astype(np.float32)
    return _fused_odd(a, b, c).astype(np.float32)


def _fused_f64(a: Array, b: Array, c: Array) -> Array:
    """Exact rational arithmetic, one element at a time: slow and rare."""
    plain = np.asarray(a * b + c)
    flat = [np.broadcast_to(x, plain.shape).reshape(-1).tolist() for x in (a, b, c)]
    result = plain.reshape(-1).copy()
    for i, (x, y, z) in enumerate(zip(*flat, strict=True)):
        if np.isfinite([x, y, z]).all() and (x and y):
            result[i] = _nearest(Fraction(x) * Fraction(y) + Fraction(z), result[i])
    return result.reshape(plain.shape)


def _nearest(value: Fraction, if_zero: float) -> float:
    try:
        return float(value) if value else if_zero
    except OverflowError:
        return float(np.inf if value > 0 else -np.inf)


def _approximate(function: Function) -> Function:
    """Computed in float64 and rounded once, so that no libm's float32 shows."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
}


@operation(*_FUNCTIONS)
def _unary(bind: Binder, instruction: Instruction, position: int) -> Step:
    function = _FUNCTIONS[instruction.name]
    mode = next((part for part in instruction.parts if part in ("rz", "rm", "rp")), "rn")
    if instruction.types[-1] == "f64":
        return _float_step(bind, instruction, function)
    if mode != "rn":
        return _float_step(bind, instruction, lambda x: round_float(function(x.astype(np.float64)), _F32, mode))
    return _float_step(bind, instruction, _approximate(function))


@operation("copysign")
def _copysign(bind: Binder, instruction: Instruction, position: int) -> Step:
    """d has the sign of a and the size of b."""
    return _float_step(bind, instruction, lambda sign, size: np.copysign(size, sign))


@operation("testp")
def _testp(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    tiny = np.finfo(dtype).tiny
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }
    source = bind.source(instruction.operands[1], dtype)
    return assign(bind, instruction.operands[0], np.dtype(np.bool_), tests[instruction.parts[1]], [source])

"""Integer arithmetic: wrap-around, high and widening products, division, saturation, carries, dot products.

Division by zero, undefined in PTX, gives all ones (and the dividend as remainder) as NVIDIA hardware does.
Source: PTX ISA, Integer Arithmetic Instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.ops import floating
from pagedcore_ptxsim.ops.registry import assign, elementwise, operation
from pagedcore_ptxsim.scalar_types import SIGNED, UNSIGNED, Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_PLAIN = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "neg": np.negative,
          "abs": np.absolute}


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return (SIGNED if dtype.kind == "i" else UNSIGNED)[2 * dtype.itemsize]


@operation("add", "sub", "min", "max", "neg", "abs")
def _plain(bind: Binder, instruction: Instruction, position: int) -> Step:
    if floating.is_float(instruction):
        return floating.arithmetic(bind, instruction)
    dtype = numpy_type(instruction.types[-1])
    if instruction.has("cc"):
        return _carry_out(bind, instruction, None)
    if instruction.has("sat"):
        return elementwise(bind, instruction, _saturating(_PLAIN[instruction.name]), dtype)
    if instruction.types[-1].endswith("x2"):
        return _packed(bind, instruction)
    return elementwise(bind, instruction, _PLAIN[instruction.name], dtype)


def _packed(bind: Binder, instruction: Instruction) -> Step:
    """Two 16-bit lanes in a word (``add.u16x2``, ``max.s16x2`` ...)."""
    half = numpy_type(instruction.types[-1].removesuffix("x2"))
    function = _PLAIN[instruction.name]

    def apply(*words: Array) -> Array:
        parts = [np.ascontiguousarray(word).reshape(-1).view(half).reshape(-1, 2) for word in words]
        return np.ascontiguousarray(function(*parts)).view(np.uint32).reshape(-1)
    return elementwise(bind, instruction, apply, np.dtype(np.uint32))


def _saturating(function: np.ufunc) -> Any:
    def apply(x: Array, y: Array) -> Array:
        return np.clip(function(x.astype(np.int64), y.astype(np.int64)), -(2**31), 2**31 - 1).astype(np.int32)
    return apply


@operation("addc", "subc")
def _with_carry(bind: Binder, instruction: Instruction, position: int) -> Step:
    return _carry_out(bind, instruction, "carry")


def _carry_out(bind: Binder, instruction: Instruction, carry_in: str | None) -> Step:
    """add.cc, addc, sub.cc, subc on 32 and 64 bits; the carry is a register of the batch."""
    dtype = UNSIGNED[numpy_type(instruction.types[-1]).itemsize]
    x, y = (bind.source(operand, dtype) for operand in instruction.operands[1:3])
    carry = bind.batch.registers.setdefault("carry", np.zeros(bind.batch.count, np.bool_))
    write, write_carry = bind.writer(instruction.operands[0], dtype), bind.writer("carry", np.dtype(np.bool_))
    subtract = instruction.name.startswith("sub")

    def step() -> None:
        taken = carry.astype(dtype) if carry_in else dtype.type(0)
        first = x - y if subtract else x + y
        result = first - taken if subtract else first + taken
        out = (x < y) | (first < taken) if subtract else (first < x) | (result < first)
        write(result)
        if instruction.has("cc"):
            write_carry(out)
    return step


def multiply_high(x: Array, y: Array) -> Array:
    """The upper half of the double-width product."""
    dtype = x.dtype
    if dtype.itemsize < 8:
        bits = 8 * dtype.itemsize
        wide = _wide(dtype)
        return ((x.astype(wide) * y.astype(wide)) >> wide.type(bits)).astype(dtype)
    mask = np.uint64(0xFFFFFFFF)
    xu, yu, half = x.astype(np.uint64), y.astype(np.uint64), np.uint64(32)
    low_low, high_low = (xu & mask) * (yu & mask), (xu >> half) * (yu & mask)
    low_high, high_high = (xu & mask) * (yu >> half), (xu >> half) * (yu >> half)
    middle = (low_low >> half) + (high_low & mask) + (low_high & mask)
    high = high_high + (high_low >> half) + (low_high >> half) + (middle >> half)
    if dtype.kind == "i":
        high = high - np.where(x < 0, yu, np.uint64(0)) - np.where(y < 0, xu, np.uint64(0))
    return high.astype(dtype)


def _multiply_wide(x: Array, y: Array) -> Array:
    wide = _wide(x.dtype)
    return x.astype(wide) * y.astype(wide)


@operation("mul")
def _mul(bind: Binder, instruction: Instruction, position: int) -> Step:
    if floating.is_float(instruction):
        return floating.arithmetic(bind, instruction)
    dtype = numpy_type(instruction.types[-1])
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:]]
    if instruction.has("wide"):
        return assign(bind, instruction.operands[0], _wide(dtype), _multiply_wide, sources)
    return elementwise(bind, instruction, multiply_high if instruction.has("hi") else np.multiply, dtype)


@operation("mad")
def _mad(bind: Binder, instruction: Instruction, position: int) -> Step:
    if floating.is_float(instruction):
        return floating.fused(bind, instruction)
    dtype = numpy_type(instruction.types[-1])
    result = _wide(dtype) if instruction.has("wide") else dtype
    product = _multiply_wide if instruction.has("wide") else multiply_high if instruction.has("hi") else np.multiply
    x, y = (bind.source(operand, dtype) for operand in instruction.operands[1:3])
    addend = bind.source(instruction.operands[3], result)
    return assign(bind, instruction.operands[0], result, lambda a, b, c: product(a, b) + c, [x, y, addend])


@operation("mul24", "mad24")
def _mul24(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    shift = dtype.type(8)

    def low(x: Array, y: Array, addend: Any = 0) -> Array:
        wide = _wide(dtype)
        product = ((x << shift) >> shift).astype(wide) * ((y << shift) >> shift).astype(wide)
        return (product >> wide.type(16) if instruction.has("hi") else product).astype(dtype) + addend
    return elementwise(bind, instruction, low, dtype)


def divide(x: Array, y: Array) -> Array:
    """Quotient toward zero."""
    if x.dtype.kind == "u":
        return np.where(y == 0, x.dtype.type(np.iinfo(x.dtype).max), x // np.where(y == 0, y.dtype.type(1), y))
    safe = np.where(y == 0, y.dtype.type(1), y)
    quotient = x // safe
    quotient = quotient + ((quotient < 0) & (quotient * safe != x)).astype(x.dtype)
    return np.where(y == 0, x.dtype.type(-1), quotient).astype(x.dtype)


def _remainder(x: Array, y: Array) -> Array:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y))).astype(x.dtype)


@operation("div")
def _div(bind: Binder, instruction: Instruction, position: int) -> Step:
    if floating.is_float(instruction):
        return floating.arithmetic(bind, instruction)
    return elementwise(bind, instruction, divide, numpy_type(instruction.types[-1]))


@operation("rem")
def _rem(bind: Binder, instruction: Instruction, position: int) -> Step:
    return elementwise(bind, instruction, _remainder, numpy_type(instruction.types[-1]))


@operation("sad")
def _sad(bind: Binder, instruction: Instruction, position: int) -> Step:
    return elementwise(bind, instruction, lambda x, y, z: np.where(x > y, x - y, y - x) + z,
                       numpy_type(instruction.types[-1]))


@operation("dp4a", "dp2a")
def _dot(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Four byte products, or two products of 16 and 8 bits, added to a word."""
    first, second = (numpy_type(kind) for kind in instruction.types[-2:])
    four = instruction.name == "dp4a"
    left = np.dtype(f"{first.kind}{1 if four else 2}")
    right = np.dtype(f"{second.kind}1")
    half = slice(None) if four else slice(2, 4) if instruction.has("hi") else slice(0, 2)
    result = np.dtype(np.int32 if "i" in (first.kind, second.kind) else np.uint32)

    def apply(x: Array, y: Array, z: Array) -> Array:
        a = np.ascontiguousarray(x).reshape(-1, 1).view(left).astype(np.int64)
        b = np.ascontiguousarray(y).reshape(-1, 1).view(right)[:, half].astype(np.int64)
        return ((a * b).sum(1) + z.astype(np.int64)).astype(result)
    x, y = (bind.source(operand, np.dtype(np.uint32)) for operand in instruction.operands[1:3])
    return assign(bind, instruction.operands[0], result, apply, [x, y, bind.source(instruction.operands[3], result)])

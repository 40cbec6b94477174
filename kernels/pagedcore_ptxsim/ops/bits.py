"""Bits: logic, shifts, bit fields, byte permutation, counting. Source: PTX ISA, Logic and Shift Instructions."""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.ops.registry import assign, elementwise, operation
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction, integer

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
_U32, _I64 = np.dtype(np.uint32), np.dtype(np.int64)


@operation("and", "or", "xor", "not")
def _logic(bind: Binder, instruction: Instruction, position: int) -> Step:
    return elementwise(bind, instruction, _LOGIC[instruction.name], numpy_type(instruction.types[-1]))


@operation("cnot")
def _cnot(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    return elementwise(bind, instruction, lambda x: (x == 0).astype(dtype), dtype)


@operation("shl", "shr")
def _shift(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Shifts clamp: by the width or more gives 0, or the sign for ``shr.s``."""
    dtype = numpy_type(instruction.types[-1])
    bits = 8 * dtype.itemsize
    function = np.left_shift if instruction.name == "shl" else np.right_shift
    value, amount = bind.source(instruction.operands[1], dtype), bind.source(instruction.operands[2], _U32)
    if amount.ndim == 0 and int(amount) < bits:
        return assign(bind, instruction.operands[0], dtype, function, [value, np.array(int(amount), dtype)])
    keeps_sign = instruction.name == "shr" and dtype.kind == "i"

    def apply(x: Array, n: Array) -> Array:
        shifted = function(x, np.minimum(n, bits - 1).astype(dtype))
        return shifted if keeps_sign else np.where(n >= bits, dtype.type(0), shifted)
    return assign(bind, instruction.operands[0], dtype, apply, [value, amount])


@operation("shf")
def _funnel(bind: Binder, instruction: Instruction, position: int) -> Step:
    """The high (``l``) or low (``r``) word of a shifted pair of words."""
    clamp = instruction.has("clamp")
    left = instruction.has("l")

    def apply(low: Array, high: Array, amount: Array) -> Array:
        n = (np.minimum(amount, 32) if clamp else amount & np.uint32(31)).astype(np.uint64)
        pair = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        moved = (pair << n) >> np.uint64(32) if left else pair >> n
        return moved.astype(np.uint32)
    return elementwise(bind, instruction, apply, _U32)


@operation("lop3")
def _lop3(bind: Binder, instruction: Instruction, position: int) -> Step:
    table = integer(instruction.operands[4])

    def apply(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result
    sources = [bind.source(operand, _U32) for operand in instruction.operands[1:4]]
    return assign(bind, instruction.operands[0], _U32, apply, sources)


@operation("bfi")
def _insert(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = UNSIGNED[numpy_type(instruction.types[-1]).itemsize]
    bits = 8 * dtype.itemsize
    one = dtype.type(1)

    def apply(field: Array, into: Array, start: Array, length: Array) -> Array:
        begin, width = start & np.uint32(0xFF), length & np.uint32(0xFF)
        ones = np.where(width >= bits, ~dtype.type(0), (one << np.minimum(width, bits - 1).astype(dtype)) - one)
        shift = np.minimum(begin, bits - 1).astype(dtype)
        mask = np.where(begin >= bits, dtype.type(0), ones << shift)
        return ((field << shift) & mask) | (into & ~mask)
    sources = [bind.source(operand, dtype) for operand in instruction.operands[1:3]]
    sources += [bind.source(operand, _U32) for operand in instruction.operands[3:5]]
    return assign(bind, instruction.operands[0], dtype, apply, sources)


@operation("bfe")
def _extract(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    bits = 8 * dtype.itemsize
    unsigned = UNSIGNED[dtype.itemsize]

    def apply(x: Array, start: Array, length: Array) -> Array:
        begin, width = (start & np.uint32(0xFF)).astype(np.int64), (length & np.uint32(0xFF)).astype(np.int64)
        shifted = x >> np.minimum(begin, bits - 1).astype(dtype)
        if dtype.kind == "u":
            shifted = np.where(begin >= bits, dtype.type(0), shifted)
        kept = np.clip(width, 1, bits)
        up = (bits - kept).astype(dtype)
        # Why: where the field reaches past the top, the bits above are sign (or zero), as `shifted` already has them.
        field = np.where(begin + width > bits, shifted, (shifted.view(unsigned) << up.view(unsigned)).view(dtype) >> up)
        return np.where(width == 0, dtype.type(0), field)
    sources = [bind.source(instruction.operands[1], dtype)]
    sources += [bind.source(operand, _U32) for operand in instruction.operands[2:4]]
    return assign(bind, instruction.operands[0], dtype, apply, sources)


@operation("bmsk")
def _mask(bind: Binder, instruction: Instruction, position: int) -> Step:
    def apply(start: Array, length: Array) -> Array:
        begin, width = (np.minimum(x, 32).astype(np.uint64) for x in (start, length))
        if instruction.has("wrap"):
            begin, width = (x.astype(np.uint64) & np.uint64(31) for x in (start, length))
        return ((((np.uint64(1) << width) - np.uint64(1)) << begin) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return elementwise(bind, instruction, apply, _U32)


@operation("prmt")
def _permute(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Pick four of eight bytes; bit 3 of a selector copies the byte's sign. The named modes are table look-ups."""
    modes = {"f4e": [[(i + j) % 8 for i in range(4)] for j in range(4)],
             "b4e": [[(j - i) % 8 for i in range(4)] for j in range(4)],
             "rc8": [[j] * 4 for j in range(4)],
             "ecl": [[max(i, j) for i in range(4)] for j in range(4)],
             "ecr": [[min(i, j) for i in range(4)] for j in range(4)],
             "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]]}
    mode = next((modes[part] for part in instruction.parts if part in modes), None)
    count = bind.batch.count

    def apply(low: Array, high: Array, selector: Array) -> Array:
        eight = np.empty((count, 2), np.uint32)
        eight[:, 0], eight[:, 1] = low, high
        if mode is not None:
            chosen = np.broadcast_to(np.array(mode)[selector & 3], (count, 4))
            signs = np.zeros((count, 4), np.bool_)
        else:
            nibbles = np.broadcast_to(selector, count)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
            chosen, signs = (nibbles & np.uint32(7)).astype(np.int64), (nibbles & np.uint32(8)) != 0
        picked = np.take_along_axis(eight.view(np.uint8), chosen, 1)
        if signs.any():
            picked = np.where(signs, np.where(picked & 0x80, np.uint8(255), np.uint8(0)), picked)
        return np.ascontiguousarray(picked).view(np.uint32)[:, 0]
    return elementwise(bind, instruction, apply, _U32)


def leading_zeros(x: Array) -> Array:
    """Zero bits above the highest set bit of unsigned integers."""
    bits = 8 * x.dtype.itemsize
    left = np.zeros(x.shape, np.int64)
    rest = x.copy()
    step = bits // 2
    while step:
        empty = rest < (x.dtype.type(1) << x.dtype.type(bits - step))
        left += np.where(empty, step, 0)
        rest = np.where(empty, rest << x.dtype.type(step), rest)
        step //= 2
    return (left + (rest == 0)).astype(np.uint32)


@operation("clz", "popc", "brev", "bfind")
def _count(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    unsigned = UNSIGNED[dtype.itemsize]
    bits = 8 * dtype.itemsize

    def find(x: Array) -> Array:
        magnitude = np.where(x < 0, ~x, x).view(unsigned) if dtype.kind == "i" else x
        zeros = leading_zeros(magnitude)
        found = zeros if instruction.has("shiftamt") else np.uint32(bits - 1) - zeros
        return np.where(zeros == bits, np.uint32(0xFFFFFFFF), found)

    def reverse(x: Array) -> Array:
        each = np.unpackbits(np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")
        return np.packbits(each[:, ::-1], axis=1, bitorder="little").view(unsigned)[:, 0]

    functions = {"clz": leading_zeros, "popc": lambda x: np.bitwise_count(x).astype(np.uint32), "bfind": find}
    sources = [bind.source(instruction.operands[1], dtype if instruction.name == "bfind" else unsigned)]
    if instruction.name == "brev":
        return assign(bind, instruction.operands[0], unsigned, reverse, sources)
    return assign(bind, instruction.operands[0], _U32, functions[instruction.name], sources)

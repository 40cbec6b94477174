"""Matrix fragments and products: ldmatrix, stmatrix, movmatrix, mma.sync.

Thread ``4 g + q`` of a warp holds, of a matrix with elements of ``b`` bits, in register ``i`` the ``32 / b``
neighbours that begin at row ``g`` (+8 for odd ``i``) and column ``(32 / b) q`` (+ ``4 * 32 / b`` for ``i`` of 2 and 3)
of A; B is the same with columns for rows; C and D hold two neighbours of rows ``g`` and ``g + 8``.
Products are exact and sums float32 (int32), in no particular order: a device may differ in the last bits.
Source: PTX ISA, Matrix Fragments for mma.m16n8k16 and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from pagedcore_ptxsim.batch import WARP, Batch
from pagedcore_ptxsim.binder import Binder, split_vector
from pagedcore_ptxsim.errors import UnsupportedPtx
from pagedcore_ptxsim.formats import bf16_to_f32, fp8_to_f32
from pagedcore_ptxsim.ops.memory import loader, storer
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.scalar_types import Array
from pagedcore_ptxsim.scheduler import Step, whole_warps
from pagedcore_ptxsim.syntax import Instruction

_U32 = np.dtype(np.uint32)
_ROW = 16
"""Bytes of one row of an 8x8 matrix of 16-bit elements."""


@operation("ldmatrix")
def _ldmatrix(bind: Binder, instruction: Instruction, position: int) -> Step:
    """1, 2 or 4 matrices of 8 rows of 16 bytes; thread ``8 m + r`` gives the address of row r of matrix m."""
    if instruction.types[-1] != "b16" or not instruction.has("m8n8"):
        raise UnsupportedPtx("ldmatrix of other than .m8n8 .b16")
    batch = bind.batch
    targets = split_vector(instruction.operands[0])
    writers = [bind.lane_writer(target, _U32) for target in targets]
    addresses, load = bind.addresses(instruction.operands[1]), loader(batch, "shared")
    count, transposed = len(targets), instruction.has("trans")

    def step() -> None:
        lanes = batch.lanes
        giving = lanes % WARP < 8 * count
        rows = load(addresses()[giving], _ROW, lanes[giving])
        matrices = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, WARP)
        for i, write in enumerate(writers):
            write(words[:, i].reshape(-1))
    return whole_warps(batch, position, step)


@operation("stmatrix")
def _stmatrix(bind: Binder, instruction: Instruction, position: int) -> Step:
    """The inverse of ldmatrix."""
    batch = bind.batch
    sources = [bind.source(operand, _U32) for operand in split_vector(instruction.operands[1])]
    addresses, store = bind.addresses(instruction.operands[0]), storer(batch, "shared")
    count, transposed = len(sources), instruction.has("trans")

    def step() -> None:
        lanes = batch.lanes
        words = np.stack([source[lanes].reshape(-1, WARP) for source in sources], 1)
        matrices = words.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        giving = lanes % WARP < 8 * count
        rows = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, _ROW)
        store(addresses()[giving], _ROW, lanes[giving], rows)
    return whole_warps(batch, position, step)


@operation("movmatrix")
def _movmatrix(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Transpose an 8x8 matrix of 16-bit elements across the warp."""
    batch, source = bind.batch, bind.source(instruction.operands[1], _U32)
    write = bind.lane_writer(instruction.operands[0], _U32)

    def step() -> None:
        matrix = np.ascontiguousarray(source[batch.lanes]).view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        write(np.ascontiguousarray(matrix).view(np.uint32).reshape(-1))
    return whole_warps(batch, position, step)


def _half(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


_ELEMENTS: dict[str, tuple[type[np.generic], Callable[[Array], Array]]] = {
    "f16": (np.uint16, _half),
    "bf16": (np.uint16, bf16_to_f32),
    "tf32": (np.uint32, lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32)),
    "e4m3": (np.uint8, lambda bits: fp8_to_f32(bits, "e4m3")),
    "e5m2": (np.uint8, lambda bits: fp8_to_f32(bits, "e5m2")),
    "s8": (np.uint8, lambda bits: bits.view(np.int8).astype(np.int32)),
    "u8": (np.uint8, lambda bits: bits.astype(np.int32)),
}
"""How elements are stored in a fragment's registers, and their values."""


Registers = list[Array]
"""The registers of a fragment: uint32[warps, 8, 4] each, by group and place in the group."""


def _spread(register: Array, kind: str, out: Array) -> None:
    """Values of the elements of one register, into out[warps, 8, 4, elements]."""
    if kind == "bf16":
        bits = out.view(np.uint32)
        np.left_shift(register, np.uint32(16), out=bits[..., 0])
        np.bitwise_and(register, np.uint32(0xFFFF0000), out=bits[..., 1])
        return
    stored, value = _ELEMENTS[kind]
    elements = np.ascontiguousarray(register).view(stored)
    out[...] = value(elements).reshape(out.shape)


def _value_type(kind: str) -> type[np.generic]:
    return np.int32 if kind in ("s8", "u8") else np.float32


def unpack_a(registers: Registers, kind: str) -> Array:
    """Values [warps, 16, K] of A fragments."""
    per = 4 // np.dtype(_ELEMENTS[kind][0]).itemsize
    warps, halves = len(registers[0]), len(registers) // 2
    out = np.empty((warps, 2, 8, halves, 4, per), _value_type(kind))
    for i, register in enumerate(registers):
        _spread(register, kind, out[:, i & 1, :, i >> 1])
    return out.reshape(warps, 16, 4 * halves * per)


def unpack_b(registers: Registers, kind: str) -> Array:
    """Values [warps, K, 8] of B fragments: a transposed view of rows that are contiguous in K."""
    per = 4 // np.dtype(_ELEMENTS[kind][0]).itemsize
    warps, count = len(registers[0]), len(registers)
    out = np.empty((warps, 8, count, 4, per), _value_type(kind))
    for i, register in enumerate(registers):
        _spread(register, kind, out[:, :, i])
    return out.reshape(warps, 8, 4 * count * per).transpose(0, 2, 1)


def _unpack_c(registers: Registers, kind: str) -> Array:
    """Values [warps, 16, 8] of C fragments: four words, or two words of half pairs."""
    out = np.empty((len(registers[0]), 2, 8, 4, 2), np.int32 if kind == "s32" else np.float32)
    for i, register in enumerate(registers):
        if kind == "f16":
            out[:, i] = np.ascontiguousarray(register).view(np.float16).reshape(-1, 8, 4, 2)
        else:
            out[:, i >> 1, :, :, i & 1] = register.view(out.dtype)
    return out.reshape(-1, 16, 8)


def _pack_d(values: Array, kind: str) -> Registers:
    """uint32[threads] of each register of D values [warps, 16, 8]."""
    parts = values.reshape(-1, 2, 8, 4, 2)
    if kind == "f16":
        halves = np.ascontiguousarray(parts.astype(np.float16)).view(np.uint32)
        return [halves[:, i].reshape(-1) for i in range(2)]
    return [parts[:, i >> 1, :, :, i & 1].reshape(-1).view(np.uint32) for i in range(4)]


@operation("mma")
def _mma(bind: Binder, instruction: Instruction, position: int) -> Step:
    """D = A B + C of shapes m16n8kK, row-major A and column-major B."""
    shape = re.fullmatch(r"m16n8k(\d+)", next((part for part in instruction.parts if part.startswith("m16")), ""))
    kinds = [part for part in instruction.parts if part in (*_ELEMENTS, "f32", "s32")]
    if shape is None or len(kinds) != 4 or instruction.has("sp", "block_scale", "mxf8f6f4"):
        raise UnsupportedPtx("mma of other than dense m16n8k*")
    d_kind, a_kind, b_kind, c_kind = kinds
    batch = bind.batch
    a, b, c = ([bind.source(each, _U32) for each in split_vector(part)] for part in instruction.operands[1:4])
    if len(a) * 128 // (16 * _ELEMENTS[a_kind][0]().itemsize) != int(shape.group(1)):
        raise UnsupportedPtx(f"mma .k{shape.group(1)} with {len(a)} registers of A")
    writers = [bind.lane_writer(target, _U32) for target in split_vector(instruction.operands[0])]
    saturate = instruction.has("satfinite") and d_kind == "s32"

    def fragment(sources: list[Array]) -> Registers:
        return [_of_active(source, batch) for source in sources]

    def step() -> None:
        left, right = unpack_a(fragment(a), a_kind), unpack_b(fragment(b), b_kind)
        addend = _unpack_c(fragment(c), c_kind)
        if saturate:
            exact = left.astype(np.int64) @ right.astype(np.int64) + addend
            result = np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32)
        else:
            result = left @ right
            result += addend
        for write, word in zip(writers, _pack_d(result, d_kind), strict=True):
            write(word)
    return whole_warps(batch, position, step)


def _of_active(source: Array, batch: Batch) -> Array:
    """A register of the active warps, uint32[warps, 8, 4]; a literal is the same in every thread."""
    if source.ndim == 0:
        return np.full((len(batch.lanes) // WARP, 8, 4), source)
    return (source if batch.full else source[batch.lanes]).reshape(-1, 8, 4)

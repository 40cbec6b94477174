"""The inner part of products of ``grouped_bytes.py`` on matrix units: the same sums of integers, so the same bits.

A chunk of a group of 4 bits is unpacked to int8, which is tiles of weights; its zero points are subtracted there. One
of 8 bits is such tiles as it is. When the last chunk of a group is multiplied, its sums become float32 and are scaled,
as ``grouped_bytes.py`` says. Weights of 4 bits that a scale and a least weight make are from 0 to 15, others from -16
to 15. Read ``amx.py`` for the instructions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.amx import multiply_blocks
from pagedcore_kernels.cpu.matmul.grouped_bytes import MIDDLE, four_values
from pagedcore_kernels.cpu.matmul.grouped_tiles import (
    UNIT,
    WITH_LEAST,
    WITH_ZEROS,
    load_numbers,
    load_zeros,
    scale_bytes,
    unit_bytes,
)
from pagedcore_kernels.cpu.matmul.tiles import PANEL, STEP_BYTES, SUM_BYTES
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT8,
    INT32,
    LANES,
    LINE,
    Builder,
    Typing,
    Value,
    floats,
    fma,
    int64,
    integer_constant,
    load,
    splat,
    store,
)

CHUNK_UNITS = 32
"""Most units of a chunk: as many weights as 16 KiB hold in int8."""

_VECTORS, _STEPS_OF_UNIT = PANEL // LANES, UNIT // 4
_WHOLE, _BYTES = ir.VectorType(INT32, LANES), ir.VectorType(INT8, 4 * LANES)


@njit(inline="always")
def multiply_byte_blocks_of_chunk(
    form: int, bits: int, values: int, halves: int, rows: int, row_bytes: int, num_rows: int, block_rows: int,
    known: int, known_bytes: int, weights: int, group: int, num_units: int, is_first: int, is_last: int, sums: int,
    ahead: int, buffer: int, products: int,
) -> None:  # fmt: skip
    """``multiply_byte_tiles`` for a chunk of a group, by blocks of rows as ``amx.multiply_blocks`` cuts them.

    ``products`` [blocks, block_rows, PANEL] is room for the int32 sums of the group, whose first and last chunk
    ``is_first`` and ``is_last`` say; ``buffer`` is room for the chunk's weights of 4 bits.
    """
    steps, ahead_bytes, tiles = num_units * _STEPS_OF_UNIT, num_units * PANEL * bits, weights
    if bits == 4:
        unpack_bytes(values, halves, weights, group, num_units, buffer)
        tiles = buffer
    multiply_blocks(form, rows, row_bytes, num_rows, block_rows, tiles, steps, products, is_first, ahead, ahead_bytes)
    if is_last:
        for block in range((num_rows + block_rows - 1) // block_rows):
            place, row = block * block_rows * SUM_BYTES, min(block * block_rows, num_rows - block_rows)
            add_scaled_products(
                values, halves, products + place, known + row * known_bytes, known_bytes, group, block_rows,
                sums + place,
            )  # fmt: skip


@intrinsic(prefer_literal=True)
def unpack_bytes(
    typing: Typing, values: Any, halves: Any, weights: Any, group: Any, num_units: Any, buffer: Any
) -> Any:  # fmt: skip
    """buffer[steps, PANEL, 4] = the values of ``num_units``, less what of them stands for zero. Literal: the first two.

    ``group`` is the address of the weights' header.
    """
    stand_for, half = values.literal_value, halves.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, w, header, units, target = args
        zeros = [_four_zeros(b, header, v, stand_for, half) for v in range(_VECTORS)]
        with cgutils.for_range(b, units) as loop:
            place, unpacked = (b.mul(loop.index, int64(size)) for size in (unit_bytes(4), _STEPS_OF_UNIT * STEP_BYTES))
            for v, zero in enumerate(zeros):
                packed = load(b, w, b.add(place, int64(v * LINE)), _WHOLE, 4)
                for step in range(_STEPS_OF_UNIT):
                    made = b.bitcast(four_values(b, packed, step), _BYTES)
                    made = made if zero is None else b.sub(made, zero)
                    store(b, made, target, b.add(unpacked, int64(step * STEP_BYTES + v * LINE)), LINE)
        return context.get_dummy_value()

    return types.void(values, halves, *[types.int64] * 4), codegen


def _four_zeros(b: Builder, header: Value, vector: int, values: int, halves: int) -> Value | None:
    """Return what is subtracted from each of the four values in a lane."""
    if values == WITH_LEAST:
        return None
    if values != WITH_ZEROS:
        return integer_constant(MIDDLE, _BYTES)
    zeros = b.add(load_zeros(b, header, vector, halves), integer_constant(MIDDLE, _WHOLE))
    return b.bitcast(b.mul(zeros, integer_constant(0x01010101, _WHOLE)), _BYTES)


@intrinsic(prefer_literal=True)
def add_scaled_products(
    typing: Typing, values: Any, halves: Any, products: Any, known: Any, known_bytes: Any, group: Any, num_rows: Any,
    sums: Any,
) -> Any:  # fmt: skip
    """sums[num_rows, PANEL] += scales * (row scale * products), and then least weights * the row's sum.

    Literal: values, halves. ``products`` are int32 [num_rows, PANEL]; the others are as in ``multiply_byte_tile``.
    """
    stand_for, half = values.literal_value, halves.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, of_rows, stride, header, count, target = args
        scales = [load_numbers(b, header, 0, v, half) for v in range(_VECTORS)]
        has_least = stand_for == WITH_LEAST
        least = [load_numbers(b, header, scale_bytes(half), v, half) for v in range(_VECTORS if has_least else 0)]
        with cgutils.for_range(b, count) as loop:
            place, of_row = b.mul(loop.index, int64(SUM_BYTES)), b.add(of_rows, b.mul(loop.index, stride))
            scale = splat(b, load(b, of_row, 0, FLOAT, 4))
            inputs = b.fmul(b.sitofp(splat(b, load(b, of_row, 4, INT32, 4)), floats()), scale) if has_least else None
            for v in range(_VECTORS):
                here = b.add(place, int64(v * LINE))
                total = b.fmul(b.sitofp(load(b, source, here, _WHOLE, LINE), floats()), scale)
                after = fma(b, total, scales[v], load(b, target, here, floats(), LINE))
                if inputs is not None:
                    after = fma(b, inputs, least[v], after)
                store(b, after, target, here, LINE)
        return context.get_dummy_value()

    return types.void(values, halves, *[types.int64] * 6), codegen

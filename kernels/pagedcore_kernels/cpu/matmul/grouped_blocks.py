"""The inner part of weight-only products on matrix units: a chunk is unpacked to bfloat16, which is tiles of weights.

An output is the sum over chunks, in order, of the chunk's sum, made as ``amx.py`` says, times the group's scale, each
in one fused operation; where weights have a least one, the chunk's sum of inputs, made in the same order, times that
comes next. Read ``grouped_tiles.py`` for how weights are packed, and for other processors.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.amx import multiply_blocks, sum_inputs_of_blocks
from pagedcore_kernels.cpu.matmul.grouped_tiles import (
    BUFFER_WEIGHTS,
    KEPT,
    ONES,
    UNIT,
    WITH_LEAST,
    multiply_grouped_tile,
    scale_bytes,
)
from pagedcore_kernels.cpu.matmul.tiles import MATRIX_UNITS, PAIRS, PANEL, SUM_BYTES
from pagedcore_kernels.cpu.simd import (
    INT32,
    LANES,
    Builder,
    Typing,
    Value,
    floats,
    fma,
    int64,
    integer_constant,
    load,
    store,
)

_UNPACKED_AT_ONCE, _PAIRS_OF_UNIT = 4, UNIT // 2
"""Vectors that are unpacked at a time, and pairs of inputs of a unit."""
_VECTORS = PANEL // LANES
_WHOLE = ir.VectorType(INT32, LANES)
_LINE = 64


@njit(inline="always")
def multiply_blocks_of_chunk(
    bits: int, values: int, halves: int, rows: int, row_bytes: int, num_rows: int, block_rows: int, weights: int,
    group: int, num_units: int, sums: int, ahead: int, buffer: int, products: int, of_inputs: int, ones: int,
) -> None:  # fmt: skip
    """``multiply_tiles_of_chunk`` on matrix units, by blocks of rows as ``amx.multiply_blocks`` cuts them.

    ``products`` and ``of_inputs`` are room for the sums of the chunk, which are multiplied with the scales and least
    weights and added to ``sums``; ``ones`` is a tile of ones.
    """
    multiply_grouped_tile(
        PAIRS, bits, values, halves, KEPT, _UNPACKED_AT_ONCE, 1, 0, rows, row_bytes, weights, group, num_units, sums,
        ahead, buffer,
    )  # fmt: skip
    steps = num_units * _PAIRS_OF_UNIT
    multiply_blocks(MATRIX_UNITS, rows, row_bytes, num_rows, block_rows, buffer, steps, products, 1, buffer, 0)
    if values == WITH_LEAST:
        sum_inputs_of_blocks(rows, row_bytes, num_rows, block_rows, ones, steps, of_inputs)
    num_places = (num_rows + block_rows - 1) // block_rows * block_rows
    add_scaled(values, products, of_inputs, buffer + BUFFER_WEIGHTS, num_places, sums)


@intrinsic(prefer_literal=True)
def add_scaled(
    typing: Typing, values: Any, products: Any, of_inputs: Any, header: Any, num_rows: Any, sums: Any
) -> Any:
    """sums[num_rows, PANEL] += scales * products, and then least weights * ``of_inputs`` [num_rows, 16], each fused.

    Literal: values. ``header`` is the address of float32 scales [PANEL], then of (negated) least weights.
    """
    num_parts = 2 if values.literal_value == WITH_LEAST else 1

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, source, inputs, factors, count, target = args
        known = [[load(b, factors, part * scale_bytes(0) + v * 64, floats(), 4) for v in range(_VECTORS)]
                 for part in range(num_parts)]  # fmt: skip
        with cgutils.for_range(b, count) as loop:
            row = b.mul(loop.index, int64(SUM_BYTES))
            others = [load(b, inputs, b.mul(loop.index, int64(_LINE)), floats(), 4) for _ in range(num_parts - 1)]
            for v in range(_VECTORS):
                place = b.add(row, int64(v * 64))
                after = fma(b, load(b, source, place, floats(), 4), known[0][v], load(b, target, place, floats(), 4))
                for other in others:
                    after = fma(b, other, known[1][v], after)
                store(b, after, target, place, 4)
        return context.get_dummy_value()

    return types.void(values, *[types.int64] * 5), codegen


@intrinsic
def fill_with_ones(typing: Typing, tile: Any) -> Any:
    """Write a tile of weights, sixteen cache lines, whose bfloat16 numbers are all 1."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        for line in range(LANES):
            store(b, integer_constant(ONES, _WHOLE), args[0], line * _LINE, 4)
        return context.get_dummy_value()

    return types.void(types.int64), codegen

"""Tiles of the two products of a low-rank update: rows by its first matrix, and what comes out by its second.

Owns the arithmetic of ``low_rank.py``, in float32 with one order of additions: that of sixteen lanes and their pairwise
sum for the first product, and of the rank, one after the other, for the second.

Invariant: an element's bits do not depend on how many rows or ranks its tile has.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT64,
    LANES,
    Builder,
    Typing,
    Value,
    constant,
    floats,
    fma,
    int64,
    item_bytes,
    load,
    load_floats,
    reduce_lanes,
    splat,
    store,
    store_floats,
)

_VECTORS: Final = 4
UPDATE_PANEL: Final = _VECTORS * LANES
"""Outputs that a tile computes at once, and that lie together in memory, rank by rank."""


@intrinsic(prefer_literal=True)
def shrink_tile(
    typing: Typing, is_row_bf16: Any, is_bf16: Any, num_rows: Any, num_ranks: Any, rows: Any, matrix: Any,
    num_inputs: Any, out: Any,
) -> Any:  # fmt: skip
    """``out[num_rows, num_ranks] = rows @ matrix.T``, float32.

    Literal: whether rows are bfloat16, or else float32, whether the matrix is, and the size of the tile. ``rows`` is
    the address of an int64 address for each row; ``matrix`` [num_ranks, num_inputs] lies in one piece.
    """
    row_format, matrix_format = is_row_bf16.literal_value, is_bf16.literal_value
    height, width = num_rows.literal_value, num_ranks.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, _, _, addresses, first, size, target = args
        matrix_bytes = item_bytes(matrix_format)
        sources = [load(b, addresses, 8 * i, INT64, 8) for i in range(height)]
        ranks = [b.add(first, b.mul(size, int64(j * matrix_bytes))) for j in range(width)]
        tile = [(i, j) for i in range(height) for j in range(width)]
        num_vectors = b.sdiv(size, int64(LANES))
        sums = _add_products(b, tile, sources, ranks, (row_format, matrix_format), LANES, int64(0), num_vectors,
                             [constant(0.0, floats())] * len(tile))
        totals = [reduce_lanes(b, one, b.fadd) for one in sums]
        begin = b.mul(num_vectors, int64(LANES))
        rest = b.sub(size, begin)
        totals = _add_products(b, tile, sources, ranks, (row_format, matrix_format), 0, begin, rest, totals)
        for number, total in enumerate(totals):
            store(b, total, target, 4 * number, 4)
        return context.get_dummy_value()

    return types.void(is_row_bf16, is_bf16, num_rows, num_ranks, *[types.int64] * 4), codegen


def _add_products(
    b: Builder, tile: list[tuple[int, int]], rows: list[Value], ranks: list[Value], formats: tuple[int, int],
    lanes: int, begin: Value, count: Value, sums: list[Value],
) -> list[Value]:  # fmt: skip
    """Emit the sums of ``count`` products from input ``begin`` on, of vectors or, with no lanes, of single elements."""
    rooms = [cgutils.alloca_once_value(b, one) for one in sums]
    with cgutils.for_range(b, count) as loop:
        place = b.add(begin, b.mul(loop.index, int64(max(lanes, 1))))
        offsets = [b.mul(place, int64(item_bytes(one))) for one in formats]
        inputs = [load_floats(b, one, offsets[0], formats[0], lanes) for one in rows]
        weights = [load_floats(b, one, offsets[1], formats[1], lanes) for one in ranks]
        for (i, j), room in zip(tile, rooms, strict=True):
            b.store(fma(b, inputs[i], weights[j], b.load(room)), room)
    return [b.load(room) for room in rooms]


@intrinsic(prefer_literal=True)
def expand_tile(
    typing: Typing, is_bf16: Any, num_rows: Any, shrunk: Any, stride: Any, panel: Any, rank: Any, out: Any
) -> Any:
    """``out[num_rows, UPDATE_PANEL] = shrunk @ panel``, float32.

    Literal: whether the panel is bfloat16, or else float32, and the number of rows. ``shrunk`` are rows of float32,
    ``stride`` bytes apart; the panel is [rank, UPDATE_PANEL].
    """
    panel_format, height = is_bf16.literal_value, num_rows.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, distance, weights, depth, target = args
        rows = [b.add(source, b.mul(distance, int64(i))) for i in range(height)]
        tile = [(i, v) for i in range(height) for v in range(_VECTORS)]
        zero = constant(0.0, floats())
        rooms = [cgutils.alloca_once_value(b, zero) for _ in tile]
        vector_bytes = LANES * item_bytes(panel_format)
        with cgutils.for_range(b, depth) as loop:
            factors = [splat(b, load(b, one, b.mul(loop.index, int64(4)), FLOAT, 4)) for one in rows]
            line = b.mul(loop.index, int64(_VECTORS * vector_bytes))
            vectors = [load_floats(b, weights, b.add(line, int64(v * vector_bytes)), panel_format)
                       for v in range(_VECTORS)]  # fmt: skip
            for (i, v), room in zip(tile, rooms, strict=True):
                b.store(fma(b, factors[i], vectors[v], b.load(room)), room)
        for number, room in enumerate(rooms):
            store(b, b.load(room), target, 4 * LANES * number, 4)
        return context.get_dummy_value()

    return types.void(is_bf16, num_rows, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def add_update(typing: Typing, is_bf16: Any, lanes: Any, target: Any, addend: Any, count: Any) -> Any:
    """``add_update(is_bf16, lanes, target, addend, count)``: add float32 to ``count`` vectors of ``lanes`` stored
    elements, each rounded once.
    """
    stored, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[4]) as loop:
            place = b.mul(loop.index, int64(width * item_bytes(stored)))
            values = load_floats(b, args[2], place, stored, width)
            update = load(b, args[3], b.mul(loop.index, int64(width * 4)), ir.VectorType(FLOAT, width), 4)
            store_floats(b, b.fadd(values, update), args[2], place, stored)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, *[types.int64] * 3), codegen

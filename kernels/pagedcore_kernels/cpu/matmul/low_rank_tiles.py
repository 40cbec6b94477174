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
    LINE,
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
    prefetch_line,
    reduce_lanes,
    splat,
    store,
    store_floats,
)

RANKS: Final = 4
"""Ranks that a tile computes at once."""
_VECTORS: Final = 4
UPDATE_PANEL: Final = _VECTORS * LANES
"""Outputs that a tile computes at once, and that lie together in memory, rank by rank."""
_AHEAD_BYTES: Final = 4096
"""How far behind what it multiplies a tile asks for more: several times what a core gets while it waits for memory."""


@intrinsic(prefer_literal=True)
def shrink_tile(
    typing: Typing, is_row_bf16: Any, is_bf16: Any, num_rows: Any, rows: Any, block: Any, num_inputs: Any, out: Any
) -> Any:
    """``out[num_rows, RANKS] = rows @ block.T``, float32.

    Literal: whether rows are bfloat16, or else float32, whether the block is, and the number of rows. ``rows`` is the
    address of an int64 address for each row; the block is [inputs / LANES, RANKS, LANES], the last vectors filled up.
    """
    formats, height = (is_row_bf16.literal_value, is_bf16.literal_value), num_rows.literal_value
    bytes_at_once = [lanes * item_bytes(one) for lanes, one in zip((LANES, RANKS * LANES), formats, strict=True)]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, _, addresses, weights, size, target = args
        rows = [load(b, addresses, 8 * i, INT64, 8) for i in range(height)]
        num_vectors = b.sdiv(size, int64(LANES))
        rooms = [cgutils.alloca_once_value(b, constant(0.0, floats())) for _ in range(height * RANKS)]
        with cgutils.for_range(b, num_vectors) as loop:
            here = b.add(weights, b.mul(loop.index, int64(bytes_at_once[1])))
            _ask(b, here, _AHEAD_BYTES, bytes_at_once[1])
            _add_products(b, rows, b.mul(loop.index, int64(bytes_at_once[0])), here, formats, LANES, rooms)
        totals = [cgutils.alloca_once_value(b, reduce_lanes(b, b.load(room), b.fadd)) for room in rooms]
        first = b.mul(num_vectors, int64(bytes_at_once[0]))
        last = b.add(weights, b.mul(num_vectors, int64(bytes_at_once[1])))
        with cgutils.for_range(b, b.srem(size, int64(LANES))) as loop:
            here = b.add(last, b.mul(loop.index, int64(item_bytes(formats[1]))))
            offset = b.add(first, b.mul(loop.index, int64(item_bytes(formats[0]))))
            _add_products(b, rows, offset, here, formats, 0, totals)
        for number, total in enumerate(totals):
            store(b, b.load(total), target, 4 * number, 4)
        return context.get_dummy_value()

    return types.void(is_row_bf16, is_bf16, num_rows, *[types.int64] * 4), codegen


def _add_products(
    b: Builder, rows: list[Value], offset: Value, block: Value, formats: tuple[int, int], lanes: int,
    sums: list[Value],
) -> None:  # fmt: skip
    """Emit products of one vector of each row, or with no lanes of one element, with those of the ranks."""
    inputs = [load_floats(b, one, offset, formats[0], lanes) for one in rows]
    for j in range(RANKS):
        weights = load_floats(b, block, j * LANES * item_bytes(formats[1]), formats[1], lanes)
        for i, one in enumerate(inputs):
            room = sums[i * RANKS + j]
            b.store(fma(b, one, weights, b.load(room)), room)


def _ask(b: Builder, address: Value, distance: int, num_bytes: int) -> None:
    """Ask for so many bytes, at a distance behind an address; they may be anybody's."""
    for line in range(0, num_bytes, LINE):
        prefetch_line(b, address, int64(distance + line))


@intrinsic
def ask_ahead(typing: Typing, address: Any, num_bytes: Any) -> Any:
    """``ask_ahead(address, num_bytes)``: ask for the cache lines from an address on."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, b.sdiv(args[1], int64(LINE))) as loop:
            prefetch_line(b, args[0], b.mul(loop.index, int64(LINE)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
            _ask(b, b.add(weights, line), _AHEAD_BYTES, _VECTORS * vector_bytes)
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

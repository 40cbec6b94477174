"""The inner part of a matrix product as intrinsics: a few rows by one panel of weights, and the way out.

A panel is ``PANEL`` outputs of a weight matrix, in steps that take ``STEP_BYTES`` of weights and four bytes of a row:
one input in float32, two side by side in bfloat16. An instruction multiplies a row's step by sixteen outputs and adds
to sixteen float32 sums, which stay in registers over a whole chunk of steps. ``matmul_amx.py`` multiplies the same
panels with other instructions; ``matmul.py`` makes a product of either.

Invariant: an output is the sum over chunks, in order, of the sum over the chunk's steps, in order. How many rows a tile
has changes the speed and never a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT32,
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
    pointer,
    prefetch_line,
    splat,
    store,
    to_bfloat16,
)

#: Outputs that one work item computes: four vectors, a whole number of cache lines of weights.
PANEL = 64
#: Most rows of a tile: with four vectors of outputs enough sums to hide the latency of an addition.
TILE_ROWS = 4
#: Bytes of a panel's weights for one step, and of a row.
STEP_BYTES, ROW_STEP_BYTES = 4 * PANEL, 4
#: Bytes of one row of a panel's sums.
SUM_BYTES = 4 * PANEL

_VECTORS = PANEL // LANES
_LINE = 64


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    is_pointer = False

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@njit(inline="always")
def multiply_tiles(
    is_bf16: int, rows: int, row_bytes: int, num_rows: int, weights: int, num_steps: int, sums: int, is_first: int,
    ahead: int, ahead_bytes: int,
) -> None:  # fmt: skip
    """``multiply_tile`` for any number of rows, each tile asking for its share of the memory ahead."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    # Why a line: a cache line with every step, sooner than the share would need it, was faster.
    step = max(_LINE, STEP_BYTES // num_tiles)
    for tile in range(num_tiles):
        # Tiles of even sizes: the smaller ones are slower for their size.
        row, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        source, target = rows + row * row_bytes, sums + row * SUM_BYTES
        share = ahead + tile * ahead_bytes // num_tiles
        if end - row == 4:
            multiply_tile(is_bf16, 4, source, row_bytes, weights, num_steps, target, is_first, share, step)
        elif end - row == 3:
            multiply_tile(is_bf16, 3, source, row_bytes, weights, num_steps, target, is_first, share, step)
        elif end - row == 2:
            multiply_tile(is_bf16, 2, source, row_bytes, weights, num_steps, target, is_first, share, step)
        else:
            multiply_tile(is_bf16, 1, source, row_bytes, weights, num_steps, target, is_first, share, step)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Typing,
    is_bf16: Any,
    num_rows: Any,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    num_steps: Any,
    sums: Any,
    is_first: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """sums[num_rows, PANEL] = (nothing if ``is_first``, else sums) + rows[num_rows, num_steps] @ weights.

    Literal: is_bf16, num_rows. ``weights`` is the address of a panel's chunk [num_steps, STEP_BYTES]; ``rows`` are
    ``row_bytes`` apart. With every step, memory ``ahead_step`` bytes further on from ``ahead`` is asked for.
    """
    count, add_products = num_rows.literal_value, _add_pairs if is_bf16.literal_value else _add_product

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, x, stride, w, steps, target, first, next_memory, step = args
        totals = {(m, v): cgutils.alloca_once_value(b, constant(0.0)) for m in range(count) for v in range(_VECTORS)}
        starts = [b.add(x, b.mul(stride, int64(m))) for m in range(count)]
        with cgutils.for_range(b, steps) as loop:
            panel_row = b.mul(loop.index, int64(STEP_BYTES))
            weight = [load(b, w, b.add(panel_row, int64(v * 64)), floats(), 4) for v in range(_VECTORS)]
            prefetch_line(b, next_memory, b.mul(loop.index, step))
            for m in range(count):
                inputs = splat(b, load(b, starts[m], b.mul(loop.index, int64(ROW_STEP_BYTES)), FLOAT, 4))
                for v in range(_VECTORS):
                    b.store(add_products(b, b.load(totals[m, v]), weight[v], inputs), totals[m, v])
        starts_anew = b.icmp_signed("!=", first, int64(0))
        for (m, v), total in totals.items():
            place, chunk = m * SUM_BYTES + v * 64, b.load(total)
            before = load(b, target, place, floats(), 4)
            store(b, b.select(starts_anew, chunk, b.fadd(before, chunk)), target, place, 4)
        return context.get_dummy_value()

    addresses = [types.int64] * 8
    return types.void(is_bf16, num_rows, *addresses), codegen


@intrinsic(prefer_literal=True)
def store_sums(typing: Typing, is_bf16: Any, sums: Any, bias: Any, out: Any, num_outputs: Any) -> Any:
    """out[num_outputs] = sums + bias, rounded once; sums and bias are [PANEL], all of them readable."""
    bf16 = is_bf16.literal_value
    vector_bytes = LANES * item_bytes(bf16)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, source, addend, target, wanted = args
        for v in range(_VECTORS):
            place = v * vector_bytes
            total = b.fadd(load(b, source, v * 64, floats(), 4), load_floats(b, addend, place, bf16))
            rounded = to_bfloat16(b, total) if bf16 else total
            _store_first(b, rounded, b.add(target, int64(place)), b.sub(wanted, int64(v * LANES)))
        return context.get_dummy_value()

    return types.void(is_bf16, *[types.int64] * 4), codegen


def _add_product(b: Builder, total: Value, weights: Value, inputs: Value) -> Value:
    return fma(b, inputs, weights, total)


def _add_pairs(b: Builder, total: Value, weights: Value, inputs: Value) -> Value:
    kind = ir.FunctionType(floats(), [floats(), _PAIRS, _PAIRS])
    dot_product = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(dot_product, [total, b.bitcast(weights, _PAIRS), b.bitcast(inputs, _PAIRS)])


def _store_first(b: Builder, values: Value, address: Value, count: Value) -> None:
    """Store the first ``count`` of sixteen elements, all or none included."""
    numbers = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
    is_wanted = b.icmp_signed("<", numbers, splat(b, count))
    target = pointer(b, address, 0, values.type)
    kind = ir.FunctionType(ir.VoidType(), [values.type, target.type, INT32, is_wanted.type])
    element = "f32" if values.type.element == FLOAT else "i16"
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.store.v16{element}.p0")
    b.call(function, [values, target, ir.Constant(INT32, 2), is_wanted])

"""The inner part of a matrix product as intrinsics: a few rows by one panel of weights, and the way out.

A panel is ``PANEL`` outputs of a weight matrix, in steps that take ``STEP_BYTES`` of weights: one input in float32, two
side by side in bfloat16, four in int8. An instruction multiplies a row's step by sixteen outputs and adds to sixteen
sums, float32 or int32, which stay in registers over a slice of a chunk of steps. Where no instruction takes pairs of
bfloat16, the two are widened to float32 and added one after the other, to rows that were widened before; where none
adds four products of int8, two are added as int16, which holds those of magnitudes and inputs with the weights' signs.
``amx.py`` multiplies the same panels with other instructions; ``packed.py`` and ``packed_int8.py`` make products of
them.

Invariant: an output is the sum over chunks, in order, of the sum over the chunk's steps, in order; int32 sums are
exact in any order. How many rows a tile has and how a chunk is sliced change the speed and never a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from pagedcore_kernels.cpu.features import has_wide_vectors
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT8,
    INT16,
    INT32,
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
    integer_constant,
    item_bytes,
    load,
    load_floats,
    pointer,
    prefetch_line,
    splat,
    store,
    stream,
    to_bfloat16,
)

PANEL = 64
"""Outputs that one work item computes: four vectors, a whole number of cache lines of weights."""
TILE_ROWS, LARGE_TILE_ROWS = 4, 6
"""Most rows of a tile: four have enough sums to hide the latency of an addition; where registers hold the sums of six,
the second cache level brings fewer bytes of weights for each operation."""
STEP_BYTES = 4 * PANEL
"""Bytes of a panel's weights for one step."""
SINGLES, PAIRS, WIDENED_PAIRS = 0, 1, 2
"""How a step is multiplied: float32; pairs of bfloat16 in one instruction; such pairs widened."""
BYTES, WIDENED_BYTES = 4, 5
"""The same for int8: four of them in one instruction, which takes the row's as uint8; two as int16, then four."""
MATRIX_UNITS, BYTE_MATRIX_UNITS = 3, 6
"""On matrix units, see ``amx.py``: pairs of bfloat16; four int8, the row's as uint8."""
GROUP_MATRIX_UNITS, HALF_MATRIX_UNITS = 7, 8
"""On matrix units: four int8, both signed; the same by half the steps at once, for groups that fill no whole tile."""
SUM_BYTES = 4 * PANEL
"""Bytes of one row of a panel's sums."""

_VECTORS = PANEL // LANES
_WHOLE = ir.VectorType(INT32, LANES)
_WORDS = ir.VectorType(INT16, 2 * LANES)
_BYTES = ir.VectorType(INT8, 4 * LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    is_pointer = False

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIR_VECTOR = ir.VectorType(_BFloat(), 2 * LANES)


@register_jitable
def most_rows_of_tile(most_sums: int) -> int:
    """How many rows a tile has at most where so many vectors of sums are in registers at once."""
    return LARGE_TILE_ROWS if most_sums >= LARGE_TILE_ROWS * _VECTORS else TILE_ROWS


@njit(inline="always")
def multiply_tiles(
    form: int, most_sums: int, rows: int, row_bytes: int, num_rows: int, weights: int, num_steps: int, sums: int,
    is_first: int, open_sums: int, goes_on: int, is_last: int, ahead: int, ahead_bytes: int,
) -> None:  # fmt: skip
    """``multiply_tile`` for any number of rows, each tile asking for its share of the memory ahead."""
    tile_rows = most_rows_of_tile(most_sums)
    num_tiles = (num_rows + tile_rows - 1) // tile_rows
    # Why not a line with every step: many requests at once would keep the loads of this slice waiting.
    step = (STEP_BYTES + num_tiles - 1) // num_tiles
    for tile in range(num_tiles):
        # Tiles of even sizes: the smaller ones are slower for their size.
        row, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        source, target, kept = rows + row * row_bytes, sums + row * SUM_BYTES, open_sums + row * SUM_BYTES
        share = ahead + tile * ahead_bytes // num_tiles
        multiply_tile(
            form, most_sums, source, row_bytes, end - row, weights, num_steps, target, is_first, kept, goes_on, is_last,
            share, step,
        )  # fmt: skip


@intrinsic(prefer_literal=True)
def multiply_tile(
    typing: Typing,
    form: Any,
    most_sums: Any,
    rows: Any,
    row_bytes: Any,
    num_rows: Any,
    weights: Any,
    num_steps: Any,
    sums: Any,
    is_first: Any,
    open_sums: Any,
    goes_on: Any,
    is_last: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """chunk = (open_sums if ``goes_on``, else nothing) + rows[num_rows, num_steps] @ weights; then
    sums[num_rows, PANEL] = (nothing if ``is_first``, else sums) + chunk if ``is_last``, else open_sums = chunk.

    Literal: form, most_sums (vectors of them that are in registers at once); ``num_rows`` is at most
    ``most_rows_of_tile``, and there is code for each. ``weights`` is the address of a slice of a panel's chunk
    [num_steps, STEP_BYTES]; ``is_first`` says that the chunk is the first, ``is_last`` that the slice is the chunk's
    last; ``rows`` are ``row_bytes`` apart. With every step, memory ``ahead_step`` bytes further on from ``ahead`` is
    asked for.
    """
    literals = (form, most_sums)
    kind, most = (literal.literal_value for literal in literals)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, stride, wanted, w, steps, target, first, kept, later, last, next_memory, step = args[len(literals) :]
        starts_anew, continues, ends = (b.icmp_signed("!=", flag, int64(0)) for flag in (first, later, last))
        # Why four lines where a step has a share of more than one: fewer let the memory of few rows wait.
        needs_more_lines, quarter = b.icmp_signed(">", step, int64(LINE)), b.sdiv(step, int64(_VECTORS))

        def multiply(count: int, vectors: range) -> None:
            starts = [b.add(x, b.mul(stride, int64(m))) for m in range(count)]
            places = [(m, v) for m in range(count) for v in vectors]
            totals = {place: cgutils.alloca_once_value(b, _zero(kind)) for place in places}
            with b.if_then(continues):
                for m, v in places:
                    b.store(load(b, kept, m * SUM_BYTES + v * 64, _zero(kind).type, 4), totals[m, v])
            with cgutils.for_range(b, steps) as loop:
                panel_row = b.mul(loop.index, int64(STEP_BYTES))
                weight = {v: _weights(b, kind, w, b.add(panel_row, int64(v * 64))) for v in vectors}
                if vectors.start == 0:
                    line = b.mul(loop.index, step)
                    prefetch_line(b, next_memory, line)
                    with b.if_then(needs_more_lines):
                        for part in range(1, _VECTORS):
                            prefetch_line(b, next_memory, b.add(line, b.mul(quarter, int64(part))))
                row_step = b.mul(loop.index, int64(row_step_bytes(kind)))
                for m in range(count):
                    for part in range(len(weight[vectors.start])):
                        inputs = _inputs(b, kind, starts[m], b.add(row_step, int64(4 * part)))
                        for v in vectors:
                            total = b.load(totals[m, v])
                            b.store(add_products(b, kind, total, weight[v][part], inputs), totals[m, v])
            with b.if_else(ends) as (ended, remaining):
                with ended:
                    for m, v in places:
                        place, chunk = m * SUM_BYTES + v * 64, b.load(totals[m, v])
                        before = load(b, target, place, chunk.type, 4)
                        added = b.add(before, chunk) if is_of_bytes(kind) else b.fadd(before, chunk)
                        store(b, b.select(starts_anew, chunk, added), target, place, 4)
                with remaining:
                    for m, v in places:
                        store(b, b.load(totals[m, v]), kept, m * SUM_BYTES + v * 64, 4)

        for count in range(1, most_rows_of_tile(most) + 1):
            with b.if_then(b.icmp_signed("==", wanted, int64(count))):
                width = max(1, min(_VECTORS, most // count))
                for start in range(0, _VECTORS, width):
                    multiply(count, range(start, min(start + width, _VECTORS)))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 12), codegen


@intrinsic(prefer_literal=True)
def store_sums(
    typing: Typing, is_bf16: Any, sums: Any, bias: Any, out: Any, num_outputs: Any, is_streamed: Any
) -> Any:
    """out[num_outputs] = sums + bias, rounded once; sums and bias are [PANEL], all of them readable.

    Whole cache lines of a whole panel are streamed if ``is_streamed``.
    """
    bf16 = is_bf16.literal_value
    vector_bytes = LANES * item_bytes(bf16)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, source, addend, target, wanted, streamed = args
        outputs = []
        for v in range(_VECTORS):
            total = b.fadd(load(b, source, v * 64, floats(), 4), load_floats(b, addend, v * vector_bytes, bf16))
            outputs.append(to_bfloat16(b, total) if bf16 else total)
        _store_outputs(b, outputs, target, wanted, streamed)
        return context.get_dummy_value()

    return types.void(is_bf16, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def store_scaled_sums(
    typing: Typing, is_bf16: Any, sums: Any, row_scale: Any, corrections: Any, scales: Any, bias: Any, out: Any,
    num_outputs: Any, is_streamed: Any,
) -> Any:  # fmt: skip
    """out[num_outputs] = float(sums - corrections) * row_scale * scales + bias, each operation rounded, in this order.

    Sums and corrections are int32 [PANEL], scales and bias float32 [PANEL], all of them readable; ``row_scale`` is the
    address of a float32. ``is_streamed`` as in ``store_sums``.
    """
    bf16 = is_bf16.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, source, of_row, offsets, of_outputs, addend, target, wanted, streamed = args
        outputs = []
        row = splat(b, load(b, of_row, 0, FLOAT, 4))
        for v in range(_VECTORS):
            total = b.sub(load(b, source, v * 64, _WHOLE, 4), load(b, offsets, v * 64, _WHOLE, 4))
            scaled = b.fmul(b.fmul(b.sitofp(total, floats()), row), load(b, of_outputs, v * 64, floats(), 4))
            value = b.fadd(scaled, load(b, addend, v * 64, floats(), 4))
            outputs.append(to_bfloat16(b, value) if bf16 else value)
        _store_outputs(b, outputs, target, wanted, streamed)
        return context.get_dummy_value()

    return types.void(is_bf16, *[types.int64] * 8), codegen


def is_of_bytes(form: int) -> bool:
    """Whether a form multiplies int8, and its sums are int32."""
    return form in (BYTES, WIDENED_BYTES, BYTE_MATRIX_UNITS, GROUP_MATRIX_UNITS, HALF_MATRIX_UNITS)


def row_step_bytes(form: int) -> int:
    """Bytes of a row for one step: rows of widened pairs are float32."""
    return 8 if form == WIDENED_PAIRS else 4


def _weights(b: Builder, form: int, address: Value, offset: Value) -> list[Value]:
    """Load the weights of one step for sixteen outputs: one vector, or two where pairs are widened."""
    if is_of_bytes(form):
        return [load(b, address, offset, _WHOLE, 4)]
    if form != WIDENED_PAIRS:
        return [load(b, address, offset, floats(), 4)]
    pairs = load(b, address, offset, _WHOLE, 4)
    upper = b.and_(pairs, integer_constant(-0x10000, _WHOLE))
    return [b.bitcast(half, floats()) for half in (b.shl(pairs, integer_constant(16, _WHOLE)), upper)]


def add_products(b: Builder, form: int, total: Value, weights: Value, inputs: Value) -> Value:
    """Emit ``total`` and the products of one step, for sixteen outputs."""
    if form == BYTES:
        return add_four_products(b, LANES if has_wide_vectors() else LANES // 2, total, inputs, weights)
    if form == WIDENED_BYTES:
        of_weights, of_inputs = (b.bitcast(one, _BYTES) for one in (weights, inputs))
        # Why magnitudes: the instruction takes unsigned bytes, as which -128 becomes 128. Inputs are -127 to 127, so
        # two products are 2 * 128 * 127 at most, which an int16 holds.
        magnitudes = in_parts(b, "avx2.psign.b", _BYTES, 2 * LANES, of_weights, of_weights)
        signed = in_parts(b, "avx2.psign.b", _BYTES, 2 * LANES, of_inputs, of_weights)
        pairs = in_parts(b, "avx2.pmadd.ub.sw", _WORDS, LANES, magnitudes, signed)
        return b.add(total, in_parts(b, "avx2.pmadd.wd", _WHOLE, LANES // 2, pairs, integer_constant(1, _WORDS)))
    if form != PAIRS:
        return fma(b, inputs, weights, total)
    return add_pairs(b, total, b.bitcast(weights, PAIR_VECTOR), b.bitcast(inputs, PAIR_VECTOR))


def add_pairs(b: Builder, total: Value, some: Value, others: Value) -> Value:
    """Emit ``total`` [16] and the products of pairs of bfloat16, [16, 2] each, in one instruction."""
    kind = ir.FunctionType(floats(), [floats(), PAIR_VECTOR, PAIR_VECTOR])
    dot_product = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(dot_product, [total, some, others])


def add_four_products(b: Builder, lanes: int, total: Value, unsigned: Value, signed: Value) -> Value:
    """Emit int32 sums and four products of uint8 by int8 each, on vectors of so many lanes: 16, or 8."""
    # Why by these names: where there is no AVX-512, LLVM makes the instruction of AVX-VNNI of the second.
    name = "avx512.vpdpbusd.512" if lanes == LANES else "avx512.vpdpbusd.256"
    return in_parts(b, name, _WHOLE, lanes, total, unsigned, signed)


def in_parts(b: Builder, instruction: str, kind: Any, lanes: int, *operands: Value) -> Value:
    """Call an instruction whose results have ``lanes``, for vectors of a ``kind`` that has as many or twice."""
    num_parts, result = kind.count // lanes, ir.VectorType(kind.element, lanes)

    def part(operand: Value, number: int) -> Value:
        count = operand.type.count // num_parts
        return b.shuffle_vector(operand, operand, lane_numbers(number * count, count)) if num_parts > 1 else operand

    parts = [[part(operand, number) for operand in operands] for number in range(num_parts)]
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(result, [one.type for one in parts[0]]), f"llvm.x86.{instruction}"
    )
    made = [b.call(function, one) for one in parts]
    return made[0] if num_parts == 1 else b.shuffle_vector(*made, lane_numbers(0, kind.count))


def _zero(form: int) -> Value:
    return integer_constant(0, _WHOLE) if is_of_bytes(form) else constant(0.0)


def _inputs(b: Builder, form: int, address: Value, offset: Value) -> Value:
    """Load one step of a row into all lanes."""
    return splat(b, load(b, address, offset, INT32 if is_of_bytes(form) else FLOAT, 4))


def lane_numbers(start: int, count: int) -> Value:
    """Return consecutive numbers, by which lanes are picked from a vector."""
    return ir.Constant(ir.VectorType(INT32, count), list(range(start, start + count)))


def _store_outputs(b: Builder, outputs: list[Value], address: Value, count: Value, is_streamed: Value) -> None:
    """Store the first ``count`` of a panel's outputs, which are vectors of ``LANES``."""
    lane_bytes = 4 if outputs[0].type.element == FLOAT else 2
    is_whole = b.icmp_signed(">=", count, int64(PANEL))
    is_aligned = b.icmp_signed("==", b.and_(address, int64(LINE - 1)), int64(0))
    may_stream = b.and_(b.icmp_signed("!=", is_streamed, int64(0)), b.and_(is_whole, is_aligned))
    with b.if_else(may_stream) as (streamed, cached):
        with streamed:
            lines = outputs
            if lane_bytes == 2:
                both = lane_numbers(0, 2 * LANES)
                lines = [b.shuffle_vector(*outputs[v : v + 2], both) for v in range(0, _VECTORS, 2)]
            for number, line in enumerate(lines):
                stream(b, line, address, number * LINE)
        with cached:
            for v, values in enumerate(outputs):
                place = b.add(address, int64(v * LANES * lane_bytes))
                _store_first(b, values, place, b.sub(count, int64(v * LANES)))


def _store_first(b: Builder, values: Value, address: Value, count: Value) -> None:
    """Store the first ``count`` of sixteen elements, all or none included."""
    numbers = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
    is_wanted = b.icmp_signed("<", numbers, splat(b, count))
    target = pointer(b, address, 0, values.type)
    kind = ir.FunctionType(ir.VoidType(), [values.type, target.type, INT32, is_wanted.type])
    element = "f32" if values.type.element == FLOAT else "i16"
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.store.v16{element}.p0")
    b.call(function, [values, target, ir.Constant(INT32, 2), is_wanted])

"""The inner part of a product of int8 rows with weights of 4 or 8 bits that have scales for groups, as intrinsics.

A unit of packed weights of 4 bits is as ``grouped_tiles.py`` says, with values that are counted from 0 to 15. Two masks
and a shift make of it two steps: four unsigned inputs in each of sixteen lanes, which an instruction multiplies with
four signed inputs of a row. ``grouped_rows.py`` puts a row's inputs in the order that comes of it, which units of 8
bits have too: two steps as ``tiles.py`` has them, of signed values.

Without an instruction that adds four products to an int32, two of 4 bits are added as int16, and those of 32 inputs
after that, which an int16 holds: 16 * 15 * 127 is below 2**15. Of 8 bits it holds two, see ``tiles.add_products``; with
the instruction, which takes unsigned weights, values of 8 bits are counted from -128.

Invariant: an output is, over the groups in order, ``fma(float(sum) * row scale, scale, sum before)``, where the sum is
that of the group's products ``row * (value - zero)``, an exact int32; with least weights comes then
``fma(float(sum of the row's group) * row scale, -least, that)``. Every processor computes it to the last bit alike.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.grouped_tiles import (
    UNIT,
    WITH_LEAST,
    WITH_ZEROS,
    load_numbers,
    load_zeros,
    scale_bytes,
    unit_bytes,
)
from pagedcore_kernels.cpu.matmul.tiles import (
    BYTES,
    PANEL,
    STEP_BYTES,
    SUM_BYTES,
    WIDENED_BYTES,
    add_four_products,
    add_products,
    in_parts,
    most_rows_of_tile,
)
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT8,
    INT16,
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
    prefetch_line,
    splat,
    store,
)

MIDDLE = 8
"""Added to values from -8 to 7 when they are packed."""
SIGN_OF_BYTES = 128
"""Added to values of 8 bits where an instruction takes unsigned ones."""

_VECTORS = PANEL // LANES
_UNITS_OF_WORDS = 4
"""Units whose products an int16 holds the sum of."""
_WHOLE, _WORDS = ir.VectorType(INT32, LANES), ir.VectorType(INT16, 2 * LANES)


@njit(inline="always")
def multiply_byte_tiles(
    form: int, bits: int, values: int, halves: int, most_sums: int, is_wide: int, rows: int, row_bytes: int,
    num_rows: int, known: int, known_bytes: int, weights: int, group: int, num_units: int, sums: int, ahead: int,
) -> None:  # fmt: skip
    """``multiply_byte_tile`` for any number of rows; the first tile asks for memory ahead."""
    tile_rows = most_rows_of_tile(most_sums)
    num_tiles = (num_rows + tile_rows - 1) // tile_rows
    for tile in range(num_tiles):
        # Tiles of even sizes: the smaller ones are slower for their size.
        row, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        multiply_byte_tile(
            form, bits, values, halves, most_sums, is_wide, rows + row * row_bytes, row_bytes, end - row,
            known + row * known_bytes, known_bytes, weights, group, num_units, sums + row * SUM_BYTES,
            ahead if tile == 0 else 0,
        )  # fmt: skip


@intrinsic(prefer_literal=True)
def multiply_byte_tile(
    typing: Typing,
    form: Any,
    bits: Any,
    values: Any,
    halves: Any,
    most_sums: Any,
    is_wide: Any,
    rows: Any,
    row_bytes: Any,
    num_rows: Any,
    known: Any,
    known_bytes: Any,
    weights: Any,
    group: Any,
    num_units: Any,
    sums: Any,
    ahead: Any,
) -> Any:
    """sums[num_rows, PANEL] += the products of a group, as the module's first lines say.

    Literal: form, bits, values, halves (whether scales and least weights are float16), most_sums (vectors of sums in
    registers at once), is_wide (vectors of 512 bits are there); there is code for each ``num_rows``. ``known`` is the
    address of scale and sum of each row's group, ``known_bytes`` apart, and ``group`` that of the weights' header. As
    many bytes from ``ahead`` on as weights have are asked for, unless it is 0.
    """
    literals = (form, bits, values, halves, most_sums, is_wide)
    kind, num_bits, stand_for, half, most, wide = (literal.literal_value for literal in literals)
    bytes_of_unit, is_exact = unit_bytes(num_bits), kind == BYTES or num_bits == 8
    offset = SIGN_OF_BYTES * (kind == BYTES) if num_bits == 8 else 0 if stand_for == WITH_LEAST else MIDDLE
    lanes = LANES if wide and kind == BYTES else LANES // 2

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, stride, wanted, of_rows, known_stride, w, header, units, target, next_memory = args[len(literals) :]
        asks = b.icmp_signed("!=", next_memory, int64(0))

        def multiply(count: int, vectors: range) -> None:
            places = [(m, v) for m in range(count) for v in vectors]
            starts, of_groups = ([b.add(start, b.mul(step, int64(m))) for m in range(count)]
                                 for start, step in ((x, stride), (of_rows, known_stride)))
            sums_of_rows = [load(b, one, 4, INT32, 4) for one in of_groups]
            zeros = {v: load_zeros(b, header, v, half) if stand_for == WITH_ZEROS else None for v in vectors}
            totals = {(m, v): cgutils.alloca_once_value(b, _first_sum(b, sums_of_rows[m], offset, zeros[v]))
                      for m, v in places}

            def add_unit(number: Value, totals: Any) -> None:
                place = b.mul(number, int64(bytes_of_unit))
                if vectors.start == 0:
                    with b.if_then(asks):
                        for line in range(0, bytes_of_unit, LINE):
                            prefetch_line(b, next_memory, b.add(place, int64(line)))
                packed = {v: load(b, w, b.add(place, int64(v * LINE)), _WHOLE, 4) for v in vectors}
                for step in range(UNIT // 4):
                    if num_bits == 4:
                        weight = {v: four_values(b, packed[v], step) for v in vectors}
                    else:
                        here = b.add(place, int64(step * STEP_BYTES))
                        weight = {v: _four_bytes(b, kind, w, b.add(here, int64(v * LINE))) for v in vectors}
                    for m in range(count):
                        of_step = b.add(b.mul(number, int64(UNIT)), int64(4 * step))
                        inputs = splat(b, load(b, starts[m], of_step, INT32, 1))
                        for v in vectors:
                            after = _add(b, kind, num_bits, lanes, b.load(totals[m, v]), weight[v], inputs)
                            b.store(after, totals[m, v])

            if is_exact:
                with cgutils.for_range(b, units) as loop:
                    add_unit(loop.index, totals)
            else:
                of_words = {place: cgutils.alloca_once(b, _WORDS) for place in places}
                with cgutils.for_range_slice(b, int64(0), units, int64(_UNITS_OF_WORDS)) as (start, _):
                    for place in places:
                        b.store(integer_constant(0, _WORDS), of_words[place])
                    rest = b.sub(units, start)
                    some = b.select(b.icmp_signed("<", rest, int64(_UNITS_OF_WORDS)), rest, int64(_UNITS_OF_WORDS))
                    with cgutils.for_range(b, some) as loop:
                        add_unit(b.add(start, loop.index), of_words)
                    for place in places:
                        b.store(b.add(b.load(totals[place]), _sum_pairs(b, b.load(of_words[place]))), totals[place])
            for v in vectors:
                scales = load_numbers(b, header, 0, v, half)
                least = load_numbers(b, header, scale_bytes(half), v, half) if stand_for == WITH_LEAST else None
                for m in range(count):
                    scale, output = splat(b, load(b, of_groups[m], 0, FLOAT, 4)), m * SUM_BYTES + v * LINE
                    total = b.fmul(b.sitofp(b.load(totals[m, v]), floats()), scale)
                    after = fma(b, total, scales, load(b, target, output, floats(), 4))
                    if least is not None:
                        inputs = b.fmul(b.sitofp(splat(b, sums_of_rows[m]), floats()), scale)
                        after = fma(b, inputs, least, after)
                    store(b, after, target, output, 4)

        for count in range(1, most_rows_of_tile(most) + 1):
            with b.if_then(b.icmp_signed("==", wanted, int64(count))):
                width = max(1, min(_VECTORS, most // count))
                for start in range(0, _VECTORS, width):
                    multiply(count, range(start, min(start + width, _VECTORS)))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 10), codegen


def _first_sum(b: Builder, sum_of_row: Value, offset: int, zeros: Value | None) -> Value:
    """Return what is added to the products of values to which ``offset`` was added."""
    if zeros is None:
        return splat(b, b.mul(sum_of_row, ir.Constant(INT32, -offset)))
    return b.mul(b.sub(integer_constant(-offset, _WHOLE), zeros), splat(b, sum_of_row))


def _four_bytes(b: Builder, form: int, weights: Value, place: Value) -> Value:
    """Load four inputs in each lane, unsigned for the instruction that takes them so."""
    loaded = load(b, weights, place, _WHOLE, 4)
    return b.xor(loaded, integer_constant(0x80808080, _WHOLE)) if form == BYTES else loaded


def four_values(b: Builder, packed: Value, step: int) -> Value:
    """Return four unsigned inputs in each lane: those in the lower halves of bytes, or in the upper."""
    shifted = b.lshr(packed, integer_constant(4, _WHOLE)) if step else packed
    return b.and_(shifted, integer_constant(0x0F0F0F0F, _WHOLE))


def _add(b: Builder, form: int, bits: int, lanes: int, total: Value, weights: Value, inputs: Value) -> Value:
    """Emit ``total`` and the products of a step: int32 sums of four, or int16 sums of two."""
    if form == BYTES:
        return add_four_products(b, lanes, total, weights, inputs)
    if bits == 8:
        return add_products(b, WIDENED_BYTES, total, weights, inputs)
    some = ir.VectorType(INT8, 4 * LANES)
    products = in_parts(b, "avx2.pmadd.ub.sw", _WORDS, 2 * lanes, *(b.bitcast(one, some) for one in (weights, inputs)))
    return b.add(total, products)


def _sum_pairs(b: Builder, words: Value) -> Value:
    """Add the two int16 of each lane."""
    return in_parts(b, "avx2.pmadd.wd", _WHOLE, LANES // 2, words, integer_constant(1, _WORDS))

"""The inner part of a product with weights of 4 or 8 bits whose scales are those of groups of inputs, as intrinsics.

A weight is ``scale * (value - zero)``. The difference is a whole number below 256, which float32 and bfloat16 hold, so
it is multiplied as it is, and a scale is applied to the sum of a chunk: ``CHUNK_STEPS`` steps at most, all of one
group. Or a weight is ``scale`` times one of the sixteen numbers of a codebook, which are rounded to bfloat16 where
pairs of them are multiplied. Or it is ``scale * value - least``, with a float for each group, which the sum of the
chunk's inputs is multiplied with; values of 4 bits are from 0 to 15 then. A tile of rows unpacks weights into
registers while they come from memory; of several tiles the first one leaves a chunk in a buffer of 16 KiB, where the
others find it. All multiply the same numbers in the same order.

Weights come in units of ``UNIT`` inputs by ``PANEL`` outputs. Of 4 bits: 32 bits for each output, input ``j`` from bit
``4 * (j // 2) + 16 * (j % 2)`` on, so that a shift brings a pair of inputs to the low ends of two words. Of 8 bits: the
outputs of an input side by side.

Invariant: an output is, over the chunks in order, ``fma(sum over the chunk's steps in order, scale, sum before)``, then
``fma(sum over the chunk's inputs in order, -least, that)``. How many rows a tile has and where its weights are unpacked
changes the speed and never a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.tiles import (
    PAIRS,
    PANEL,
    SINGLES,
    STEP_BYTES,
    SUM_BYTES,
    TILE_ROWS,
    add_products,
    is_of_bytes,
    lane_numbers,
)
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT16,
    INT32,
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
    load,
    prefetch_line,
    splat,
    store,
)

UNIT = 8
"""Inputs of a unit of packed weights."""
CHUNK_STEPS = 64
"""Most steps of a chunk. Part of the order of additions: another number gives other bits."""
CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
    "e2m1": tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    "iq4_nl": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0,
               113.0),
}  # fmt: skip
"""What 4 bits stand for, other than whole numbers: the number of each of the sixteen, from 0b0000 on."""
WHOLE, WITH_ZEROS, WITH_LEAST = 0, 1, 2
"""What packed values stand for, as a literal of the functions below: themselves; themselves less the zero point of
their group; themselves, counted from 0, with a least weight; and, from the next number on, numbers of a codebook."""
KIND_OF_CODEBOOK = {name: number for number, name in enumerate(CODEBOOKS, 3)}
PACKED, KEPT, UNPACKED = 0, 1, 2
"""How a tile finds its weights: packed; packed, and it leaves them in a buffer, unpacked; in that buffer."""
BUFFER_WEIGHTS = CHUNK_STEPS * STEP_BYTES
"""Bytes of the buffer: weights of a chunk, then the group's scales and least weights in float32."""
BUFFER_BYTES = BUFFER_WEIGHTS + 2 * 4 * PANEL

_VECTORS = PANEL // LANES
_WHOLE = ir.VectorType(INT32, LANES)
_WORDS = ir.VectorType(INT16, 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SIGNED = {bits: [*range(2 ** (bits - 1)), *range(-(2 ** (bits - 1)), 0)] for bits in (4, 5)}
"""What numbers of 4 and of 5 bits are in two's complement."""
ONES = 0x3F803F80
"""A pair of bfloat16 that are 1."""


def unit_bytes(bits: int) -> int:
    """Bytes of a unit of packed weights."""
    return UNIT * PANEL * bits // 8


def scale_bytes(halves: int) -> int:
    """Bytes of a group's scales, which come before its weights: float16 or float32."""
    return (2 if halves else 4) * PANEL


def header_bytes(values: int, halves: int) -> int:
    """Bytes of a group's scales, and of its zero points or (negated) least weights, which come next."""
    return scale_bytes(halves) + {WITH_ZEROS: PANEL, WITH_LEAST: scale_bytes(halves)}.get(values, 0)


def inputs_of_step(form: int) -> int:
    """Inputs that one step takes: four of int8, a pair, or one."""
    return 4 if is_of_bytes(form) else 1 if form == SINGLES else 2


@njit(inline="always")
def multiply_tiles_of_chunk(
    form: int, bits: int, values: int, halves: int, most_sums: int, is_wide: int, rows: int, row_bytes: int,
    num_rows: int, weights: int, group: int, num_units: int, sums: int, ahead: int, buffer: int,
) -> None:  # fmt: skip
    """``multiply_grouped_tile`` for any number of rows: the first of several tiles unpacks weights for the others."""
    if num_rows <= TILE_ROWS:
        multiply_few_rows(
            form, bits, values, halves, PACKED, most_sums, is_wide, rows, row_bytes, num_rows, weights, group,
            num_units, sums, ahead, buffer,
        )  # fmt: skip
        return
    num_others = (num_rows - 1) // TILE_ROWS
    # Three or four rows, as many as the largest of tiles of even sizes.
    first = (num_rows + num_others) // (num_others + 1)
    if first == 4:
        multiply_grouped_tile(
            form, bits, values, halves, KEPT, most_sums, is_wide, 4, rows, row_bytes, weights, group, num_units, sums,
            ahead, buffer,
        )  # fmt: skip
    else:
        multiply_grouped_tile(
            form, bits, values, halves, KEPT, most_sums, is_wide, 3, rows, row_bytes, weights, group, num_units, sums,
            ahead, buffer,
        )  # fmt: skip
    for tile in range(num_others):
        row = first + tile * (num_rows - first) // num_others
        end = first + (tile + 1) * (num_rows - first) // num_others
        multiply_few_rows(
            form, bits, values, 0, UNPACKED, most_sums, is_wide, rows + row * row_bytes, row_bytes, end - row,
            buffer, buffer + BUFFER_WEIGHTS, num_units, sums + row * SUM_BYTES, buffer, buffer,
        )  # fmt: skip


@njit(inline="always")
def multiply_few_rows(
    form: int, bits: int, values: int, halves: int, state: int, most_sums: int, is_wide: int, rows: int,
    row_bytes: int, num_rows: int, weights: int, group: int, num_units: int, sums: int, ahead: int, buffer: int,
) -> None:  # fmt: skip
    """``multiply_grouped_tile`` for up to ``TILE_ROWS`` rows."""
    if num_rows == 4:
        multiply_grouped_tile(
            form, bits, values, halves, state, most_sums, is_wide, 4, rows, row_bytes, weights, group, num_units,
            sums, ahead, buffer,
        )  # fmt: skip
    elif num_rows == 3:
        multiply_grouped_tile(
            form, bits, values, halves, state, most_sums, is_wide, 3, rows, row_bytes, weights, group, num_units,
            sums, ahead, buffer,
        )  # fmt: skip
    elif num_rows == 2:
        multiply_grouped_tile(
            form, bits, values, halves, state, most_sums, is_wide, 2, rows, row_bytes, weights, group, num_units,
            sums, ahead, buffer,
        )  # fmt: skip
    else:
        multiply_grouped_tile(
            form, bits, values, halves, state, most_sums, is_wide, 1, rows, row_bytes, weights, group, num_units,
            sums, ahead, buffer,
        )  # fmt: skip


@intrinsic(prefer_literal=True)
def multiply_grouped_tile(
    typing: Typing,
    form: Any,
    bits: Any,
    values: Any,
    halves: Any,
    state: Any,
    most_sums: Any,
    is_wide: Any,
    num_rows: Any,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    group: Any,
    num_units: Any,
    sums: Any,
    ahead: Any,
    buffer: Any,
) -> Any:
    """sums[num_rows, PANEL] += scales * (rows[num_rows, num_units] @ weights).

    Literal: form, bits, values, halves (whether scales and least weights are float16), state (of the weights, see
    ``PACKED``), most_sums (vectors of sums in registers at once), is_wide (vectors of 512 bits are there), num_rows.
    Without rows, weights are unpacked. ``group`` is the address of the group's scales and what comes with them; as many
    bytes from ``ahead`` on as packed weights have are asked for.
    """
    literals = (form, bits, values, halves, state, most_sums, is_wide, num_rows)
    kind, num_bits, stand_for, half, packed, most, wide, count = (literal.literal_value for literal in literals)
    width, num_steps = max(1, min(_VECTORS, most // max(1, count))), UNIT // inputs_of_step(kind)
    bytes_unpacked = num_steps * STEP_BYTES
    bytes_of_unit = bytes_unpacked if packed == UNPACKED else unit_bytes(num_bits)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, stride, w, scales, units, target, next_memory, unpacked = args[len(literals) :]
        starts = [b.add(x, b.mul(stride, int64(m))) for m in range(count)]

        def multiply(vectors: range) -> None:
            places = [(m, v) for m in range(count) for v in vectors]
            totals = {place: cgutils.alloca_once_value(b, constant(0.0)) for place in places}
            num_sums = count if stand_for == WITH_LEAST else 0
            of_inputs = [cgutils.alloca_once_value(b, constant(0.0)) for _ in range(num_sums)]
            has_zeros = stand_for == WITH_ZEROS and packed != UNPACKED
            zeros = {v: load_zeros(b, scales, v, half) if has_zeros else None for v in vectors}
            with cgutils.for_range(b, units) as loop:
                place = b.mul(loop.index, int64(bytes_of_unit))
                unit = {v: _Unit(b, kind, num_bits, stand_for, wide, b.add(w, place), v, zeros[v]) for v in vectors}
                if packed != UNPACKED and vectors.start == 0:
                    for line in range(0, bytes_of_unit, LINE):
                        prefetch_line(b, next_memory, b.add(place, int64(line)))
                row_unit = b.mul(loop.index, int64(num_steps * 4))
                kept = b.add(unpacked, b.mul(loop.index, int64(bytes_unpacked)))
                for step in range(num_steps):
                    if packed == UNPACKED:
                        weight = {v: unit[v].load_unpacked(step) for v in vectors}
                    else:
                        weight = {v: unit[v].unpack(step) for v in vectors}
                    for v in vectors if packed == KEPT else ():
                        store(b, weight[v], kept, step * STEP_BYTES + v * 64, 4)
                    for m in range(count):
                        inputs = splat(b, load(b, starts[m], b.add(row_unit, int64(4 * step)), FLOAT, 4))
                        for v in vectors:
                            added = add_products(b, kind, b.load(totals[m, v]), weight[v], inputs)
                            b.store(added, totals[m, v])
                        for total in of_inputs[m : m + 1]:
                            b.store(add_products(b, kind, b.load(total), _ones(b, kind), inputs), total)
            for v in vectors:
                header = [load_numbers(b, scales, part * scale_bytes(half), v, half)
                          for part in range(2 if stand_for == WITH_LEAST else 1)]  # fmt: skip
                for part, numbers in enumerate(header if packed == KEPT else ()):
                    store(b, numbers, unpacked, BUFFER_WEIGHTS + part * scale_bytes(0) + v * 64, 4)
                for m in range(count):
                    place = m * SUM_BYTES + v * 64
                    after = fma(b, b.load(totals[m, v]), header[0], load(b, target, place, floats(), 4))
                    for total in of_inputs[m : m + 1]:
                        after = fma(b, b.load(total), header[1], after)
                    store(b, after, target, place, 4)

        for start in range(0, _VECTORS, width):
            multiply(range(start, min(start + width, _VECTORS)))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def ask_for_header(typing: Typing, num_bytes: Any, address: Any) -> Any:
    """Ask for the memory of a group's scales and what comes with them; literal: num_bytes."""
    size = num_bytes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        for line in range(0, size, LINE):
            prefetch_line(b, args[1], int64(line))
        return context.get_dummy_value()

    return types.void(num_bytes, types.int64), codegen


@intrinsic(prefer_literal=True)
def clear_sums(typing: Typing, sums: Any, num_rows: Any) -> Any:
    """sums[num_rows, PANEL] = 0."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[1]) as loop:
            row = b.add(args[0], b.mul(loop.index, int64(SUM_BYTES)))
            for v in range(_VECTORS):
                store(b, constant(0.0), row, v * 64, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


class _Unit:
    """Emits the weights of one unit, for sixteen outputs: in float32 or pairs of bfloat16."""

    def __init__(
        self, b: Builder, form: int, bits: int, values: int, is_wide: int, address: Value, vector: int,
        zeros: Value | None,
    ) -> None:  # fmt: skip
        self._b, self._form, self._bits, self._values, self._is_wide = b, form, bits, values, is_wide
        self._address, self._vector, self._zeros = address, vector, zeros
        self._packed: Value | None = None

    def load_unpacked(self, step: int) -> Value:
        """Load what ``unpack_chunk`` has written."""
        return load(self._b, self._address, step * STEP_BYTES + self._vector * 64, floats(), 4)

    def unpack(self, step: int) -> Value:
        """Unpack the weights of a step."""
        if self._bits == 4 and self._packed is None:
            self._packed = load(self._b, self._address, self._vector * 64, _WHOLE, 4)
        if self._form != PAIRS:
            return self._single(step)
        if self._bits == 4:
            return self._pair_of_four_bits(step)
        b, sixteen = self._b, integer_constant(16, _WHOLE)
        even, odd = (b.bitcast(self._single(2 * step + i), _WHOLE) for i in range(2))
        # Why exact: the lower half of a whole number below 256 is zero in float32.
        return b.bitcast(b.or_(b.lshr(even, sixteen), odd), floats())

    def _single(self, number: int) -> Value:
        """Return input ``number`` of the unit in float32."""
        b = self._b
        if self._bits == 8:
            whole = b.sext(load(b, self._address, number * PANEL + self._vector * LANES, _BYTES, 1), _WHOLE)
        else:
            shift = 4 * (number // 2) + 16 * (number % 2)
            if self._values > WITH_ZEROS or (self._is_wide and self._zeros is None):
                return self._look_up(b.lshr(self._packed, integer_constant(shift, _WHOLE)))
            at_the_top = b.shl(self._packed, integer_constant(28 - shift, _WHOLE))
            whole = b.ashr(at_the_top, integer_constant(28, _WHOLE))
        return b.sitofp(whole if self._zeros is None else b.sub(whole, self._zeros), floats())

    def _look_up(self, numbers: Value) -> Value:
        """Take float32 from a table of sixteen by the low four bits, and no others, of each lane."""
        b, table = self._b, [ir.Constant(FLOAT, number) for number in _numbers(self._values)]
        if self._is_wide:
            return _permute(b, "avx512.permvar.sf.512", ir.Constant(floats(), table), numbers)
        # Vectors and tables of eight: the low three bits pick from two tables, and the fourth, as a sign, one of them.
        parts = []
        for start in (0, 8):
            some = b.shuffle_vector(numbers, numbers, lane_numbers(start, 8))
            low, high = (_permute(b, "avx2.permps", ir.Constant(floats(8), half), some)
                         for half in (table[:8], table[8:]))  # fmt: skip
            is_high = b.icmp_signed("<", b.shl(some, integer_constant(28, some.type)), integer_constant(0, some.type))
            parts.append(b.select(is_high, high, low))
        return b.shuffle_vector(*parts, lane_numbers(0, LANES))

    def _pair_of_four_bits(self, step: int) -> Value:
        """Take bfloat16 from a table of 32 by the low five bits, and no others, of each word."""
        b = self._b
        words = b.lshr(b.bitcast(self._packed, _WORDS), integer_constant(4 * step, _WORDS))
        if self._zeros is None:
            numbers = 2 * _numbers(self._values)
        else:
            # The five bits are those of the difference, from -16 to 15.
            low = b.and_(words, integer_constant(15, _WORDS))
            values = b.sub(b.xor(low, integer_constant(8, _WORDS)), integer_constant(8, _WORDS))
            both = b.or_(b.and_(self._zeros, integer_constant(0xFFFF, _WHOLE)),
                         b.shl(self._zeros, integer_constant(16, _WHOLE)))  # fmt: skip
            words, numbers = b.sub(values, b.bitcast(both, _WORDS)), _SIGNED[5]
        table = ir.Constant(_WORDS, [ir.Constant(INT16, _bfloat16(number)) for number in numbers])
        return b.bitcast(_permute(b, "avx512.permvar.hi.512", table, words), floats())


def _numbers(values: int) -> list[float]:
    """Return what four bits without a zero point stand for, from 0b0000 on; see ``WHOLE``."""
    return [float(number) for number in (_SIGNED[4], _SIGNED[4], range(16), *CODEBOOKS.values())[values]]


def _ones(b: Builder, form: int) -> Value:
    """Return the weights of a step that are all 1."""
    return b.bitcast(integer_constant(ONES, _WHOLE), floats()) if form == PAIRS else constant(1.0)


def _bfloat16(number: float) -> int:
    """Return the bits of the nearest bfloat16, ties to even; small whole numbers lose nothing."""
    bits = int(np.float32(number).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _permute(b: Builder, instruction: str, table: Value, numbers: Value) -> Value:
    """Take elements of a table by the low bits of numbers."""
    kind = ir.FunctionType(table.type, [table.type, numbers.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{instruction}"), [table, numbers])


def load_zeros(b: Builder, group: Value, vector: int, halves: int) -> Value:
    """Load sixteen zero points of a group's header, as int32."""
    return b.sext(load(b, group, scale_bytes(halves) + vector * LANES, _BYTES, 1), _WHOLE)


def load_numbers(b: Builder, group: Value, place: int, vector: int, halves: int) -> Value:
    """Load sixteen float32 of a group's header, or float16, of which float32 loses nothing."""
    if not halves:
        return load(b, group, place + vector * 64, floats(), 4)
    return b.fpext(load(b, group, place + vector * 32, _HALVES, 2), floats())

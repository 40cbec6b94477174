"""The inner part of a product with weights of 4 or 8 bits whose scales are those of groups of inputs, as intrinsics.

A weight is ``scale * (value - zero)``. The difference is a whole number below 256, which float32 and bfloat16 hold, so
it is multiplied as it is, and a scale is applied to the sum of a chunk: ``CHUNK_STEPS`` steps at most, all of one
group. Or a weight is ``scale`` times one of the sixteen numbers of a codebook, which are rounded to bfloat16 where
pairs of them are multiplied. Or it is ``scale * value - least``, with a float for each group, which the sum of the
chunk's inputs is multiplied with; values of 4 bits are from 0 to 15 then. A few rows unpack weights into registers
while they come from memory; for more rows a chunk is unpacked once, into a buffer of 16 KiB. Both multiply the same
numbers in the same order.

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
    STEP_BYTES,
    SUM_BYTES,
    TILE_ROWS,
    add_products,
    lane_numbers,
)
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT16,
    INT32,
    LANES,
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

#: Inputs of a unit of packed weights.
UNIT = 8
#: Most steps of a chunk. Part of the order of additions: another number gives other bits.
CHUNK_STEPS = 64
#: What 4 bits stand for, other than whole numbers: the number of each of the sixteen, from 0b0000 on.
CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
#: What packed values stand for, as a literal of the functions below: themselves; themselves less the zero point of
#: their group; themselves, counted from 0, with a least weight; and, from the next number on, numbers of a codebook.
WHOLE, WITH_ZEROS, WITH_LEAST = 0, 1, 2
KIND_OF_CODEBOOK = {name: number for number, name in enumerate(CODEBOOKS, 3)}
#: Bytes of a group's scales, which come before its weights, and of its zero points or (negated) least weights, which
#: come between.
SCALE_BYTES, OFFSET_BYTES = 4 * PANEL, {WITH_ZEROS: PANEL, WITH_LEAST: 4 * PANEL}

_VECTORS = PANEL // LANES
_WHOLE = ir.VectorType(INT32, LANES)
_WORDS = ir.VectorType(INT16, 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_LINE = 64
#: What numbers of 4 and of 5 bits are in two's complement.
_SIGNED = {bits: [*range(2 ** (bits - 1)), *range(-(2 ** (bits - 1)), 0)] for bits in (4, 5)}
#: A pair of bfloat16 that are 1.
_ONES = 0x3F803F80


def unit_bytes(bits: int) -> int:
    """Bytes of a unit of packed weights."""
    return UNIT * PANEL * bits // 8


def inputs_of_step(form: int) -> int:
    """Inputs that one step takes: a pair, or one."""
    return 2 if form == PAIRS else 1


@njit(inline="always")
def multiply_unpacked_tiles(
    form: int, bits: int, values: int, most_sums: int, is_wide: int, rows: int, row_bytes: int, num_rows: int,
    buffer: int, group: int, num_units: int, sums: int, is_first: int,
) -> None:  # fmt: skip
    """``multiply_grouped_tile`` for any number of rows by weights that are unpacked already."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(num_tiles):
        row, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        multiply_few_rows(
            form, bits, values, 0, most_sums, is_wide, rows + row * row_bytes, row_bytes, end - row, buffer, group,
            num_units, sums + row * SUM_BYTES, is_first, buffer,
        )  # fmt: skip


@njit(inline="always")
def multiply_few_rows(
    form: int, bits: int, values: int, is_packed: int, most_sums: int, is_wide: int, rows: int, row_bytes: int,
    num_rows: int, weights: int, group: int, num_units: int, sums: int, is_first: int, ahead: int,
) -> None:  # fmt: skip
    """``multiply_grouped_tile`` for up to ``TILE_ROWS`` rows."""
    if num_rows == 4:
        multiply_grouped_tile(
            form, bits, values, is_packed, most_sums, is_wide, 4, rows, row_bytes, weights, group, num_units, sums,
            is_first, ahead,
        )  # fmt: skip
    elif num_rows == 3:
        multiply_grouped_tile(
            form, bits, values, is_packed, most_sums, is_wide, 3, rows, row_bytes, weights, group, num_units, sums,
            is_first, ahead,
        )  # fmt: skip
    elif num_rows == 2:
        multiply_grouped_tile(
            form, bits, values, is_packed, most_sums, is_wide, 2, rows, row_bytes, weights, group, num_units, sums,
            is_first, ahead,
        )  # fmt: skip
    else:
        multiply_grouped_tile(
            form, bits, values, is_packed, most_sums, is_wide, 1, rows, row_bytes, weights, group, num_units, sums,
            is_first, ahead,
        )  # fmt: skip


@intrinsic(prefer_literal=True)
def multiply_grouped_tile(
    typing: Typing,
    form: Any,
    bits: Any,
    values: Any,
    is_packed: Any,
    most_sums: Any,
    is_wide: Any,
    num_rows: Any,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    group: Any,
    num_units: Any,
    sums: Any,
    is_first: Any,
    ahead: Any,
) -> Any:
    """sums[num_rows, PANEL] = (nothing if ``is_first``, else sums) + scales * (rows[num_rows, num_units] @ weights).

    Literal: form, bits, values, is_packed (weights are units of a panel, else what ``unpack_chunk`` makes of them),
    most_sums (vectors of sums in registers at once), is_wide (vectors of 512 bits are there), num_rows. ``group`` is
    the address of the group's scales and what comes with them; as many bytes from ``ahead`` on as packed weights have
    are asked for.
    """
    literals = (form, bits, values, is_packed, most_sums, is_wide, num_rows)
    kind, num_bits, stand_for, packed, most, wide, count = (literal.literal_value for literal in literals)
    width, num_steps = max(1, min(_VECTORS, most // count)), UNIT // inputs_of_step(kind)
    bytes_of_unit = unit_bytes(num_bits) if packed else num_steps * STEP_BYTES

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, stride, w, scales, units, target, first, next_memory = args[len(literals) :]
        starts = [b.add(x, b.mul(stride, int64(m))) for m in range(count)]
        starts_anew = b.icmp_signed("!=", first, int64(0))

        def multiply(vectors: range) -> None:
            places = [(m, v) for m in range(count) for v in vectors]
            totals = {place: cgutils.alloca_once_value(b, constant(0.0)) for place in places}
            num_sums = count if stand_for == WITH_LEAST else 0
            of_inputs = [cgutils.alloca_once_value(b, constant(0.0)) for _ in range(num_sums)]
            zeros = {v: _load_zeros(b, scales, v) if stand_for == WITH_ZEROS else None for v in vectors}
            with cgutils.for_range(b, units) as loop:
                place = b.mul(loop.index, int64(bytes_of_unit))
                unit = {v: _Unit(b, kind, num_bits, stand_for, wide, b.add(w, place), v, zeros[v]) for v in vectors}
                if packed and vectors.start == 0:
                    for line in range(0, bytes_of_unit, _LINE):
                        prefetch_line(b, next_memory, b.add(place, int64(line)))
                row_unit = b.mul(loop.index, int64(num_steps * 4))
                for step in range(num_steps):
                    if packed:
                        weight = {v: unit[v].unpack(step) for v in vectors}
                    else:
                        weight = {v: unit[v].load_unpacked(step) for v in vectors}
                    for m in range(count):
                        inputs = splat(b, load(b, starts[m], b.add(row_unit, int64(4 * step)), FLOAT, 4))
                        for v in vectors:
                            added = add_products(b, kind, b.load(totals[m, v]), weight[v], inputs)
                            b.store(added, totals[m, v])
                        for total in of_inputs[m : m + 1]:
                            b.store(add_products(b, kind, b.load(total), _ones(b, kind), inputs), total)
            for m, v in places:
                place = m * SUM_BYTES + v * 64
                before = b.select(starts_anew, constant(0.0), load(b, target, place, floats(), 4))
                scale = load(b, scales, v * 64, floats(), 4)
                after = fma(b, b.load(totals[m, v]), scale, before)
                for total in of_inputs[m : m + 1]:
                    after = fma(b, b.load(total), load(b, scales, SCALE_BYTES + v * 64, floats(), 4), after)
                store(b, after, target, place, 4)

        for start in range(0, _VECTORS, width):
            multiply(range(start, min(start + width, _VECTORS)))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def unpack_chunk(
    typing: Typing,
    form: Any,
    bits: Any,
    values: Any,
    is_wide: Any,
    weights: Any,
    group: Any,
    num_units: Any,
    buffer: Any,
    ahead: Any,
) -> Any:
    """Write [num_units, steps of a unit, PANEL] weights to ``buffer``; see ``multiply_grouped_tile``."""
    literals = (form, bits, values, is_wide)
    kind, num_bits, stand_for, wide = (literal.literal_value for literal in literals)
    num_steps, bytes_of_unit = UNIT // inputs_of_step(kind), unit_bytes(num_bits)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        w, scales, units, target, next_memory = args[len(literals) :]
        zeros = [_load_zeros(b, scales, v) if stand_for == WITH_ZEROS else None for v in range(_VECTORS)]
        with cgutils.for_range(b, units) as loop:
            place = b.mul(loop.index, int64(bytes_of_unit))
            for line in range(0, bytes_of_unit, _LINE):
                prefetch_line(b, next_memory, b.add(place, int64(line)))
            out = b.add(target, b.mul(loop.index, int64(num_steps * STEP_BYTES)))
            for v in range(_VECTORS):
                unit = _Unit(b, kind, num_bits, stand_for, wide, b.add(w, place), v, zeros[v])
                for step in range(num_steps):
                    store(b, unit.unpack(step), out, step * STEP_BYTES + v * 64, 4)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 5), codegen


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
    return b.bitcast(integer_constant(_ONES, _WHOLE), floats()) if form == PAIRS else constant(1.0)


def _bfloat16(number: float) -> int:
    """Return the bits of the nearest bfloat16, ties to even; small whole numbers lose nothing."""
    bits = int(np.float32(number).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _permute(b: Builder, instruction: str, table: Value, numbers: Value) -> Value:
    """Take elements of a table by the low bits of numbers."""
    kind = ir.FunctionType(table.type, [table.type, numbers.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{instruction}"), [table, numbers])


def _load_zeros(b: Builder, group: Value, vector: int) -> Value:
    return b.sext(load(b, group, SCALE_BYTES + vector * LANES, _BYTES, 1), _WHOLE)

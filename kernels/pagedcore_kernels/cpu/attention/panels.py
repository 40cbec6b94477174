"""The parts of attention in pairs of bfloat16 as intrinsics: K and V arranged for products, scores made weights.

A *panel* is what ``matmul/tiles.py`` multiplies rows by: 64 outputs in steps of two inputs side by side. Of keys the
outputs are 64 positions and the inputs their elements; of values the outputs are elements and the inputs positions.
Scores and sums of a panel are rows of 64 float32, and weights in bfloat16 take the place of the scores they come from.
``attend_pairs.py`` arranges all this into a kernel.

Invariant: what becomes of a row depends on that row alone, and on the panels that it is told of.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.tiles import PAIR_VECTOR, PANEL, STEP_BYTES, add_pairs
from pagedcore_kernels.cpu.simd import (
    INT16,
    INT32,
    LANES,
    LINE,
    Builder,
    Typing,
    Value,
    combine_pairwise,
    constant,
    floats,
    fma,
    int64,
    integer_constant,
    load,
    maximum,
    reduce_lanes,
    splat,
    store,
)

_VECTORS: Final = PANEL // LANES
_PAIR_BYTES: Final = 4
_FLOOR: Final = 9
"""Of ``vreduceps``: what is left of a number after the next integer below it; no exception is raised."""
_AS_SET: Final = 4
"""Round as the thread's state says."""
_SMALLEST_POWER: Final = -125.0
_EXP2 = (0.013426684351733272, 0.05224247404263457, 0.24128020488002855, 0.6930448448751831, 1.0)
"""2**f for f from 0 to 1, from the fourth power down to the constant: the least relative error, 3e-6, with 1 at 0."""


def _interleave(b: Builder, first: Value, second: Value) -> list[Value]:
    """Put elements side by side, first[0], second[0], first[1], ...: vectors of at most sixteen pairs."""
    lanes = first.type.count
    width = min(lanes, LANES)
    return [
        b.shuffle_vector(first, second, ir.Constant(
            ir.VectorType(INT32, 2 * width), [number for i in range(start, start + width) for number in (i, lanes + i)]
        ))
        for start in range(0, lanes, width)
    ]  # fmt: skip


def _store_pairs(b: Builder, first: Value, second: Value, target: Value, offset: int) -> None:
    for number, pairs in enumerate(_interleave(b, first, second)):
        store(b, pairs, target, offset + number * LANES * _PAIR_BYTES, 4)


@intrinsic(prefer_literal=True)
def gather_keys(typing: Typing, key_size: Any, block_size: Any, positions: Any, source: Any, target: Any) -> Any:
    """Arrange keys of a block, [key_size, block_size] of which ``positions`` are taken, as columns of a panel.

    Literal: key_size, block_size, positions.
    """
    literals = key_size, block_size, positions
    size, slots, count = (literal.literal_value for literal in literals)
    lanes = min(2 * LANES, count)
    kind, row_bytes = ir.VectorType(INT16, lanes), slots * 2

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        keys, panel = args[len(literals) :]

        def arrange(step: Value, *, has_second: bool) -> None:
            row = b.add(keys, b.mul(step, int64(2 * row_bytes)))
            place = b.add(panel, b.mul(step, int64(STEP_BYTES)))
            for start in range(0, count, lanes):
                first = load(b, row, start * 2, kind, 2)
                second = load(b, row, row_bytes + start * 2, kind, 2) if has_second else integer_constant(0, kind)
                _store_pairs(b, first, second, place, start * _PAIR_BYTES)

        with cgutils.for_range(b, int64(size // 2)) as loop:
            arrange(loop.index, has_second=True)
        if size % 2:
            arrange(int64(size // 2), has_second=False)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 2), codegen


@intrinsic(prefer_literal=True)
def gather_values(
    typing: Typing, width: Any, panel_bytes: Any, positions: Any, source: Any, target: Any
) -> Any:
    """Arrange the values of some positions, [positions, width], as steps of panels ``panel_bytes`` apart.

    Literal: width (a multiple of 16), panel_bytes, positions (an even number).
    """
    literals = width, panel_bytes, positions
    size, distance, count = (literal.literal_value for literal in literals)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        values, panels = args[len(literals) :]
        with cgutils.for_range(b, int64(count // 2)) as loop:
            row = b.add(values, b.mul(loop.index, int64(2 * size * 2)))
            place = b.add(panels, b.mul(loop.index, int64(STEP_BYTES)))
            _arrange_values(b, size, distance, row, b.add(row, int64(size * 2)), place)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 2), codegen


@intrinsic(prefer_literal=True)
def gather_two_values(typing: Typing, width: Any, panel_bytes: Any, first: Any, second: Any, target: Any) -> Any:
    """Arrange the values of two positions, rows of ``width`` elements, as a step. Literal: width, panel_bytes."""
    literals = width, panel_bytes
    size, distance = (literal.literal_value for literal in literals)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _arrange_values(b, size, distance, *args[len(literals) :])
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 3), codegen


def _arrange_values(b: Builder, size: int, distance: int, first: Value, second: Value, target: Value) -> None:
    lanes = 2 * LANES if size % (2 * LANES) == 0 else LANES
    kind = ir.VectorType(INT16, lanes)
    for start in range(0, size, lanes):
        offset = start // PANEL * distance + start % PANEL * _PAIR_BYTES
        _store_pairs(b, load(b, first, start * 2, kind, 2), load(b, second, start * 2, kind, 2), target, offset)


@intrinsic
def largest_score(typing: Typing, scores: Any) -> Any:
    """``largest_score(scores) -> float32``: the largest of a row's 64, NaN left out; minus infinity if all are."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        vectors = [load(b, args[0], v * LINE, floats(), 4) for v in range(_VECTORS)]
        hidden = constant(float("-inf"))
        largest = combine_pairwise([maximum(b, v, hidden) for v in vectors], lambda x, y: maximum(b, x, y))
        return reduce_lanes(b, largest, lambda x, y: maximum(b, x, y))

    return types.float32(types.int64), codegen


@intrinsic
def weigh_scores(typing: Typing, scores: Any, scale: Any, highest: Any, total: Any) -> Any:
    """Make a row's 64 scores weights, ``2**(score * scale - highest)``, in bfloat16 where the first 32 scores were.

    ``total``: address of sixteen float32, each the sum of some of the row's weights as they are rounded. Lane i takes
    pair i of each 32 positions, in order, and a weight that is 0 changes no bit.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, scale, highest, place = args
        scale, below = splat(b, scale), b.fneg(splat(b, highest))
        ones = ir.Constant(ir.VectorType(INT16, 2 * LANES), [ir.Constant(INT16, 0x3F80)] * 2 * LANES)
        powers = [_power(b, fma(b, load(b, row, v * LINE, floats(), 4), scale, below)) for v in range(_VECTORS)]
        total = load(b, place, 0, floats(), 4)
        for pair in range(_VECTORS // 2):
            weights = _round_both(b, powers[2 * pair], powers[2 * pair + 1])
            store(b, weights, row, pair * LINE, 4)
            total = add_pairs(b, total, weights, b.bitcast(ones, PAIR_VECTOR))
        store(b, total, place, 0, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.float32, types.int64), codegen


@intrinsic
def clear_weights(typing: Typing, weights: Any) -> Any:
    """``clear_weights(weights)``: all 64 weights of a row are 0."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        for line in range(_VECTORS // 2):
            store(b, constant(0.0), args[0], line * LINE, 4)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def sum_of_lanes(typing: Typing, total: Any) -> Any:
    """``sum_of_lanes(address) -> float32``: the sum of sixteen float32, in a fixed order."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return reduce_lanes(b, load(b, args[0], 0, floats(), 4), b.fadd)

    return types.float32(types.int64), codegen


def _power(b: Builder, x: Value) -> Value:
    """2**x for x <= 127, a vector of float32: relative error below 3e-6, exactly 0 below -125, NaN for NaN."""
    whole, mask = ir.VectorType(INT32, LANES), ir.Constant(INT16, -1)
    kind = ir.FunctionType(floats(), [floats(), INT32, floats(), INT16, INT32])
    reduce = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.reduce.ps.512")
    fraction = b.call(reduce, [x, ir.Constant(INT32, _FLOOR), x, mask, ir.Constant(INT32, _AS_SET)])
    power = constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = fma(b, power, fraction, constant(coefficient))
    kind = ir.FunctionType(floats(), [floats(), floats(), floats(), INT16, INT32])
    scale = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    value = b.call(scale, [power, x, power, mask, ir.Constant(INT32, _AS_SET)])
    # Why a bound: no weight is denormal, so what a processor makes of those does not matter.
    bits = b.select(b.fcmp_ordered("<", x, constant(_SMALLEST_POWER)), integer_constant(0, whole),
                    b.bitcast(value, whole))  # fmt: skip
    return b.bitcast(bits, floats())


def _round_both(b: Builder, low: Value, high: Value) -> Value:
    """Round two vectors of float32 to one of bfloat16, ties to even."""
    kind = ir.FunctionType(PAIR_VECTOR, [floats(), floats()])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return b.call(function, [high, low])

"""Rows of attention as intrinsics: a query read in, a score row masked and exponentiated, an output written.

Rows of float32 lie in the kernel's own memory and are handled as whole 16-lane vectors; rows of the caller's
tensors have any length and are never read or written past their end. Used by ``attend.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.simd import (
    INT64,
    LANES,
    LOG2_E,
    Builder,
    Typing,
    Value,
    constant,
    exp2,
    floats,
    fma,
    int64,
    item_bytes,
    load,
    load_floats,
    maximum,
    minimum,
    reduce_lanes,
    splat,
    store,
    store_floats,
)

_VECTOR_BYTES = LANES * 4


def _for_vectors(b: Builder, row: Value, first: Value, last: Value, body: Callable[[Value, Value], Any]) -> None:
    """Run ``body(vector, index)`` for vectors ``first`` to ``last`` of a row; store what it returns, if anything."""
    with cgutils.for_range(b, last, first) as loop:
        offset = b.mul(loop.index, int64(_VECTOR_BYTES))
        changed = body(load(b, row, offset, floats(), 4), loop.index)
        if changed is not None:
            store(b, changed, row, offset, 4)


def _vector(b: Builder, row: Value, index: Value) -> Value:
    return load(b, row, b.mul(index, int64(_VECTOR_BYTES)), floats(), 4)


def _within(b: Builder, low_number: Value, high_number: Value) -> Callable[[Value], Value]:
    """Return a function of a vector's index: which of its columns are in ``[low_number, high_number)``."""
    low, high = splat(b, low_number), splat(b, high_number)
    lanes = ir.Constant(ir.VectorType(INT64, LANES), [ir.Constant(INT64, lane) for lane in range(LANES)])

    def is_within(index: Value) -> Value:
        column = b.add(splat(b, b.mul(index, int64(LANES))), lanes)
        return b.and_(b.icmp_signed(">=", column, low), b.icmp_signed("<", column, high))

    return is_within


@intrinsic
def fill_row(typing: Typing, row: Any, first: Any, last: Any, value: Any) -> Any:
    """``fill_row(row, first, last, value)``: set vectors ``first`` to ``last`` (exclusive)."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, number = args
        value = splat(b, number)
        _for_vectors(b, row, first, last, lambda old, index: value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def scale_row(typing: Typing, row: Any, first: Any, last: Any, factor: Any) -> Any:
    """``scale_row(row, first, last, factor)``: multiply in place."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, number = args
        factor = splat(b, number)
        _for_vectors(b, row, first, last, lambda old, index: b.fmul(old, factor))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def multiply_row(typing: Typing, row: Any, first: Any, last: Any, factors: Any) -> Any:
    """``multiply_row(row, first, last, factors)``: multiply in place by a row of factors."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, factors = args
        _for_vectors(b, row, first, last, lambda old, index: b.fmul(old, _vector(b, factors, index)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def multiply_visible(typing: Typing, row: Any, first: Any, last: Any, low: Any, high: Any, factors: Any) -> Any:
    """``multiply_visible(row, first, last, low, high, factors)``: the same in columns ``[low, high)``, else 0.

    The factors of other columns may be anything, NaN included: they are dropped, not computed with.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, low, high, factors = args
        is_visible = _within(b, low, high)

        def weighed(weight: Value, index: Value) -> Value:
            return b.select(is_visible(index), b.fmul(weight, _vector(b, factors, index)), constant(0.0))

        _for_vectors(b, row, first, last, weighed)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


@intrinsic
def cap_row(typing: Typing, row: Any, first: Any, last: Any, inverse: Any, cap: Any) -> Any:
    """``cap_row(row, first, last, inverse, cap)``: ``cap * tanh(score * inverse)`` in place."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, inverse_number, cap_number = args
        inverse, cap = splat(b, inverse_number), splat(b, cap_number)

        def capped(score: Value, index: Value) -> Value:
            # tanh(x) = 1 - 2 / (e**2x + 1); beyond 60 powers of two it is 1 in float32.
            doubled = b.fmul(b.fmul(score, inverse), constant(2 * LOG2_E))
            power = exp2(b, minimum(b, constant(60.0), doubled))
            one = constant(1.0)
            return b.fmul(b.fsub(one, b.fdiv(constant(2.0), b.fadd(power, one))), cap)

        _for_vectors(b, row, first, last, capped)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.float32), codegen


@intrinsic
def mask_row(typing: Typing, row: Any, first: Any, last: Any, low: Any, high: Any) -> Any:
    """``mask_row(row, first, last, low, high)``: minus infinity in all columns outside ``[low, high)``.

    What was there may be anything, NaN included: it is dropped, not computed with.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, low, high = args
        is_visible = _within(b, low, high)
        hidden = constant(float("-inf"))
        _for_vectors(b, row, first, last, lambda score, index: b.select(is_visible(index), score, hidden))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def row_maximum(typing: Typing, row: Any, first: Any, last: Any, start: Any) -> Any:
    """``row_maximum(row, first, last, start) -> float32``: the largest of ``start`` and the row, NaN left out."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, start = args
        largest = cgutils.alloca_once_value(b, splat(b, start))
        _for_vectors(b, row, first, last, lambda v, i: b.store(maximum(b, v, b.load(largest)), largest) and None)
        return reduce_lanes(b, b.load(largest), lambda x, y: maximum(b, x, y))

    return types.float32(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def exponentiate_row(typing: Typing, row: Any, first: Any, last: Any, largest: Any) -> Any:
    """``exponentiate_row(row, first, last, largest) -> float32``: ``2**(score - largest)`` in place, and the sum.

    Lane i of the sum takes columns i, i + 16, ... in order: a masked vector more or less adds zeros and changes
    no bit.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        row, first, last, number = args
        largest = splat(b, number)
        total = cgutils.alloca_once_value(b, constant(0.0))

        def weight(score: Value, index: Value) -> Value:
            power = exp2(b, b.fsub(score, largest))
            b.store(b.fadd(power, b.load(total)), total)
            return power

        _for_vectors(b, row, first, last, weight)
        return reduce_lanes(b, b.load(total), b.fadd)

    return types.float32(types.int64, types.int64, types.int64, types.float32), codegen


def _convert_row(b: Builder, dim: int, convert: Callable[[int, int], None]) -> None:
    """Call ``convert(first element, lanes)`` for the vectors of a row, then for single elements (lanes 0)."""
    for start in range(0, dim - LANES + 1, LANES):
        convert(start, LANES)
    for start in range(dim // LANES * LANES, dim):
        convert(start, 0)


@intrinsic(prefer_literal=True)
def load_query(typing: Typing, is_bf16: Any, dim: Any, source: Any, target: Any, factor: Any) -> Any:
    """``load_query(is_bf16, dim, source, target, factor)``: target = source * factor, as float32.

    Literal: is_bf16, dim.
    """
    bf16, size = is_bf16.literal_value, dim.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, target, factor = args

        def convert(start: int, lanes: int) -> None:
            value = load_floats(b, source, start * item_bytes(bf16), bf16, lanes)
            store(b, b.fmul(value, splat(b, factor) if lanes else factor), target, start * 4, 4)

        _convert_row(b, size, convert)
        return context.get_dummy_value()

    return types.void(is_bf16, dim, types.int64, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def store_output(typing: Typing, is_bf16: Any, dim: Any, source: Any, target: Any, factor: Any) -> Any:
    """``store_output(is_bf16, dim, source, target, factor)``: target = source * factor, rounded once.

    Literal: is_bf16, dim.
    """
    bf16, size = is_bf16.literal_value, dim.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, target, factor = args

        def convert(start: int, lanes: int) -> None:
            value = load_floats(b, source, start * 4, 0, lanes)
            number = splat(b, factor) if lanes else factor
            # Why: adding zero turns -0 into 0. The sign of a sum that vanishes may depend on how many masked
            # values, times zero, were added to it; nothing else does.
            zero = constant(0.0, value.type)
            store_floats(b, fma(b, value, number, zero), target, start * item_bytes(bf16), bf16)

        _convert_row(b, size, convert)
        return context.get_dummy_value()

    return types.void(is_bf16, dim, types.int64, types.int64, types.float32), codegen

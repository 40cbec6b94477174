"""Weights in integers of 4 or 8 bits, each group of an output's inputs with a scale of its own.

Converting a model reads every weight twice, once for the largest magnitude of its group: a matrix at a time, on all
threads, where a chain of torch's operations would write it to memory eight times.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT8,
    INT32,
    LANES,
    ROUNDING,
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    constant,
    int64,
    integer_constant,
    item_bytes,
    larger,
    load_floats,
    load_int64,
    maximum,
    minimum,
    reduce_lanes,
    splat,
    store,
)

_DIVISORS = {8: 127.0, 4: -8.0}
"""By bits, what a group's largest number is divided by: as a magnitude, or with its sign turned."""
_RANGES = {8: (-127.0, 127.0), 4: (-8.0, 7.0)}
"""Least and largest value, by bits."""
_SIGN, _INFINITY = -(2**31), 0x7F800000
_WHOLE = ir.VectorType(INT32, LANES)
_AT_ONCE = 2**18
"""Numbers that a thread converts at a time at least."""


def quantize_groups(weight: torch.Tensor, num_groups: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] and float32 scales [out, groups] of a weight [out, in], float32 or bfloat16.

    With 8 bits a scale is a 127th of the group's largest magnitude; with 4 a -8th of its number of largest magnitude,
    of two such numbers the positive one. A value is the nearest integer to ``weight / scale``, ties to even, with
    4 bits 7 at most. A group of zeros has the scale 0, one with an infinity or a NaN the scale NaN and values of zero.

    Args:
        weight: any strides.
        num_groups: divides ``in``; groups are inputs side by side.
        bits: 4 or 8.
    """
    rows = weight.contiguous()
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows), num_groups)
    size = rows.shape[1] // num_groups
    parameters, at_once = ParameterBlock(7), -(-_AT_ONCE // max(1, size))
    parameters.fill(rows.data_ptr(), values.data_ptr(), scales.data_ptr(), scales.numel(), size, at_once)
    _kernel(int(rows.dtype == torch.bfloat16), bits).run(parameters)
    return values, scales


@cache
def _kernel(is_bf16: int, bits: int) -> Kernel:
    number_bytes = item_bytes(is_bf16)

    def quantize(parameters: Any) -> None:
        p = address_of(parameters)
        counter, numbers, values, scales = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        num_groups, size, groups_at_once = load_int64(p, 4), load_int64(p, 5), load_int64(p, 6)
        first = claim(counter) * groups_at_once
        while first < num_groups:
            for group in range(first, min(first + groups_at_once, num_groups)):
                begin = group * size
                _quantize_group(is_bf16, bits, numbers + begin * number_bytes, size, values + begin, scales + group * 4)
            first = claim(counter) * groups_at_once

    return compile_kernel(quantize)


@intrinsic(prefer_literal=True)
def _quantize_group(
    typing: Typing, is_bf16: Any, bits: Any, numbers: Any, size: Any, values: Any, scale: Any
) -> Any:  # fmt: skip
    """Quantise ``size`` numbers. Literal: is_bf16, bits."""
    bf16, num_bits = is_bf16.literal_value, bits.literal_value
    number_bytes = item_bytes(bf16)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, count, target, scale_address = args
        largest = _number_of_largest_magnitude(b, source, count, bf16)
        bits_of_magnitude = b.and_(b.bitcast(largest, INT32), ir.Constant(INT32, ~_SIGN))
        is_finite = b.icmp_signed("<", bits_of_magnitude, ir.Constant(INT32, _INFINITY))
        if num_bits == 8:
            largest = b.bitcast(bits_of_magnitude, FLOAT)
        quotient, zero = b.fdiv(largest, constant(_DIVISORS[num_bits], FLOAT)), constant(0.0, FLOAT)
        is_zero = b.fcmp_ordered("==", quotient, zero)
        known = b.select(is_zero, zero, b.select(is_finite, quotient, constant(float("nan"), FLOAT)))
        store(b, known, scale_address, 0, 4)
        is_usable = b.and_(is_finite, b.not_(is_zero))
        divisor = b.select(is_usable, quotient, constant(1.0, FLOAT))
        # Why: where no scale is of use, all values are 0, those of NaN too.
        bounds = [b.select(is_usable, constant(number, FLOAT), zero) for number in _RANGES[num_bits]]
        for start, end, lanes in _runs(b, count):
            by, least, most = (splat(b, number, lanes) if lanes else number for number in (divisor, *bounds))
            whole, byte = (ir.VectorType(kind, lanes) if lanes else kind for kind in (INT32, INT8))
            with cgutils.for_range_slice(b, start, end, int64(lanes or 1)) as (index, _):
                scaled = b.fdiv(load_floats(b, source, b.mul(index, int64(number_bytes)), bf16, lanes), by)
                bounded = minimum(b, maximum(b, scaled, least), most)
                rounded = b.fadd(bounded, constant(ROUNDING, bounded.type))
                store(b, b.trunc(b.bitcast(rounded, whole), byte), target, index, 1)
        return context.get_dummy_value()

    return types.void(is_bf16, bits, *[types.int64] * 4), codegen


def _runs(b: Builder, count: Value) -> list[tuple[Value, Value, int]]:
    """Return begin, end and lanes of the numbers that fill vectors, and of those that are left, one by one."""
    end_of_vectors = b.and_(count, int64(-LANES))
    return [(int64(0), end_of_vectors, LANES), (end_of_vectors, count, 0)]


def _number_of_largest_magnitude(b: Builder, source: Value, count: Value, is_bf16: int) -> Value:
    """Return it, of two the positive one; a NaN or an infinity if there is any.

    Why as integers: bits of positive numbers are in the order of the numbers, those of NaN last. With the sign turned,
    that holds for negative numbers.
    """
    lowest = ir.Constant(INT32, _SIGN)
    found = [cgutils.alloca_once_value(b, lowest) for _ in range(2)]

    def take(numbers: Value, places: list[Value]) -> None:
        turned = b.xor(numbers, integer_constant(_SIGN, numbers.type))
        for place, here in zip(places, (numbers, turned), strict=True):
            b.store(larger(b, here, b.load(place)), place)

    for start, end, lanes in _runs(b, count):
        kind = _WHOLE if lanes else INT32
        places = [cgutils.alloca_once_value(b, integer_constant(_SIGN, _WHOLE)) for _ in found] if lanes else found
        with cgutils.for_range_slice(b, start, end, int64(lanes or 1)) as (index, _):
            numbers = load_floats(b, source, b.mul(index, int64(item_bytes(is_bf16))), is_bf16, lanes)
            take(b.bitcast(numbers, kind), places)
        if lanes:
            for place, vectors in zip(found, places, strict=True):
                b.store(reduce_lanes(b, b.load(vectors), partial(larger, b)), place)
    positive, negative = (b.load(place) for place in found)
    is_negative = b.icmp_signed(">", negative, positive)
    return b.bitcast(b.select(is_negative, b.xor(negative, lowest), positive), FLOAT)

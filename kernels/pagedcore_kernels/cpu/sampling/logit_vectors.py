"""Chunks of logits as intrinsics: maxima, masses of probability, and where the large ones are.

A chunk is 64 consecutive float32 at any address. Every function looks at whole chunks only and changes nothing but
the result addresses it is given. Read ``logit_views.py`` next.

A token's *weight* is ``2 ** ((logit - largest) * scale)``: its probability but for a factor, 1 for the most likely.
With a scale of 0 every finite logit weighs 1, so that counting and adding up probabilities are one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.simd import Builder, Typing, Value

CHUNK: Final = 64
"""Logits of a chunk."""
_VECTORS: Final = CHUNK // simd.LANES
_VECTOR_BYTES: Final = simd.LANES * 4
_CHUNK_BYTES: Final = CHUNK * 4
_INFINITY: Final = float("inf")
_LARGEST_FINITE: Final = 3.4028234663852886e38


def _for_each_chunk(b: Builder, address: Value, count: Value, body: Callable[[Value, list[Value]], None]) -> None:
    """Emit ``body(chunk index, its vectors)`` for ``count`` chunks."""
    with cgutils.for_range(b, count) as loop:
        start = b.add(address, b.mul(loop.index, simd.int64(_CHUNK_BYTES)))
        body(loop.index, _load_chunk(b, start))


def _load_chunk(b: Builder, address: Value) -> list[Value]:
    return [simd.load(b, address, vector * _VECTOR_BYTES, simd.floats(), 4) for vector in range(_VECTORS)]


def _accumulators(b: Builder, start: float) -> list[Value]:
    return [cgutils.alloca_once_value(b, simd.constant(start)) for _ in range(_VECTORS)]


def _total(b: Builder, accumulators: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    return simd.reduce_lanes(b, simd.combine_pairwise([b.load(one) for one in accumulators], combine), combine)


def _weight(b: Builder, logits: Value, largest: Value, scale: Value) -> Value:
    # Why: a difference beyond float32 is clamped, because minus infinity times a scale of 0 would be NaN.
    difference = simd.maximum(b, simd.constant(-_LARGEST_FINITE), b.fsub(logits, largest))
    return simd.exp2(b, b.fmul(difference, scale))


@intrinsic
def chunk_maxima(typing: Typing, address: Any, num_chunks: Any, maxima: Any) -> Any:
    """``chunk_maxima(address, num_chunks, maxima) -> int64``: write each chunk's maximum; return 1 if there is a NaN.

    The maximum of a chunk that holds a NaN may be any number.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        whole = ir.VectorType(simd.INT32, simd.LANES)
        seen = cgutils.alloca_once_value(b, simd.integer_constant(0, whole))

        def visit(index: Value, vectors: list[Value]) -> None:
            largest = simd.combine_pairwise(vectors, lambda x, y: simd.maximum(b, x, y))
            reduced = simd.reduce_lanes(b, largest, lambda x, y: simd.maximum(b, x, y))
            simd.store(b, reduced, args[2], b.mul(index, simd.int64(4)), 4)
            # Why: an unordered comparison of two vectors finds the NaNs of both at once.
            pairs = [b.fcmp_unordered("uno", x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
            found = b.sext(simd.combine_pairwise(pairs, b.or_), whole)
            b.store(b.or_(b.load(seen), found), seen)

        _for_each_chunk(b, args[0], args[1], visit)
        return b.and_(b.sext(simd.reduce_lanes(b, b.load(seen), b.or_), simd.INT64), simd.int64(1))

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def widen_chunks(typing: Typing, address: Any, num_chunks: Any, target: Any) -> Any:
    """``widen_chunks(address, num_chunks, target)``: write chunks of bfloat16 as float32."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[1]) as loop:
            source = b.add(args[0], b.mul(loop.index, simd.int64(CHUNK * 2)))
            widened = b.add(args[2], b.mul(loop.index, simd.int64(_CHUNK_BYTES)))
            for vector in range(_VECTORS):
                logits = simd.load_floats(b, source, vector * simd.LANES * 2, simd.AS_BFLOAT16)
                simd.store(b, logits, widened, vector * _VECTOR_BYTES, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def weigh_chunks(typing: Typing, address: Any, num_chunks: Any, largest: Any, scale: Any, low: Any) -> Any:
    """``weigh_chunks(address, num_chunks, largest, scale, low) -> float32``: sum of the weights of logits >= low."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        largest, scale, low = (simd.splat(b, number) for number in args[2:])
        sums = _accumulators(b, 0.0)

        def visit(index: Value, vectors: list[Value]) -> None:
            for total, logits in zip(sums, vectors, strict=True):
                is_kept = b.fcmp_ordered(">=", logits, low)
                kept = b.select(is_kept, _weight(b, logits, largest, scale), simd.constant(0.0))
                b.store(b.fadd(b.load(total), kept), total)

        _for_each_chunk(b, args[0], args[1], visit)
        return _total(b, sums, b.fadd)

    return types.float32(types.int64, types.int64, types.float32, types.float32, types.float32), codegen


@intrinsic
def split_chunks(
    typing: Typing, address: Any, num_chunks: Any, largest: Any, scale: Any, pivot: Any, neighbours: Any
) -> Any:
    """``split_chunks(address, num_chunks, largest, scale, pivot, neighbours) -> float32``: weight of logits >= pivot.

    ``neighbours[0]`` is lowered to the least logit that is >= pivot, ``neighbours[1]`` raised to the largest below.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        largest, scale, pivot = (simd.splat(b, number) for number in args[2:5])
        sums = _accumulators(b, 0.0)
        above, below = _accumulators(b, _INFINITY), _accumulators(b, -_INFINITY)

        def visit(index: Value, vectors: list[Value]) -> None:
            for vector, logits in enumerate(vectors):
                is_above = b.fcmp_ordered(">=", logits, pivot)
                kept = b.select(is_above, _weight(b, logits, largest, scale), simd.constant(0.0))
                b.store(b.fadd(b.load(sums[vector]), kept), sums[vector])
                least = b.select(is_above, logits, simd.constant(_INFINITY))
                b.store(simd.minimum(b, least, b.load(above[vector])), above[vector])
                most = b.select(is_above, simd.constant(-_INFINITY), logits)
                b.store(simd.maximum(b, most, b.load(below[vector])), below[vector])

        def merge(accumulators: list[Value], combine: Callable[[Value, Value], Value], place: int) -> None:
            found = _total(b, accumulators, combine)
            known = simd.load(b, args[5], 4 * place, simd.FLOAT, 4)
            simd.store(b, combine(found, known), args[5], 4 * place, 4)

        _for_each_chunk(b, args[0], args[1], visit)
        merge(above, lambda x, y: simd.minimum(b, x, y), 0)
        merge(below, lambda x, y: simd.maximum(b, x, y), 1)
        return _total(b, sums, b.fadd)

    address_type, number = types.int64, types.float32
    return number(address_type, types.int64, number, number, number, address_type), codegen


def _mask_intrinsic(comparison: str) -> Any:
    def mask_chunk(typing: Typing, address: Any, bound: Any) -> Any:
        def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
            bound = simd.splat(b, args[1])
            mask = simd.int64(0)
            for vector, logits in enumerate(_load_chunk(b, args[0])):
                bits = b.bitcast(b.fcmp_ordered(comparison, logits, bound), ir.IntType(simd.LANES))
                mask = b.or_(mask, b.shl(b.zext(bits, simd.INT64), simd.int64(vector * simd.LANES)))
            return mask

        return types.int64(types.int64, types.float32), codegen

    return intrinsic(mask_chunk)


mask_at_least = _mask_intrinsic(">=")
"""``mask_at_least(chunk address, bound) -> int64``: bit ``i`` says whether logit ``i`` is >= bound."""
mask_equal = _mask_intrinsic("==")
"""``mask_equal(chunk address, bound) -> int64``: bit ``i`` says whether logit ``i`` is equal to bound."""


@intrinsic
def lowest_bit(typing: Typing, mask: Any) -> Any:
    """``lowest_bit(mask) -> int64``: number of the lowest bit that is set; the mask is not 0."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


@intrinsic
def load_float64(typing: Typing, address: Any, index: Any) -> Any:
    """``load_float64(address, index) -> float64``"""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return simd.load(b, args[0], b.mul(args[1], simd.int64(8)), ir.DoubleType(), 8)

    return types.float64(types.int64, types.int64), codegen


@intrinsic
def store_float64(typing: Typing, address: Any, index: Any, value: Any) -> Any:
    """``store_float64(address, index, value)``"""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        simd.store(b, args[2], args[0], b.mul(args[1], simd.int64(8)), 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float64), codegen

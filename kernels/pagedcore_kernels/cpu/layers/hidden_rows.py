"""Intrinsics for one row of hidden states: add, RMS norm, gated activation, rotary embedding.

Each one works on consecutive elements at raw addresses and rounds to the storage dtype exactly where the
modules of transformers do: a bfloat16 model rounds after every one of its operations, so do these. They know
nothing of threads, batches or pools. Read ``elementwise.py`` next.

Invariant: the bits of a row depend on that row and the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.simd import Builder, Typing, Value

SILU, GELU_TANH = 0, 1
"""Activations that ``gated_activation`` knows."""

_LARGEST_POWER = 127.0
"""exp(x) overflows float32 above 88; 2**127 is the last power that ``simd.exp2`` returns."""


def rounded(b: Builder, value: Value, is_bf16: int) -> Value:
    """Round to the storage dtype and widen again."""
    if not is_bf16:
        return value
    whole = ir.VectorType(simd.INT32, value.type.count)
    wide = b.zext(simd.to_bfloat16(b, value), whole)
    return b.bitcast(b.shl(wide, simd.integer_constant(16, whole)), value.type)


def _for_each_vector(b: Builder, count: Value, size: int, body: Callable[[Value], None]) -> None:
    """Emit ``body(byte offset)`` for ``count`` vectors of ``size`` bytes."""
    with cgutils.for_range(b, count) as loop:
        body(b.mul(loop.index, simd.int64(size)))


@intrinsic(prefer_literal=True)
def add_row(typing: Typing, is_bf16: Any, lanes: Any, target: Any, addend: Any, num_vectors: Any) -> Any:
    """``add_row(is_bf16, lanes, target, addend, num_vectors)``: ``target += addend``, rounded to storage."""
    bf16, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        def add(offset: Value) -> None:
            left = simd.load_floats(b, args[2], offset, bf16, width)
            right = simd.load_floats(b, args[3], offset, bf16, width)
            simd.store_floats(b, b.fadd(left, right), args[2], offset, bf16)

        _for_each_vector(b, args[4], width * simd.item_bytes(bf16), add)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def inverse_rms(typing: Typing, is_bf16: Any, lanes: Any, source: Any, num_vectors: Any, epsilon: Any) -> Any:
    """``inverse_rms(is_bf16, lanes, source, num_vectors, epsilon) -> float32``: ``1 / sqrt(mean(x**2) + epsilon)``."""
    bf16, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        total = cgutils.alloca_once_value(b, simd.constant(0.0, simd.floats(width)))

        def accumulate(offset: Value) -> None:
            x = simd.load_floats(b, args[2], offset, bf16, width)
            b.store(simd.fma(b, x, x, b.load(total)), total)

        _for_each_vector(b, args[3], width * simd.item_bytes(bf16), accumulate)
        squares = simd.reduce_lanes(b, b.load(total), b.fadd)
        count = b.sitofp(b.mul(args[3], simd.int64(width)), simd.FLOAT)
        root = simd.call_llvm(b, "sqrt", b.fadd(b.fdiv(squares, count), args[4]))
        return b.fdiv(simd.constant(1.0, simd.FLOAT), root)

    signature = types.float32(is_bf16, lanes, types.int64, types.int64, types.float32)
    return signature, codegen


@intrinsic(prefer_literal=True)
def scale_row(
    typing: Typing, is_bf16: Any, is_weight_bf16: Any, lanes: Any, source: Any, weight: Any, target: Any,
    num_vectors: Any, scale: Any,
) -> Any:
    """``scale_row(is_bf16, is_weight_bf16, lanes, source, weight, target, num_vectors, scale)``:
    ``weight * (source * scale)``.

    The result is rounded to storage, and so is the inner product unless the weight is wider; ``target`` may be
    ``source``.
    """
    bf16, weight_bf16, width = is_bf16.literal_value, is_weight_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        factor = simd.splat(b, args[7], width)

        def scale_vector(offset: Value) -> None:
            x = rounded(b, b.fmul(simd.load_floats(b, args[3], offset, bf16, width), factor), weight_bf16)
            place = b.mul(offset, simd.int64(2)) if bf16 and not weight_bf16 else offset
            w = simd.load_floats(b, args[4], place, weight_bf16, width)
            simd.store_floats(b, b.fmul(w, x), args[5], offset, bf16)

        _for_each_vector(b, args[6], width * simd.item_bytes(bf16), scale_vector)
        return context.get_dummy_value()

    address = types.int64
    return types.void(is_bf16, is_weight_bf16, lanes, address, address, address, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def gated_activation(
    typing: Typing, is_bf16: Any, lanes: Any, activation: Any, gate: Any, up: Any, target: Any, num_vectors: Any
) -> Any:
    """``gated_activation(is_bf16, lanes, activation, gate, up, target, num_vectors)``: ``f(gate) * up``."""
    bf16, width = is_bf16.literal_value, lanes.literal_value
    function = (silu, _gelu_tanh)[activation.literal_value]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        def activate(offset: Value) -> None:
            activated = function(b, simd.load_floats(b, args[3], offset, bf16, width))
            factor = simd.load_floats(b, args[4], offset, bf16, width)
            simd.store_floats(b, b.fmul(rounded(b, activated, bf16), factor), args[5], offset, bf16)

        _for_each_vector(b, args[6], width * simd.item_bytes(bf16), activate)
        return context.get_dummy_value()

    address = types.int64
    return types.void(is_bf16, lanes, activation, address, address, address, types.int64), codegen


def exp(b: Builder, x: Value) -> Value:
    """Emit ``exp(x)``; beyond 88 it stays what it is there."""
    power = b.fmul(x, simd.constant(simd.LOG2_E, x.type))
    return simd.exp2(b, simd.minimum(b, simd.constant(_LARGEST_POWER, x.type), power))


def sigmoid(b: Builder, x: Value) -> Value:
    """Emit ``1 / (1 + exp(-x))``."""
    one = simd.constant(1.0, x.type)
    return b.fdiv(one, b.fadd(exp(b, b.fmul(x, simd.constant(-1.0, x.type))), one))


def silu(b: Builder, x: Value) -> Value:
    """Emit ``x / (1 + exp(-x))``."""
    decay = exp(b, b.fmul(x, simd.constant(-1.0, x.type)))
    return b.fdiv(x, b.fadd(decay, simd.constant(1.0, x.type)))


def _gelu_tanh(b: Builder, x: Value) -> Value:
    """x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x**3), which is x / (1 + exp(-2 y))."""
    cubic = simd.fma(b, b.fmul(x, x), b.fmul(x, simd.constant(0.044715, x.type)), x)
    decay = exp(b, b.fmul(cubic, simd.constant(-2.0 * 0.7978845608028654, x.type)))
    return b.fdiv(x, b.fadd(decay, simd.constant(1.0, x.type)))


@intrinsic(prefer_literal=True)
def rotate_head(
    typing: Typing, is_bf16: Any, rounds: Any, lanes: Any, size: Any, head: Any, cosines: Any, sines: Any
) -> Any:
    """``rotate_head(is_bf16, rounds, lanes, size, head, cosines, sines)``: rotary embedding of the first ``size``
    elements of one head, in place.

    Their first half is paired with the second. ``cosines`` and ``sines`` are ``size / 2`` float32. The sum is rounded
    to storage, and if ``rounds`` is 1 so is every product.
    """
    bf16, width, half = is_bf16.literal_value, lanes.literal_value, size.literal_value // 2
    item, products = simd.item_bytes(bf16), bf16 and rounds.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        for start in range(0, half, width):
            low, high = start * item, (half + start) * item
            x = simd.load_floats(b, args[4], low, bf16, width)
            y = simd.load_floats(b, args[4], high, bf16, width)
            cosine = simd.load_floats(b, args[5], start * 4, 0, width)
            sine = simd.load_floats(b, args[6], start * 4, 0, width)
            x_cosine, x_sine = (rounded(b, b.fmul(x, factor), products) for factor in (cosine, sine))
            y_cosine, y_sine = (rounded(b, b.fmul(y, factor), products) for factor in (cosine, sine))
            simd.store_floats(b, b.fsub(x_cosine, y_sine), args[4], low, bf16)
            simd.store_floats(b, b.fadd(y_cosine, x_sine), args[4], high, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, rounds, lanes, size, types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def cap_row(typing: Typing, is_bf16: Any, lanes: Any, row: Any, num_vectors: Any, cap: Any) -> Any:
    """``cap_row(is_bf16, lanes, row, num_vectors, cap)``: ``cap * tanh(row / cap)`` in place, each step rounded.

    An element's bits do not depend on the number of lanes.
    """
    bf16, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        factor = simd.splat(b, args[4], width)
        one, two = (simd.constant(number, simd.floats(width)) for number in (1.0, 2.0))

        def cap_vector(offset: Value) -> None:
            x = rounded(b, b.fdiv(simd.load_floats(b, args[2], offset, bf16, width), factor), bf16)
            # Rule: tanh(x) = 1 - 2 / (1 + exp(2 x))
            tanh = b.fsub(one, b.fdiv(two, b.fadd(one, exp(b, b.fmul(two, x)))))
            simd.store_floats(b, b.fmul(rounded(b, tanh, bf16), factor), args[2], offset, bf16)

        _for_each_vector(b, args[3], width * simd.item_bytes(bf16), cap_vector)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, types.int64, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def copy_row(typing: Typing, is_bf16: Any, count: Any, source: Any, target: Any) -> Any:
    """``copy_row(is_bf16, count, source, target)``: copy ``count`` elements, a literal."""
    size = simd.item_bytes(is_bf16.literal_value)
    whole = ir.VectorType(ir.IntType(8 * size), count.literal_value)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        simd.store(b, simd.load(b, args[2], 0, whole, size), args[3], 0, size)
        return context.get_dummy_value()

    return types.void(is_bf16, count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def ask_for_scattered(typing: Typing, is_bf16: Any, count: Any, target: Any, stride: Any) -> Any:
    """Ask for the cache lines that ``scatter_row`` writes to. Literal: is_bf16, count."""
    size = simd.item_bytes(is_bf16.literal_value)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, simd.int64(count.literal_value)) as loop:
            place = b.mul(loop.index, b.mul(args[3], simd.int64(size)))
            simd.prefetch_line(b, args[2], place, to_write=True)
        return context.get_dummy_value()

    return types.void(is_bf16, count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def scatter_row(typing: Typing, is_bf16: Any, count: Any, source: Any, target: Any, stride: Any) -> Any:
    """``scatter_row(is_bf16, count, source, target, stride)``: element ``i`` goes to ``target[i * stride]``."""
    size = simd.item_bytes(is_bf16.literal_value)
    element = ir.IntType(8 * size)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, simd.int64(count.literal_value)) as loop:
            value = simd.load(b, args[2], b.mul(loop.index, simd.int64(size)), element, size)
            simd.store(b, value, args[3], b.mul(loop.index, b.mul(args[4], simd.int64(size))), size)
        return context.get_dummy_value()

    return types.void(is_bf16, count, types.int64, types.int64, types.int64), codegen

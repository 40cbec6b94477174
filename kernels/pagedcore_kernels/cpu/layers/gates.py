"""Gates of token mixers: on what attention returns, on the norm of what a recurrence returns, and of its decay.

Owns three kernels and the objects that call them. They compute what the modules of transformers compute, with the same
rounding; gates are read where a product of several projections has left them, between other elements of its rows.

Invariant: work is split by rows, so the bits of a row depend neither on the other rows nor on the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import Any

import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.layers import hidden_rows
from pagedcore_kernels.cpu.layers.elementwise import rows_at_once
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.simd import (
    AS_FLOAT32,
    LANES,
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    int64,
    load_float32,
    load_int64,
)
from pagedcore_kernels.errors import InternalError

_NUM_ROWS, _AT_ONCE = 1, 2
"""Words of every kernel's parameters that depend on the rows."""
_ATANH = tuple(1.0 / power for power in range(15, 0, -2))
"""Coefficients of atanh(s) / s in s**2, the highest power first."""


class HeadGate:
    """``rows * sigmoid(gate)``, head by head, in place: the gate of attention.

    Args:
        dtype: of all rows.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_bf16, self._parameters = int(dtype == torch.bfloat16), ParameterBlock(8)

    def __call__(self, rows: torch.Tensor, gate: torch.Tensor) -> None:
        """Multiply rows [T, H, D], contiguous, with gates [T, H, D], whose last dimension is, or [T, H, 1]."""
        is_shared = gate.shape[2] == 1
        kernel = _head_gate_kernel(self._is_bf16, rows.shape[2], int(is_shared))
        _run_heads(kernel, self._parameters, rows, gate, rows, 0, is_shared=is_shared)


class GatedNorm:
    """``weight * rows / rms(rows) * silu(gate)``, each head by itself.

    Args:
        weight: [D], float32 or bfloat16; with a weight of float32 the norm is not rounded before the gate.
        epsilon: added to the mean of squares.
        dtype: of all rows.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> None:
        self._weight = weight.detach().clone(memory_format=torch.contiguous_format)
        formats = [int(one == torch.bfloat16) for one in (dtype, weight.dtype)]
        self._kernel = _gated_norm_kernel(*formats, len(weight))
        self._parameters = ParameterBlock(10)
        self._parameters.set_float(9, epsilon)

    def __call__(self, rows: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``out`` [T, H, D] of rows [T, H, D], both contiguous and perhaps the same, and gates [T, H, D]."""
        _run_heads(self._kernel, self._parameters, rows, gate, out, self._weight.data_ptr())


class DeltaGates:
    """The gates of a gated delta rule: ``-exp(rates) * softplus(a + bias)``, and ``sigmoid(b)``.

    Args:
        rates: [H], the logarithms of decay rates.
        bias: [H].
        dtype: of all rows.
    """

    def __init__(self, rates: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rates, self._bias = -rates.detach().float().exp(), bias.detach().float().clone()
        self._kernel = _delta_gates_kernel(int(dtype == torch.bfloat16), len(rates))
        self._parameters = ParameterBlock(10)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> None:
        """Write ``log_decay`` and ``beta``, float32 [T, H] and contiguous, of a and b [T, H]."""
        for name, out in (("log_decay", log_decay), ("beta", beta)):
            # Safety: the kernel writes raw memory.
            if out.shape != a.shape or out.dtype != torch.float32 or not out.is_contiguous():
                raise InternalError(f"{name}: {out.dtype} {tuple(out.shape)}, expected float32 {tuple(a.shape)}")
        num_rows, heads = len(a), len(self._bias)
        for name, given in (("a", a), ("b", b)):
            is_row = heads == 1 or given.stride(1) == 1
            if given.shape != (num_rows, heads) or given.dtype != self._dtype or not is_row:
                raise InternalError(
                    f"{name}: {given.dtype} {tuple(given.shape)}, expected {self._dtype} {(num_rows, heads)}"
                )
        self._parameters.fill(
            num_rows, rows_at_once(num_rows), a.data_ptr(), a.stride(0) * a.itemsize, b.data_ptr(),
            b.stride(0) * b.itemsize, self._rates.data_ptr(), self._bias.data_ptr(), log_decay.data_ptr(),
            beta.data_ptr(),
        )  # fmt: skip
        self._kernel.run(self._parameters, num_rows, (_sizes_of_rows,))


def _run_heads(
    kernel: Kernel, parameters: ParameterBlock, rows: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, weight: int,
    *, is_shared: bool = False,
) -> None:  # fmt: skip
    num_rows, heads, size = rows.shape
    expected = *gate.shape[:2], size if is_shared else gate.shape[2]
    for name, one in (("rows", rows), ("out", out)):
        # Safety: the kernel reads and writes raw memory.
        if one.shape != expected or one.dtype != gate.dtype or not one.is_contiguous():
            raise InternalError(f"{name}: {one.dtype} {tuple(one.shape)}, expected {gate.dtype} {expected}")
    if gate.stride(2) != 1 and not is_shared:
        raise InternalError(f"gate: stride {gate.stride(2)} in the last dimension, expected 1")
    parameters.fill(
        num_rows, rows_at_once(num_rows), heads, rows.data_ptr(), gate.data_ptr(), gate.stride(0) * gate.itemsize,
        gate.stride(1) * gate.itemsize, out.data_ptr(), *((weight,) if weight else ()),
    )  # fmt: skip
    kernel.run(parameters, num_rows, (_sizes_of_rows,))


def _sizes_of_rows(shape: StepShape) -> Sizes:
    at_once = rows_at_once(shape.num_rows)
    return Sizes([(_NUM_ROWS, shape.num_rows), (_AT_ONCE, at_once)], shape.num_rows)


# ------------------------------------------------------------------------------------------------------------
# Kernels. Closures hold integers only; every argument is a word of the parameter block.


@intrinsic(prefer_literal=True)
def _gate_row(
    typing: Typing, is_bf16: Any, lanes: Any, is_shared: Any, source: Any, gate: Any, target: Any, num_vectors: Any
) -> Any:
    """``source * sigmoid(gate)``; literal: is_bf16, lanes, and whether all elements have one gate."""
    bf16, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source, gates, target, num_vectors = args[3:]

        def factor(g: Value) -> Value:
            return hidden_rows.rounded(b, hidden_rows.sigmoid(b, g), bf16)

        shared = None
        if is_shared.literal_value:
            one = b.extract_element(simd.load_floats(b, gates, int64(0), bf16, 1), int64(0))
            shared = factor(simd.splat(b, one, width))

        def body(place: Value) -> None:
            x = simd.load_floats(b, source, place, bf16, width)
            own = factor(simd.load_floats(b, gates, place, bf16, width)) if shared is None else shared
            simd.store_floats(b, b.fmul(x, own), target, place, bf16)

        _for_vectors(b, num_vectors, width * simd.item_bytes(bf16), body)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, is_shared, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def _gate_norm(
    typing: Typing, is_bf16: Any, is_weight_bf16: Any, lanes: Any, source: Any, scale: Any, weight: Any, gate: Any,
    target: Any, num_vectors: Any,
) -> Any:
    """``weight * (source * scale) * silu(gate)``; literal: is_bf16, is_weight_bf16, lanes."""
    bf16, weight_bf16, width = is_bf16.literal_value, is_weight_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source, scale, weight, gate, target, num_vectors = args[3:]
        factor = simd.splat(b, scale, width)

        def body(place: Value) -> None:
            x, g = (simd.load_floats(b, one, place, bf16, width) for one in (source, gate))
            of_weight = b.mul(place, int64(2)) if bf16 and not weight_bf16 else place
            w = simd.load_floats(b, weight, of_weight, weight_bf16, width)
            normed = b.fmul(w, hidden_rows.rounded(b, b.fmul(x, factor), bf16))
            normed = hidden_rows.rounded(b, normed, weight_bf16)
            simd.store_floats(b, b.fmul(normed, hidden_rows.silu(b, g)), target, place, bf16)

        _for_vectors(b, num_vectors, width * simd.item_bytes(bf16), body)
        return context.get_dummy_value()

    address = types.int64
    literals = is_bf16, is_weight_bf16, lanes
    return types.void(*literals, address, types.float32, address, address, address, types.int64), codegen


@intrinsic(prefer_literal=True)
def _delta_gates_row(
    typing: Typing, is_bf16: Any, size: Any, a: Any, b: Any, rates: Any, bias: Any, log_decay: Any, beta: Any
) -> Any:
    """``log_decay = rates * softplus(a + bias)``, ``beta = sigmoid(b)`` of ``size`` heads; literal: is_bf16, size."""
    bf16, lanes, vectors = is_bf16.literal_value, gcd(size.literal_value, LANES), size.literal_value
    vectors //= lanes

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        a_row, b_row, rates, bias, log_decay, beta = args[2:]

        def body(place: Value) -> None:
            wide = b.mul(place, int64(2)) if bf16 else place
            x = b.fadd(
                simd.load_floats(b, a_row, place, bf16, lanes), simd.load_floats(b, bias, wide, AS_FLOAT32, lanes)
            )
            rate = simd.load_floats(b, rates, wide, AS_FLOAT32, lanes)
            simd.store(b, b.fmul(rate, _softplus(b, x)), log_decay, wide, 4)
            gate = hidden_rows.sigmoid(b, simd.load_floats(b, b_row, place, bf16, lanes))
            simd.store(b, hidden_rows.rounded(b, gate, bf16), beta, wide, 4)

        _for_vectors(b, int64(vectors), lanes * simd.item_bytes(bf16), body)
        return context.get_dummy_value()

    return types.void(is_bf16, size, *[types.int64] * 6), codegen


def _for_vectors(b: Builder, count: Value, size: int, body: Callable[[Value], None]) -> None:
    """Emit ``body(byte offset)`` for ``count`` vectors of ``size`` bytes."""
    with cgutils.for_range(b, count) as loop:
        body(b.mul(loop.index, int64(size)))


def _softplus(b: Builder, x: Value) -> Value:
    """``log(1 + exp(x))`` as ``max(x, 0) + log(1 + e)`` with ``e = exp(-|x|)``.

    The logarithm is ``2 atanh(e / (2 + e))``, whose argument is at most 1/3, so that small results are exact too.
    """
    magnitude = simd.call_llvm(b, "fabs", x)
    e = hidden_rows.exp(b, b.fmul(magnitude, simd.constant(-1.0, x.type)))
    s = b.fdiv(e, b.fadd(e, simd.constant(2.0, x.type)))
    square = b.fmul(s, s)
    series = simd.constant(_ATANH[0], x.type)
    for coefficient in _ATANH[1:]:
        series = simd.fma(b, series, square, simd.constant(coefficient, x.type))
    logarithm = b.fmul(b.fmul(s, simd.constant(2.0, x.type)), series)
    return b.fadd(simd.maximum(b, simd.constant(0.0, x.type), x), logarithm)


@cache
def _head_gate_kernel(is_bf16: int, head_size: int, is_shared: int) -> Kernel:
    lanes, head_bytes = gcd(head_size, LANES), head_size * (2 if is_bf16 else 4)
    vectors = head_size // lanes

    def gate_heads(parameters: Any) -> None:
        p = address_of(parameters)
        num_rows, at_once, heads = load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        rows, gates, token_bytes, gate_bytes, out = (
            load_int64(p, 4), load_int64(p, 5), load_int64(p, 6), load_int64(p, 7), load_int64(p, 8)
        )  # fmt: skip
        while True:
            first = claim(load_int64(p, 0)) * at_once
            if first >= num_rows:
                break
            for row in range(first, min(first + at_once, num_rows)):
                for head in range(heads):
                    place = (row * heads + head) * head_bytes
                    gate = gates + row * token_bytes + head * gate_bytes
                    _gate_row(is_bf16, lanes, is_shared, rows + place, gate, out + place, vectors)

    return compile_kernel(gate_heads)


@cache
def _gated_norm_kernel(is_bf16: int, is_weight_bf16: int, head_size: int) -> Kernel:
    lanes, head_bytes = gcd(head_size, LANES), head_size * (2 if is_bf16 else 4)
    vectors = head_size // lanes

    def norm_and_gate(parameters: Any) -> None:
        p = address_of(parameters)
        num_rows, at_once, heads = load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        rows, gates, token_bytes, gate_bytes, out = (
            load_int64(p, 4), load_int64(p, 5), load_int64(p, 6), load_int64(p, 7), load_int64(p, 8)
        )  # fmt: skip
        weight, epsilon = load_int64(p, 9), load_float32(p, 20)
        while True:
            first = claim(load_int64(p, 0)) * at_once
            if first >= num_rows:
                break
            for row in range(first, min(first + at_once, num_rows)):
                for head in range(heads):
                    place = (row * heads + head) * head_bytes
                    gate = gates + row * token_bytes + head * gate_bytes
                    scale = hidden_rows.inverse_rms(is_bf16, lanes, rows + place, vectors, epsilon)
                    _gate_norm(
                        is_bf16, is_weight_bf16, lanes, rows + place, scale, weight, gate, out + place, vectors
                    )

    return compile_kernel(norm_and_gate)


@cache
def _delta_gates_kernel(is_bf16: int, heads: int) -> Kernel:
    row_bytes = 4 * heads

    def delta_gates(parameters: Any) -> None:
        p = address_of(parameters)
        num_rows, at_once = load_int64(p, 1), load_int64(p, 2)
        a, a_bytes, b, b_bytes = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5), load_int64(p, 6)
        rates, bias, log_decay, beta = load_int64(p, 7), load_int64(p, 8), load_int64(p, 9), load_int64(p, 10)
        while True:
            first = claim(load_int64(p, 0)) * at_once
            if first >= num_rows:
                break
            for row in range(first, min(first + at_once, num_rows)):
                _delta_gates_row(
                    is_bf16, heads, a + row * a_bytes, b + row * b_bytes, rates, bias, log_decay + row * row_bytes,
                    beta + row * row_bytes,
                )  # fmt: skip

    return compile_kernel(delta_gates)

"""The gated activation of a feed-forward block: ``f(gate) * up`` over rows that hold gate and up side by side.

``f(gate)`` is rounded to the storage format before the product, as the modules of transformers round. Exponential and
reciprocal are the hardware's approximations, whose errors of about 2**-22 vanish in that rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, u32, u64
from pagedcore_kernels.cuda.device.tiles import packer, pair_unpackers
from pagedcore_kernels.cuda.shapes import GATED_VECTORS, LOG2_E, ROW_THREADS, Format

_LARGEST_POWER = 126.0
"""Of 2, so that one more than the power is finite and its reciprocal no denormal number."""
_GELU_FACTOR = 2.0 * 0.7978845608028654


@cuda.jit(device=True, inline="always")
def _over_one_plus_exp(x, exponent):
    """``x / (1 + exp(exponent))``; a NaN stays one because it is x that is multiplied."""
    power = ptx.fmin(ptx.fmul(exponent, f32(LOG2_E)), f32(_LARGEST_POWER))
    return ptx.fmul(x, ptx.rcp(ptx.fadd(ptx.ex2(power), f32(1))))


@cuda.jit(device=True, inline="always")
def _silu(x):
    return _over_one_plus_exp(x, f32(-x))


@cuda.jit(device=True, inline="always")
def _gelu_tanh(x):
    """x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x**3), which is x / (1 + exp(-2 y))."""
    cubic = ptx.ffma(ptx.fmul(x, x), ptx.fmul(x, f32(0.044715)), x)
    return _over_one_plus_exp(x, ptx.fmul(cubic, f32(-_GELU_FACTOR)))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def gated_kernel(storage: Format, activation: str) -> Any:
    """Make the kernel of one activation."""
    low, high = pair_unpackers(storage)
    pack = packer(storage)
    function = ACTIVATIONS[activation]
    VECTORS, WORDS = GATED_VECTORS, GATED_VECTORS * 4

    @cuda.jit(device=True, inline="always")
    def gated_pair(gate, up):
        activated = pack(function(low(gate)), function(high(gate)))
        return pack(ptx.fmul(low(activated), low(up)), ptx.fmul(high(activated), high(up)))

    def gated_activation(gate_up, out, row_vectors, num_vectors):
        """Read gate_up [T, 2 * intermediate], write out [T, intermediate]; sizes are in vectors of eight elements."""
        first = u32(u32(u32(cuda.blockIdx.x) * u32(ROW_THREADS * VECTORS)) + u32(cuda.threadIdx.x))
        gates = cuda.local.array(WORDS, dtype=np.uint32)
        ups = cuda.local.array(WORDS, dtype=np.uint32)
        for j in range(VECTORS):                      # loads without a branch between them, so that all are in flight
            vector = u32(min(u32(first + u32(j * ROW_THREADS)), u32(num_vectors - u32(1))))
            row = u32(vector // row_vectors)
            column = u32(vector % row_vectors)
            at = gate_up + (u64(row) * u64(row_vectors) * u64(2) + u64(column)) * u64(16)
            words = ptx.ldg128_nc(at)
            gates[4 * j], gates[4 * j + 1], gates[4 * j + 2], gates[4 * j + 3] = words[0], words[1], words[2], words[3]
            words = ptx.ldg128_nc(at + u64(row_vectors) * u64(16))
            ups[4 * j], ups[4 * j + 1], ups[4 * j + 2], ups[4 * j + 3] = words[0], words[1], words[2], words[3]
        for j in range(VECTORS):
            vector = u32(first + u32(j * ROW_THREADS))
            if vector < num_vectors:
                ptx.stg128(out + u64(vector) * u64(16),
                           gated_pair(gates[4 * j], ups[4 * j]), gated_pair(gates[4 * j + 1], ups[4 * j + 1]),
                           gated_pair(gates[4 * j + 2], ups[4 * j + 2]), gated_pair(gates[4 * j + 3], ups[4 * j + 3]))

    return gated_activation

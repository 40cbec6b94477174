"""A causal convolution of a few taps over the rows of each sequence, whose last inputs are part of a state.

What a step reads of earlier steps are the rows of the state that its row begins from, oldest first, and what it leaves
are the last inputs of its own last token.

Invariant: an output's bits depend on its own ``taps`` inputs alone, wherever they were read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.layers.hidden_rows import silu
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    int64,
    load_int64,
    stack_int64,
    store_int64,
)

COUNTER = ParameterBlock.COUNTER
(
    INPUT,
    INPUT_BYTES,
    OUTPUT,
    WEIGHT,
    BIAS,
    ZEROS,
    POOL,
    STATE_BYTES,
    NUM_VECTORS,
    ROW_OF_TOKENS,
    READS,
    WRITES,
    QUERY_START,
    NUM_TOKENS,
    AT_ONCE,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 15)
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them."""
NUM_ARGUMENTS = 15


@intrinsic(prefer_literal=True)
def convolve_inputs(
    typing: Typing, is_bf16: Any, lanes: Any, taps: Any, activates: Any, sources: Any, weight: Any, bias: Any,
    target: Any, num_vectors: Any,
) -> Any:
    """``convolve_inputs(is_bf16, lanes, taps, activates, sources, weight, bias, target, num_vectors)``: an output.

    Literal: is_bf16, lanes, taps, activates; it is SiLU of the sum if it ``activates``. ``sources`` is the address of
    the addresses of its inputs, oldest first; ``weight`` that of float32 [taps, channels], ``bias`` of float32
    [channels].
    """
    bf16, width, count = is_bf16.literal_value, lanes.literal_value, taps.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        sources, weight, bias, target, num_vectors = args[4:]
        inputs = [simd.load(b, sources, 8 * tap, simd.INT64, 8) for tap in range(count)]
        channels = b.mul(num_vectors, int64(width))
        factors = [b.add(weight, b.mul(channels, int64(4 * tap))) for tap in range(count)]
        with cgutils.for_range(b, num_vectors) as loop:
            stored, wide = (b.mul(loop.index, int64(width * size)) for size in (simd.item_bytes(bf16), 4))
            total = simd.load_floats(b, bias, wide, simd.AS_FLOAT32, width)
            for row, of_tap in zip(inputs, factors, strict=True):
                x = simd.load_floats(b, row, stored, bf16, width)
                total = simd.fma(b, x, simd.load_floats(b, of_tap, wide, simd.AS_FLOAT32, width), total)
            simd.store_floats(b, silu(b, total) if activates.literal_value else total, target, stored, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, taps, activates, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def copy_vectors(typing: Typing, is_bf16: Any, lanes: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """``copy_vectors(is_bf16, lanes, source, target, num_vectors)``. Literal: is_bf16, lanes."""
    bf16, width = is_bf16.literal_value, lanes.literal_value
    item, element = simd.item_bytes(bf16), simd.ELEMENTS[bf16]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[4]) as loop:
            place = b.mul(loop.index, int64(width * item))
            simd.store(b, simd.load(b, args[2], place, ir.VectorType(element, width), item), args[3], place, item)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, types.int64, types.int64, types.int64), codegen


@cache
def state_convolution_kernel(is_bf16: int, lanes: int, taps: int, activates: int) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above.

    Args:
        is_bf16: whether rows are bfloat16, else float32.
        lanes: elements of a vector; rows are whole vectors.
        taps: inputs of one output.
        activates: whether the output is SiLU of the sum.
    """
    item = 2 if is_bf16 else 4

    def state_convolution(parameters: Any) -> None:
        p = address_of(parameters)
        rows, step, vectors = load_int64(p, INPUT), load_int64(p, INPUT_BYTES), load_int64(p, NUM_VECTORS)
        weight, bias, at_once = load_int64(p, WEIGHT), load_int64(p, BIAS), load_int64(p, AT_ONCE)
        pool, state_bytes, num_tokens = load_int64(p, POOL), load_int64(p, STATE_BYTES), load_int64(p, NUM_TOKENS)
        row_size, sources = vectors * lanes * item, stack_int64(taps)
        while True:
            begin = claim(load_int64(p, COUNTER)) * at_once
            if begin >= num_tokens:
                break
            for token in range(begin, min(begin + at_once, num_tokens)):
                row = load_int64(load_int64(p, ROW_OF_TOKENS), token)
                first = load_int64(load_int64(p, QUERY_START), row)
                read, write = load_int64(load_int64(p, READS), row), load_int64(load_int64(p, WRITES), row)
                for tap in range(taps):
                    back = taps - 1 - tap
                    source = rows + (token - back) * step
                    if token - back < first:
                        source = load_int64(p, ZEROS)
                        if read >= 0:
                            # Shape: the state's last row is the input before the row's first token.
                            source = pool + read * state_bytes + (taps - 1 + token - back - first) * row_size
                    store_int64(sources, tap, source)
                target = load_int64(p, OUTPUT) + token * row_size
                convolve_inputs(is_bf16, lanes, taps, activates, sources, weight, bias, target, vectors)
                if write >= 0 and token + 1 == load_int64(load_int64(p, QUERY_START), row + 1):
                    for tap in range(1, taps):
                        kept = pool + write * state_bytes + (tap - 1) * row_size
                        copy_vectors(is_bf16, lanes, load_int64(sources, tap), kept, vectors)

    return compile_kernel(state_convolution)

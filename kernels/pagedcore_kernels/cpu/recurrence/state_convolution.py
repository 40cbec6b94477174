"""A causal convolution of a few taps over the rows of each sequence, whose last inputs are part of a state.

What a step reads of earlier steps are the rows of the state that its row begins from, oldest first, and what it leaves
are the last inputs of its own last token. Between gates, inputs are products, which are computed wherever they are
read, so that threads need not wait for each other.

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
from pagedcore_kernels.cpu.layers.hidden_rows import rounded, silu
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
    ONES,
    POOL,
    STATE_BYTES,
    NUM_VECTORS,
    ROW_OF_TOKENS,
    READS,
    WRITES,
    QUERY_START,
    NUM_TOKENS,
    AT_ONCE,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 16)
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them."""
NUM_ARGUMENTS = 16
SILU, GATES = 1, 2
"""How a convolution may end, if not with its sum; ``GATES`` are at its beginning too."""


@intrinsic(prefer_literal=True)
def convolve_inputs(
    typing: Typing, is_bf16: Any, lanes: Any, taps: Any, ending: Any, sources: Any, weight: Any, bias: Any, after: Any,
    target: Any, num_vectors: Any,
) -> Any:
    """``convolve_inputs(is_bf16, lanes, taps, ending, sources, weight, bias, after, target, num_vectors)``: an output.

    Literal: is_bf16, lanes, taps, ending. ``sources`` is the address of the addresses of its inputs, oldest first, and
    then, with ``GATES``, of their factors; ``weight`` that of float32 [taps, channels], ``bias`` of float32 [channels],
    ``after`` of what multiplies an output with ``GATES``.
    """
    bf16, width, count = is_bf16.literal_value, lanes.literal_value, taps.literal_value
    how = ending.literal_value
    num_places = 2 * count if how == GATES else count

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        sources, weight, bias, after, target, num_vectors = args[4:]
        places = [simd.load(b, sources, 8 * place, simd.INT64, 8) for place in range(num_places)]
        channels = b.mul(num_vectors, int64(width))
        of_taps = [b.add(weight, b.mul(channels, int64(4 * tap))) for tap in range(count)]
        with cgutils.for_range(b, num_vectors) as loop:
            stored, wide = (b.mul(loop.index, int64(width * size)) for size in (simd.item_bytes(bf16), 4))
            total = simd.load_floats(b, bias, wide, simd.AS_FLOAT32, width)
            for tap, of_tap in enumerate(of_taps):
                x = _input(b, places[tap::count], stored, bf16, width)
                total = simd.fma(b, x, simd.load_floats(b, of_tap, wide, simd.AS_FLOAT32, width), total)
            if how == SILU:
                total = silu(b, total)
            if how == GATES:
                total = b.fmul(simd.load_floats(b, after, stored, bf16, width), rounded(b, total, bf16))
            simd.store_floats(b, total, target, stored, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, taps, ending, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def keep_input(
    typing: Typing, is_bf16: Any, lanes: Any, ending: Any, source: Any, factor: Any, target: Any, num_vectors: Any
) -> Any:
    """``keep_input(is_bf16, lanes, ending, source, factor, target, num_vectors)``: copy an input.

    Literal: is_bf16, lanes, ending. ``factor`` is used with ``GATES``.
    """
    bf16, width = is_bf16.literal_value, lanes.literal_value
    item, element = simd.item_bytes(bf16), simd.ELEMENTS[bf16]
    num_factors = 2 if ending.literal_value == GATES else 1

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[6]) as loop:
            place = b.mul(loop.index, int64(width * item))
            if num_factors == 1:
                # Why as it lies: a conversion would not keep every NaN.
                simd.store(b, simd.load(b, args[3], place, ir.VectorType(element, width), item), args[5], place, item)
            else:
                simd.store_floats(b, _input(b, args[3:5], place, bf16, width), args[5], place, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, ending, *[types.int64] * 4), codegen


def _input(b: Builder, places: list[Value], offset: Value, bf16: int, width: int) -> Value:
    """Load an input, which is the product of what lies at ``places``, rounded to storage."""
    first, *others = (simd.load_floats(b, place, offset, bf16, width) for place in places)
    return rounded(b, b.fmul(first, *others), bf16) if others else first


@cache
def state_convolution_kernel(is_bf16: int, lanes: int, taps: int, ending: int) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above.

    Args:
        is_bf16: whether rows are bfloat16, else float32.
        lanes: elements of a vector; rows are whole vectors.
        taps: inputs of one output.
        ending: ``SILU``, ``GATES`` or neither.
    """
    item, num_sources, is_gated = 2 if is_bf16 else 4, 2 * taps, ending == GATES

    def state_convolution(parameters: Any) -> None:
        p = address_of(parameters)
        rows, step, vectors = load_int64(p, INPUT), load_int64(p, INPUT_BYTES), load_int64(p, NUM_VECTORS)
        weight, bias, at_once = load_int64(p, WEIGHT), load_int64(p, BIAS), load_int64(p, AT_ONCE)
        pool, state_bytes, num_tokens = load_int64(p, POOL), load_int64(p, STATE_BYTES), load_int64(p, NUM_TOKENS)
        row_size, sources = vectors * lanes * item, stack_int64(num_sources)
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
                    factor = rows + (token - back) * step
                    # Shape: between gates, a row has what multiplies its input, its output, and what is its input.
                    source = factor + 2 * row_size if is_gated else factor
                    if token - back < first:
                        source, factor = load_int64(p, ZEROS), load_int64(p, ONES)
                        if read >= 0:
                            # Shape: the state's last row is the input before the row's first token.
                            source = pool + read * state_bytes + (taps - 1 + token - back - first) * row_size
                    store_int64(sources, tap, source)
                    store_int64(sources, taps + tap, factor)
                target = load_int64(p, OUTPUT) + token * row_size
                after = rows + token * step + row_size
                convolve_inputs(is_bf16, lanes, taps, ending, sources, weight, bias, after, target, vectors)
                if write >= 0 and token + 1 == load_int64(load_int64(p, QUERY_START), row + 1):
                    for tap in range(1, taps):
                        kept = pool + write * state_bytes + (tap - 1) * row_size
                        source, factor = load_int64(sources, tap), load_int64(sources, taps + tap)
                        keep_input(is_bf16, lanes, ending, source, factor, kept, vectors)

    return compile_kernel(state_convolution)

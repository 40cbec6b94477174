"""A causal convolution of a few taps over the rows of each sequence, whose inputs lie in the KV pool where V lies.

Each channel by itself: ``out[t] = after[t] * (bias + sum over j of weight[j] * x[t - taps + 1 + j])`` of inputs
``x = before * row``, with zeros before a sequence's first position; the sum in float32, oldest tap first. What a step
reads of earlier steps are rows of the pool, so whatever moves, shares or forgets blocks does the same for convolutions
as for attention. Inputs of the step itself are computed from its rows wherever they are read, so that threads need not
wait for each other. Source: the layers of LFM2.

Invariant: a row's bits depend on its own ``taps`` inputs alone, wherever they were read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.layers.hidden_rows import rounded
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    int64,
    load_int32,
    load_int64,
    stack_int64,
    store_int64,
)

TILE_ROWS_AT_ONCE = 32
"""Tokens of one sequence that a thread claims together."""
COUNTER = ParameterBlock.COUNTER
(
    INPUT,
    INPUT_BYTES,
    OUTPUT,
    WEIGHT,
    BIAS,
    CONSTANTS,
    POOL,
    BLOCK_BYTES,
    OFFSET,
    NUM_VECTORS,
    SLOTS,
    BLOCK_TABLES,
    TABLE_WIDTH,
    QUERY_START,
    KV_LENS,
    TILE_ROWS,
    TILE_STARTS,
    NUM_TILES,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 18)
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them."""
NUM_ARGUMENTS = 18


@intrinsic(prefer_literal=True)
def convolve_row(
    typing: Typing, is_bf16: Any, lanes: Any, taps: Any, sources: Any, weight: Any, bias: Any, after: Any, target: Any,
    num_vectors: Any,
) -> Any:
    """``convolve_row(is_bf16, lanes, taps, sources, weight, bias, after, target, num_vectors)``: one token's output.

    Literal: is_bf16, lanes, taps. ``sources`` is the address of 2 * taps addresses: of the factors ``before`` of its
    inputs, oldest first, and of their factors ``row``; ``weight`` that of float32 [taps, channels], ``bias`` of float32
    [channels].
    """
    bf16, width, count = is_bf16.literal_value, lanes.literal_value, taps.literal_value
    item = simd.item_bytes(bf16)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        factors = [simd.load(b, args[3], 8 * number, simd.INT64, 8) for number in range(2 * count)]
        channels = b.mul(args[8], int64(width))
        weights = [b.add(args[4], b.mul(channels, int64(4 * tap))) for tap in range(count)]
        with cgutils.for_range(b, args[8]) as loop:
            stored, wide = (b.mul(loop.index, int64(width * size)) for size in (item, 4))
            total = simd.load_floats(b, args[5], wide, simd.AS_FLOAT32, width)
            for before, row, of_tap in zip(factors[:count], factors[count:], weights, strict=True):
                x = _product(b, before, row, stored, bf16, width)
                total = simd.fma(b, x, simd.load_floats(b, of_tap, wide, simd.AS_FLOAT32, width), total)
            gate = simd.load_floats(b, args[6], stored, bf16, width)
            simd.store_floats(b, b.fmul(gate, rounded(b, total, bf16)), args[7], stored, bf16)
        return context.get_dummy_value()

    address = types.int64
    return types.void(is_bf16, lanes, taps, address, address, address, address, address, types.int64), codegen


@intrinsic(prefer_literal=True)
def multiply_vectors(
    typing: Typing, is_bf16: Any, lanes: Any, left: Any, right: Any, target: Any, num_vectors: Any
) -> Any:
    """``multiply_vectors(is_bf16, lanes, left, right, target, num_vectors)``. Literal: is_bf16, lanes."""
    bf16, width = is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, args[5]) as loop:
            place = b.mul(loop.index, int64(width * simd.item_bytes(bf16)))
            simd.store_floats(b, _product(b, args[2], args[3], place, bf16, width), args[4], place, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, types.int64, types.int64, types.int64, types.int64), codegen


def _product(b: Builder, left: Value, right: Value, offset: Value, bf16: int, width: int) -> Value:
    """Multiply two vectors, rounded to storage."""
    return rounded(b, b.fmul(*(simd.load_floats(b, one, offset, bf16, width) for one in (left, right))), bf16)


@cache
def short_convolution_kernel(is_bf16: int, lanes: int, taps: int, block_size: int, row_bytes: int) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above.

    Args:
        is_bf16: whether rows are bfloat16, else float32.
        lanes: elements of a vector; rows are whole vectors.
        taps: inputs of one output.
        block_size: tokens of a block.
        row_bytes: from one token's row in a block to the next one's.
    """
    at_once, num_factors = TILE_ROWS_AT_ONCE, 2 * taps

    def short_convolution(parameters: Any) -> None:
        p = address_of(parameters)
        rows, step, out, zeros = (
            load_int64(p, INPUT), load_int64(p, INPUT_BYTES), load_int64(p, OUTPUT), load_int64(p, CONSTANTS)
        )  # fmt: skip
        weight, bias, vectors = load_int64(p, WEIGHT), load_int64(p, BIAS), load_int64(p, NUM_VECTORS)
        blocks, block_bytes = load_int64(p, POOL) + load_int64(p, OFFSET), load_int64(p, BLOCK_BYTES)
        row_size = vectors * lanes * (2 if is_bf16 else 4)
        sources, num_tiles, ones = stack_int64(num_factors), load_int64(p, NUM_TILES), zeros + row_size
        while True:
            tile = claim(load_int64(p, COUNTER))
            if tile >= num_tiles:
                break
            row, start = load_int64(load_int64(p, TILE_ROWS), tile), load_int64(load_int64(p, TILE_STARTS), tile)
            first = load_int64(load_int64(p, QUERY_START), row)
            count = load_int64(load_int64(p, QUERY_START), row + 1) - first
            known = load_int64(load_int64(p, KV_LENS), row) - count
            table = load_int64(p, BLOCK_TABLES) + 4 * row * load_int64(p, TABLE_WIDTH)
            for number in range(start, min(start + at_once, count)):
                for tap in range(taps):
                    place, before, source = number - (taps - 1 - tap), ones, zeros
                    if place >= 0:
                        before = rows + (first + place) * step
                        source = before + 2 * row_size
                    elif known + place >= 0:
                        position = known + place
                        column = position // block_size
                        source = blocks + load_int32(table, column) * block_bytes
                        source += (position - column * block_size) * row_bytes
                    store_int64(sources, tap, before)
                    store_int64(sources, taps + tap, source)
                token = first + number
                given = rows + token * step
                target = out + token * row_size
                convolve_row(is_bf16, lanes, taps, sources, weight, bias, given + row_size, target, vectors)
                slot = load_int64(load_int64(p, SLOTS), token)
                if slot >= 0:
                    block = slot // block_size
                    target = blocks + block * block_bytes + (slot - block * block_size) * row_bytes
                    multiply_vectors(is_bf16, lanes, given, given + 2 * row_size, target, vectors)

    return compile_kernel(short_convolution)

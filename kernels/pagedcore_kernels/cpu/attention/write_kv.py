"""The kernel that stores a step's K and V into their slots, and the intrinsics it is made of.

V rows are copied; K is stored with tokens innermost, so tokens that fill an aligned vector of slots are transposed
in registers and single tokens are scattered. Work items are runs of tokens within one block: two threads never
write the same block's cache lines, and a block's lines are written while they are at hand. In int8 pools each row is
quantised by itself, so that what is stored depends on nothing but the row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.attention.rows import fill_row, load_query
from pagedcore_kernels.cpu.matmul.quantize_rows import quantize_row
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    AS_FLOAT32,
    AS_INT8,
    ELEMENTS,
    INT32,
    LANES,
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    int64,
    item_bytes,
    load,
    load_int64,
    stack_floats,
    store,
)
from pagedcore_kernels.layout import SCALE_BYTES, scaled_head_bytes

COUNTER = ParameterBlock.COUNTER
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them."""
(
    KEY,
    KEY_TOKEN_BYTES,
    KEY_HEAD_BYTES,
    VALUE,
    VALUE_TOKEN_BYTES,
    VALUE_HEAD_BYTES,
    POOL,
    BLOCK_BYTES,
    KEY_OFFSET,
    VALUE_OFFSET,
    RUN_TOKENS,
    RUN_SLOTS,
    RUN_LENGTHS,
    NUM_RUNS,
    NUM_KV_HEADS,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 15)
NUM_ARGUMENTS = 15

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def _transposed(b: Builder, vectors: list[Value]) -> list[Value]:
    """Transpose n vectors of n lanes by exchanging halves of pairs, log2(n) times (Eklundh 1972)."""
    lanes = len(vectors)
    kind = ir.VectorType(INT32, lanes)
    distance = 1
    while distance < lanes:
        low = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
        high = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
        for i in range(lanes):
            if not i & distance:
                upper, lower = vectors[i], vectors[i + distance]
                vectors[i] = b.shuffle_vector(upper, lower, ir.Constant(kind, low))
                vectors[i + distance] = b.shuffle_vector(upper, lower, ir.Constant(kind, high))
        distance *= 2
    return vectors


@intrinsic(prefer_literal=True)
def transpose_keys(
    typing: Typing, dim: Any, block_size: Any, is_bf16: Any, source: Any, token_bytes: Any, target: Any
) -> Any:
    """target[d, t] = source[t, d] for as many tokens t as a vector of slots has lanes.

    Literal: dim, block_size, is_bf16. ``target`` is where d = 0 of the first token goes in K [dim, block_size].
    """
    size, slots, bf16 = dim.literal_value, block_size.literal_value, is_bf16.literal_value
    lanes = min(LANES, slots)
    item, element = item_bytes(bf16), ELEMENTS[bf16]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source, token_bytes, target = args[3:]
        tokens = [b.add(source, b.mul(token_bytes, int64(t))) for t in range(lanes)]
        with cgutils.for_range(b, int64(size // lanes)) as loop:
            d = b.mul(loop.index, int64(lanes * item))
            loaded = [load(b, token, d, ir.VectorType(element, lanes), item) for token in tokens]
            for i, vector in enumerate(_transposed(b, loaded)):
                store(b, vector, target, b.add(b.mul(d, int64(slots)), int64(i * slots * item)), item)
        for d in range(size // lanes * lanes, size):
            for t, token in enumerate(tokens):
                single = load(b, token, d * item, element, item)
                store(b, single, target, (d * slots + t) * item, item)
        return context.get_dummy_value()

    return types.void(dim, block_size, is_bf16, types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def scatter_key(typing: Typing, dim: Any, block_size: Any, number_format: Any, source: Any, target: Any) -> Any:
    """target[d, 0] = source[d]: one token's K. Literal: dim, block_size, number_format."""
    size, slots, stored = dim.literal_value, block_size.literal_value, number_format.literal_value
    item, element = item_bytes(stored), ELEMENTS[stored]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        with cgutils.for_range(b, int64(size)) as loop:
            single = load(b, args[3], b.mul(loop.index, int64(item)), element, item)
            store(b, single, args[4], b.mul(loop.index, int64(slots * item)), item)
        return context.get_dummy_value()

    return types.void(dim, block_size, number_format, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def copy_row(typing: Typing, dim: Any, number_format: Any, source: Any, target: Any) -> Any:
    """target[d] = source[d], d < dim. Literal: dim, number_format."""
    size, stored = dim.literal_value, number_format.literal_value
    item, element = item_bytes(stored), ELEMENTS[stored]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        whole = size // LANES * LANES
        for start in range(0, whole, LANES):
            vector = load(b, args[2], start * item, ir.VectorType(element, LANES), item)
            store(b, vector, args[3], start * item, item)
        for start in range(whole, size):
            store(b, load(b, args[2], start * item, element, item), args[3], start * item, item)
        return context.get_dummy_value()

    return types.void(dim, number_format, types.int64, types.int64), codegen


@cache
def write_kv_kernel(key_size: int, value_size: int, block_size: int, is_bf16: int, is_int8: int = 0) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above.

    ``is_bf16`` says what the rows are, and the pool unless ``is_int8``.
    """
    item_size = item_bytes(AS_INT8 if is_int8 else is_bf16)
    lanes = min(LANES, block_size)
    value_row_bytes = -(-value_size // LANES) * LANES * item_size
    key_bytes, value_bytes = key_size * block_size * item_size, value_row_bytes * block_size
    key_vectors, value_vectors = -(-key_size // LANES), -(-value_size // LANES)
    if is_int8:
        key_bytes, value_bytes = (scaled_head_bytes(number, block_size) for number in (key_bytes, value_bytes))
    key_scales, value_scales = (number - SCALE_BYTES * block_size for number in (key_bytes, value_bytes))
    row_floats = max(key_vectors, value_vectors) * LANES if is_int8 else 1
    scale_bytes, int8, float32 = SCALE_BYTES, AS_INT8, AS_FLOAT32

    def write_kv(parameters: Any) -> None:
        p = address_of(parameters)
        num_kv_heads = load_int64(p, NUM_KV_HEADS)
        num_items = load_int64(p, NUM_RUNS) * num_kv_heads
        key_stride, value_stride = load_int64(p, KEY_TOKEN_BYTES), load_int64(p, VALUE_TOKEN_BYTES)
        floats, whole = stack_floats(row_floats), stack_floats(row_floats)
        while True:
            item = claim(load_int64(p, COUNTER))
            if item >= num_items:
                break
            run = item // num_kv_heads
            head = item - run * num_kv_heads
            token, length = load_int64(load_int64(p, RUN_TOKENS), run), load_int64(load_int64(p, RUN_LENGTHS), run)
            slot = load_int64(load_int64(p, RUN_SLOTS), run)
            # Safety: the host's plan leaves unslotted tokens out; a negative slot that came here all the same
            # must not become an address.
            if slot < 0:
                continue
            block = slot // block_size
            offset = slot - block * block_size
            base = load_int64(p, POOL) + block * load_int64(p, BLOCK_BYTES)
            keys = base + load_int64(p, KEY_OFFSET) + head * key_bytes
            values = base + load_int64(p, VALUE_OFFSET) + head * value_bytes
            key = load_int64(p, KEY) + token * key_stride + head * load_int64(p, KEY_HEAD_BYTES)
            value = load_int64(p, VALUE) + token * value_stride + head * load_int64(p, VALUE_HEAD_BYTES)
            if is_int8:
                for i in range(length):
                    slot_scale = (offset + i) * scale_bytes
                    fill_row(floats, key_vectors - 1, key_vectors, _ZERO)
                    load_query(is_bf16, key_size, key + i * key_stride, floats, _ONE)
                    quantize_row(float32, 0, floats, key_vectors, whole, keys + key_scales + slot_scale)
                    scatter_key(key_size, block_size, int8, whole, keys + offset + i)
                    fill_row(floats, value_vectors - 1, value_vectors, _ZERO)
                    load_query(is_bf16, value_size, value + i * value_stride, floats, _ONE)
                    quantize_row(float32, 0, floats, value_vectors, whole, values + value_scales + slot_scale)
                    copy_row(value_size, int8, whole, values + (offset + i) * value_row_bytes)
                continue
            i = 0
            while i < length:
                target = keys + (offset + i) * item_size
                if (offset + i) % lanes == 0 and length - i >= lanes:
                    transpose_keys(key_size, block_size, is_bf16, key + i * key_stride, key_stride, target)
                    i += lanes
                else:
                    scatter_key(key_size, block_size, is_bf16, key + i * key_stride, target)
                    i += 1
            for j in range(length):
                row = values + (offset + j) * value_row_bytes
                copy_row(value_size, is_bf16, value + j * value_stride, row)

    return compile_kernel(write_kv)

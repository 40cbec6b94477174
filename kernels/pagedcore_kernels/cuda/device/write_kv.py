"""Storing K and V of a step's tokens in their slots, for models that have rotated them already.

One thread moves eight elements of one head of one token; K heads first, then V heads. Pools of 8 bits are quantised
on the way with the head's static scale. It reads no slot of another token and writes nothing for slot -1.
"""

from __future__ import annotations

from typing import Any

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import pair_unpackers
from pagedcore_kernels.cuda.shapes import ROW_THREADS, Format


def _quantiser(pool: Format) -> Any:
    """The function that makes one word of four 8-bit elements from four floats that were divided by their scale."""

    @cuda.jit(device=True, inline="always")
    def to_e4m3(a, b, c, d):
        return u32(u32(ptx.pack_e4m3(a, b)) | u32(u32(ptx.pack_e4m3(c, d)) << u32(16)))

    @cuda.jit(device=True, inline="always")
    def byte(x):
        return u32(u32(max(min(ptx.round_to_int(x), i32(127)), i32(-127))) & u32(0xFF))

    @cuda.jit(device=True, inline="always")
    def to_int8(a, b, c, d):
        low = u32(byte(a) | u32(byte(b) << u32(8)))
        return u32(low | u32(u32(byte(c) << u32(16)) | u32(byte(d) << u32(24))))

    return to_e4m3 if pool is Format.E4M3 else to_int8


def chunk_store(source: Format, pool: Format) -> Any:
    """The function that stores eight elements, in four words, in the format of the pool; 8 bits times ``inverse``."""
    NARROW = pool.itemsize == 1
    quantise = _quantiser(pool)
    low, high = pair_unpackers(source)

    @cuda.jit(device=True, inline="always")
    def store_chunk(target, w0, w1, w2, w3, inverse):
        if NARROW:
            ptx.stg64(target,
                      quantise(ptx.fmul(low(w0), inverse), ptx.fmul(high(w0), inverse),
                               ptx.fmul(low(w1), inverse), ptx.fmul(high(w1), inverse)),
                      quantise(ptx.fmul(low(w2), inverse), ptx.fmul(high(w2), inverse),
                               ptx.fmul(low(w3), inverse), ptx.fmul(high(w3), inverse)))
        else:
            ptx.stg128(target, w0, w1, w2, w3)

    return store_chunk


def write_kernel(source: Format, pool: Format, key_size: int, value_size: int) -> Any:
    """Make the kernel of one variant; its parameters are ``variants.WRITE_PARAMETERS``."""
    NARROW = pool.itemsize == 1
    K_CHUNKS, V_CHUNKS = key_size // 8, value_size // 8
    K_ROW, V_ROW = key_size * pool.itemsize, value_size * pool.itemsize
    CHUNK_BYTES = 8 * pool.itemsize
    store_chunk = chunk_store(source, pool)

    def write_kv(key, value, key_pool, value_pool, slots, scales, block_stride, num_tokens, key_token, key_head,
                 value_token, value_head, block_shift, kv_heads):
        per_token = u32(u32(kv_heads) * u32(K_CHUNKS + V_CHUNKS))
        index = u32(u32(cuda.blockIdx.x) * u32(ROW_THREADS) + u32(cuda.threadIdx.x))
        token = u32(index // per_token)
        rest = u32(index % per_token)
        if token >= u32(num_tokens):
            return
        slot = i32(ptx.ldg32_nc(slots + u64(token) * u64(4)))
        if slot < 0:                                  # a token without a place: padding
            return
        page = u64(u32(u32(slot) >> u32(block_shift))) * block_stride
        within = u32(u32(slot) & u32((u32(1) << u32(block_shift)) - u32(1)))
        is_key = rest < u32(u32(kv_heads) * u32(K_CHUNKS))
        if is_key:
            head = u32(rest // u32(K_CHUNKS))
            chunk = u32(rest % u32(K_CHUNKS))
            origin = key + u64(token) * u64(key_token) + u64(head) * u64(key_head)
            row = u32(u32(u32(head << u32(block_shift)) + within) * u32(K_ROW))
            target = key_pool + page + u64(u32(row + u32(chunk * u32(CHUNK_BYTES))))
            scale_at = head
        else:
            rest = u32(rest - u32(u32(kv_heads) * u32(K_CHUNKS)))
            head = u32(rest // u32(V_CHUNKS))
            chunk = u32(rest % u32(V_CHUNKS))
            origin = value + u64(token) * u64(value_token) + u64(head) * u64(value_head)
            row = u32(u32(u32(head << u32(block_shift)) + within) * u32(V_ROW))
            target = value_pool + page + u64(u32(row + u32(chunk * u32(CHUNK_BYTES))))
            scale_at = u32(u32(kv_heads) + head)
        w = ptx.ldg128_nc(origin + u64(u32(chunk * u32(16))))
        inverse = f32(1)
        if NARROW:
            inverse = ptx.rcp(ptx.ldgf32(scales + u64(scale_at) * u64(4)))
        store_chunk(target, w[0], w[1], w[2], w[3], inverse)

    return write_kv

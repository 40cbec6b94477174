"""Storing rows of K and V in the pool, in its format: what ``rotate.py`` does with a row when it has turned it.

A group of lanes has one head of one token in its registers, two vectors of eight elements a lane. Pools of 8 bits are
``ScaledKVLayout``: a row is quantised by itself, with the numbers and the bytes of ``cpu/attention/write_kv.py``, and
its K goes to a place for each element, because the tokens of an element lie together there.
"""

from __future__ import annotations

from typing import Any

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import pair_unpackers
from pagedcore_kernels.cuda.shapes import LARGEST, SMALLEST, Format

INFINITY = 0x7F800000
NAN = 0x7FC00000


def quantiser(pool: Format) -> Any:
    """The function that makes one word of four 8-bit elements from four floats that were divided by their scale."""

    @cuda.jit(device=True, inline="always")
    def to_e4m3(a, b, c, d):
        return u32(u32(ptx.pack_e4m3(a, b)) | u32(u32(ptx.pack_e4m3(c, d)) << u32(16)))

    @cuda.jit(device=True, inline="always")
    def byte(x):
        return u32(u32(ptx.round_to_int(x)) & u32(0xFF))

    @cuda.jit(device=True, inline="always")
    def to_int8(a, b, c, d):
        low = u32(byte(a) | u32(byte(b) << u32(8)))
        return u32(low | u32(u32(byte(c) << u32(16)) | u32(byte(d) << u32(24))))

    return to_e4m3 if pool is Format.E4M3 else to_int8


def largest_magnitude(source: Format) -> Any:
    """The function that finds the bits of the largest magnitude of a row, of NaN if it has one, as float32."""
    low, high = pair_unpackers(source)

    @cuda.jit(device=True, inline="always")
    def largest_of_group(x, shift):
        """Of eight words of every lane of a group of 2**shift; whole numbers, because NaN is above infinity there."""
        largest = u32(0)
        for i in range(8):
            largest = u32(max(largest, u32(ptx.as_u32(low(x[i])) & u32(0x7FFFFFFF))))
            largest = u32(max(largest, u32(ptx.as_u32(high(x[i])) & u32(0x7FFFFFFF))))
        for i in range(5):
            if i < shift:
                other = ptx.as_u32(ptx.shfl_xor(ptx.as_f32(largest), u32(1) << u32(i)))
                largest = u32(max(largest, other))
        return largest

    return largest_of_group


def row_store(source: Format, pool: Format) -> Any:
    """The function that stores a lane's two vectors of a row, and the row's scale if there is one."""
    SCALED = pool.itemsize == 1
    MOST = LARGEST.get(pool, 1.0)
    quantise = quantiser(pool)
    low, high = pair_unpackers(source)

    @cuda.jit(device=True, inline="always")
    def quantised(a, b, factor):
        return quantise(ptx.fmul(low(a), factor), ptx.fmul(high(a), factor),
                        ptx.fmul(low(b), factor), ptx.fmul(high(b), factor))

    @cuda.jit(device=True, inline="always")
    def scatter(target, word, block_shift):
        """Store four bytes, each of another element of the token."""
        for i in range(4):
            ptx.stg8(target + u64(u32(u32(i) << u32(block_shift))), u32(word >> u32(8 * i)))

    @cuda.jit(device=True, inline="always")
    def store_row(page, head, within, size, block_shift, is_value, is_first, chunk_a, chunk_b, x, largest):
        """Store ``x`` in slot ``within`` of a block whose K or V of this layer begin at ``page``."""
        if SCALED:
            base = page + u64(u32(u32(head << u32(block_shift)) * u32(u32(size) + u32(4))))
            is_finite = largest < u32(INFINITY)
            is_used = is_finite and ptx.as_f32(largest) >= f32(SMALLEST)
            factor = ptx.fdiv(f32(MOST), ptx.as_f32(largest)) if is_used else f32(0)
            if is_first:
                scale = ptx.fdiv(ptx.as_f32(largest), f32(MOST)) if is_used else f32(0)
                place = u32((u32(size) << u32(block_shift)) + u32(within << u32(2)))
                ptx.stg32(base + u64(place), ptx.as_u32(scale) if is_finite else u32(NAN))
            for i in range(8):
                x[i] = x[i] if is_finite else u32(0)
            for half in range(2):
                element = u32((chunk_a if half == 0 else chunk_b) << u32(3))
                i = i32(4 * half)
                first, second = quantised(x[i], x[i + 1], factor), quantised(x[i + 2], x[i + 3], factor)
                if is_value:
                    ptx.stg64(base + u64(u32(u32(within * u32(size)) + element)), first, second)
                else:
                    at = base + u64(u32(u32(element << u32(block_shift)) + within))
                    scatter(at, first, block_shift)
                    scatter(at + u64(u32(u32(4) << u32(block_shift))), second, block_shift)
        else:
            base = page + u64(u32(u32(u32(head << u32(block_shift)) + within) * u32(u32(size) << u32(1))))
            ptx.stg128(base + u64(u32(chunk_a << u32(4))), x[0], x[1], x[2], x[3])
            ptx.stg128(base + u64(u32(chunk_b << u32(4))), x[4], x[5], x[6], x[7])

    return store_row

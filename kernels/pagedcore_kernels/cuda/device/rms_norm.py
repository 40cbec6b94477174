"""RMS norm of rows of hidden states, after an optional residual add: every element is read once.

A CTA has one row in its registers. The sum is rounded to the storage format, the squares are added up in float32, the
normed row is rounded before the weight multiplies it, or with a weight in float32 the product alone: the roundings of
``cpu/hidden_rows.py``. The order of additions
is a function of the row's length alone: a thread's elements, the lanes of a warp as a tree, the warps in ascending
order. Division and square root are the exactly rounded ones, so no bit is left to an approximation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import packer, pair_unpackers
from pagedcore_kernels.cuda.shapes import ROW_THREADS, Format

_WARPS = ROW_THREADS // 32


@cuda.jit(device=True, inline="always")
def sum_of_group(x, shift):
    """The sum of x over the 2**shift neighbouring lanes of a group, the same bits in each of them."""
    for i in range(5):
        if i < shift:
            x = ptx.fadd(x, ptx.shfl_xor(x, u32(1) << u32(i)))
    return x


@cuda.jit(device=True, inline="always")
def inverse_rms(squares, count, epsilon):
    """``1 / sqrt(mean of squares + epsilon)``, each step exactly rounded."""
    return ptx.fdiv(f32(1), ptx.fsqrt(ptx.fadd(ptx.fdiv(squares, f32(count)), epsilon)))


def normed_by_float32(storage: Format) -> Any:
    """The function that multiplies a pair with the inverse root and two bits of float32, and rounds once."""
    low, high = pair_unpackers(storage)
    pack = packer(storage)

    @cuda.jit(device=True, inline="always")
    def wide_product(pair, scale, first, second):
        return pack(ptx.fmul(ptx.fmul(low(pair), scale), ptx.as_f32(first)),
                    ptx.fmul(ptx.fmul(high(pair), scale), ptx.as_f32(second)))

    return wide_product


def rms_norm_kernel(storage: Format, vectors: int) -> Any:
    """Make the kernel for rows of up to ``ROW_THREADS * vectors`` vectors of 16 bytes."""
    VECTORS, WORDS = vectors, vectors * 4
    low, high = pair_unpackers(storage)
    pack = packer(storage)
    wide_product = normed_by_float32(storage)

    def rms_norm(residual, addend, weight, out, row_vectors, is_wide, epsilon):
        """CTA b adds row b of ``addend``, unless that is 0, to ``residual`` in place, and writes the norm to ``out``,
        which may be ``residual`` where there is no ``addend``.

        Rows are ``row_vectors`` vectors of eight elements, one right after another; so is the weight, which is of the
        storage format or, if ``is_wide``, float32.
        """
        sums = ptx.shared_address(cuda.shared.array(_WARPS, dtype=np.float32))
        t = i32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x) * u64(row_vectors) * u64(16)
        x = cuda.local.array(WORDS, dtype=np.uint32)
        for j in range(VECTORS):                      # loads without a branch between them, so that all are in flight
            place = i32(min(i32(t + j * ROW_THREADS), i32(row_vectors - 1)))
            words = ptx.ldg128(residual + row + u64(u32(place)) * u64(16))
            x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3] = words[0], words[1], words[2], words[3]
        if addend != u64(0):
            for j in range(VECTORS):
                place = i32(t + j * ROW_THREADS)
                at = row + u64(u32(min(place, i32(row_vectors - 1)))) * u64(16)
                words = ptx.ldg128(addend + at)
                for k in range(4):
                    x[4 * j + k] = pack(ptx.fadd(low(x[4 * j + k]), low(words[k])),
                                        ptx.fadd(high(x[4 * j + k]), high(words[k])))
                if place < row_vectors:
                    ptx.stg128(residual + at, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3])
        squares = f32(0)
        for j in range(VECTORS):
            if i32(t + j * ROW_THREADS) < row_vectors:
                for k in range(4):
                    squares = ptx.ffma(low(x[4 * j + k]), low(x[4 * j + k]), squares)
                    squares = ptx.ffma(high(x[4 * j + k]), high(x[4 * j + k]), squares)
        squares = sum_of_group(squares, 5)
        if (t & 31) == 0:
            ptx.stsf32(sums + u32(u32(t >> 5) * u32(4)), squares)
        cuda.syncthreads()
        total = f32(0)
        for i in range(_WARPS):
            total = ptx.fadd(total, ptx.ldsf32(sums + u32(4 * i)))
        scale = inverse_rms(total, i32(row_vectors * 8), epsilon)
        y = cuda.local.array(4, dtype=np.uint32)
        for j in range(VECTORS):
            place = i32(t + j * ROW_THREADS)
            if place < row_vectors:
                if is_wide != 0:
                    for h in range(2):
                        wide = ptx.ldg128_nc(weight + u64(u32(place)) * u64(32) + u64(16 * h))
                        for k in range(2):
                            word = x[4 * j + 2 * h + k]
                            y[2 * h + k] = wide_product(word, scale, wide[2 * k], wide[2 * k + 1])
                else:
                    words = ptx.ldg128_nc(weight + u64(u32(place)) * u64(16))
                    for k in range(4):
                        normed = pack(ptx.fmul(low(x[4 * j + k]), scale), ptx.fmul(high(x[4 * j + k]), scale))
                        y[k] = pack(ptx.fmul(low(words[k]), low(normed)), ptx.fmul(high(words[k]), high(normed)))
                ptx.stg128(out + row + u64(u32(place)) * u64(16), y[0], y[1], y[2], y[3])

    return rms_norm

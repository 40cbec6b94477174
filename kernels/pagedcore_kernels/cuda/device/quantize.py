"""Rows of hidden states in e4m3 with a scale for each, for torch's scaled products of weights in e4m3.

A CTA has one row, which it reads twice: for its largest magnitude, which no order of comparisons changes, and for its
codes. So a row's scale and codes are those of the row alone. They are the numbers of ``write_kv.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import pair_unpackers
from pagedcore_kernels.cuda.device.write_kv import INFINITY, NAN, quantiser
from pagedcore_kernels.cuda.shapes import LARGEST, ROW_THREADS, SMALLEST, Format

_WARPS = ROW_THREADS // 32


def quantize_kernel(storage: Format) -> Any:
    """Make the kernel for rows of any whole number of vectors of 16 bytes."""
    MOST = LARGEST[Format.E4M3]
    low, high = pair_unpackers(storage)
    to_e4m3 = quantiser(Format.E4M3)

    @cuda.jit(device=True, inline="always")
    def magnitude(word):
        first = u32(ptx.as_u32(low(word)) & u32(0x7FFFFFFF))
        return u32(max(first, u32(ptx.as_u32(high(word)) & u32(0x7FFFFFFF))))

    @cuda.jit(device=True, inline="always")
    def codes_of(first, second, factor):
        return to_e4m3(ptx.fmul(low(first), factor), ptx.fmul(high(first), factor),
                       ptx.fmul(low(second), factor), ptx.fmul(high(second), factor))

    def quantize_rows(rows, codes, scales, row_vectors, given):
        """CTA b writes the codes of row b, and its scale: ``given``, or if that is 0 a 448th of its largest magnitude.

        A row with an infinity or a NaN has codes of 0 and the scale NaN, so that all its products are NaN. Numbers
        beyond 448 times a given scale become 448.
        """
        maxima = ptx.shared_address(cuda.shared.array(_WARPS, dtype=np.uint32))
        t = i32(cuda.threadIdx.x)
        row = u64(cuda.blockIdx.x) * u64(row_vectors)
        rounds = i32((row_vectors + ROW_THREADS - 1) // ROW_THREADS)
        largest = u32(0)
        for j in range(rounds):                       # as often in every thread; the last vector may count twice
            place = min(i32(t + j * ROW_THREADS), i32(row_vectors - 1))
            words = ptx.ldg128_nc(rows + (row + u64(u32(place))) * u64(16))
            for k in range(4):
                largest = u32(max(largest, magnitude(words[k])))
        largest = ptx.redux_max(largest)
        if (t & 31) == 0:
            ptx.sts32(maxima + u32(u32(t >> 5) * u32(4)), largest)
        cuda.syncthreads()
        for i in range(_WARPS):
            largest = u32(max(largest, ptx.lds32(maxima + u32(4 * i))))
        is_finite = largest < u32(INFINITY)
        is_used = ptx.as_f32(largest) >= f32(SMALLEST)
        factor = ptx.fdiv(f32(MOST), ptx.as_f32(largest)) if is_used else f32(0)
        scale = ptx.fdiv(ptx.as_f32(largest), f32(MOST)) if is_used else f32(0)
        if given > f32(0):
            factor, scale = ptx.fdiv(f32(1), given), given
        if t == 0:
            ptx.stg32(scales + u64(cuda.blockIdx.x) * u64(4), ptx.as_u32(scale) if is_finite else u32(NAN))
        for j in range(rounds):
            place = i32(t + j * ROW_THREADS)
            if place < row_vectors:
                words = ptx.ldg128_nc(rows + (row + u64(u32(place))) * u64(16))
                first, second = codes_of(words[0], words[1], factor), codes_of(words[2], words[3], factor)
                ptx.stg64(codes + (row + u64(u32(place))) * u64(8), first if is_finite else u32(0),
                          second if is_finite else u32(0))

    return quantize_rows

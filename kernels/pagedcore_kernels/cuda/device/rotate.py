"""Rotary embedding of the queries and keys of a step together with the write of its K and V into the pool.

A group of lanes, a power of two, has one head of one token in its registers, two vectors of 16 bytes per lane: for
halves that turn together one of each half, otherwise two neighbours. Queries are turned in place; keys and values go
to their slots and nowhere else. With norms every query head and key head is RMS-normed first, with the sum taken over
a lane's elements and then over the group as a tree. Every product is rounded to the storage format, as the modules of
transformers round, so that this launch leaves the bits that separate ones would. What is stored how, ``write_kv.py``
says. Without queries and angles it stores the K and V of models that have turned them already, of heads that may differ
in size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.rms_norm import inverse_rms, normed_by_float32, sum_of_group
from pagedcore_kernels.cuda.device.tiles import packer, pair_unpackers
from pagedcore_kernels.cuda.device.write_kv import largest_magnitude, row_store
from pagedcore_kernels.cuda.shapes import ROW_THREADS, Format


def rotate_kernel(source: Format, pool: Format, interleaved: bool) -> Any:
    """Make the kernel for one storage format, pool format and manner of pairing elements.

    Pairs are elements i and i + rotary_size / 2, or with ``interleaved`` elements 2 i and 2 i + 1.
    """
    INTERLEAVED = interleaved
    SCALED = pool.itemsize == 1
    low, high = pair_unpackers(source)
    pack = packer(source)
    store_row, largest_of_group = row_store(source, pool), largest_magnitude(source)
    wide_product = normed_by_float32(source)

    @cuda.jit(device=True, inline="always")
    def turned(x, y, cosine, sine):
        """Both elements of a pair after the turn, not yet rounded."""
        by_cosine = pack(ptx.fmul(x, cosine), ptx.fmul(y, cosine))
        by_sine = pack(ptx.fmul(x, sine), ptx.fmul(y, sine))
        return (ptx.fadd(low(by_cosine), f32(-high(by_sine))), ptx.fadd(high(by_cosine), low(by_sine)))

    @cuda.jit(device=True, inline="always")
    def turn(x, cosines, sines):
        """Turn the lane's eight pairs by the angles at two addresses."""
        for quarter in range(2):
            c = ptx.ldg128_nc(cosines + u64(16 * quarter))
            s = ptx.ldg128_nc(sines + u64(16 * quarter))
            c0, c1, c2, c3 = ptx.as_f32(c[0]), ptx.as_f32(c[1]), ptx.as_f32(c[2]), ptx.as_f32(c[3])
            s0, s1, s2, s3 = ptx.as_f32(s[0]), ptx.as_f32(s[1]), ptx.as_f32(s[2]), ptx.as_f32(s[3])
            if INTERLEAVED:
                i = 4 * quarter
                p0 = turned(low(x[i]), high(x[i]), c0, s0)
                p1 = turned(low(x[i + 1]), high(x[i + 1]), c1, s1)
                p2 = turned(low(x[i + 2]), high(x[i + 2]), c2, s2)
                p3 = turned(low(x[i + 3]), high(x[i + 3]), c3, s3)
                x[i], x[i + 1] = pack(p0[0], p0[1]), pack(p1[0], p1[1])
                x[i + 2], x[i + 3] = pack(p2[0], p2[1]), pack(p3[0], p3[1])
            else:
                i = 2 * quarter
                p0 = turned(low(x[i]), low(x[i + 4]), c0, s0)
                p1 = turned(high(x[i]), high(x[i + 4]), c1, s1)
                p2 = turned(low(x[i + 1]), low(x[i + 5]), c2, s2)
                p3 = turned(high(x[i + 1]), high(x[i + 5]), c3, s3)
                x[i], x[i + 1] = pack(p0[0], p1[0]), pack(p2[0], p3[0])
                x[i + 4], x[i + 5] = pack(p0[1], p1[1]), pack(p2[1], p3[1])

    def rotate_and_write(query, key, value, positions, angles, query_norm, key_norm, slots, key_pool, value_pool,
                         block_stride, num_tokens, query_token, query_head, key_token, key_head, value_token,
                         value_head, heads, kv_heads, head_size, value_size, rotary_size, group_shift, block_shift,
                         is_wide, epsilon):
        """Turn query [T, H, D] in place by angles [positions, rotary_size], cosines and then sines in float32, and
        write key [T, KVH, D] and value [T, KVH, Dv] to their slots. Slots at address 0 mean that nothing is written.
        Weights of norms are of the storage format or, if ``is_wide``, float32.
        """
        index = u32(u32(u32(cuda.blockIdx.x) * u32(ROW_THREADS)) + u32(cuda.threadIdx.x))
        item = u32(index >> u32(group_shift))
        t = u32(index & u32(u32(u32(1) << u32(group_shift)) - u32(1)))
        per_token = u32(u32(heads) + u32(u32(2) * u32(kv_heads)))
        token = u32(item // per_token)
        head = u32(item % per_token)
        turning = u32(u32(rotary_size) >> u32(4))
        is_query = head < u32(heads)
        is_value = head >= u32(u32(heads) + u32(kv_heads))
        size = u32(value_size) if is_value else u32(head_size)
        works = token < u32(num_tokens) and t < u32(size >> u32(4))
        kv_head = u32(head - u32(heads))
        if is_query:
            origin = query + u64(token) * u64(query_token) + u64(head) * u64(query_head)
            norm = query_norm
        elif is_value:
            kv_head = u32(kv_head - u32(kv_heads))
            origin = value + u64(token) * u64(value_token) + u64(kv_head) * u64(value_head)
            norm = u64(0)
        else:
            origin = key + u64(token) * u64(key_token) + u64(kv_head) * u64(key_head)
            norm = key_norm
        turns = t < turning and not is_value
        chunk_a = u32(t << u32(1))
        chunk_b = u32(chunk_a + u32(1))
        if turns and not INTERLEAVED:
            chunk_a = t
            chunk_b = u32(t + turning)
        x = cuda.local.array(8, dtype=np.uint32)
        for i in range(8):
            x[i] = u32(0)
        if works:
            a = ptx.ldg128(origin + u64(u32(chunk_a << u32(4))))
            b = ptx.ldg128(origin + u64(u32(chunk_b << u32(4))))
            x[0], x[1], x[2], x[3] = a[0], a[1], a[2], a[3]
            x[4], x[5], x[6], x[7] = b[0], b[1], b[2], b[3]
        if query_norm != u64(0):
            # Invariant: all lanes of the warp are here, those without work with zeros, as shuffles demand.
            squares = f32(0)
            for i in range(8):
                squares = ptx.ffma(low(x[i]), low(x[i]), squares)
                squares = ptx.ffma(high(x[i]), high(x[i]), squares)
            scale = inverse_rms(sum_of_group(squares, group_shift), head_size, epsilon)
            if works and not is_value and is_wide != 0:
                for half in range(2):
                    at = norm + u64(u32((chunk_a if half == 0 else chunk_b) << u32(5)))
                    for h in range(2):
                        wide = ptx.ldg128_nc(at + u64(16 * h))
                        for k in range(2):
                            i = 4 * half + 2 * h + k
                            x[i] = wide_product(x[i], scale, wide[2 * k], wide[2 * k + 1])
            elif works and not is_value:
                a = ptx.ldg128_nc(norm + u64(u32(chunk_a << u32(4))))
                b = ptx.ldg128_nc(norm + u64(u32(chunk_b << u32(4))))
                w = (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])
                for i in range(8):
                    normed = pack(ptx.fmul(low(x[i]), scale), ptx.fmul(high(x[i]), scale))
                    x[i] = pack(ptx.fmul(low(w[i]), low(normed)), ptx.fmul(high(w[i]), high(normed)))
        if works and turns:
            position = ptx.ldg32_nc(positions + u64(token) * u64(4))
            cosines = angles + u64(position) * u64(u32(u32(rotary_size) << u32(2))) + u64(u32(t << u32(5)))
            turn(x, cosines, cosines + u64(u32(u32(rotary_size) << u32(1))))
        largest = u32(0)
        if SCALED:                                    # all lanes are here too
            largest = largest_of_group(x, group_shift)
        if not works:
            return
        if is_query:
            ptx.stg128(origin + u64(u32(chunk_a << u32(4))), x[0], x[1], x[2], x[3])
            ptx.stg128(origin + u64(u32(chunk_b << u32(4))), x[4], x[5], x[6], x[7])
            return
        if slots == u64(0):
            return
        slot = i32(ptx.ldg32_nc(slots + u64(token) * u64(4)))
        if slot < 0:                                  # a token without a place: padding
            return
        page = u64(u32(u32(slot) >> u32(block_shift))) * block_stride
        within = u32(u32(slot) & u32(u32(u32(1) << u32(block_shift)) - u32(1)))
        store_row((value_pool if is_value else key_pool) + page, kv_head, within, size, block_shift, is_value,
                  t == u32(0), chunk_a, chunk_b, x, largest)

    return rotate_and_write

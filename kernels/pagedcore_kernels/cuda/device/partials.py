"""Results of decode, whole or in part: where they go, and how the last CTA folds the parts of a context.

Owns the layout of a partial result (``shapes.partial_bytes``) and of the output. The order of the fold is
``numerics.py``'s: ascending segments. Read ``decode.py`` for who leaves partial results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import numerics as num
from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.shapes import DECODE_ROWS as ROWS
from pagedcore_kernels.cuda.shapes import THREADS, WARPS, AttentionShape, partial_bytes

AHEAD = 8
"""Partial results that a merge reads before it folds the first of them: it waits for memory once for so many."""


@cuda.jit(device=True, inline="always")
def of_query_head(numbers, head, group, packed):
    """One float32 per query head: the one of a packed row."""
    index = u32(u32(u32(head) * u32(group)) + u32(u32(packed) % u32(group)))
    return ptx.ldgf32(numbers + u64(index) * u64(4))


def result_functions(shape: AttentionShape, fn: SimpleNamespace) -> SimpleNamespace:
    """Make the functions of one variant: ``store_result``, ``store_partial`` and ``merge``."""
    pair_index, pair_column, pack_result = fn.pair_index, fn.pair_column, fn.pack_result
    PAIRS, PAIR_STEP = fn.pairs_per_group, fn.pair_step
    DV, GROUPS, FLOATS = shape.value_size, shape.value_groups, shape.floats_per_group
    MY_GROUPS = (GROUPS + WARPS - 1) // WARPS
    UNEVEN = GROUPS % WARPS != 0
    GROUP_COLUMNS = 32 // shape.pool.itemsize
    PARTIAL = partial_bytes(DV)
    QUADS = DV // 4
    NUMBERS = AHEAD * 6
    MERGE_ROUNDS = (ROWS * QUADS + THREADS - 1) // THREADS

    @cuda.jit(device=True, inline="always")
    def result_address(output, q_start, packed, head, kv_heads, group):
        token = u32(u32(q_start) + u32(u32(packed) // u32(group)))
        column = u32(u32(u32(head) * u32(group)) + u32(u32(packed) % u32(group)))
        return output + (u64(token) * u64(u32(u32(kv_heads) * u32(group))) + u64(column)) * u64(DV * 2)

    @cuda.jit(device=True, inline="always")
    def partial_address(partials, slot, head, kv_heads):
        return partials + u64(u32(u32(u32(slot) * u32(kv_heads)) + u32(head))) * u64(PARTIAL)

    @cuda.jit(device=True, inline="always")
    def store_result(to_a, to_b, has_a, has_b, total, norm_a, norm_b, warp, lane):
        """Write this thread's numbers of its two rows, normalised."""
        for g in range(MY_GROUPS):
            if not UNEVEN or warp + g * WARPS < GROUPS:
                for pair in range(PAIRS):
                    z = g * FLOATS + pair_index(pair)
                    at = u64(u32(u32((warp + g * WARPS) * GROUP_COLUMNS) + pair_column(pair, lane))) * u64(2)
                    if has_a:
                        ptx.stg32(to_a + at, pack_result(ptx.fmul(total[z], norm_a),
                                                         ptx.fmul(total[z + PAIR_STEP], norm_a)))
                    if has_b:
                        ptx.stg32(to_b + at, pack_result(ptx.fmul(total[z + 2], norm_b),
                                                         ptx.fmul(total[z + 2 + PAIR_STEP], norm_b)))

    @cuda.jit(device=True, inline="always")
    def store_partial(place, total, max_a, max_b, sum_a, sum_b, warp, lane):
        """Leave this thread's numbers of its two rows, not normalised."""
        row_a = u32(lane >> 2)
        for g in range(MY_GROUPS):
            if not UNEVEN or warp + g * WARPS < GROUPS:
                for pair in range(PAIRS):
                    z = g * FLOATS + pair_index(pair)
                    column = u32(u32((warp + g * WARPS) * GROUP_COLUMNS) + pair_column(pair, lane))
                    to = place + u64(u32(u32(row_a * u32(DV)) + column)) * u64(4)
                    ptx.stgf32(to, total[z])
                    ptx.stgf32(to + u64(4), total[z + PAIR_STEP])
                    ptx.stgf32(to + u64(8 * DV * 4), total[z + 2])
                    ptx.stgf32(to + u64(8 * DV * 4 + 4), total[z + 2 + PAIR_STEP])
        if warp == 0 and (lane & 3) == 0:
            sums = place + u64(ROWS * DV * 4) + u64(row_a) * u64(4)
            ptx.stgf32(sums, max_a)
            ptx.stgf32(sums + u64(32), max_b)
            ptx.stgf32(sums + u64(64), sum_a)
            ptx.stgf32(sums + u64(96), sum_b)

    @cuda.jit(device=True, inline="always")
    def merge(partials, first_slot, skipped, num_partials, output, q_start, row0, last, head, kv_heads, group, unit,
              sinks, thread):
        """Fold the partial results from number ``skipped`` on and write the rows' result; 4 columns a thread."""
        for i in range(MERGE_ROUNDS):
            place_in = i32(thread + i * THREADS)
            r = i32(u32(place_in) // u32(QUADS))
            column = u32(u32(u32(place_in) % u32(QUADS)) * u32(4))
            packed = i32(row0 + r)
            if r < ROWS and packed <= last:
                place = partial_address(partials, i32(first_slot + skipped), head, kv_heads)
                sums = place + u64(ROWS * DV * 4) + u64(u32(r)) * u64(4)
                numbers = place + u64(u32(u32(r * DV) + column)) * u64(4)
                step = u64(u32(kv_heads)) * u64(PARTIAL)
                maximum = f32(num.MASKED)
                weights = f32(0)
                v0, v1, v2, v3 = f32(0), f32(0), f32(0), f32(0)
                read = cuda.local.array(NUMBERS, dtype=np.float32)
                part = i32(skipped)
                while part < num_partials:
                    for k in range(AHEAD):
                        ahead = u64(u32(min(i32(part - skipped + k), i32(num_partials - 1 - skipped)))) * step
                        read[k * 6] = ptx.ldgf32(sums + ahead)
                        read[k * 6 + 1] = ptx.ldgf32(sums + ahead + u64(64))
                        v = ptx.ldg128(numbers + ahead)
                        for c in range(4):
                            read[k * 6 + 2 + c] = ptx.as_f32(v[c])
                    for k in range(AHEAD):
                        if part + k < num_partials:
                            highest = ptx.fmax(maximum, read[k * 6])
                            keep = num.rescale(maximum, highest, unit)
                            add = num.rescale(read[k * 6], highest, unit)
                            maximum = highest
                            weights = num.fold(weights, keep, read[k * 6 + 1], add)
                            v0 = num.fold(v0, keep, read[k * 6 + 2], add)
                            v1 = num.fold(v1, keep, read[k * 6 + 3], add)
                            v2 = num.fold(v2, keep, read[k * 6 + 4], add)
                            v3 = num.fold(v3, keep, read[k * 6 + 5], add)
                    part = i32(part + AHEAD)
                sink = f32(0)
                if sinks != u64(0):
                    sink = of_query_head(sinks, head, group, packed)
                norm = num.normaliser(maximum, weights, unit, sinks != u64(0), sink)
                to = result_address(output, q_start, packed, head, kv_heads, group) + u64(column) * u64(2)
                ptx.stg64(to, pack_result(ptx.fmul(v0, norm), ptx.fmul(v1, norm)),
                          pack_result(ptx.fmul(v2, norm), ptx.fmul(v3, norm)))

    functions: dict[str, Any] = {
        "result_address": result_address, "partial_address": partial_address, "store_result": store_result,
        "store_partial": store_partial, "merge": merge,
    }
    return SimpleNamespace(**functions)

"""Attention of few query rows over long contexts: 16 packed rows, and the context split among CTAs.

One CTA computes one work item of ``work_lists.py``: 16 rows, each one token and one query head of a KV head's group,
over a run of segments. Its four warps share every tile: each multiplies the queries with 16 of the keys, the warps
agree on the maximum, and each multiplies all weights with its share of the columns of V. An item that covers its
rows' whole context writes the result; the others leave what they have per segment, and the last of them to finish
folds it, in the order of the segments. Which CTA that is, and how the context was split, changes no bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import numerics as num
from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.partials import of_query_head, result_functions
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import tile_functions
from pagedcore_kernels.cuda.shapes import DECODE_ROWS as ROWS
from pagedcore_kernels.cuda.shapes import LOG2_E, WARPS, AttentionShape
from pagedcore_kernels.cuda.shapes import ROW_PADDING as PADDING


def decode_kernel(shape: AttentionShape) -> Any:
    """Make the kernel of one variant; its parameters are ``variants.ATTENTION_PARAMETERS``."""
    fn = tile_functions(shape)
    load_keys, load_values, stage_query, load_query = fn.load_keys, fn.load_values, fn.stage_query, fn.load_query
    score_step, value_step, pack = fn.score_step, fn.value_step, fn.pack
    low_weight, high_weight, scale_scores, weigh_values = (
        fn.low_weight, fn.high_weight, fn.scale_scores, fn.weigh_values
    )
    key_lane, value_row, key_of = fn.key_lane, fn.value_row, fn.key_of
    QUAD_KEYS, KEY_STEP, KEY_BLOCK = fn.quad_keys, fn.key_step, fn.key_block
    out = result_functions(shape, fn)
    result_address, partial_address, store_result, store_partial, merge = (
        out.result_address, out.partial_address, out.store_result, out.store_partial, out.merge
    )
    TILE, STAGES = shape.tile, shape.stages
    MASKED = num.MASKED
    VROW, QROW, PROW = shape.value_row, shape.query_row, shape.tile * 2 + PADDING
    STEPS, WORDS = shape.key_steps, shape.words_per_step
    QUERY_WORDS = STEPS * WORDS
    COLUMN_WARPS = TILE // 16
    PV_STEPS = TILE // 16
    GROUPS = shape.value_groups
    MY_GROUPS = (GROUPS + WARPS - 1) // WARPS
    UNEVEN = GROUPS % WARPS != 0
    FLOATS = shape.floats_per_group
    OUT = MY_GROUPS * FLOATS
    SCALED = shape.is_scaled
    KEY_HEAD, VALUE_HEAD = shape.pool_key_bytes, shape.pool_value_bytes
    KEY_TILE = shape.key_tile_bytes
    STAGE = KEY_TILE + shape.value_tile_bytes
    KEY_SCALES = shape.key_scales_at
    VALUE_SCALES = KEY_TILE + shape.value_scales_at
    Q_AT = STAGES * STAGE
    MAX_AT = Q_AT + ROWS * QROW
    P_AT = MAX_AT + WARPS * ROWS * 4
    SUM_AT = P_AT + ROWS * PROW
    FLAG_AT = SUM_AT + (ROWS * TILE if SCALED else 0)

    def decode(query, keys, values, tables, work, rows_info, output, partials, counters, slopes, sinks,
               block_stride, query_token, query_head, block_shift, kv_heads, group, window, chunk,
               segment_shift, unit, cap_input):
        base = ptx.shared_address(cuda.shared.array(0, dtype=np.uint8))
        t = i32(cuda.threadIdx.x)
        lane = i32(t & 31)
        warp = i32(t >> 5)
        item = work + u64(u32(u32(cuda.blockIdx.x) // u32(kv_heads))) * u64(32)
        head = i32(u32(cuda.blockIdx.x) % u32(kv_heads))
        w = ptx.ldg128(item)
        x = ptx.ldg128(item + u64(16))
        row = i32(w[0])
        if row < 0:                                   # an empty item of a fixed-size grid
            return
        row0 = i32(w[1])
        segment0 = i32(w[2])
        segment1 = i32(w[3])
        slot = i32(x[0])                              # of the first partial, -1: the result is written at once
        first_slot = i32(x[1])
        num_partials = i32(x[2])
        last_arrival = u32(x[3] - u32(1))
        info = ptx.ldg128(rows_info + u64(row) * u64(16))
        q_start = i32(info[0])
        q_len = i32(info[1])
        kv_len = i32(info[2])
        all_rows = i32(q_len * group)
        past = i32(kv_len - q_len)                    # the position of the row's first token
        last = i32(min(i32(row0 + ROWS), all_rows) - 1)
        first_position = i32(past + i32(u32(row0) // u32(group)))
        last_position = i32(past + i32(u32(last) // u32(group)))
        begin = num.first_visible(first_position, window, chunk)
        all_visible_from = num.first_visible(last_position, window, chunk)
        begin = i32(i32(u32(begin) // u32(TILE)) * TILE)
        opens = slot == first_slot                    # this item starts where its rows' context does
        j = i32(max(begin, i32(segment0 << segment_shift)))
        end = i32(min(i32(last_position + 1), i32(segment1 << segment_shift)))
        table = tables + u64(u32(info[3])) * u64(4)
        k_head = keys + u64(u32(head << block_shift)) * u64(KEY_HEAD)
        v_head = values + u64(u32(head << block_shift)) * u64(VALUE_HEAD)

        stage_query(base + u32(Q_AT), query + u64(q_start) * u64(query_token)
                    + u64(u32(head * group)) * u64(query_head), query_token, query_head, row0, ROWS, all_rows, group, t)
        for s in range(STAGES - 1):
            start = i32(j + s * TILE)
            if start < end:
                load_keys(base + u32(s * STAGE), k_head, table, block_shift, block_stride, start, kv_len, t)
                load_values(
                    base + u32(s * STAGE + KEY_TILE), v_head, table, block_shift, block_stride, start, kv_len, t
                )
            ptx.cp_async_commit()

        row_a = i32(lane >> 2)
        packed_a = i32(min(i32(row0 + row_a), last))
        packed_b = i32(min(i32(row0 + row_a + 8), last))
        position_a = i32(past + i32(u32(packed_a) // u32(group)))
        position_b = i32(past + i32(u32(packed_b) // u32(group)))
        visible_a = num.first_visible(position_a, window, chunk)
        visible_b = num.first_visible(position_b, window, chunk)
        slope_a, slope_b = f32(0), f32(0)
        if slopes != u64(0):
            per_unit = ptx.fmul(f32(LOG2_E), ptx.rcp(unit))
            slope_a = ptx.fmul(of_query_head(slopes, head, group, packed_a), per_unit)
            slope_b = ptx.fmul(of_query_head(slopes, head, group, packed_b), per_unit)

        cuda.syncthreads()
        q = cuda.local.array(QUERY_WORDS, dtype=np.uint32)
        q_lane = base + u32(Q_AT + (lane & 15) * QROW + (lane >> 4) * 16)
        for step in range(STEPS):
            load_query(q_lane + u32(step * WORDS * 8), q, step * WORDS)

        o = cuda.local.array(OUT, dtype=np.float32)
        total = cuda.local.array(OUT, dtype=np.float32)
        for i in range(OUT):
            o[i] = f32(0)
            total[i] = f32(0)
        max_a, max_b = f32(MASKED), f32(MASKED)
        sum_a, sum_b = f32(0), f32(0)
        total_max_a, total_max_b = f32(MASKED), f32(MASKED)
        total_sum_a, total_sum_b = f32(0), f32(0)
        k_lane = u32(key_lane(lane) + warp * KEY_BLOCK)
        v_lane = u32(KEY_TILE + value_row(lane) * VROW + (lane >> 4) * 16 + warp * 32)
        my_scales = u32(warp * 64 + (lane & 3) * 16)  # of the four keys of this thread
        sum_store = base + u32(SUM_AT + ((warp * ROWS + row_a) * 4 + (lane & 3)) * 4)
        sum_load = base + u32(SUM_AT + (row_a * 4 + (lane & 3)) * 4)
        is_late = (lane & 2) != 0
        p_store = base + u32(P_AT + row_a * PROW + warp * 32 + (lane & 3) * 4)
        p_lane = base + u32(P_AT + (lane & 15) * PROW + (lane >> 4) * 16)
        max_at = base + u32(MAX_AT)
        current = i32(0)
        while j < end:
            if STAGES == 2:
                ptx.cp_async_wait0()
            else:
                ptx.cp_async_wait1()
            cuda.syncthreads()                        # the tile is here; nobody reads the one before any more
            ahead = i32(j + (STAGES - 1) * TILE)
            free = i32(current + STAGES - 1)
            free = i32(free - STAGES) if free >= STAGES else free
            if ahead < end:
                to = base + u32(free * STAGE)
                load_keys(to, k_head, table, block_shift, block_stride, ahead, kv_len, t)
                load_values(to + u32(KEY_TILE), v_head, table, block_shift, block_stride, ahead, kv_len, t)
            ptx.cp_async_commit()
            tile = base + u32(current * STAGE)

            # Scores of this warp's 16 keys.
            s = cuda.local.array(8, dtype=np.float32)
            for i in range(8):
                s[i] = f32(0)
            peak_a = f32(MASKED)
            peak_b = f32(MASKED)
            if warp < COLUMN_WARPS:
                for step in range(STEPS):
                    score_step(tile + k_lane + u32(step * KEY_STEP), q, step * WORDS, s, 0)
                if SCALED:
                    scale_scores(tile + u32(KEY_SCALES) + my_scales, s, 0)
                if cap_input > f32(0):
                    for i in range(8):
                        s[i] = num.capped(s[i], cap_input)
                key = i32(j + warp * 16 + (lane & 3) * QUAD_KEYS)
                if slopes != u64(0):
                    for i in range(8):
                        at = i32(key + key_of(i))
                        s[i] = num.biased(s[i], slope_a if (i & 2) == 0 else slope_b, at,
                                          position_a if (i & 2) == 0 else position_b)
                if i32(j + TILE - 1) > first_position or j < all_visible_from:
                    for i in range(8):
                        at = i32(key + key_of(i))
                        s[i] = num.masked(s[i], at, position_a if (i & 2) == 0 else position_b,
                                          visible_a if (i & 2) == 0 else visible_b)
                peak_a = num.max_of_quad(ptx.fmax(ptx.fmax(s[0], s[1]), ptx.fmax(s[4], s[5])))
                peak_b = num.max_of_quad(ptx.fmax(ptx.fmax(s[2], s[3]), ptx.fmax(s[6], s[7])))
                if (lane & 3) == 0:
                    ptx.stsf32(max_at + u32((warp * ROWS + row_a) * 4), peak_a)
                    ptx.stsf32(max_at + u32((warp * ROWS + row_a + 8) * 4), peak_b)
            cuda.syncthreads()                        # every warp's maxima are here
            new_a = max_a
            new_b = max_b
            for i in range(COLUMN_WARPS):
                new_a = ptx.fmax(new_a, ptx.ldsf32(max_at + u32((i * ROWS + row_a) * 4)))
                new_b = ptx.fmax(new_b, ptx.ldsf32(max_at + u32((i * ROWS + row_a + 8) * 4)))
            factor_a = num.rescale(max_a, new_a, unit)
            factor_b = num.rescale(max_b, new_b, unit)
            max_a = new_a
            max_b = new_b
            if warp < COLUMN_WARPS:
                shift_a = num.exponent_shift(max_a, unit)
                shift_b = num.exponent_shift(max_b, unit)
                if SCALED:
                    v = ptx.lds128(tile + u32(VALUE_SCALES) + my_scales)
                    a0, a2 = num.weight(s[0], unit, shift_a), num.weight(s[1], unit, shift_a)
                    b0, b2 = num.weight(s[2], unit, shift_b), num.weight(s[3], unit, shift_b)
                    a1, a3 = num.weight(s[4], unit, shift_a), num.weight(s[5], unit, shift_a)
                    b1, b3 = num.weight(s[6], unit, shift_b), num.weight(s[7], unit, shift_b)
                    ptx.stsf32(sum_store, num.sum_of_four(a0, a1, a2, a3))
                    ptx.stsf32(sum_store + u32(8 * 16), num.sum_of_four(b0, b1, b2, b3))
                    of_a, of_b = weigh_values(v, a0, a1, a2, a3, is_late), weigh_values(v, b0, b1, b2, b3, is_late)
                    ptx.sts32(p_store, of_a[0])
                    ptx.sts32(p_store + u32(16), of_a[1])
                    ptx.sts32(p_store + u32(8 * PROW), of_b[0])
                    ptx.sts32(p_store + u32(8 * PROW + 16), of_b[1])
                else:
                    for h in range(2):
                        ptx.sts32(p_store + u32(h * 16), pack(num.weight(s[h * 4], unit, shift_a),
                                                              num.weight(s[h * 4 + 1], unit, shift_a)))
                        ptx.sts32(p_store + u32(8 * PROW + h * 16), pack(num.weight(s[h * 4 + 2], unit, shift_b),
                                                                         num.weight(s[h * 4 + 3], unit, shift_b)))
            cuda.syncthreads()                        # all weights are here

            # All weights times this warp's columns of V.
            for i in range(OUT // 4):
                o[i * 4] = ptx.fmul(o[i * 4], factor_a)
                o[i * 4 + 1] = ptx.fmul(o[i * 4 + 1], factor_a)
                o[i * 4 + 2] = ptx.fmul(o[i * 4 + 2], factor_b)
                o[i * 4 + 3] = ptx.fmul(o[i * 4 + 3], factor_b)
            tile_a = f32(0)
            tile_b = f32(0)
            for step in range(PV_STEPS):
                p = ptx.ldmatrix_x4(p_lane + u32(step * 32))
                if SCALED:
                    tile_a = ptx.fadd(tile_a, ptx.ldsf32(sum_load + u32(step * ROWS * 16)))
                    tile_b = ptx.fadd(tile_b, ptx.ldsf32(sum_load + u32((step * ROWS + 8) * 16)))
                else:
                    tile_a = ptx.fadd(tile_a, num.sum_of_four(low_weight(p[0]), high_weight(p[0]),
                                                              low_weight(p[2]), high_weight(p[2])))
                    tile_b = ptx.fadd(tile_b, num.sum_of_four(low_weight(p[1]), high_weight(p[1]),
                                                              low_weight(p[3]), high_weight(p[3])))
                for g in range(MY_GROUPS):
                    if not UNEVEN or warp + g * WARPS < GROUPS:
                        value_step(tile + v_lane + u32(step * 16 * VROW + g * WARPS * 32), p[0], p[1], p[2], p[3],
                                   o, g * FLOATS)
            sum_a = ptx.ffma(sum_a, factor_a, tile_a)
            sum_b = ptx.ffma(sum_b, factor_b, tile_b)
            j = i32(j + TILE)
            current = i32(current + 1) if current + 1 < STAGES else i32(0)

            if num.completes_segment(j, end, segment_shift):
                sum_a = num.sum_of_quad(sum_a)
                sum_b = num.sum_of_quad(sum_b)
                new_a = ptx.fmax(total_max_a, max_a)
                new_b = ptx.fmax(total_max_b, max_b)
                keep_a = num.rescale(total_max_a, new_a, unit)
                keep_b = num.rescale(total_max_b, new_b, unit)
                add_a = num.rescale(max_a, new_a, unit)
                add_b = num.rescale(max_b, new_b, unit)
                total_max_a = new_a
                total_max_b = new_b
                total_sum_a = num.fold(total_sum_a, keep_a, sum_a, add_a)
                total_sum_b = num.fold(total_sum_b, keep_b, sum_b, add_b)
                for i in range(OUT):
                    total[i] = num.fold(total[i], keep_a if (i & 2) == 0 else keep_b, o[i],
                                        add_a if (i & 2) == 0 else add_b)
                    o[i] = f32(0)
                max_a, max_b = f32(MASKED), f32(MASKED)
                sum_a, sum_b = f32(0), f32(0)
                if slot >= 0 and (j >= end or not opens):
                    mine = i32(slot)
                    if not opens:
                        mine = i32(slot + i32(u32(j - 1) >> u32(segment_shift)) - segment0)
                    store_partial(partial_address(partials, mine, head, kv_heads), total, total_max_a, total_max_b,
                                  total_sum_a, total_sum_b, warp, lane)
                    total_max_a, total_max_b = f32(MASKED), f32(MASKED)
                    total_sum_a, total_sum_b = f32(0), f32(0)
                    for i in range(OUT):
                        total[i] = f32(0)
        ptx.cp_async_wait0()

        if slot < 0:
            sink_a, sink_b = f32(0), f32(0)
            has_sink = sinks != u64(0)
            if has_sink:
                sink_a = of_query_head(sinks, head, group, packed_a)
                sink_b = of_query_head(sinks, head, group, packed_b)
            norm_a = num.normaliser(total_max_a, total_sum_a, unit, has_sink, sink_a)
            norm_b = num.normaliser(total_max_b, total_sum_b, unit, has_sink, sink_b)
            store_result(result_address(output, q_start, packed_a, head, kv_heads, group),
                         result_address(output, q_start, packed_b, head, kv_heads, group),
                         row0 + row_a <= last, row0 + row_a + 8 <= last, total, norm_a, norm_b, warp, lane)
            return

        # The last CTA of these rows folds what all of them have left.
        # Safety: each thread's stores are made visible before the counter is raised, and it is read after.
        flag = base + u32(FLAG_AT)
        ptx.fence()
        cuda.syncthreads()
        if t == 0:
            counter = u32(u32(u32(first_slot) * u32(kv_heads)) + u32(head))
            ptx.sts32(flag, ptx.atom_inc(counters + u64(counter) * u64(4), last_arrival))
        cuda.syncthreads()
        if ptx.lds32(flag) != last_arrival:
            return
        ptx.fence()
        # The partials are the last segments, one each, and before them everything else in one; what lies wholly
        # before the first visible key was left by nobody.
        before = i32(i32(u32(last_position) >> u32(segment_shift)) + 1 - num_partials)
        skipped = i32(max(i32(i32(u32(begin) >> u32(segment_shift)) - before), 0))
        merge(partials, first_slot, skipped, num_partials, output, q_start, row0, last, head, kv_heads, group, unit,
              sinks, t)

    return decode

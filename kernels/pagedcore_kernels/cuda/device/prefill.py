"""Attention of many query rows: 64 packed rows against all keys they see, K and V shared by a KV head's group.

One CTA computes one work item of ``work_lists.py``: 64 rows of (token, query head of the group), 16 to a warp; or half
of one, with half the warps, where shared memory is small. V of a
tile is loaded during its scores, K of the next during its softmax. The total of the segments so far waits in shared
memory, each thread's own part where only that thread looks. A row gets the bits that ``decode.py`` would give it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedcore_kernels.cuda.device import numerics as num
from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.partials import of_query_head
from pagedcore_kernels.cuda.device.primitives import f32, i32, u32, u64
from pagedcore_kernels.cuda.device.tiles import tile_functions
from pagedcore_kernels.cuda.shapes import LOG2_E, PREFILL_ROWS, AttentionShape


def prefill_kernel(shape: AttentionShape, rows: int = PREFILL_ROWS) -> Any:
    """Make the kernel of one variant, so many rows to a CTA; its parameters are ``variants.ATTENTION_PARAMETERS``."""
    ROWS, THREADS, PARTS = rows, rows * 2, PREFILL_ROWS // rows
    fn = tile_functions(shape, THREADS)
    load_keys, load_values, stage_query, load_query = fn.load_keys, fn.load_values, fn.stage_query, fn.load_query
    score_step, value_step, pack, pack_result = fn.score_step, fn.value_step, fn.pack, fn.pack_result
    pair_index, pair_column, low_weight, high_weight = fn.pair_index, fn.pair_column, fn.low_weight, fn.high_weight
    scale_scores, weigh_values = fn.scale_scores, fn.weigh_values
    key_lane, value_row, key_of = fn.key_lane, fn.value_row, fn.key_of
    QUAD_KEYS, KEY_STEP, KEY_BLOCK = fn.quad_keys, fn.key_step, fn.key_block
    PAIRS, PAIR_STEP = fn.pairs_per_group, fn.pair_step
    TILE, DV = shape.tile, shape.value_size
    MASKED = num.MASKED
    VROW, QROW = shape.value_row, shape.query_row
    STEPS, WORDS = shape.key_steps, shape.words_per_step
    QREG = shape.keeps_query_in_registers
    QUERY_WORDS = STEPS * WORDS if QREG else WORDS
    BLOCKS = TILE // 16
    SCORES = TILE // 2
    GROUPS = shape.value_groups
    FLOATS = shape.floats_per_group
    GROUP_COLUMNS = 32 // shape.pool.itemsize
    OUT = GROUPS * FLOATS
    SCALED = shape.is_scaled
    KEY_HEAD, VALUE_HEAD = shape.pool_key_bytes, shape.pool_value_bytes
    KEY_SCALES = shape.key_scales_at
    V_AT = shape.key_tile_bytes
    VALUE_SCALES = V_AT + shape.value_scales_at
    Q_AT = V_AT + shape.value_tile_bytes
    TOTAL_AT = Q_AT + ROWS * QROW

    def prefill(query, keys, values, tables, work, rows_info, output, partials, counters, slopes, sinks,
                block_stride, query_token, query_head, block_shift, kv_heads, group, window, chunk,
                segment_shift, unit, cap_input):
        base = ptx.shared_address(cuda.shared.array(0, dtype=np.uint8))
        t = i32(cuda.threadIdx.x)
        lane = i32(t & 31)
        warp = i32(t >> 5)
        block_of_item = u32(u32(cuda.blockIdx.x) // u32(PARTS))
        w = ptx.ldg64(work + u64(u32(block_of_item // u32(kv_heads))) * u64(8))
        head = i32(block_of_item % u32(kv_heads))
        row = i32(w[0])
        if row < 0:                                   # an empty item of a fixed-size grid
            return
        row0 = i32(i32(w[1]) + i32(u32(u32(cuda.blockIdx.x) % u32(PARTS)) * u32(ROWS)))
        info = ptx.ldg128(rows_info + u64(row) * u64(16))
        q_start = i32(info[0])
        q_len = i32(info[1])
        kv_len = i32(info[2])
        all_rows = i32(q_len * group)
        if PARTS > 1 and row0 >= all_rows:            # an item that its first part has done
            return
        past = i32(kv_len - q_len)                    # the position of the row's first token
        last = i32(min(i32(row0 + ROWS), all_rows) - 1)
        first_position = i32(past + i32(u32(row0) // u32(group)))
        last_position = i32(past + i32(u32(last) // u32(group)))
        begin = num.first_visible(first_position, window, chunk)
        all_visible_from = num.first_visible(last_position, window, chunk)
        j = i32(i32(u32(begin) // u32(TILE)) * TILE)
        end = i32(last_position + 1)
        table = tables + u64(u32(info[3])) * u64(4)
        k_head = keys + u64(u32(head << block_shift)) * u64(KEY_HEAD)
        v_head = values + u64(u32(head << block_shift)) * u64(VALUE_HEAD)

        load_keys(base, k_head, table, block_shift, block_stride, j, kv_len, t)
        ptx.cp_async_commit()
        stage_query(base + u32(Q_AT), query + u64(q_start) * u64(query_token)
                    + u64(u32(head * group)) * u64(query_head), query_token, query_head, row0, ROWS, all_rows, group, t)

        row_a = i32(row0 + warp * 16 + (lane >> 2))
        packed_a = i32(min(row_a, last))
        packed_b = i32(min(i32(row_a + 8), last))
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
        q_lane = base + u32(Q_AT + (warp * 16 + (lane & 15)) * QROW + (lane >> 4) * 16)
        for step in range(STEPS if QREG else 0):
            load_query(q_lane + u32(step * WORDS * 8), q, step * WORDS)

        o = cuda.local.array(OUT, dtype=np.float32)
        for i in range(OUT):
            o[i] = f32(0)
        max_a, max_b = f32(MASKED), f32(MASKED)
        sum_a, sum_b = f32(0), f32(0)
        total_max_a, total_max_b = f32(MASKED), f32(MASKED)
        total_sum_a, total_sum_b = f32(0), f32(0)
        has_total = False
        mine = base + u32(TOTAL_AT + t * 16)
        k_lane = base + u32(key_lane(lane))
        v_lane = base + u32(V_AT + value_row(lane) * VROW + (lane >> 4) * 16)
        my_scales = base + u32((lane & 3) * 16)       # of the four keys of this thread
        is_late = (lane & 2) != 0
        while j < end:
            ptx.cp_async_wait0()
            cuda.syncthreads()                        # K is here; nobody reads V of the tile before any more
            load_values(base + u32(V_AT), v_head, table, block_shift, block_stride, j, kv_len, t)
            ptx.cp_async_commit()
            s = cuda.local.array(SCORES, dtype=np.float32)
            for i in range(SCORES):
                s[i] = f32(0)
            for step in range(STEPS):
                if not QREG:
                    load_query(q_lane + u32(step * WORDS * 8), q, 0)
                for block in range(BLOCKS):
                    score_step(k_lane + u32(block * KEY_BLOCK + step * KEY_STEP), q, step * WORDS if QREG else 0,
                               s, block * 8)
            if SCALED:
                for block in range(BLOCKS):
                    scale_scores(my_scales + u32(KEY_SCALES + block * 64), s, block * 8)
            ptx.cp_async_wait0()
            cuda.syncthreads()                        # V is here; nobody reads K any more
            following = i32(j + TILE)
            if following < end:
                load_keys(base, k_head, table, block_shift, block_stride, following, kv_len, t)
            ptx.cp_async_commit()

            if cap_input > f32(0):
                for i in range(SCORES):
                    s[i] = num.capped(s[i], cap_input)
            key = i32(j + (lane & 3) * QUAD_KEYS)
            if slopes != u64(0):
                for i in range(SCORES):
                    at = i32(key + key_of(i))
                    s[i] = num.biased(s[i], slope_a if (i & 2) == 0 else slope_b, at,
                                      position_a if (i & 2) == 0 else position_b)
            if i32(j + TILE - 1) > first_position or j < all_visible_from:
                for i in range(SCORES):
                    at = i32(key + key_of(i))
                    s[i] = num.masked(s[i], at, position_a if (i & 2) == 0 else position_b,
                                      visible_a if (i & 2) == 0 else visible_b)
            new_a = s[0]
            new_b = s[2]
            for i in range(SCORES // 4):
                new_a = ptx.fmax(new_a, ptx.fmax(s[i * 4], s[i * 4 + 1]))
                new_b = ptx.fmax(new_b, ptx.fmax(s[i * 4 + 2], s[i * 4 + 3]))
            new_a = ptx.fmax(max_a, num.max_of_quad(new_a))
            new_b = ptx.fmax(max_b, num.max_of_quad(new_b))
            factor_a = num.rescale(max_a, new_a, unit)
            factor_b = num.rescale(max_b, new_b, unit)
            max_a = new_a
            max_b = new_b
            shift_a = num.exponent_shift(max_a, unit)
            shift_b = num.exponent_shift(max_b, unit)
            for i in range(OUT // 4):
                o[i * 4] = ptx.fmul(o[i * 4], factor_a)
                o[i * 4 + 1] = ptx.fmul(o[i * 4 + 1], factor_a)
                o[i * 4 + 2] = ptx.fmul(o[i * 4 + 2], factor_b)
                o[i * 4 + 3] = ptx.fmul(o[i * 4 + 3], factor_b)
            tile_a = f32(0)
            tile_b = f32(0)
            for block in range(BLOCKS):
                z = block * 8
                a0, a1 = num.weight(s[z], unit, shift_a), num.weight(s[z + 1], unit, shift_a)
                b0, b1 = num.weight(s[z + 2], unit, shift_b), num.weight(s[z + 3], unit, shift_b)
                a2, a3 = num.weight(s[z + 4], unit, shift_a), num.weight(s[z + 5], unit, shift_a)
                b2, b3 = num.weight(s[z + 6], unit, shift_b), num.weight(s[z + 7], unit, shift_b)
                if SCALED:                            # of keys 0, 2, 1, 3 of the quad's four
                    v = ptx.lds128(my_scales + u32(VALUE_SCALES + block * 64))
                    p0, p2 = weigh_values(v, a0, a2, a1, a3, is_late)
                    p1, p3 = weigh_values(v, b0, b2, b1, b3, is_late)
                    tile_a = ptx.fadd(tile_a, num.sum_of_four(a0, a2, a1, a3))
                    tile_b = ptx.fadd(tile_b, num.sum_of_four(b0, b2, b1, b3))
                else:
                    p0, p1, p2, p3 = pack(a0, a1), pack(b0, b1), pack(a2, a3), pack(b2, b3)
                    tile_a = ptx.fadd(tile_a, num.sum_of_four(low_weight(p0), high_weight(p0),
                                                              low_weight(p2), high_weight(p2)))
                    tile_b = ptx.fadd(tile_b, num.sum_of_four(low_weight(p1), high_weight(p1),
                                                              low_weight(p3), high_weight(p3)))
                for g in range(GROUPS):
                    value_step(v_lane + u32(block * 16 * VROW + g * 32), p0, p1, p2, p3, o, g * FLOATS)
            sum_a = ptx.ffma(sum_a, factor_a, tile_a)
            sum_b = ptx.ffma(sum_b, factor_b, tile_b)
            j = following

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
                for i in range(OUT // 4):
                    v0, v1, v2, v3 = f32(0), f32(0), f32(0), f32(0)
                    if has_total:
                        v = ptx.lds128(mine + u32(i * THREADS * 16))
                        v0, v1, v2, v3 = ptx.as_f32(v[0]), ptx.as_f32(v[1]), ptx.as_f32(v[2]), ptx.as_f32(v[3])
                    v0 = num.fold(v0, keep_a, o[i * 4], add_a)
                    v1 = num.fold(v1, keep_a, o[i * 4 + 1], add_a)
                    v2 = num.fold(v2, keep_b, o[i * 4 + 2], add_b)
                    v3 = num.fold(v3, keep_b, o[i * 4 + 3], add_b)
                    if j < end:
                        ptx.sts128(mine + u32(i * THREADS * 16), ptx.as_u32(v0), ptx.as_u32(v1), ptx.as_u32(v2),
                                   ptx.as_u32(v3))
                        v0, v1, v2, v3 = f32(0), f32(0), f32(0), f32(0)
                    o[i * 4], o[i * 4 + 1], o[i * 4 + 2], o[i * 4 + 3] = v0, v1, v2, v3
                max_a, max_b = f32(MASKED), f32(MASKED)
                sum_a, sum_b = f32(0), f32(0)
                has_total = True
        ptx.cp_async_wait0()

        has_sink = sinks != u64(0)
        sink_a, sink_b = f32(0), f32(0)
        head_a = u32(u32(u32(head) * u32(group)) + u32(u32(packed_a) % u32(group)))
        head_b = u32(u32(u32(head) * u32(group)) + u32(u32(packed_b) % u32(group)))
        if has_sink:
            sink_a = of_query_head(sinks, head, group, packed_a)
            sink_b = of_query_head(sinks, head, group, packed_b)
        norm_a = num.normaliser(total_max_a, total_sum_a, unit, has_sink, sink_a)
        norm_b = num.normaliser(total_max_b, total_sum_b, unit, has_sink, sink_b)
        heads = u64(u32(u32(kv_heads) * u32(group)))
        token_a = u64(u32(u32(q_start) + u32(u32(packed_a) // u32(group))))
        token_b = u64(u32(u32(q_start) + u32(u32(packed_b) // u32(group))))
        to_a = output + (token_a * heads + u64(head_a)) * u64(DV * 2)
        to_b = output + (token_b * heads + u64(head_b)) * u64(DV * 2)
        for g in range(GROUPS):
            for pair in range(PAIRS):
                z = g * FLOATS + pair_index(pair)
                at = u64(u32(u32(g * GROUP_COLUMNS) + pair_column(pair, lane))) * u64(2)
                if row_a <= last:
                    ptx.stg32(to_a + at, pack_result(ptx.fmul(o[z], norm_a), ptx.fmul(o[z + PAIR_STEP], norm_a)))
                if row_a + 8 <= last:
                    ptx.stg32(to_b + at, pack_result(ptx.fmul(o[z + 2], norm_b),
                                                     ptx.fmul(o[z + 2 + PAIR_STEP], norm_b)))

    return prefill

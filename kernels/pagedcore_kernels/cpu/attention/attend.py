"""The paged attention kernel: one ragged batch of prefill and decode rows against K/V blocks, online softmax.

A work item is (query tile, KV head, head tile): up to ``queries`` tokens of one sequence times up to ``heads`` of
the query heads that share a KV head. All its rows use every block that is read. Keys are visited in tiles of
``TILE`` positions and each tile updates a running maximum, sum and output (Milakov and Gimelshein 2018; Dao et
al. 2022).

Invariant: an output depends on the token's own query and on K and V up to its position, bit for bit; not on
batch, chunking, order, placement, block size or threads. Three rules give that:
  1. tiles start at multiples of ``TILE`` of the absolute position, whatever the window or the chunk start;
  2. masked probabilities are exactly 0 and a tile that a row cannot see leaves its state as it was;
  3. sums are taken in the order fixed in ``microkernels.py`` and ``rows.py``.

Invariant: what is masked is dropped by selection, so unwritten slots may hold NaN; V past the last visible
position of a work item is never read.

Of int8 pools the products take the whole numbers. A score is multiplied by the scale of its key once it is summed up,
a weight by the scale of its value once it is in the sum of weights.

``attend_pairs.py`` is the kernel of bfloat16 pools on processors that multiply pairs of bfloat16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from pagedcore_kernels.cpu.attention.microkernels import add_weighted_values, multiply_queries_and_keys
from pagedcore_kernels.cpu.attention.rows import (
    cap_row,
    exponentiate_row,
    fill_row,
    load_query,
    mask_row,
    multiply_row,
    multiply_visible,
    row_maximum,
    scale_row,
    store_output,
)
from pagedcore_kernels.cpu.attention.variants import TILE, Variant
from pagedcore_kernels.cpu.attention.write_kv import copy_row
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import (
    AS_FLOAT32,
    AS_INT8,
    LANES,
    LOG2_E,
    address_of,
    claim,
    exp2_float32,
    item_bytes,
    load_float32,
    load_int32,
    load_int64,
    stack_floats,
    stack_int64,
    store_float32,
    store_int64,
)
from pagedcore_kernels.layout import SCALE_BYTES, scaled_head_bytes

COUNTER = ParameterBlock.COUNTER
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them."""
(
    QUERY,
    QUERY_TOKEN_BYTES,
    QUERY_HEAD_BYTES,
    OUTPUT,
    POOL,
    BLOCK_BYTES,
    KEY_OFFSET,
    VALUE_OFFSET,
    BLOCK_TABLES,
    TABLE_WIDTH,
    QUERY_START,
    KV_LENS,
    TILE_ROWS,
    TILE_STARTS,
    NUM_TILES,
    NUM_KV_HEADS,
    GROUP,
    WINDOW,
    CHUNK,
    SINKS,
    SCALE,
    CAP_INVERSE,
    CAP,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 23)
NUM_ARGUMENTS = 23

_LOG2_E = np.float32(LOG2_E)
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@njit(inline="always")
def first_visible(position: int, window: int, chunk: int) -> int:
    """First position that ``position`` may see."""
    first = 0
    if window > 0:
        first = max(first, position + 1 - window)
    if chunk > 0:
        first = max(first, position // chunk * chunk)
    return first


@njit(inline="always")
def locate(p: int, item: int, head_tiles: int) -> tuple[int, int, int, int, int, int, int]:
    """Say what a work item is about.

    Returns:
        Its sequence, that sequence's number of tokens and block table, the item's first token among them and that
        token's position, its KV head, and its head tile among those of the KV head.
    """
    num_kv_heads = load_int64(p, NUM_KV_HEADS)
    tile = item // (num_kv_heads * head_tiles)
    head_tile = item - tile * num_kv_heads * head_tiles
    kv_head = head_tile // head_tiles
    sequence, start = load_int64(load_int64(p, TILE_ROWS), tile), load_int64(load_int64(p, TILE_STARTS), tile)
    starts = load_int64(p, QUERY_START)
    num_tokens = load_int64(starts, sequence + 1) - load_int64(starts, sequence)
    position = load_int64(load_int64(p, KV_LENS), sequence) - num_tokens + start
    table = load_int64(p, BLOCK_TABLES) + sequence * load_int64(p, TABLE_WIDTH) * 4
    return sequence, num_tokens, table, start, position, kv_head, head_tile - kv_head * head_tiles


@njit(inline="always")
def _update_row(
    scores: int, first: int, last: int, low: int, high: int, state: int, row: int, output: int, width: int
) -> None:
    """Turn one row's scores into weights and bring its running maximum, sum and output up to date.

    Vectors ``first`` to ``last`` hold the tile's scores, columns ``low`` to ``high`` the visible ones. ``state``
    holds a pair of maximum and sum per row; ``output`` is a row of ``width`` vectors.
    """
    if high <= low:
        fill_row(scores, first, last, _ZERO)
    else:
        if low > first * LANES:
            mask_row(scores, first, low // LANES + 1, low, high)
        if high < last * LANES:
            mask_row(scores, high // LANES, last, low, high)
        before = load_float32(state, 2 * row)
        largest = row_maximum(scores, first, last, before)
        total = exponentiate_row(scores, first, last, largest)
        if largest != before:
            shrink = exp2_float32(before - largest)
            store_float32(state, 2 * row, largest)
            store_float32(state, 2 * row + 1, load_float32(state, 2 * row + 1) * shrink + total)
            scale_row(output, 0, width, shrink)
        else:
            store_float32(state, 2 * row + 1, load_float32(state, 2 * row + 1) + total)


@cache
def attention_kernel(variant: Variant) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above."""
    # Why: Numba's cache tells kernels apart by the integers they close over, and takes nothing but integers.
    key_size, value_size, block_size = variant.key_size, variant.value_size, variant.block_size
    heads, queries, grouped, budget = variant.heads, variant.queries, variant.decode_blocks, variant.budget
    is_bf16, is_int8, float32 = int(variant.is_bf16), int(variant.is_int8), AS_FLOAT32
    stored = AS_INT8 if is_int8 else is_bf16
    output_bytes, stored_bytes = item_bytes(is_bf16), item_bytes(stored)
    rows = heads * queries
    width = -(-value_size // LANES)
    padded = width * LANES
    query_vectors = -(-rows * key_size // LANES)
    query_floats, output_floats = query_vectors * LANES, rows * padded
    # Why: a power of two would put all rows of scores into the same few cache sets.
    stride = (TILE + LANES) * 4
    score_floats, state_floats = rows * stride // 4, 2 * rows
    tile_blocks = TILE // block_size
    num_ahead = 2 * grouped
    key_bytes, value_bytes = key_size * block_size * stored_bytes, padded * block_size * stored_bytes
    if is_int8:
        key_bytes, value_bytes = (scaled_head_bytes(number, block_size) for number in (key_bytes, value_bytes))
    key_scales, value_scales = (number - SCALE_BYTES * block_size for number in (key_bytes, value_bytes))
    scale_floats, tile_bytes = 2 * TILE if is_int8 else 1, TILE * 4

    def attention(parameters: Any) -> None:
        p = address_of(parameters)
        pool, block_bytes = load_int64(p, POOL), load_int64(p, BLOCK_BYTES)
        num_kv_heads, group = load_int64(p, NUM_KV_HEADS), load_int64(p, GROUP)
        window, chunk, sinks = load_int64(p, WINDOW), load_int64(p, CHUNK), load_int64(p, SINKS)
        scale, cap = load_float32(p, 2 * SCALE), load_float32(p, 2 * CAP)
        cap_inverse = load_float32(p, 2 * CAP_INVERSE)
        head_tiles = (group + heads - 1) // heads
        num_items = load_int64(p, NUM_TILES) * num_kv_heads * head_tiles
        query_rows, scores = stack_floats(query_floats), stack_floats(score_floats)
        outputs, state = stack_floats(output_floats), stack_floats(state_floats)
        blocks, ahead, scales = stack_int64(tile_blocks), stack_int64(num_ahead), stack_floats(scale_floats)
        # Rows without a query take part in the products; what they hold need only be numbers, not slow ones.
        fill_row(query_rows, 0, query_vectors, _ZERO)
        fill_row(outputs, 0, rows * width, _ZERO)

        next_item = claim(load_int64(p, COUNTER))
        while next_item < num_items:
            # Why: claimed ahead, the item after this one is known, and its first keys can be asked for.
            item, next_item = next_item, claim(load_int64(p, COUNTER))
            sequence, num_tokens, table, start, position, kv_head, head_tile = locate(p, item, head_tiles)
            num_heads, first_head = min(heads, group - head_tile * heads), kv_head * group + head_tile * heads
            num_queries = min(queries, num_tokens - start)
            token = load_int64(load_int64(p, QUERY_START), sequence) + start
            keys = load_int64(p, KEY_OFFSET) + kv_head * key_bytes
            values = load_int64(p, VALUE_OFFSET) + kv_head * value_bytes
            _, _, next_table, _, next_position, next_head, _ = locate(p, min(next_item, num_items - 1), head_tiles)
            next_first = first_visible(next_position, window, chunk) // block_size
            num_next = min(next_position // block_size + 1 - next_first, grouped)
            next_key_offset = load_int64(p, KEY_OFFSET) + next_head * key_bytes

            # Row i * heads + h: token i and head h, scaled once; an empty softmax and output.
            for i in range(num_queries):
                source = load_int64(p, QUERY) + (token + i) * load_int64(p, QUERY_TOKEN_BYTES)
                for h in range(num_heads):
                    row = i * heads + h
                    head_source = source + (first_head + h) * load_int64(p, QUERY_HEAD_BYTES)
                    load_query(is_bf16, key_size, head_source, query_rows + row * key_size * 4, scale)
                    # A sink is a score that is there from the beginning and has no value.
                    sink = load_float32(sinks, first_head + h) * _LOG2_E if sinks != 0 else _MINUS_INFINITY
                    store_float32(state, 2 * row, sink)
                    store_float32(state, 2 * row + 1, _ONE if sinks != 0 else _ZERO)
            fill_row(outputs, 0, num_queries * heads * width, _ZERO)

            # All tiles that any row sees; their columns ``low`` to ``high`` are the positions any row sees.
            end = position + num_queries
            first = first_visible(position, window, chunk)
            tile_start = first // TILE * TILE
            while tile_start < end:
                low, high = max(first - tile_start, 0), min(TILE, end - tile_start)
                first_block, last_block = low // block_size, (high + block_size - 1) // block_size
                first_group, last_group = first_block // grouped, (last_block + grouped - 1) // grouped
                for j in range(first_group * grouped, last_group * grouped):
                    # A group may reach past what is visible: score a visible block again instead of another.
                    visible = min(max(j, first_block), last_block - 1)
                    block = load_int32(table, tile_start // block_size + visible)
                    store_int64(blocks, j, pool + block * block_bytes)

                # Scores. A single query is short of rows to fill the registers: it takes a group of blocks.
                if num_queries == 1:
                    for g in range(first_group, last_group):
                        # On the way the group's values are asked for, and the next keys.
                        for j in range(grouped):
                            block = g * grouped + j
                            store_int64(ahead, 2 * j, load_int64(blocks, block) + values)
                            block = min(block + grouped, last_group * grouped - 1)
                            store_int64(ahead, 2 * j + 1, load_int64(blocks, block) + keys)
                        multiply_queries_and_keys(
                            heads, key_size, block_size, grouped, budget, stored, num_ahead, query_rows,
                            blocks + g * grouped * 8, keys, scores + g * grouped * block_size * 4, stride, ahead,
                        )  # fmt: skip
                else:
                    for j in range(first_block, last_block):
                        multiply_queries_and_keys(
                            rows, key_size, block_size, 1, budget, stored, 0,
                            query_rows, blocks + j * 8, keys, scores + j * block_size * 4, stride, ahead,
                        )  # fmt: skip

                # The scales of the tile's keys, then those of its values.
                if is_int8:
                    for j in range(first_block, last_block):
                        block, target = load_int64(blocks, j), scales + j * block_size * 4
                        copy_row(block_size, float32, block + keys + key_scales, target)
                        copy_row(block_size, float32, block + values + value_scales, target + tile_bytes)

                # Weights, in place of the scores.
                first_vector, last_vector = low // LANES, (high + LANES - 1) // LANES
                for i in range(num_queries):
                    row_low = max(first_visible(position + i, window, chunk) - tile_start, 0)
                    row_high = min(position + i + 1 - tile_start, high)
                    for h in range(num_heads):
                        row = i * heads + h
                        row_scores = scores + row * stride
                        if is_int8:
                            multiply_row(row_scores, first_vector, last_vector, scales)
                        if cap > _ZERO:
                            cap_row(row_scores, first_vector, last_vector, cap_inverse, cap)
                        _update_row(
                            row_scores, first_vector, last_vector, row_low, row_high,
                            state, row, outputs + row * padded * 4, width,
                        )  # fmt: skip
                        if is_int8:
                            multiply_visible(
                                row_scores, first_vector, last_vector, row_low, row_high, scales + tile_bytes
                            )

                # Weighted values, and while they are added the next tile's first keys on their way.
                for j in range(first_block, last_block):
                    next_keys = scores
                    if tile_start + TILE + j * block_size < end:
                        block = load_int32(table, (tile_start + TILE) // block_size + j)
                        next_keys = pool + block * block_bytes + keys
                    elif j + num_next >= last_block:
                        block = load_int32(next_table, next_first + j + num_next - last_block)
                        next_keys = pool + block * block_bytes + next_key_offset
                    skipped = max(low - j * block_size, 0)
                    count = min(block_size, high - j * block_size) - skipped
                    weights = scores + (j * block_size + skipped) * 4
                    block_values = load_int64(blocks, j) + values + skipped * padded * stored_bytes
                    if num_queries == 1:
                        add_weighted_values(
                            heads, padded, budget, stored, weights, stride, block_values, outputs, count, next_keys
                        )
                    else:
                        add_weighted_values(
                            rows, padded, budget, stored, weights, stride, block_values, outputs, count, next_keys
                        )
                tile_start += TILE

            # Outputs, divided by the sum of their weights.
            for i in range(num_queries):
                target = load_int64(p, OUTPUT) + (token + i) * num_kv_heads * group * value_size * output_bytes
                for h in range(num_heads):
                    row = i * heads + h
                    inverse = _ONE / load_float32(state, 2 * row + 1)
                    head_target = target + (first_head + h) * value_size * output_bytes
                    store_output(is_bf16, value_size, outputs + row * padded * 4, head_target, inverse)

    return compile_kernel(attention)

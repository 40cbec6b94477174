"""Paged attention in products of pairs of bfloat16, by vectors or on matrix units: for bfloat16 models and pools.

A work item is what it is in ``attend.py``, with more rows. Positions are visited by 64: their keys and values are put
in panels, and these multiplied with all rows by the code that multiplies by weights (``matmul/tiles.py`` and
``matmul/amx.py``), or, for few rows, read where they lie (``direct.py``, with the same bits); ``panels.py`` has what
happens between the two products. Queries are taken as the model made them, in bfloat16, and scores are scaled in
float32; weights are rounded to bfloat16, and so are summed. Denormal numbers are zero throughout, as the instructions
for bfloat16 take them.

Invariant: that of ``attend.py``, by its rules, with panels for tiles. The order of a sum is that of a product: of a
score over the elements of a head, of an output over the positions of a panel, added to those before. The ways to
compute (two here, one in ``attend.py``) differ in last bits, so a processor has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numba import njit

from pagedcore_kernels.cpu.attention.attend import (
    BLOCK_BYTES,
    CAP,
    CAP_INVERSE,
    CHUNK,
    COUNTER,
    GROUP,
    KEY_OFFSET,
    NUM_KV_HEADS,
    NUM_TILES,
    OUTPUT,
    POOL,
    QUERY,
    QUERY_HEAD_BYTES,
    QUERY_START,
    QUERY_TOKEN_BYTES,
    SCALE,
    SINKS,
    VALUE_OFFSET,
    WINDOW,
    first_visible,
    locate,
)
from pagedcore_kernels.cpu.attention.direct import (
    POSITIONS,
    flush_denormals,
    may_be_direct,
    restore_denormals,
    score_directly,
    weigh_directly,
    widen_rows,
)
from pagedcore_kernels.cpu.attention.panels import (
    clear_weights,
    gather_keys,
    gather_two_values,
    gather_values,
    largest_score,
    sum_of_lanes,
    weigh_scores,
)
from pagedcore_kernels.cpu.attention.rows import cap_row, fill_row, mask_row, scale_row, store_output
from pagedcore_kernels.cpu.attention.write_kv import copy_row
from pagedcore_kernels.cpu.features import has_fast_pairs, has_instructions
from pagedcore_kernels.cpu.matmul.amx import (
    BLOCK_ROWS,
    CONFIGURATION_WORDS,
    TILE_STEPS,
    configure_tiles,
    may_use_tiles,
    multiply_block,
    release_tiles,
    rows_of_blocks,
)
from pagedcore_kernels.cpu.matmul.grouped_tiles import ask_for_header
from pagedcore_kernels.cpu.matmul.tiles import MATRIX_UNITS, PAIRS, PANEL, STEP_BYTES, SUM_BYTES, multiply_tiles
from pagedcore_kernels.cpu.runtime.kernel import Kernel, compile_kernel
from pagedcore_kernels.cpu.simd import (
    AS_BFLOAT16,
    LANES,
    LINE,
    LOG2_E,
    address_of,
    claim,
    exp2_float32,
    load_float32,
    load_int32,
    load_int64,
    stack_floats,
    stack_int64,
    store_float32,
    store_int64,
)

_MOST_ROWS: Final = 4 * BLOCK_ROWS
"""Rows of a work item at most: enough for what a panel costs to be little beside its products."""
_ROOM_BYTES: Final = 2**17
"""What the rows of a work item may take of a thread's stack, large heads having fewer of them."""
_LAZY: Final = np.float32(8.0)
"""By how many powers of two a weight may exceed 1 before what is added up is scaled down: float32 has room for more,
and a maximum that grows by little, as most do, then costs nothing."""
_SUMS: Final = 24
"""Vectors of sums in registers at once."""
_STEPS: Final = PANEL // 2
"""Steps of a panel of values."""
_LOG2_E = np.float32(LOG2_E)
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def form_of_attention() -> int | None:
    """Say how attention in bfloat16 is computed here: by matrix units, by pairs; ``None``: in float32."""
    if not has_instructions("avx512bf16", "avx512dq"):
        return None
    if may_use_tiles(MATRIX_UNITS):
        return MATRIX_UNITS
    return PAIRS if has_fast_pairs() else None


@dataclass(frozen=True)
class PairVariant:
    """What a kernel is compiled for: how it computes, the shape of a layer, and a work item: there is room for
    ``rows``, a multiple of ``BLOCK_ROWS``. An item of ``few`` rows takes whole panels straight from the pool; 0: none
    does, and no code is there for it.
    """

    form: int
    key_size: int
    value_size: int
    block_size: int
    rows: int
    heads: int
    queries: int
    few: int

    @classmethod
    def choose(cls, form: int, group: int, key_size: int, value_size: int, block_size: int) -> PairVariant:
        """Choose the rows for ``group`` query heads per KV head."""
        row_bytes = 2 * key_size + SUM_BYTES * (1 + -(-value_size // PANEL))
        rows = max(BLOCK_ROWS, min(_MOST_ROWS, _ROOM_BYTES // row_bytes // BLOCK_ROWS * BLOCK_ROWS))
        heads = -(-group // -(-group // rows))
        few = heads if may_be_direct(key_size, value_size, block_size, heads) else 0
        return cls(form, key_size, value_size, block_size, rows, heads, rows // heads, few)


@njit(inline="always")
def _multiply(
    form: int, rows: int, row_bytes: int, num_rows: int, panel: int, num_steps: int, sums: int, is_first: int
) -> None:
    """sums[num_rows, PANEL] = (nothing if ``is_first``, else sums) + rows[num_rows, num_steps] @ panel.

    On matrix units ``num_rows`` are those of a block.
    """
    if form == MATRIX_UNITS:
        if num_rows > BLOCK_ROWS // 2:
            multiply_block(form, 2, rows, row_bytes, panel, num_steps // TILE_STEPS, sums, is_first, rows, 0)
        else:
            multiply_block(form, 1, rows, row_bytes, panel, num_steps // TILE_STEPS, sums, is_first, rows, 0)
    else:
        multiply_tiles(form, _SUMS, rows, row_bytes, num_rows, panel, num_steps, sums, is_first, sums, 0, 1, panel, 0)


@njit(inline="always")
def _weigh_row(
    scores: int, low: int, high: int, scale: np.float32, highest: int, total: int, outputs: int, panel_bytes: int,
    num_panels: int,
) -> None:  # fmt: skip
    """Turn the scores of a row into weights, of which columns ``low`` to ``high`` are visible.

    ``highest`` is the address of a bound of the row's scores so far, ``total`` of sixteen sums of weights, and the row
    of outputs has a part in each of ``num_panels``.
    """
    if high <= low:
        clear_weights(scores)
        return
    if low > 0 or high < PANEL:
        mask_row(scores, 0, PANEL // LANES, low, high)
    before, largest = load_float32(highest, 0), largest_score(scores) * scale
    if largest > before + _LAZY:
        shrink = exp2_float32(before - largest)
        store_float32(highest, 0, largest)
        scale_row(total, 0, 1, shrink)
        for part in range(num_panels):
            scale_row(outputs + part * panel_bytes, 0, PANEL // LANES, shrink)
    weigh_scores(scores, scale, load_float32(highest, 0), total)


@cache
def pair_attention_kernel(variant: PairVariant) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words that ``attend.py`` lists."""
    # Why: Numba's cache tells kernels apart by the integers they close over, and takes nothing but integers.
    form, key_size, value_size, block_size = variant.form, variant.key_size, variant.value_size, variant.block_size
    room, heads, queries, few = variant.rows, variant.heads, variant.queries, variant.few
    uses_matrix_units = int(form == MATRIX_UNITS)
    key_steps = -(-key_size // 2)
    if uses_matrix_units:
        key_steps = -(-key_steps // TILE_STEPS) * TILE_STEPS
    padded, whole_panels, rest = -(-value_size // LANES) * LANES, value_size // PANEL, value_size % PANEL
    value_panels, query_bytes, value_row_bytes = -(-value_size // PANEL), key_steps * 4, padded * 2
    block_key_bytes, block_value_bytes = key_size * block_size * 2, value_row_bytes * block_size
    span = min(block_size, PANEL)
    even_span = max(span, 2)
    half, span_key_bytes, span_value_bytes = -(-PANEL // span // 2), span * key_size * 2, span * value_row_bytes
    row_bytes, block_bytes_of_sums = SUM_BYTES, room * SUM_BYTES
    panel, panel_vectors, steps, weight_bytes = PANEL, PANEL // LANES, _STEPS, _STEPS * STEP_BYTES
    query_floats, score_floats, key_floats = room * key_steps, room * PANEL, key_steps * PANEL
    output_floats, value_floats, nothing_floats = value_panels * room * PANEL, value_panels * _STEPS * PANEL, padded
    num_spans = PANEL // span
    total_floats, num_words, bfloat16 = room * LANES, CONFIGURATION_WORDS, AS_BFLOAT16
    wide_query_floats, wide_weight_floats, positions = max(1, few * key_size), max(1, few * PANEL), POSITIONS

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
        outputs = stack_floats(output_floats)
        key_panel, value_panel = stack_floats(key_floats), stack_floats(value_floats)
        highest, totals, nothing = stack_floats(room), stack_floats(total_floats), stack_floats(nothing_floats)
        configuration, configured_rows, aheads = stack_int64(num_words), 0, stack_int64(num_spans)
        wide_queries, wide_weights = stack_floats(wide_query_floats), stack_floats(wide_weight_floats)
        state = stack_int64(1)
        flush_denormals(state)
        # Rows without a query take part in the products; what they hold need only be numbers.
        fill_row(query_rows, 0, query_floats // LANES, _ZERO)
        fill_row(scores, 0, score_floats // LANES, _ZERO)
        fill_row(outputs, 0, output_floats // LANES, _ZERO)
        # What is past the size of a head, or not seen, is nothing.
        fill_row(key_panel, 0, key_floats // LANES, _ZERO)
        fill_row(value_panel, 0, value_floats // LANES, _ZERO)
        fill_row(nothing, 0, nothing_floats // LANES, _ZERO)

        next_item = claim(load_int64(p, COUNTER))
        while next_item < num_items:
            # Why: claimed ahead, the item after this one is known, and its first keys can be asked for.
            item, next_item = next_item, claim(load_int64(p, COUNTER))
            sequence, num_tokens, table, start, position, kv_head, head_tile = locate(p, item, head_tiles)
            num_heads, first_head = min(heads, group - head_tile * heads), kv_head * group + head_tile * heads
            num_queries = min(queries, num_tokens - start)
            token = load_int64(load_int64(p, QUERY_START), sequence) + start
            keys = load_int64(p, KEY_OFFSET) + kv_head * block_key_bytes
            values = load_int64(p, VALUE_OFFSET) + kv_head * block_value_bytes
            _, _, next_table, _, next_position, next_head, _ = locate(p, min(next_item, num_items - 1), head_tiles)
            next_first = first_visible(next_position, window, chunk) // panel * panel
            next_keys = load_int64(p, KEY_OFFSET) + next_head * block_key_bytes
            next_values = load_int64(p, VALUE_OFFSET) + next_head * block_value_bytes
            num_rows = num_queries * heads
            size = rows_of_blocks(num_rows)
            if uses_matrix_units and size != configured_rows:
                configure_tiles(configuration, size)
                configured_rows = size

            # Row i * heads + h: token i and head h; an empty softmax and output.
            for i in range(num_queries):
                source = load_int64(p, QUERY) + (token + i) * load_int64(p, QUERY_TOKEN_BYTES)
                for h in range(num_heads):
                    row = i * heads + h
                    head_source = source + (first_head + h) * load_int64(p, QUERY_HEAD_BYTES)
                    copy_row(key_size, bfloat16, head_source, query_rows + row * query_bytes)
                    # A sink is a score that is there from the beginning and has no value.
                    sink = load_float32(sinks, first_head + h) * _LOG2_E if sinks != 0 else _MINUS_INFINITY
                    store_float32(highest, row, sink)
                    fill_row(totals + row * LINE, 0, 1, _ZERO)
                    store_float32(totals + row * LINE, 0, _ONE if sinks != 0 else _ZERO)
            for part in range(value_panels):
                fill_row(outputs + part * block_bytes_of_sums, 0, num_rows * panel_vectors, _ZERO)
            is_few = few > 0 and num_rows == few
            few_queries, few_weights = query_rows, scores
            if is_few and uses_matrix_units:
                widen_rows(few, key_size, query_rows, query_bytes, wide_queries)
                few_queries, few_weights = wide_queries, wide_weights

            # All panels that any row sees; their columns ``low`` to ``high`` are the positions any row sees.
            end = position + num_queries
            first = first_visible(position, window, chunk)
            start = first // panel * panel
            while start < end:
                low, high = max(first - start, 0), min(panel, end - start)
                in_spans = low == 0 and high == panel and span > 1
                block, second, block_ahead, second_ahead = pool, pool, pool, pool
                # Of the next panel, or the next item's first one, all is asked for while this one is computed.
                ahead, next_blocks, ahead_keys, ahead_values = start + panel, table, keys, values
                if ahead >= end:
                    ahead, next_blocks, ahead_keys, ahead_values = next_first, next_table, next_keys, next_values
                last = end - 1 if next_blocks == table else next_position
                for number in range(num_spans):
                    block = load_int32(next_blocks, min(ahead + number * span, last) // block_size)
                    store_int64(aheads, number, pool + block * block_bytes)

                is_direct = is_few and in_spans
                slot, second_slot = start % block_size, (start + positions) % block_size
                ahead_slot, second_ahead_slot = ahead % block_size, (ahead + positions) % block_size
                if is_direct:
                    block = pool + load_int32(table, start // block_size) * block_bytes
                    second = pool + load_int32(table, (start + positions) // block_size) * block_bytes
                    block_ahead, second_ahead = load_int64(aheads, 0), load_int64(aheads, num_spans - 1)
                    score_directly(
                        form, few, key_size, block_size, few_queries, query_bytes, block + keys + slot * 2,
                        second + keys + second_slot * 2, scores, block_ahead + ahead_keys + ahead_slot * 2,
                        second_ahead + ahead_keys + second_ahead_slot * 2,
                    )  # fmt: skip
                else:
                    for column in range(low // span * span, high, span):
                        block = pool + load_int32(table, (start + column) // block_size) * block_bytes
                        slot = (start + column) % block_size
                        gather_keys(key_size, block_size, span, block + keys + slot * 2, key_panel + column * 4)
                        if in_spans:
                            gather_values(
                                padded, weight_bytes, even_span, block + values + slot * value_row_bytes,
                                value_panel + column // 2 * STEP_BYTES,
                            )  # fmt: skip
                    if not in_spans:
                        for step in range(steps):
                            column = 2 * step
                            one, other = nothing, nothing
                            if low <= column < high:
                                block = pool + load_int32(table, (start + column) // block_size) * block_bytes
                                one = block + values + (start + column) % block_size * value_row_bytes
                            column += 1
                            if low <= column < high:
                                block = pool + load_int32(table, (start + column) // block_size) * block_bytes
                                other = block + values + (start + column) % block_size * value_row_bytes
                            gather_two_values(padded, weight_bytes, one, other, value_panel + step * STEP_BYTES)

                    # Why block by block only within each of the three: what was just stored cannot be loaded as a tile.
                    for number in range(half):
                        ask_for_header(span_key_bytes, load_int64(aheads, number) + ahead_keys)
                    for first_row in range(0, num_rows, size):
                        source, target = query_rows + first_row * query_bytes, scores + first_row * row_bytes
                        _multiply(form, source, query_bytes, size, key_panel, key_steps, target, 1)
                    for number in range(half, num_spans):
                        ask_for_header(span_key_bytes, load_int64(aheads, number) + ahead_keys)
                if cap > _ZERO:
                    cap_row(scores, 0, num_rows * panel_vectors, cap_inverse, cap)
                for row in range(num_rows):
                    i = row // heads
                    row_low = max(first_visible(position + i, window, chunk) - start, 0)
                    row_high = min(position + i + 1 - start, high)
                    _weigh_row(
                        scores + row * row_bytes, row_low, row_high, scale, highest + 4 * row, totals + row * LINE,
                        outputs + row * row_bytes, block_bytes_of_sums, value_panels,
                    )  # fmt: skip
                if is_direct:
                    if uses_matrix_units:
                        widen_rows(few, panel, scores, row_bytes, wide_weights)
                    weigh_directly(
                        form, few, padded, few_weights, row_bytes, block + values + slot * value_row_bytes,
                        second + values + second_slot * value_row_bytes, outputs, block_bytes_of_sums,
                        block_ahead + ahead_values + ahead_slot * value_row_bytes,
                        second_ahead + ahead_values + second_ahead_slot * value_row_bytes,
                    )  # fmt: skip
                else:
                    for number in range(half):
                        ask_for_header(span_value_bytes, load_int64(aheads, number) + ahead_values)
                    for part in range(value_panels):
                        for first_row in range(0, num_rows, size):
                            source = scores + first_row * row_bytes
                            target = outputs + part * block_bytes_of_sums + first_row * row_bytes
                            weights = value_panel + part * weight_bytes
                            _multiply(form, source, row_bytes, size, weights, steps, target, 0)
                    for number in range(half, num_spans):
                        ask_for_header(span_value_bytes, load_int64(aheads, number) + ahead_values)
                start += panel

            # Outputs, divided by the sum of their weights.
            for i in range(num_queries):
                target = load_int64(p, OUTPUT) + (token + i) * num_kv_heads * group * value_size * 2
                for h in range(num_heads):
                    row = i * heads + h
                    inverse = _ONE / sum_of_lanes(totals + row * LINE)
                    source, place = outputs + row * row_bytes, target + (first_head + h) * value_size * 2
                    for _part in range(whole_panels):
                        store_output(bfloat16, panel, source, place, inverse)
                        source, place = source + block_bytes_of_sums, place + panel * 2
                    store_output(bfloat16, rest, source, place, inverse)
        restore_denormals(state)
        if uses_matrix_units:
            release_tiles()

    return compile_kernel(attention)

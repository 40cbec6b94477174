"""The kernel of all recurrences whose state is a matrix a head: gated delta rule, decaying attention, Mamba 1 and 2,
and of those that keep a number a channel.

Work is split by rows, heads and, where these are few, groups of columns, so that one long prompt and many short rows
both have something for every thread. The columns of a head stay in a thread's cache while it goes through the positions
of a row: the first position reads the state that the row begins from, the last one writes where the row's state goes,
and between them nothing leaves the thread's own memory. The arithmetic is in ``columns.py``.

Invariant: a state goes through one position after another, each by the same operations in the same order, wherever it
was read and whatever follows; so a row's bits depend on its own inputs alone, and not on where its prompt was cut.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import gcd
from typing import Any

from pagedcore_kernels.cpu.features import has_wide_vectors
from pagedcore_kernels.cpu.recurrence import columns
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.simd import LANES, address_of, claim, drain_streams, load_float32, load_int64, stack_floats

GROUP_COLUMNS = 128, 32
"""Columns of a group, at most, with vectors of 512 bits and without: what is summed of them lies in registers.

Why so many: a state that comes from memory was read half as fast in runs of 32 columns as in whole rows of 128.
"""
MOST_COLUMNS = 256
"""Columns of a state that a thread claims together, at most."""
MOST_ELEMENTS = 16384
"""Elements of a state that a thread claims together, at most: 64 KiB, which its second-level cache has."""
MOST_ROWS = MOST_ELEMENTS // LANES
"""Elements of a key, at most."""
STREAMED_BYTES = 2**24
"""From so many bytes of states in a step on, one of decode steps writes them past the caches.

Why: lines need not be read to be written then, which took a quarter off the time of a step of the gated delta rule and
two fifths off one of Mamba 2, on Zen 4. Of fewer states the next step finds some in a cache.
"""
ITEMS_OF_THREADS = 4
"""Items for each thread from which on they are not made smaller: threads end at about the same time then."""
COUNTER = ParameterBlock.COUNTER
(
    QUERY,
    QUERY_TOKEN,
    QUERY_HEAD,
    KEY,
    KEY_TOKEN,
    KEY_HEAD,
    VALUE,
    VALUE_TOKEN,
    VALUE_HEAD,
    OUTPUT,
    RATES,
    RATES_TOKEN,
    EXPONENTS,
    FACTORS,
    FACTORS_TOKEN,
    PASSED,
    HEADS,
    GROUP,
    WIDTH,
    NORMALIZES,
    POOL,
    STATE_BYTES,
    ZEROS,
    ROWS,
    READS,
    WRITES,
    QUERY_START,
    NUM_ROWS,
    TAKEN,
    SCALE,
    KEY_SCALE,
) = range(ParameterBlock.FIRST, ParameterBlock.FIRST + 31)
"""Words of the parameter block, in the order ``ParameterBlock.fill`` takes them; all strides are bytes.

A decay is ``exp(rate * exponent)``. ``RATES`` are float32 of each token and head, of each token, head and row of the
state with a decay per key, of each token and column with Mamba 1; ``EXPONENTS`` of each head, of each row and column
with Mamba 1, and unused with a decay per key. ``FACTORS`` are what updates are multiplied with, of each token and head
or column; with ``CHANNELS`` they are the decays. ``PASSED`` is the part of the values that goes to the output, of each
head or column. ``GROUP``: heads of values to a head of keys. ``ROWS``: the numbers of the rows, the longest first.
``TAKEN``: columns that are claimed together.
"""
NUM_ARGUMENTS = 31


@cache
def group_vectors(width: int, size: int) -> tuple[int, int]:
    """Return lanes of a vector and vectors of a group, of a state of so many columns and rows."""
    lanes = gcd(width, LANES)
    most = min(GROUP_COLUMNS[0 if has_wide_vectors() else 1], MOST_ELEMENTS // size)
    return lanes, _largest_divisor(width // lanes, most // LANES)


@lru_cache(1024)
def columns_at_once(width: int, size: int, num_heads: int, num_threads: int) -> int:
    """Return how many columns of a state a thread claims together; the bits do not depend on it.

    Args:
        width: columns of a state.
        size: rows of a state.
        num_heads: heads of all rows, those of a row counted less that is shorter than the longest one.
        num_threads: threads that there are.
    """
    lanes, vectors = group_vectors(width, size)
    group = lanes * vectors
    most = min(MOST_COLUMNS, MOST_ELEMENTS // size, width * num_heads // (ITEMS_OF_THREADS * num_threads))
    return group * _largest_divisor(width // group, max(1, most // group))


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


@cache
def outer_product_kernel(form: int, is_bf16: int, size: int, lanes: int, vectors: int, streams: int) -> Kernel:
    """Compile the kernel, or take it from the cache; its parameters are the words listed above.

    Args:
        form: one of ``columns``.
        is_bf16: whether queries, keys, values and outputs are bfloat16, else float32.
        size: elements of a key: rows of a state.
        lanes: elements of a vector of columns.
        vectors: as many are a group.
        streams: whether all states are written past the caches, which is fast where each row has one token.
    """
    item, group = 2 if is_bf16 else 4, lanes * vectors
    widest = min(MOST_COLUMNS, MOST_ELEMENTS // size)
    held = size * widest
    corrects = int(form in columns.CORRECTING)
    per_key, by_column = int(form == columns.DELTA_PER_KEY), int(form in columns.BY_COLUMN)

    def outer_products(parameters: Any) -> None:
        p = address_of(parameters)
        work, updates = stack_floats(held), stack_floats(widest)
        outputs, known = stack_floats(widest), stack_floats(widest)
        keys, next_keys, decayed, queries = (
            stack_floats(size), stack_floats(size), stack_floats(size), stack_floats(size)
        )  # fmt: skip
        decays, next_decays = stack_floats(size), stack_floats(size)
        heads, width = load_int64(p, HEADS), load_int64(p, WIDTH)
        taken, state_bytes = load_int64(p, TAKEN), load_int64(p, STATE_BYTES)
        blocks, groups, row_bytes = width // taken, taken // group, 4 * taken
        query_token, key_token, value_token = (
            load_int64(p, QUERY_TOKEN), load_int64(p, KEY_TOKEN), load_int64(p, VALUE_TOKEN)
        )  # fmt: skip
        rates_token, factors_token = load_int64(p, RATES_TOKEN), load_int64(p, FACTORS_TOKEN)
        scale, key_scale = load_float32(p, 2 * SCALE), load_float32(p, 2 * KEY_SCALE)
        normalizes = load_int64(p, NORMALIZES)
        num_items = load_int64(p, NUM_ROWS) * heads * blocks
        while True:
            claimed = claim(load_int64(p, COUNTER))
            if claimed >= num_items:
                break
            column, head = claimed % blocks * taken, claimed // blocks % heads
            row = load_int64(load_int64(p, ROWS), claimed // (blocks * heads))
            first = load_int64(load_int64(p, QUERY_START), row)
            end = load_int64(load_int64(p, QUERY_START), row + 1)
            if first == end:
                continue
            read, write = load_int64(load_int64(p, READS), row), load_int64(load_int64(p, WRITES), row)
            place = load_int64(p, POOL) + 4 * (head * size * width + column)
            source, source_step = load_int64(p, ZEROS), 0
            if read >= 0:
                source, source_step = place + read * state_bytes, 4 * width
            key_head = head // load_int64(p, GROUP)
            query = load_int64(p, QUERY) + key_head * load_int64(p, QUERY_HEAD)
            key = load_int64(p, KEY) + key_head * load_int64(p, KEY_HEAD)
            value = load_int64(p, VALUE) + head * load_int64(p, VALUE_HEAD) + column * item
            output = load_int64(p, OUTPUT) + (head * width + column) * item
            own = column if by_column else head
            rates = load_int64(p, RATES) + 4 * (own * size if per_key else own)
            factors, passed = load_int64(p, FACTORS) + 4 * own, load_int64(p, PASSED) + 4 * own
            exponents = load_int64(p, EXPONENTS) + 4 * own
            decay, next_decay = scale, scale
            for token in range(first, end + 1):
                if token < end:
                    columns.read_key(is_bf16, size, key + token * key_token, next_keys, key_scale, normalizes)
                    if per_key:
                        columns.exp_row(size, rates + token * rates_token, next_decays)
                    elif not by_column:
                        next_decay = columns.exp_product(
                            load_float32(rates + token * rates_token, 0), load_float32(exponents, 0)
                        )
                    if corrects:
                        columns.decay_key(form, size, next_keys, next_decays, next_decay, decayed)
                if token > first:
                    now = token - 1
                    target, target_step = work, row_bytes
                    if token == end and write >= 0:
                        target, target_step = place + write * state_bytes, 4 * width
                    factor = factors + now * factors_token
                    columns.read_key(is_bf16, size, query + now * query_token, queries, scale, normalizes)
                    columns.begin_update(
                        form, is_bf16, lanes, groups * vectors, value + now * value_token, known, factor, updates
                    )
                    columns.advance(
                        form, lanes, vectors, size, streams, groups, source, source_step, target, target_step, decay,
                        exponents if by_column else decays, 4 * width, factor, keys, updates, queries, outputs,
                        decayed, known,
                    )  # fmt: skip
                    columns.write_output(
                        form, is_bf16, lanes, groups * vectors, outputs, value + now * value_token, passed,
                        output + now * heads * width * item,
                    )  # fmt: skip
                    source, source_step = work, row_bytes
                elif corrects:
                    columns.recall(lanes, vectors, size, groups, source, source_step, decayed, known)
                keys, next_keys = next_keys, keys
                decays, next_decays = next_decays, decays
                decay = next_decay
        if streams:
            drain_streams()

    return compile_kernel(outer_products)

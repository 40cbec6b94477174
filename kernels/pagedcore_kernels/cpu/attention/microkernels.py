"""The two matrix products of attention as intrinsics: queries by keys, and weights by values.

Each handles a fixed number of rows against one or a few KV blocks and keeps its accumulators in vector
registers. ``attend.py`` arranges them into the kernel and says which rows and columns they get; ``rows.py``
has what happens between the two.

Invariant: the sum behind one score or one output element is taken in one order, d or token ascending, with one
accumulator. How many rows, blocks or registers take part in a call changes the speed and never a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT64,
    LANES,
    Builder,
    Typing,
    Value,
    constant,
    floats,
    fma,
    int64,
    item_bytes,
    load,
    load_floats,
    prefetch_line,
    splat,
    store,
)


def _tiles(total: int, most: int) -> Iterator[range]:
    """Cut ``range(total)`` into as few, as even ranges of at most ``most`` as possible."""
    number = -(-total // max(1, most))
    for index in range(number):
        yield range(index * total // number, (index + 1) * total // number)


def _literals(*arguments: Any) -> list[int]:
    return [argument.literal_value for argument in arguments]


def _unroll(count: int) -> int:
    return next(step for step in (4, 2, 1) if count % step == 0)


@intrinsic(prefer_literal=True)
def multiply_queries_and_keys(
    typing: Typing,
    rows: Any,
    dim: Any,
    block_size: Any,
    num_blocks: Any,
    budget: Any,
    number_format: Any,
    num_ahead: Any,
    queries: Any,
    blocks: Any,
    key_offset: Any,
    scores: Any,
    score_stride: Any,
    ahead: Any,
) -> Any:
    """scores[rows, num_blocks * block_size] = queries[rows, dim] @ K, for consecutive blocks of one sequence.

    Literal: rows, dim, block_size, num_blocks, budget, number_format (of K), num_ahead. ``blocks`` is the address of
    ``num_blocks`` block addresses, ``key_offset`` the bytes from there to K [dim, block_size]; ``score_stride`` in
    bytes. ``ahead`` is the address of ``num_ahead`` addresses; as much memory as one K takes is asked for there on the
    way.
    """
    fixed = (rows, dim, block_size, num_blocks, budget, number_format, num_ahead)
    num_rows, size, tokens, count, registers, stored, num_prefetched = _literals(*fixed)
    lanes = min(LANES, tokens)
    per_block = tokens // lanes
    vectors = count * per_block
    # Why: two vectors share every query element read, further ones would only crowd out rows.
    wide = vectors if vectors * num_rows <= registers else min(vectors, 2 if registers >= 8 else 1)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        q, block_addresses, offset, s, stride, wanted = args[len(fixed) :]
        item = item_bytes(stored)
        next_memory = [load(b, wanted, 8 * i, INT64, 8) for i in range(num_prefetched)]

        def tile(row_range: range, vector_range: range) -> None:
            is_first = row_range.start == vector_range.start == 0
            sums = {(m, v): cgutils.alloca_once_value(b, constant(0.0, floats(lanes)))
                    for m in row_range for v in vector_range}  # fmt: skip
            keys = {}
            for v in vector_range:
                block = load(b, block_addresses, v // per_block * 8, INT64, 8)
                keys[v] = b.add(b.add(block, offset), int64(v % per_block * lanes * item))
            step = _unroll(size)
            with cgutils.for_range(b, int64(size // step)) as loop:
                for u in range(step):
                    d = b.add(b.mul(loop.index, int64(step)), int64(u))
                    row = b.mul(d, int64(tokens * item))
                    for address in next_memory if is_first else ():
                        for line in range(0, tokens * item, 64):
                            prefetch_line(b, b.add(address, int64(line)), row)
                    key = {v: load_floats(b, keys[v], row, stored, lanes) for v in vector_range}
                    for m in row_range:
                        element = load(b, q, b.add(b.mul(d, int64(4)), int64(m * size * 4)), FLOAT, 4)
                        query = splat(b, element, lanes)
                        for v in vector_range:
                            b.store(fma(b, query, key[v], b.load(sums[m, v])), sums[m, v])
            for (m, v), total in sums.items():
                position = b.add(b.mul(stride, int64(m)), int64(v * lanes * 4))
                store(b, b.load(total), s, position, 4)

        for vector_range in _tiles(vectors, wide):
            for row_range in _tiles(num_rows, registers // wide):
                tile(row_range, vector_range)
        return context.get_dummy_value()

    addresses = [types.int64] * 6
    return types.void(*fixed, *addresses), codegen


@intrinsic(prefer_literal=True)
def add_weighted_values(
    typing: Typing,
    rows: Any,
    dim: Any,
    budget: Any,
    number_format: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    outputs: Any,
    num_tokens: Any,
    ahead: Any,
) -> Any:
    """outputs[rows, dim] += weights[rows, num_tokens] @ values[num_tokens, dim], dim a multiple of 16.

    Literal: rows, dim, budget, number_format (of the values); ``weight_stride`` in bytes. On the way, as much memory as
    the values take is asked for at the address ``ahead``.
    """
    fixed = (rows, dim, budget, number_format)
    num_rows, size, registers, stored = _literals(*fixed)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        p, stride, v, o, tokens, wanted = args[len(fixed) :]
        item = item_bytes(stored)

        def tile(row_range: range, vector_range: range) -> None:
            sums = {(m, j): cgutils.alloca_once_value(b, load(b, o, (m * size + j * LANES) * 4, floats(), 4))
                    for m in row_range for j in vector_range}  # fmt: skip
            is_first = row_range.start == vector_range.start == 0
            with cgutils.for_range(b, tokens) as loop:
                row = b.mul(loop.index, int64(size * item))
                for line in range(0, size * item, 64) if is_first else ():
                    prefetch_line(b, b.add(wanted, int64(line)), row)
                value = {j: load_floats(b, v, b.add(row, int64(j * LANES * item)), stored) for j in vector_range}
                column = b.mul(loop.index, int64(4))
                for m in row_range:
                    weight = splat(b, load(b, p, b.add(column, b.mul(stride, int64(m))), FLOAT, 4))
                    for j in vector_range:
                        b.store(fma(b, weight, value[j], b.load(sums[m, j])), sums[m, j])
            for (m, j), total in sums.items():
                store(b, b.load(total), o, (m * size + j * LANES) * 4, 4)

        vectors = size // LANES
        for row_range in _tiles(num_rows, registers):
            for vector_range in _tiles(vectors, max(1, registers // len(row_range))):
                tile(row_range, vector_range)
        return context.get_dummy_value()

    addresses = [types.int64] * 6
    return types.void(*fixed, *addresses), codegen

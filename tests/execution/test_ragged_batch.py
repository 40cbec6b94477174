from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InternalError
from pagedcore.execution.ragged_batch import RaggedBatch, assemble, build_batch
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.reservation import Demand
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence
from support.doubles import make_sequence


def make_rows(shapes: list[tuple[int, int, int]], block_size: int) -> tuple[list[ScheduledRow], BlockManager]:
    """Rows of (known tokens, computed, to compute), with blocks reserved in an order that mixes the sequences."""
    manager = BlockManager(sum(-(-known // block_size) for known, _, _ in shapes) + 1, block_size)
    rows = []
    for number, (known, computed, count) in enumerate(shapes):
        sequence = make_sequence([100 * number + i for i in range(known)], sequence_id=7 + number)
        sequence.num_computed_tokens = computed
        rows.append(ScheduledRow(sequence, computed, count))
    for positions in range(1, max(known for known, _, _ in shapes) + 1):
        reservation = manager.reserve([Demand(r.sequence.sequence_id, min(positions, r.end)) for r in rows])
        assert reservation is not None
        reservation.commit()
    return rows, manager


def one_by_one(rows: list[ScheduledRow], manager: BlockManager) -> RaggedBatch:
    """The batch built by the definition, token after token."""
    tokens, positions, slots, starts, wanted = [], [], [], [0], []
    for row in rows:
        ids = manager.table(row.sequence.sequence_id).block_ids.tolist()
        for position in range(row.start, row.end):
            tokens.append(row.sequence.token_ids[position])
            positions.append(position)
            slots.append(ids[position // manager.block_size] * manager.block_size + position % manager.block_size)
        starts.append(len(tokens))
        if row.end == len(row.sequence.token_ids):
            wanted.append(len(tokens) - 1)
    width = max(manager.blocks_for(row.end) for row in rows)
    tables = np.full((len(rows), width), -1, dtype=np.int32)
    for number, row in enumerate(rows):
        count = manager.blocks_for(row.end)
        tables[number, :count] = manager.table(row.sequence.sequence_id).block_ids[:count]
    if len(tokens) == 1:
        tokens, positions, slots = tokens * 2, positions * 2, [*slots, -1]
    arrays = [
        np.array(values, dtype=np.int64)
        for values in (tokens, positions, [r.sequence.sequence_id for r in rows], slots, starts, [r.end for r in rows])
    ]
    is_long = [len(row.sequence.token_ids) > (row.sequence.num_short_tokens or 99) for row in rows]
    return RaggedBatch(*arrays, tables, np.array(wanted, dtype=np.int64), np.array(is_long) if any(is_long) else None)


def assert_same(actual: RaggedBatch, expected: RaggedBatch) -> None:
    for name in RaggedBatch.__slots__:
        left, right = getattr(actual, name), getattr(expected, name)
        if right is None:
            assert left is None
            continue
        assert left.dtype == right.dtype, name
        assert left.flags.c_contiguous, name
        np.testing.assert_array_equal(left, right, err_msg=name)


row_shapes = st.integers(1, 40).flatmap(
    lambda known: st.integers(0, known - 1).flatmap(
        lambda done: st.tuples(st.just(known), st.just(done), st.integers(1, known - done))
    )
)


@settings(max_examples=150)
@given(st.lists(row_shapes, min_size=1, max_size=9), st.sampled_from([1, 3, 4, 16]), st.sampled_from([None, 20]))
def test_batch_follows_the_definition(
    shapes: list[tuple[int, int, int]], block_size: int, num_short_tokens: int | None
) -> None:
    """Every array is the one that a loop over rows and tokens would build."""
    rows, manager = make_rows(shapes, block_size)
    for row in rows:
        row.sequence.num_short_tokens = num_short_tokens
        row.sequence.follow_length()
    assert_same(build_batch(rows, manager), one_by_one(rows, manager))


def test_a_lone_token_is_followed_by_padding() -> None:
    """A batch never has one token: the copy is written nowhere and belongs to no row."""
    rows, manager = make_rows([(6, 5, 1)], 4)
    batch = build_batch(rows, manager)
    assert batch.token_ids.tolist() == [5, 5]
    assert batch.slot_mapping[1] == -1
    assert batch.query_start.tolist() == [0, 1]
    assert batch.num_tokens == 1
    assert batch.logits_rows.tolist() == [0]


def test_a_prompt_chunk_wants_no_logits() -> None:
    """Only rows that reach their last known token are sampled."""
    rows, manager = make_rows([(6, 0, 3), (4, 3, 1), (5, 2, 2)], 4)
    assert build_batch(rows, manager).logits_rows.tolist() == [3]


def test_a_table_that_is_too_short_is_an_error() -> None:
    """Positions without a block are refused and never read from another sequence's block."""
    rows, manager = make_rows([(9, 0, 4)], 4)
    with pytest.raises(InternalError, match="needs 3 blocks and its table has 1"):
        build_batch([ScheduledRow(rows[0].sequence, 0, 9)], manager)


@pytest.mark.slow
def test_decode_batches_are_built_quickly() -> None:
    """Thirty-two decode rows take well under a millisecond, even on a machine that is busy."""
    rows, manager = make_rows([(300 + i, 299 + i, 1) for i in range(32)], 16)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        build_batch(rows, manager)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3e-3


def test_nothing_of_a_sequence_is_changed() -> None:
    """Building a batch reads: computed counts and tokens stay as they are."""
    rows, manager = make_rows([(6, 2, 4)], 4)
    sequence: Sequence = rows[0].sequence
    before = (list(sequence.token_ids), sequence.num_computed_tokens)
    build_batch(rows, manager)
    assert (sequence.token_ids, sequence.num_computed_tokens) == before


def test_slots_of_a_large_pool_do_not_overflow() -> None:
    """Slots are computed in 64 bits although block ids have 32."""
    one = np.array([1], dtype=np.int64)
    last = np.array([2**31 - 1], dtype=np.int32)
    batch = assemble(one, one - 1, one, seq_ids=one, tables=[last], block_size=16)
    assert batch.slot_mapping.tolist() == [(2**31 - 1) * 16, -1]

"""Host-side planning: tiles and runs cover every token exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.attention_cases import Rows, random_tables
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.step_plan import StepPlan


def random_plan(seed: int) -> tuple[StepPlan, Rows]:
    """Up to twelve rows, some of them empty, over blocks of 1 to 32 tokens."""
    random = np.random.default_rng(seed)
    lengths = []
    for _ in range(int(random.integers(1, 12))):
        length = int(random.integers(1, 200))
        lengths.append((int(random.integers(0, min(length, 60) + 1)), length))
    size = int(random.choice([1, 4, 16, 32]))
    num_blocks = sum(-(-length // size) for _, length in lengths)
    rows = Rows(lengths, random_tables(lengths, size, num_blocks, seed), size, padding=int(random.integers(0, 4)))
    return StepPlan(rows, num_blocks, size), rows


@pytest.mark.parametrize("queries", [1, 2, 5, 16])
def test_tiles_cover_every_token_of_every_row_once(queries: int) -> None:
    """The tiles of a row follow each other without gap or overlap, and no tile is empty."""
    for seed in range(40):
        plan, rows = random_plan(seed)
        tiles = plan.tiles(queries)
        covered = [
            (row, token)
            for row, start in zip(tiles.rows.tolist(), tiles.starts.tolist(), strict=True)
            for token in range(start, min(start + queries, rows.lengths[row][0]))
        ]
        assert sorted(covered) == [(r, t) for r, (n, _) in enumerate(rows.lengths) for t in range(n)]


def test_expensive_tiles_come_first() -> None:
    """Decode rows over long contexts start before those over short ones, so that threads end together."""
    lengths = [(1, 10), (1, 500), (1, 90)]
    plan = StepPlan(Rows(lengths, random_tables(lengths, 16, 40, 1), 16), 40, 16)
    assert plan.tiles(2).rows.tolist() == [1, 2, 0]


def test_runs_cover_every_slot_once_within_blocks() -> None:
    """Runs of consecutive slots, expanded, are the slot mapping without its -1, and none leaves its block."""
    for seed in range(40):
        plan, rows = random_plan(seed)
        rows.slot_mapping[np.random.default_rng(seed).random(len(rows.slot_mapping)) < 0.1] = -1
        plan = StepPlan(rows, plan.num_blocks, plan.block_size)
        runs = plan.writes
        expanded = {}
        for token, slot, length in zip(runs.tokens.tolist(), runs.slots.tolist(), runs.lengths.tolist(), strict=True):
            assert slot // plan.block_size == (slot + length - 1) // plan.block_size
            for i in range(length):
                assert token + i not in expanded
                expanded[token + i] = slot + i
        assert expanded == {t: s for t, s in enumerate(rows.slot_mapping.tolist()) if s >= 0}


def test_a_prompt_is_written_in_whole_blocks() -> None:
    """Consecutive positions make one run per block, not one per token."""
    rows = Rows([(64, 64)], random_tables([(64, 64)], 16, 4, 1), 16)
    assert StepPlan(rows, 4, 16).writes.lengths.tolist() == [16, 16, 16, 16]


@pytest.mark.parametrize(("column", "kv_len", "is_locked", "is_refused"), [
    (0, 20, True, False), (0, 20, False, True), (1, 33, True, True), (2, 33, True, True), (2, 32, True, False),
])
def test_what_was_checked_is_checked_once(column: int, kv_len: int, is_locked: bool, is_refused: bool) -> None:
    """Of tables that nobody may write to, only rows that read more blocks than in the step before are looked at."""
    lengths = [(1, 40), (1, 20)]
    rows = Rows(lengths, tables := random_tables(lengths, 16, 40, 1), 16)
    rows.block_tables = tables.view()
    rows.block_tables.flags.writeable = not is_locked
    before = StepPlan(rows, 40, 16)
    tables[1, column] = 40
    rows.kv_lens = np.array([40, kv_len])
    if is_refused:
        with pytest.raises(InternalError, match=f"row 1 names block 40 at index {column}, expected 0 to 39"):
            StepPlan(rows, 40, 16, before=before)
    else:
        StepPlan(rows, 40, 16, before=before)


def test_other_tables_are_checked_whole() -> None:
    """Also where nobody may write to these or to those of the step before, and no row reads more."""
    lengths = [(1, 40), (1, 20)]
    rows = Rows(lengths, random_tables(lengths, 16, 40, 1), 16)
    rows.block_tables.flags.writeable = False
    before = StepPlan(rows, 40, 16)
    rows.block_tables = np.full_like(rows.block_tables, 40)
    rows.block_tables.flags.writeable = False
    with pytest.raises(InternalError, match="row 0 names block 40 at index 0"):
        StepPlan(rows, 40, 16, before=before)


def test_rows_without_kv_need_no_table() -> None:
    """A step may have fewer tables than rows, if the last rows read nothing."""
    lengths = [(1, 40), (0, 0)]
    rows = Rows(lengths, random_tables(lengths, 16, 40, 1), 16)
    rows.block_tables = rows.block_tables[:1]
    assert StepPlan(rows, 40, 16).used.tolist() == [3, 0]
    rows.kv_lens = np.array([40, 1])
    with pytest.raises(InternalError, match="or fewer tables if the last rows have no KV"):
        StepPlan(rows, 40, 16)

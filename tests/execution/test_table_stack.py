"""Block tables that are stacked step after step: what comes out is what stacking them from nothing gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.errors import InternalError
from pagedcore.execution.ragged_batch import TableStack, stack_tables
from pagedcore.kv_cache.block_table import BlockTable

CHANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 3)), max_size=4)
"""Tables, and how many blocks come at their end or go; 0: the last one becomes another."""


@given(st.lists(st.tuples(CHANGES, st.permutations(range(4)), st.integers(1, 4)), max_size=12))
def test_a_stack_is_that_of_the_tables_as_they_are(steps: list[tuple[list[tuple[int, int]], list[int], int]]) -> None:
    """Whatever changes between two steps, rows or tables or both; an array that was returned keeps its rows."""
    tables, stack, fresh, kept = [BlockTable() for _ in range(4)], TableStack(), iter(range(10**6)), []
    for table in tables:
        table.append([next(fresh)])
    for changes, order, count in steps:
        for place, num_blocks in changes:
            table = tables[place]
            table.truncate(max(1, table.num_blocks + min(num_blocks, 0)))
            if num_blocks == 0:
                table.truncate(table.num_blocks - 1)
            table.append([next(fresh) for _ in range(1 if num_blocks == 0 else max(0, num_blocks))])
        rows = [tables[place] for place in order[:count]]
        needed = np.array([table.num_blocks for table in rows])
        expected = stack_tables([table.block_ids for table in rows], needed)
        found = stack.stack(rows, needed)
        np.testing.assert_array_equal(found, expected)
        assert found.flags.c_contiguous
        assert not found.flags.writeable
        kept.append((found, expected))
    for found, expected in kept:
        np.testing.assert_array_equal(np.where(expected < 0, -1, found), expected)


def test_a_step_whose_rows_only_grow_costs_no_copy() -> None:
    """The array is that of the step before, with one more block in one row."""
    tables, stack = [BlockTable(), BlockTable()], TableStack()
    for table in tables:
        table.append([4, 5, 6])
    before = stack.stack(tables, np.array([2, 3]))
    assert stack.stack(tables, np.array([2, 3])) is before
    assert stack.stack(tables, np.array([3, 3])) is before
    assert stack.stack(tables, np.array([2, 3])).tolist() == [[4, 5, -1], [4, 5, 6]]
    assert before.tolist() == [[4, 5, 6], [4, 5, 6]]


def test_a_last_block_that_became_another_is_seen() -> None:
    """As after drafts that were wrong, a table may be as long as before and not the same."""
    table, stack = BlockTable(), TableStack()
    table.append([4, 5])
    before = stack.stack([table], np.array([2]))
    table.truncate(1)
    table.append([6])
    assert stack.stack([table], np.array([2])).tolist() == [[4, 6]]
    assert before.tolist() == [[4, 5]]


def test_a_table_that_is_too_short_is_refused() -> None:
    """Also where the rows are those of the last step."""
    table, stack = BlockTable(), TableStack()
    table.append([4, 5])
    stack.stack([table], np.array([2]))
    table.truncate(1)
    with pytest.raises(InternalError, match="needs 2 blocks and its table has 1"):
        stack.stack([table], np.array([2]))

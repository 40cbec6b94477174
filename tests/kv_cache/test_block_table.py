"""The blocks of one sequence, in the order of its positions."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore.kv_cache.block_table import BlockTable


def make_table(*block_ids: int) -> BlockTable:
    table = BlockTable()
    table.append(block_ids)
    return table


def test_blocks_keep_their_order_while_the_table_grows() -> None:
    """Appending never moves or changes what is there, however often the array behind it grows."""
    table, expected = BlockTable(), []
    for block_id in range(100, 160):
        table.append([block_id])
        expected.append(block_id)
        assert table.block_ids.tolist() == expected
    assert table.num_blocks == 60
    assert table.block_ids.dtype == np.int32


def test_many_blocks_can_be_appended_at_once() -> None:
    """One append may need more room than doubling gives."""
    table = make_table(7)
    table.append(range(100))
    assert table.block_ids.tolist() == [7, *range(100)]


def test_block_ids_cannot_be_written_through() -> None:
    """Readers get a view, not a way to redirect a sequence's memory."""
    with pytest.raises(ValueError, match="read-only"):
        make_table(1, 2).block_ids[0] = 5


def test_truncate_returns_what_it_removes_last_first() -> None:
    """Cutting keeps the front, and hands back the rest in the order it is to be freed."""
    table = make_table(3, 1, 4, 1, 5)
    assert table.truncate(2) == [5, 1, 4]
    assert table.block_ids.tolist() == [3, 1]
    assert table.truncate(2) == []

"""One sequence's blocks, and the slots of its positions."""

from __future__ import annotations

import numpy as np
import pytest

from pagedcore.errors import InternalError
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


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_slots_are_block_times_size_plus_offset(block_size: int) -> None:
    """Every range of positions has exactly the slots of the definition."""
    blocks = [5, 0, 9]
    table = make_table(*blocks)
    end = table.num_blocks * block_size
    assert end == 3 * block_size
    by_definition = [blocks[p // block_size] * block_size + p % block_size for p in range(end)]
    for start in range(end + 1):
        for stop in range(start, end + 1):
            slots = table.slots(start, stop, block_size)
            assert slots.dtype == np.int64
            assert slots.tolist() == by_definition[start:stop]


def test_slots_of_a_large_pool_do_not_overflow() -> None:
    """Slots are computed in 64 bits although block ids have 32."""
    assert make_table(2**31 - 1).slots(0, 1, 16).tolist() == [(2**31 - 1) * 16]


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (0, 9), (9, 9), (3, 2)])
def test_positions_without_a_block_have_no_slot(start: int, end: int) -> None:
    """A range outside the table is refused, never wrapped."""
    with pytest.raises(InternalError, match="of a table for 8"):
        make_table(1, 2).slots(start, end, 4)


def test_truncate_returns_what_it_removes_last_first() -> None:
    """Cutting keeps the front, and hands back the rest in the order it is to be freed."""
    table = make_table(3, 1, 4, 1, 5)
    assert table.truncate(2) == [5, 1, 4]
    assert table.block_ids.tolist() == [3, 1]
    assert table.truncate(2) == []

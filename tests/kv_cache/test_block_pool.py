"""Free list, idle blocks and reference counts of one memory."""

from __future__ import annotations

import pytest

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_pool import BlockPool


def test_a_new_pool_is_all_free() -> None:
    """Every block starts free, without references and not idle."""
    pool = BlockPool(3)
    assert (pool.num_blocks, len(pool.free_blocks), len(pool.idle_blocks)) == (3, 3, 0)
    assert sorted(pool.free_blocks) == [0, 1, 2]
    assert pool.reference_counts == [0, 0, 0]


def test_allocated_blocks_are_distinct_and_referenced_once() -> None:
    """What is allocated leaves the free list and gets one reference."""
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert len(pool.free_blocks) == 0
    assert pool.reference_counts == [1, 1, 1, 1]


def test_allocation_is_all_or_nothing() -> None:
    """Asking for more than is free takes nothing, and idle blocks are not free."""
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert len(pool.free_blocks) == 2
    assert pool.allocate(0) == []
    pool.allocate(1)
    pool.free_reference(0)
    assert pool.allocate(2) is None


def test_only_the_last_reference_leaves_a_block_idle() -> None:
    """Freeing removes one reference, not the block."""
    pool = BlockPool(1)
    pool.allocate(1)
    pool.add_reference(0)
    assert pool.free_reference(0) is False
    assert (pool.reference_counts[0], 0 in pool.idle_blocks) == (1, False)
    assert pool.free_reference(0) is True
    assert (pool.idle_blocks, pool.free_blocks) == ({0}, [])


def test_an_idle_block_can_be_held_again_or_made_free() -> None:
    """Idle blocks keep their contents until they are recycled; sharing takes them back."""
    pool = BlockPool(1)
    pool.allocate(1)
    pool.free_reference(0)
    pool.add_reference(0)
    assert (pool.reference_counts[0], len(pool.idle_blocks)) == (1, 0)
    pool.free_reference(0)
    pool.free_idle_block(0)
    assert (len(pool.free_blocks), len(pool.idle_blocks)) == (1, 0)
    assert pool.allocate(1) == [0]


def test_a_double_free_is_refused() -> None:
    """A block without references cannot be freed, and the free list does not grow."""
    pool = BlockPool(2)
    pool.allocate(1)
    pool.free_reference(0)
    with pytest.raises(InternalError, match="freed before"):
        pool.free_reference(0)
    assert pool.free_blocks == [1]


def test_free_and_held_blocks_cannot_be_recycled_and_free_ones_not_shared() -> None:
    """Only idle blocks become free, and only blocks with contents or holders are shared."""
    pool = BlockPool(2)
    pool.allocate(1)
    for block_id in (0, 1):
        with pytest.raises(InternalError, match="not idle"):
            pool.free_idle_block(block_id)
    with pytest.raises(InternalError, match="no reference"):
        pool.add_reference(1)


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_outside_the_pool_is_refused(block_id: int) -> None:
    """A negative id never reaches the last block by wrapping around."""
    pool = BlockPool(2)
    pool.allocate(2)
    for verb in (pool.free_reference, pool.add_reference):
        with pytest.raises(InternalError, match="outside the pool of 2"):
            verb(block_id)
    assert pool.reference_counts == [1, 1]

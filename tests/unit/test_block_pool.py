"""Reference counts and the free list of one device."""

from __future__ import annotations

import pytest

from pagedcore.cache.block_pool import BlockPool
from pagedcore.errors import InternalError


def test_a_new_pool_is_all_free() -> None:
    """Every block starts free and without references."""
    pool = BlockPool(3)
    assert (pool.num_blocks, pool.num_free) == (3, 3)
    assert sorted(pool.free_blocks) == [0, 1, 2]
    assert pool.reference_counts == (0, 0, 0)


def test_allocated_blocks_are_distinct_and_referenced_once() -> None:
    """What is allocated leaves the free list and gets one reference."""
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    assert pool.reference_counts == (1, 1, 1, 1)


def test_allocation_is_all_or_nothing() -> None:
    """Asking for more than is free takes nothing."""
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_when_its_last_reference_is_gone() -> None:
    """One free gives up one reference, not the block."""
    pool = BlockPool(1)
    pool.allocate(1)
    pool.share(0)
    pool.free(0)
    assert pool.num_free == 0
    pool.free(0)
    assert pool.num_free == 1
    assert pool.allocate(1) == [0]


def test_a_freed_block_can_be_allocated_again() -> None:
    """Blocks go round: any number of rounds leaves the pool as it was."""
    pool = BlockPool(3)
    for _ in range(5):
        for block_id in pool.allocate(3) or ():
            pool.free(block_id)
    assert sorted(pool.free_blocks) == [0, 1, 2]


def test_a_double_free_is_a_broken_law() -> None:
    """A block without references cannot be freed, and the free list does not grow."""
    pool = BlockPool(2)
    pool.allocate(1)
    pool.free(0)
    with pytest.raises(InternalError, match="freed before"):
        pool.free(0)
    assert sorted(pool.free_blocks) == [0, 1]


def test_a_free_block_cannot_be_shared() -> None:
    """Sharing needs somebody who holds the block."""
    with pytest.raises(InternalError, match="no reference"):
        BlockPool(1).share(0)


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_outside_the_pool_is_refused(block_id: int) -> None:
    """A negative id never reaches the last block by wrapping around."""
    pool = BlockPool(2)
    pool.allocate(2)
    for verb in (pool.free, pool.share):
        with pytest.raises(InternalError, match="outside the pool of 2"):
            verb(block_id)
    assert pool.reference_counts == (1, 1)

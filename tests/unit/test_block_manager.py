"""Reservations over one pool: all or nothing, then kept or taken back exactly."""

from __future__ import annotations

import pytest

from pagedcore.cache.block_manager import BlockManager, BlockSnapshot, Reservation
from pagedcore.errors import InternalError


def reserve(manager: BlockManager, *demands: tuple[int, int]) -> Reservation:
    reservation = manager.reserve(demands)
    assert reservation is not None
    return reservation


def comparable(snapshot: BlockSnapshot) -> tuple[object, ...]:
    """A snapshot without the order of the free list, which is nobody's business."""
    return sorted(snapshot.free_blocks), snapshot.reference_counts, dict(snapshot.tables)


@pytest.mark.parametrize(("num_tokens", "needed"), [(0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_a_new_sequence_needs_its_tokens_rounded_up_to_blocks(num_tokens: int, needed: int) -> None:
    """Blocks needed are tokens over block size, rounded up."""
    manager = BlockManager(8, 3)
    assert manager.num_blocks_needed(1, num_tokens) == manager.blocks_for(num_tokens) == needed


def test_only_what_the_table_lacks_is_needed() -> None:
    """Growing within the last block needs nothing, and fewer tokens than held need nothing."""
    manager = BlockManager(8, 4)
    reserve(manager, (1, 5)).commit()
    assert [manager.num_blocks_needed(1, n) for n in (1, 8, 9, 13)] == [0, 0, 1, 2]
    assert manager.num_blocks_of(1) == 2
    assert manager.num_blocks_of(2) == 0


def test_reserved_blocks_are_in_the_tables_before_commit() -> None:
    """The batch is built from tables that already hold every position of the step."""
    manager = BlockManager(4, 2)
    reserve(manager, (1, 3), (2, 1))
    assert manager.table(1).capacity(2) == 4
    assert manager.table(2).capacity(2) == 2
    blocks = [*manager.table(1).block_ids, *manager.table(2).block_ids]
    assert len(set(blocks)) == 3
    assert manager.num_free_blocks == 1


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    """All rows or none: the pool is as before when the last row finds no block."""
    manager = BlockManager(3, 1)
    reserve(manager, (1, 1)).commit()
    before = comparable(manager.snapshot())
    assert manager.reserve([(1, 2), (2, 1), (3, 1)]) is None
    assert comparable(manager.snapshot()) == before


def test_cancel_takes_out_exactly_what_was_reserved() -> None:
    """Tables, counts and the free list are as before, for old and for new sequences."""
    manager = BlockManager(8, 2)
    reserve(manager, (1, 3)).commit()
    before = comparable(manager.snapshot())
    reserve(manager, (1, 9), (2, 4)).cancel()
    assert comparable(manager.snapshot()) == before


def test_commit_keeps_the_blocks() -> None:
    """After commit the blocks belong to the table until the sequence is freed."""
    manager = BlockManager(8, 2)
    reserve(manager, (1, 4)).commit()
    assert manager.num_used_blocks == 2
    assert manager.usage == 0.25
    assert manager.free(1) == 2
    assert manager.num_free_blocks == 8


@pytest.mark.parametrize("verb", ["commit", "cancel"])
def test_closing_twice_the_same_way_does_nothing(verb: str) -> None:
    """A repeated commit or cancel is harmless, even when the sequence has grown since."""
    manager = BlockManager(8, 2)
    reservation = reserve(manager, (1, 4))
    getattr(reservation, verb)()
    reserve(manager, (1, 6)).commit()
    before = comparable(manager.snapshot())
    getattr(reservation, verb)()
    assert comparable(manager.snapshot()) == before


@pytest.mark.parametrize(("first", "second"), [("commit", "cancel"), ("cancel", "commit")])
def test_a_closed_reservation_cannot_be_closed_the_other_way(first: str, second: str) -> None:
    """What was kept is not taken back, and the other way round."""
    reservation = reserve(BlockManager(8, 2), (1, 4))
    getattr(reservation, first)()
    with pytest.raises(InternalError, match=f"{first}.* before it was {second}"):
        getattr(reservation, second)()


def test_cancel_leaves_alone_what_was_freed_meanwhile() -> None:
    """A sequence that ends while its step is in flight frees its blocks once, even if its id comes back."""
    manager = BlockManager(8, 2)
    reserve(manager, (1, 3)).commit()
    reservation = reserve(manager, (1, 7), (2, 2), (3, 2))
    assert manager.free(1) == 4
    assert manager.free(2) == 1
    reserve(manager, (1, 1), (2, 1)).commit()
    before = dict(manager.snapshot().tables)
    reservation.cancel()
    assert dict(manager.snapshot().tables) == {1: before[1], 2: before[2]}
    assert manager.num_free_blocks == 6


def test_a_sequence_without_blocks_has_no_table() -> None:
    """Asking for it is a defect of the asker; freeing it is none."""
    manager = BlockManager(2, 2)
    assert manager.free(9) == 0
    reserve(manager, (9, 0)).commit()
    with pytest.raises(InternalError, match="sequence 9 holds no blocks"):
        manager.table(9)
    assert manager.snapshot().tables == {}


def test_a_snapshot_does_not_change_with_the_manager() -> None:
    """A snapshot is a value: later moves leave it as it was."""
    manager = BlockManager(4, 2)
    reserve(manager, (1, 3)).commit()
    snapshot = manager.snapshot()
    copy = (snapshot.free_blocks, snapshot.reference_counts, dict(snapshot.tables))
    manager.free(1)
    assert (snapshot.free_blocks, snapshot.reference_counts, dict(snapshot.tables)) == copy

"""The host's blocks: what a transfer owns, and when its contents are registered."""

from __future__ import annotations

import pytest

from pagedcore.errors import InternalError
from pagedcore.kv_cache.host_cache import HostCache, Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.reservation import Demand
from pagedcore.sequence import Sequence
from support.doubles import make_sequence

TOKENS = [1, 2, 3, 4, 5, 6]


def make_tier(num_blocks: int = 6, num_host_blocks: int = 6) -> tuple[KVCacheManager, HostCache]:
    manager = KVCacheManager(num_blocks, 2, num_host_blocks=num_host_blocks)
    return manager, manager.host


def compute(manager: KVCacheManager, tokens: list[int]) -> Sequence:
    sequence = make_sequence(tokens)
    reservation = manager.device.reserve([Demand(sequence.sequence_id, len(tokens) - 1)])
    assert reservation is not None
    reservation.commit()
    sequence.num_computed_tokens = len(tokens) - 1
    manager.device.register(sequence, sequence.num_computed_tokens)
    return sequence


def swap_out(manager: KVCacheManager, sequence: Sequence, *, is_pinned: bool = True) -> Transfer:
    transfer = manager.begin_swap_out(sequence, is_pinned=is_pinned)
    assert transfer is not None
    sequence.reset_computed()
    return transfer


def evict_device(manager: KVCacheManager) -> None:
    """Let another sequence use every device block once."""
    filler = manager.device.reserve([Demand(10**6, manager.device.num_available_blocks * 2)])
    assert filler is not None
    filler.cancel()
    assert manager.device.num_cached_blocks == 0


def test_outgoing_blocks_belong_to_the_transfer_until_it_completes() -> None:
    """No table, no free block, nothing to be found on the host before the bytes are there; then all of it."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    transfer = swap_out(manager, sequence)
    assert manager.device.num_blocks_of(sequence.sequence_id) == 0
    assert (manager.device.num_used_blocks, host.num_used_blocks) == (3, 3)
    assert (host.num_leaving_blocks, host.is_moving(sequence.sequence_id), host.pins) == (3, True, {})
    assert host.cache.registered == ()
    assert manager.complete_transfer(transfer.transfer_id, is_ok=True) == (transfer, True)
    assert (manager.device.num_used_blocks, host.pins) == (0, {sequence.sequence_id: transfer.host_blocks})
    assert len(host.cache.registered) == 3
    assert not host.in_flight


def test_what_went_out_comes_back_as_a_table() -> None:
    """A swap in gives the sequence its blocks in order, half filled one included, and ends the pins."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=True)
    evict_device(manager)
    match = manager.match(sequence)
    assert (match.num_tokens, len(match.host_blocks), match.device_blocks) == (5, 3, ())
    transfer = manager.begin_swap_in(sequence, match)
    assert transfer is not None
    assert (manager.device.num_blocks_of(sequence.sequence_id), manager.device.num_used_blocks) == (0, 3)
    assert (host.num_leaving_blocks, host.pin_arriving(sequence.sequence_id)) == (0, 0)
    assert manager.complete_transfer(transfer.transfer_id, is_ok=True)[1] is True
    assert manager.bookkeeping().tables[sequence.sequence_id] == transfer.device_blocks
    assert (host.pins, host.num_used_blocks, host.num_cached_blocks) == ({}, 0, 3)


def test_what_the_device_still_holds_is_not_loaded() -> None:
    """Leading blocks that are on the device are shared; only the rest is copied."""
    manager, _ = make_tier()
    first = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, first).transfer_id, is_ok=True)
    evict_device(manager)
    manager.device.free_blocks(compute(manager, TOKENS[:3]))
    match = manager.match(first)
    assert (len(match.device_blocks), len(match.host_blocks)) == (1, 2)
    transfer = manager.begin_swap_in(first, match)
    assert transfer is not None
    assert (len(transfer.moves), len(transfer.device_blocks)) == (2, 3)


def test_what_the_host_has_already_is_not_copied_again() -> None:
    """Two sequences with one beginning: the second one moves what is new only, and holds the rest."""
    manager, _ = make_tier()
    manager.complete_transfer(swap_out(manager, compute(manager, TOKENS)).transfer_id, is_ok=True)
    second = compute(manager, [1, 2, 3, 4, 7, 8])
    assert manager.num_blocks_to_copy(second, second.num_computed_tokens) == 1
    transfer = swap_out(manager, second)
    assert (len(transfer.moves), len(transfer.host_blocks)) == (1, 3)


def test_a_host_that_is_full_of_pins_refuses_and_changes_nothing() -> None:
    """Too little room: no transfer, the table stays, the counts stay."""
    manager, _ = make_tier(num_host_blocks=4)
    manager.complete_transfer(swap_out(manager, compute(manager, TOKENS)).transfer_id, is_ok=True)
    other = compute(manager, [7, 8, 9, 7, 8])
    before = manager.bookkeeping()
    assert manager.begin_swap_out(other, is_pinned=True) is None
    assert manager.bookkeeping() == before


def test_unpinned_blocks_are_evicted_and_pinned_ones_are_not() -> None:
    """Blocks that are not pinned are evicted for the next sequence; pinned ones stay."""
    for is_pinned in (False, True):
        manager, _ = make_tier(num_host_blocks=3)
        transfer = swap_out(manager, compute(manager, TOKENS), is_pinned=is_pinned)
        manager.complete_transfer(transfer.transfer_id, is_ok=True)
        other = compute(manager, [7, 8, 9])
        assert (manager.begin_swap_out(other, is_pinned=True) is None) == is_pinned


@pytest.mark.parametrize("is_ok", [True, False])
def test_cancelling_in_flight_frees_everything_at_the_end_and_not_earlier(is_ok: bool) -> None:
    """A cancelled transfer keeps its blocks until it completes, late or failed; then they are free."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    transfer = swap_out(manager, sequence)
    host.free_sequence(sequence.sequence_id)
    assert (manager.device.num_used_blocks, host.num_used_blocks) == (3, 3)
    assert host.is_moving(sequence.sequence_id) is False
    assert manager.complete_transfer(transfer.transfer_id, is_ok=is_ok)[1] is False
    assert (manager.device.num_used_blocks, host.num_used_blocks, host.pins) == (0, 0, {})


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_cancelled_load_makes_no_table(is_ok: bool) -> None:
    """The sequence has ended when its blocks arrive: they are free or cached, and its host blocks too."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=True)
    evict_device(manager)
    transfer = manager.begin_swap_in(sequence, manager.match(sequence))
    assert transfer is not None
    host.free_sequence(sequence.sequence_id)
    assert manager.complete_transfer(transfer.transfer_id, is_ok=is_ok)[1] is False
    assert (manager.bookkeeping().tables, manager.device.num_used_blocks, host.num_used_blocks) == ({}, 0, 0)
    assert manager.device.num_cached_blocks == (3 if is_ok else 0)


def test_a_failed_swap_out_publishes_nothing() -> None:
    """Host blocks that were not filled are free again and not found; the device still has its own."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    assert manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=False)[1] is False
    assert (host.cache.registered, host.num_used_blocks, host.pins) == ((), 0, {})
    assert manager.match(sequence).device_blocks != ()


def test_a_failed_swap_in_is_not_tried_again() -> None:
    """What could not be read is evicted from the host, and its device blocks are free."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=True)
    evict_device(manager)
    transfer = manager.begin_swap_in(sequence, manager.match(sequence))
    assert transfer is not None
    assert manager.complete_transfer(transfer.transfer_id, is_ok=False)[1] is False
    assert manager.match(sequence).num_tokens == 0
    assert (manager.device.num_used_blocks, manager.device.num_cached_blocks) == (0, 0)
    assert (host.num_used_blocks, host.pins) == (0, {})


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_timed_out_swap_out_keeps_its_write_targets(is_ok: bool) -> None:
    """Its device blocks are free at once, its host blocks only when it ends; none of them is registered."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    transfer = swap_out(manager, sequence)
    manager.time_out_transfer(transfer.transfer_id)
    assert (manager.device.num_used_blocks, host.num_used_blocks, host.is_moving(sequence.sequence_id)) == (0, 3, False)
    assert (host.is_stuck, host.has_awaited, host.withholds_blocks) == (True, False, False)
    assert manager.match(sequence).num_tokens == 5
    assert manager.begin_swap_out(compute(manager, [7, 8, 9]), is_pinned=True) is None
    assert manager.complete_transfer(transfer.transfer_id, is_ok=is_ok)[1] is False
    assert (host.num_used_blocks, host.cache.registered, host.pins, host.is_stuck) == (0, (), {}, False)


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_timed_out_load_keeps_its_write_targets(is_ok: bool) -> None:
    """Its shared blocks are free at once, its sources evicted; the blocks it writes to are free when it ends."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=True)
    evict_device(manager)
    manager.device.free_blocks(compute(manager, TOKENS[:3]))
    transfer = manager.begin_swap_in(sequence, manager.match(sequence))
    assert transfer is not None
    manager.time_out_transfer(transfer.transfer_id)
    assert (manager.device.num_used_blocks, host.num_used_blocks, host.pins) == (2, 0, {})
    assert (host.is_stuck, host.withholds_blocks, len(host.cache.registered)) == (True, True, 1)
    assert manager.match(sequence).num_tokens == 2
    assert manager.complete_transfer(transfer.transfer_id, is_ok=is_ok)[1] is False
    assert (manager.device.num_used_blocks, manager.device.num_cached_blocks) == (0, 1)
    assert manager.bookkeeping().tables == {}


def test_a_transfer_times_out_once() -> None:
    """A second time-out, or one of a transfer that has ended, is an error of the caller."""
    manager, host = make_tier()
    transfer = swap_out(manager, compute(manager, TOKENS))
    manager.time_out_transfer(transfer.transfer_id)
    for _ in range(2):
        with pytest.raises(InternalError, match="not in flight"):
            manager.time_out_transfer(transfer.transfer_id)
        if host.is_stuck:
            manager.complete_transfer(transfer.transfer_id, is_ok=True)


def test_timing_out_a_cancelled_transfer_keeps_later_pins() -> None:
    """A transfer that was cancelled before frees no pins of its sequence."""
    manager, host = make_tier()
    manager.complete_transfer(swap_out(manager, compute(manager, [7, 8, 9]), is_pinned=False).transfer_id, is_ok=True)
    sequence = compute(manager, TOKENS)
    transfer = swap_out(manager, sequence)
    host.free_sequence(sequence.sequence_id)
    (present,) = (cached.block_id for cached in host.cache.registered)
    host.pin(sequence.sequence_id, (present,))
    manager.time_out_transfer(transfer.transfer_id)
    assert host.pins == {sequence.sequence_id: (present,)}


def test_blocks_in_a_transfer_count_only_if_they_will_be_pinned() -> None:
    """Blocks count as a sequence's while they will be pinned for it: not before that is asked, nor after it left."""
    manager, host = make_tier()
    sequence = compute(manager, TOKENS)
    transfer = swap_out(manager, sequence, is_pinned=False)
    assert host.blocks_kept_for((sequence.sequence_id,)) == set()
    assert host.pin_arriving(sequence.sequence_id) == 5
    assert host.blocks_kept_for((sequence.sequence_id,)) == set(transfer.host_blocks)
    host.free_sequence(sequence.sequence_id)
    assert host.pin_arriving(sequence.sequence_id) == 0
    assert host.blocks_kept_for((sequence.sequence_id,)) == set()


def test_a_load_without_room_changes_nothing() -> None:
    """Too few device blocks: no transfer, and what was matched is not held."""
    manager, _ = make_tier(num_blocks=3)
    sequence = compute(manager, TOKENS)
    manager.complete_transfer(swap_out(manager, sequence).transfer_id, is_ok=True)
    evict_device(manager)
    match = manager.match(sequence)
    assert manager.device.reserve([Demand(10**6, 2)]) is not None
    before = manager.bookkeeping()
    assert manager.begin_swap_in(sequence, match) is None
    assert manager.bookkeeping() == before


def test_a_transfer_completes_once() -> None:
    """A second completion, or one of an unknown transfer, is an error of the caller."""
    manager, _ = make_tier()
    transfer = swap_out(manager, compute(manager, TOKENS))
    manager.complete_transfer(transfer.transfer_id, is_ok=True)
    for transfer_id in (transfer.transfer_id, 99):
        with pytest.raises(InternalError, match="not in flight"):
            manager.complete_transfer(transfer_id, is_ok=True)


def test_a_table_of_another_length_is_not_swapped() -> None:
    """Blocks of a step in flight are not moved: the table has to be that of the computed positions."""
    manager, _ = make_tier()
    sequence = compute(manager, TOKENS)
    assert manager.device.reserve([Demand(sequence.sequence_id, 8)]) is not None
    with pytest.raises(InternalError, match="4 blocks for 5 positions"):
        manager.begin_swap_out(sequence, is_pinned=True)

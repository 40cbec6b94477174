"""Window blocks: who holds them, what is found with them, and what becomes of those that nobody holds."""

from __future__ import annotations

import pytest

from pagedcore.kv_cache.prefix_match import PrefixMatch
from pagedcore.kv_cache.reservation import Demand
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.sequence import Sequence
from support.doubles import make_sequence

SIZE, WINDOW = 4, 10


def manager(num_windows: int = 64, num_blocks: int = 64) -> WindowedBlocks:
    return WindowedBlocks(num_blocks, SIZE, num_windows, WINDOW)


def compute(blocks: WindowedBlocks, sequence: Sequence, end: int, match: PrefixMatch | None = None) -> None:
    """Compute a sequence's positions up to ``end`` in one step."""
    demand = Demand(sequence.sequence_id, end) if match is None else Demand(sequence.sequence_id, end, match)
    reservation = blocks.reserve([demand])
    assert reservation is not None
    reservation.commit()
    sequence.num_computed_tokens = end
    blocks.register(sequence, end)


def in_chunks(blocks: WindowedBlocks, length: int, chunk: int = SIZE) -> Sequence:
    """A sequence of so many tokens, all but the last computed."""
    sequence = make_sequence(range(length), max_tokens=8)
    for end in (*range(chunk, length - 1, chunk), length - 1):
        compute(blocks, sequence, end)
    return sequence


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13, 40, 41, 100])
def test_a_sequence_holds_what_its_window_covers(length: int) -> None:
    """Between steps a sequence holds the window blocks of its last ten positions, and of at most one more."""
    blocks = manager()
    in_chunks(blocks, length)
    first = max(0, length - 1 - WINDOW) // SIZE
    assert blocks.windows.num_used == -(-(length - 1) // SIZE) - first <= -(-WINDOW // SIZE) + 1
    assert blocks.num_used_blocks == -(-(length - 1) // SIZE)


def test_a_chunk_holds_all_of_it_for_one_step() -> None:
    """A chunk takes window blocks for its tokens, and gives up in the same step what they leave behind."""
    blocks = manager(num_windows=12)
    sequence = make_sequence(range(60), max_tokens=8)
    assert blocks.reserve([Demand(sequence.sequence_id, 52)]) is None
    assert (blocks.windows.num_used, blocks.num_used_blocks) == (0, 0)
    compute(blocks, sequence, 48)
    assert (blocks.windows.num_used, blocks.num_used_blocks) == (3, 12)
    compute(blocks, sequence, 59)
    assert blocks.windows.num_used == 3


@pytest.mark.parametrize("num_evicted", range(5))
def test_a_match_ends_where_all_kinds_are(num_evicted: int) -> None:
    """A sequence begins at the deepest position whose blocks are known and whose window has its window blocks."""
    blocks = manager(num_windows=12)
    first = in_chunks(blocks, 41)
    blocks.free_blocks(first)
    assert (blocks.windows.num_used, blocks.windows.num_kept) == (0, 10)
    # Why these: what was left behind goes first, in its order.
    other = make_sequence([99] * 41, max_tokens=8)
    if num_evicted:
        compute(blocks, other, SIZE * (2 + num_evicted))
    blocks.free_and_evict_tail(other)
    same = make_sequence(range(41), max_tokens=8)
    assert blocks.match(same).num_tokens == 40
    shorter = make_sequence([*range(4 * SIZE), 77], max_tokens=8)
    # Why 16: behind it the window reads positions 7 to 15, which are blocks 1 to 3.
    assert blocks.match(shorter).num_tokens == (16 if num_evicted <= 1 else 0)


def test_what_is_computed_again_is_found_again() -> None:
    """Blocks whose window blocks were evicted get those of a sequence that has computed their positions again."""
    blocks = manager(num_windows=10)
    blocks.free_blocks(in_chunks(blocks, 21))
    compute(blocks, other := make_sequence([99] * 41, max_tokens=8), 40)
    blocks.free_and_evict_tail(other)
    again = make_sequence(range(21), max_tokens=8)
    assert blocks.match(again).num_tokens == 0
    compute(blocks, again, 20)
    blocks.free_blocks(again)
    third = make_sequence(range(21), max_tokens=8)
    assert blocks.match(third).num_tokens == 20


def test_a_rolled_back_step_leaves_nothing() -> None:
    """A reservation that is cancelled gives back the window blocks of new, found and copied blocks."""
    blocks = manager()
    first = in_chunks(blocks, 42)
    blocks.free_blocks(first)
    before = blocks.snapshot()
    same = make_sequence([*range(42), 50], max_tokens=8)
    match = blocks.match(same)
    assert (match.num_tokens, match.tail is not None) == (41, True)
    reservation = blocks.reserve([Demand(same.sequence_id, 42, match)])
    assert reservation is not None
    assert blocks.windows.num_used == 4
    reservation.cancel()
    assert blocks.windows.num_used == 0
    after = blocks.snapshot()
    assert sorted(after["windows"]["counts"]) == sorted(before["windows"]["counts"])


def test_a_copied_block_brings_its_window_block() -> None:
    """Whoever goes on inside a block copies it in both memories."""
    blocks = manager()
    blocks.free_blocks(in_chunks(blocks, 43))
    same = make_sequence([*range(42), 50, 51], max_tokens=8)
    reservation = blocks.reserve([Demand(same.sequence_id, 43, blocks.match(same))])
    assert reservation is not None
    (pair,) = blocks.window_pairs(reservation.copies)
    assert pair == tuple(blocks.windows.of_block[list(reservation.copies[0])])
    assert pair[0] != pair[1]


def test_bookkeeping_can_be_restored() -> None:
    """A snapshot makes the same bookkeeping again, and one that does not add up is refused."""
    blocks = manager(num_windows=12)
    blocks.free_blocks(in_chunks(blocks, 30))
    in_chunks(blocks, 34)
    state, twin = blocks.snapshot(), manager(num_windows=12)
    twin.restore(state, twin.hasher.key)
    assert twin.snapshot() == state
    assert twin.bookkeeping().windows == blocks.bookkeeping().windows
    state["windows"]["left"] = []
    with pytest.raises(ValueError, match="do not add up"):
        manager(num_windows=12).restore(state, twin.hasher.key)

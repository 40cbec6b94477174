"""What one memory's blocks hold, and which contents are evicted first."""

from __future__ import annotations

from itertools import permutations, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.eviction import POLICIES
from pagedcore.kv_cache.prefix_cache import Content, PrefixCache

HASHER = BlockHasher(2, b"")
ROOT = HASHER.root({})


def make_cache(num_blocks: int = 4, policy: str = "lru") -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, POLICIES[policy])


def chain(*blocks: tuple[int, ...], hasher: BlockHasher = HASHER) -> list[Content]:
    """Contents of the blocks of one sequence."""
    found, parent = [], ROOT
    for place, tokens in enumerate(blocks):
        found.append(Content(hasher.key(parent, tokens), parent, tokens, place == 0))
        parent = found[-1].key
    return found


def keep(cache: PrefixCache, contents: list[Content]) -> list[int]:
    """Compute and free a sequence: its blocks are idle and can be found."""
    blocks = cache.allocate(len(contents))
    assert blocks is not None
    for block_id, content in zip(blocks, contents, strict=True):
        assert cache.register_block(block_id, content)
    for block_id in reversed(blocks):
        cache.free_block(block_id)
    return blocks


def test_what_was_registered_is_found_and_nothing_else() -> None:
    """Same tokens behind the same past are found; other tokens, another past or another place are not."""
    pool, cache = make_cache()
    first, second = chain((1, 2), (3, 4))
    blocks = keep(cache, [first, second])
    assert [cache.find(first), cache.find(second)] == blocks
    for other in (*chain((1, 9)), chain((7, 7), (3, 4))[1], chain((3, 4))[0]):
        assert cache.find(other) is None
    assert (len(pool.idle_blocks), pool.num_available) == (2, 4)


def test_unknown_contents_are_free_at_once() -> None:
    """A block that was not registered does not stay idle."""
    pool, cache = make_cache()
    (block_id,) = cache.allocate(1) or ()
    cache.free_block(block_id)
    assert (len(pool.free_blocks), len(pool.idle_blocks)) == (4, 0)


def test_the_best_beginning_of_a_block_is_found() -> None:
    """Among the blocks behind a past, the one with most equal leading tokens, and how many; none is None."""
    _, cache = make_cache()
    hasher = BlockHasher(3, b"")
    blocks = [keep(cache, chain(tokens, hasher=hasher))[0] for tokens in ((1, 2, 3), (1, 9, 9), (5,))]
    assert cache.find_beginning(ROOT, (1, 2, 7)) == (blocks[0], 2)
    assert cache.find_beginning(ROOT, (1, 9)) == (blocks[1], 2)
    assert cache.find_beginning(ROOT, (5, 6, 7)) == (blocks[2], 1)
    assert cache.find_beginning(ROOT, (8,)) is None
    assert cache.find_beginning(ROOT, ()) is None
    assert cache.find_beginning(b"elsewhere", (1, 2)) is None


def test_of_equally_good_beginnings_contents_decide() -> None:
    """Whichever block came first and has the higher number, the one with the smaller tokens is found."""
    hasher = BlockHasher(3, b"")
    for siblings in permutations([(1, 2, 3), (1, 2, 8), (1, 9, 9)]):
        _, cache = make_cache()
        blocks = {tokens: keep(cache, chain(tokens, hasher=hasher))[0] for tokens in siblings}
        assert cache.find_beginning(ROOT, (1, 2, 7)) == (blocks[1, 2, 3], 2)
        assert cache.find_beginning(ROOT, (1, 5)) == (blocks[1, 2, 8], 1)


TOKENS = st.lists(st.integers(0, 2), max_size=4).map(tuple)


@given(siblings=st.lists(TOKENS.filter(bool), max_size=12, unique=True), asked=TOKENS, gone=st.integers(0, 3))
def test_no_block_begins_with_more_of_what_is_asked(
    siblings: list[tuple[int, ...]], asked: tuple[int, ...], gone: int
) -> None:
    """For any blocks behind one parent, after any evictions, no other one has more in common."""
    _, cache = make_cache(12)
    hasher = BlockHasher(4, b"")
    blocks = {keep(cache, chain(tokens, hasher=hasher))[0]: tokens for tokens in siblings}
    for block_id in list(blocks)[:gone]:
        cache.evict_block(block_id)
        del blocks[block_id]
    equal = {
        one: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, asked, strict=False)))
        for one, tokens in blocks.items()
    }
    found = cache.find_beginning(ROOT, asked)
    assert (found[1] if found is not None else 0) == max(equal.values(), default=0)
    assert found is None or equal[found[0]] == found[1] > 0


def test_a_block_needs_its_past() -> None:
    """Contents without a registered parent are not registered, because they could not be found."""
    _, cache = make_cache()
    _, second = chain((1, 2), (3, 4))
    (block_id,) = cache.allocate(1) or ()
    assert cache.register_block(block_id, second) is False
    assert cache.registered == ()


def test_the_second_copy_of_the_same_contents_is_left_alone() -> None:
    """One key, one block: a duplicate counts as known, and is free without a reference."""
    pool, cache = make_cache()
    (content,) = chain((1, 2))
    (kept,) = keep(cache, [content])
    (copy,) = cache.allocate(1) or ()
    assert cache.register_block(copy, content) is True
    cache.free_block(copy)
    assert (cache.find(content), len(pool.idle_blocks)) == (kept, 1)


def test_a_block_that_was_filled_further_is_known_by_all_it_holds() -> None:
    """Registering the full block replaces what was known when it was half full."""
    _, cache = make_cache()
    (half,), (full,) = chain((1,)), chain((1, 2))
    (block_id,) = cache.allocate(1) or ()
    assert cache.register_block(block_id, half)
    assert cache.register_block(block_id, full)
    assert (cache.find(half), cache.find(full), len(cache.registered)) == (None, block_id, 1)


def test_leaves_are_evicted_before_what_they_continue() -> None:
    """Whichever block was used last, a chain is evicted from its end."""
    for policy in POLICIES:
        _, cache = make_cache(3, policy)
        contents = chain((1, 1), (2, 2), (3, 3))
        keep(cache, contents)
        for num_left in (2, 1, 0):
            (block_id,) = cache.allocate(1) or ()
            assert [cache.find(content) is not None for content in contents] == [place < num_left for place in range(3)]
            assert block_id not in [one.block_id for one in cache.registered]
        assert cache.num_evictions == 3


def test_held_blocks_are_never_evicted() -> None:
    """With only held blocks left, allocation takes nothing."""
    _, cache = make_cache(2)
    contents = chain((1, 1), (2, 2))
    blocks = keep(cache, contents)
    for block_id in blocks:
        cache.hold_block(block_id)
    assert cache.allocate(1) is None
    cache.free_block(blocks[1])
    assert cache.allocate(1) == [blocks[1]]
    assert cache.find(contents[0]) == blocks[0]


def test_a_hit_on_an_idle_block_protects_it() -> None:
    """A block that is held before the allocation stays, although it was next to be evicted."""
    _, cache = make_cache(2)
    (first,), (second,) = chain((1, 1)), chain((2, 2))
    (block_id,), _ = keep(cache, [first]), keep(cache, [second])
    cache.hold_block(block_id)
    cache.allocate(1)
    assert (cache.find(first), cache.find(second)) == (block_id, None)


@pytest.mark.parametrize(("policy", "victim"), [("lru", 1), ("lfu", 2), ("fifo", 0)])
def test_each_policy_evicts_another_block(policy: str, victim: int) -> None:
    """Least recently used, least often found, first come: one history, three choices."""
    _, cache = make_cache(3, policy)
    contents = [chain((token, token))[0] for token in (1, 2, 3)]
    blocks = [keep(cache, [content])[0] for content in contents]
    for place in (1, 1, 2, 0, 0):
        cache.hold_block(blocks[place])
        cache.free_block(blocks[place])
        if place == 1:
            continue
    order = {"lru": [1, 2, 0], "lfu": [2, 1, 0], "fifo": [0, 1, 2]}[policy]
    gone = []
    for _ in range(3):
        before = {content: cache.find(content) for content in contents}
        cache.allocate(1)
        gone += [contents.index(one) for one in contents if before[one] is not None and cache.find(one) is None]
    assert gone == order
    assert gone[0] == victim


def test_discard_takes_along_everything_that_continues_it() -> None:
    """A chain without its beginning cannot be found, so its idle blocks are free and its held ones unknown."""
    pool, cache = make_cache(4)
    first, second, third = chain((1, 1), (2, 2), (3, 3))
    blocks = keep(cache, [first, second, third])
    cache.hold_block(blocks[1])
    cache.evict_block(blocks[0])
    assert [cache.find(one) for one in (first, second, third)] == [None] * 3
    assert (len(pool.free_blocks), len(pool.idle_blocks), pool.reference_counts[blocks[1]]) == (3, 0, 1)
    cache.free_block(blocks[1])
    assert len(pool.free_blocks) == 4
    cache.evict_block(blocks[0])


def test_beginnings_are_evicted_with_all_that_continues_them() -> None:
    """Half filled blocks with the same beginning go too; blocks that differ, and those of other chains, stay."""
    pool, cache = make_cache(5)
    (half,), (other,), (stranger,) = chain((1,)), chain((1, 9)), chain((2, 2))
    full, following = chain((1, 2), (3, 4))
    for contents in ([half], [other], [stranger], [full, following]):
        keep(cache, contents)
    cache.evict_beginnings(ROOT, (1, 2))
    assert [cache.find(one) is None for one in (half, full, following, other, stranger)] == [True] * 3 + [False] * 2
    cache.evict_beginnings(ROOT, ())
    assert len(pool.free_blocks) == 3


def test_the_heap_of_candidates_stays_bounded() -> None:
    """Holding and freeing the same blocks many times leaves a bounded number of entries."""
    pool, cache = make_cache(4)
    blocks = keep(cache, chain((1, 1), (2, 2)))
    for _ in range(1000):
        for block_id in blocks:
            cache.hold_block(block_id)
        for block_id in reversed(blocks):
            cache.free_block(block_id)
    assert len(cache._heap) <= 4 * pool.num_blocks + 2


class WeakHasher(BlockHasher):
    """All first blocks have the same key."""

    def key(self, parent_key: bytes, token_ids: object) -> bytes:
        """Collide for first blocks."""
        return b"collision" if parent_key == ROOT else super().key(parent_key, token_ids)  # type: ignore[arg-type]


def test_equal_keys_and_tokens_behind_another_past_are_not_found() -> None:
    """A block belongs to another prefix unless what came before it is the same."""
    _, cache = make_cache()
    first, second = chain((1, 2), (5, 6))
    keep(cache, [first, second])
    assert cache.find(second) is not None
    assert cache.find(second._replace(parent_key=b"another past")) is None


def test_collision_at_block_zero_cannot_poison_block_one() -> None:
    """With equal keys of two first blocks, the victim finds neither them nor what continues the other's."""
    _, cache = make_cache()
    hasher = WeakHasher(2, b"")
    attacker, attackers_next = chain((1, 2), (5, 6), hasher=hasher)
    victim, victims_next = chain((3, 4), (5, 6), hasher=hasher)
    assert (attacker.key, attackers_next.key) == (victim.key, victims_next.key)
    keep(cache, [attacker, attackers_next])
    assert cache.find(victim) is None
    own = cache.allocate(2) or []
    assert cache.register_block(own[0], victim) is False
    cache.register_block(own[1], victims_next)
    for block_id in own:
        cache.free_block(block_id)
    assert cache.find(attacker) is not None


def test_keys_of_evicted_blocks_are_remembered_for_a_while_only() -> None:
    """Sixteen for each block of the pool; older ones are new contents when they are computed again."""
    _, cache = make_cache(1)
    seen = [chain((number, number))[0] for number in range(20)]
    for content in [*seen, seen[-2], seen[2], seen[-2], seen[4]]:
        cache.note_computed(content.key)
        keep(cache, [content])
    assert len(cache._evicted) == 16
    assert cache.num_recomputed == 3

"""Contents of one memory's blocks by key, so that a prefix is computed once; evicts contents to make room.

``BlockMemory`` is the cache and its pool, of the device or of the host; ``block_manager`` and ``host_cache`` add who
holds its blocks. ``block_hash`` makes the keys, ``eviction`` gives the order. It moves no bytes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.eviction import EvictionPolicy
from pagedcore.kv_cache.memory_snapshot import Known, MemorySnapshot

TokenIds = tuple[int, ...]
KeyOf = Callable[[bytes, TokenIds], bytes]
"""Makes a block's key of its parent's and its tokens."""
_EVICTED_PER_BLOCK: Final = 16
_MAX_EVICTED: Final = 2**16
"""Keys of evicted blocks that are remembered, for each block of the pool and at most: 10 MiB."""
_log = logging.getLogger("pagedcore")


class Content(NamedTuple):
    """What a block holds, in terms of keys and tokens."""

    key: bytes
    parent_key: bytes
    """The key of the block before, or the root of the chain."""
    token_ids: TokenIds
    """Fewer tokens than a block has room for at the end of a sequence."""
    is_first: bool
    """Whether it holds the first positions, so that its parent is a root."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One block whose contents are known."""

    block_id: int
    content: Content
    first_used: int
    last_used: int = 0
    num_hits: int = 0
    rank: tuple[int, ...] = ()
    """Its place in the order of eviction, set when the block becomes idle."""
    is_minor: bool = True
    """Whether none has held it but sequences that leave nothing to continue, so that it is evicted before others."""


class PrefixCache:
    """Blocks by content, over one pool.

    Invariant: keys and registered blocks are one to one.
    Invariant: an idle block is registered; a block without known contents is free once it has no reference.
    Invariant: the parent of a registered block is registered too, or is the root of its chain.
    Invariant: the blocks behind one parent are sorted by their tokens.
    """

    def __init__(self, pool: BlockPool, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._children: dict[bytes, list[CachedBlock]] = {}
        self._num_idle_children: dict[bytes, int] = {}
        self._heap: list[tuple[tuple[int, ...], int]] = []
        self._num_uses = 0
        self.num_evictions = 0
        self.num_recomputed = 0
        """Blocks that were computed again after they had been evicted for others."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self.forget_state: Callable[[bytes], None] | None = None
        """Called with the key of what was evicted, if the model keeps states."""
        self.forget_window: Callable[[int], None] | None = None
        """Called with the block whose contents were evicted, if the model has windows."""

    @property
    def registered(self) -> tuple[CachedBlock, ...]:
        """Every block whose contents are known."""
        return tuple(self._by_key.values())

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks with one reference each, evicting contents for them; or none when too few are available."""
        if num_blocks > self._pool.num_available:
            return None
        while len(self._pool.free_blocks) < num_blocks:
            victim = self._next_victim()
            self._evict(victim)
            self.num_evictions += 1
            self._evicted[victim.content.key] = None
        while len(self._evicted) > min(_EVICTED_PER_BLOCK * self._pool.num_blocks, _MAX_EVICTED):
            self._evicted.popitem(last=False)
        return self._pool.allocate(num_blocks)

    def note_computed(self, key: bytes) -> None:
        """Count a computed block that was here before and was evicted; the log says once that these are many."""
        if self._evicted and self._evicted.pop(key, False) is None:
            self.num_recomputed += 1
            if self.num_recomputed == self._pool.num_blocks:
                _log.warning(
                    "prefix cache: %d blocks were computed again that had been evicted from the pool of %d blocks. A "
                    "larger pool (num_kv_blocks, kv_cache_memory) or a host tier (host_kv_memory) would keep them; "
                    "see stats().num_blocks_recomputed.", self.num_recomputed, self._pool.num_blocks,
                )

    def hold_block(self, block_id: int) -> None:
        """Add a reference to a block that is idle or referenced."""
        cached = self._by_block.get(block_id)
        if cached is not None:
            cached.num_hits += 1
            if block_id in self._pool.idle_blocks:
                self._count_idle_child(cached.content.parent_key, -1)
        self._pool.add_reference(block_id)

    def free_block(self, block_id: int, *, is_minor: bool = False) -> None:
        """Free a reference; after the last one the block is idle, or free if its contents are unknown.

        ``is_minor``: the holder was one of those that ``CachedBlock.is_minor`` speaks of.
        """
        is_last, cached = self._pool.free_reference(block_id), self._by_block.get(block_id)
        if cached is not None and not is_minor:
            cached.is_minor = False
        if not is_last:
            return
        if cached is None:
            self._pool.free_idle_block(block_id)
            return
        self._num_uses += 1
        cached.last_used = self._num_uses
        cached.rank = (-1, *self._policy(cached)) if cached.is_minor else self._policy(cached)
        self._count_idle_child(cached.content.parent_key, +1)
        self._offer(cached)

    def register_block(self, block_id: int, content: Content) -> bool:
        """Register what a referenced block holds; return whether its contents can be found under their key now.

        They can when another block with the same contents is registered; this block then stays unregistered. They
        cannot when the key belongs to other contents, or when the block's parent is not registered.
        """
        present = self._by_key.get(content.key)
        if present is not None:
            return present.content == content
        if not content.is_first and content.parent_key not in self._by_key:
            return False
        # Why: a block that was registered half full is now registered with all it holds.
        self.evict_block(block_id)
        self._num_uses += 1
        cached = self._by_key[content.key] = self._by_block[block_id] = CachedBlock(block_id, content, self._num_uses)
        siblings = self._children.setdefault(content.parent_key, [])
        siblings.insert(_place(siblings, content.token_ids), cached)
        return True

    def evict_block(self, block_id: int) -> None:
        """Evict what a block holds, and what continues it; nothing happens when it is not registered."""
        cached = self._by_block.get(block_id)
        if cached is not None:
            self._evict(cached)

    def evict_beginnings(self, parent_key: bytes, token_ids: TokenIds) -> None:
        """Evict the blocks behind ``parent_key`` that hold a beginning of ``token_ids``, and what continues them."""
        for cached in tuple(self._children.get(parent_key, ())):
            known = cached.content.token_ids
            if known == token_ids[: len(known)]:
                self._evict(cached)

    def find(self, content: Content) -> int | None:
        """Return the block that holds exactly these tokens behind exactly this parent."""
        cached = self._by_key.get(content.key)
        # Safety: with equal keys and other tokens or another parent, the block would be another sequence's memory.
        return cached.block_id if cached is not None and cached.content == content else None

    def is_registered(self, block_id: int) -> bool:
        """Whether the contents of a block can be found."""
        return block_id in self._by_block

    def num_behind(self, key: bytes) -> int | None:
        """Return how many blocks go on behind a registered one; ``None``: none is registered under this key."""
        return len(self._children.get(key, ())) if key in self._by_key else None

    def find_beginning(self, parent_key: bytes, token_ids: TokenIds) -> tuple[int, int] | None:
        """Return the block behind ``parent_key`` that has most first tokens of ``token_ids``, and how many.

        Of equal ones it is the one with the smaller tokens: contents decide, and never the numbers of blocks.
        """
        siblings = self._children.get(parent_key, ())
        # Why: in sorted order nothing has more in common with ``token_ids`` than its two neighbours there; every
        # conversation behind one system prompt may have a block here, so they cannot all be looked at.
        place = _place(siblings, token_ids)
        near = siblings[max(0, place - 1) : place + 1]
        pairs = [(one.block_id, _num_equal(one.content.token_ids, token_ids)) for one in near]
        best = max(pairs, key=lambda pair: pair[1], default=(0, 0))
        return best if best[1] else None

    def snapshot(self) -> dict[str, Any]:
        """Copy what is registered and in which order it is evicted, as plain values, parents first.

        Keys are left out, because they follow from tokens and roots; so is what was evicted, on which no decision
        depends.
        """
        places = {key: place for place, key in enumerate(self._by_key)}
        known = [(one, one.content) for one in self._by_key.values()]
        return {
            "num_uses": self._num_uses, "num_evictions": self.num_evictions,
            "entries": [[one.block_id, -1 if what.is_first else places[what.parent_key], one.first_used, one.last_used,
                         one.num_hits, list(one.rank), one.is_minor] for one, what in known],
            "tokens": [what.token_ids for _, what in known],
            "roots": [what.parent_key if what.is_first else b"" for _, what in known],
        }

    def restore(self, state: Mapping[str, Any], key_of: KeyOf) -> None:
        """Let an empty cache be as it was copied, over a pool that is already so.

        Raises ``ValueError`` if a block comes before its parent, or two hold the same.
        """
        cached = list[CachedBlock]()
        for entry, tokens, root in zip(state["entries"], state["tokens"], state["roots"], strict=True):
            block_id, parent, first_used, last_used, num_hits, rank, is_minor = entry
            if not -1 <= parent < len(cached):
                raise ValueError("a block comes before its parent")
            parent_key = cached[parent].content.key if parent >= 0 else root
            content = Content(key_of(parent_key, tuple(tokens)), parent_key, tuple(tokens), parent < 0)
            if content.key in self._by_key or block_id in self._by_block:
                raise ValueError("two blocks hold the same")
            one = CachedBlock(block_id, content, first_used, last_used, num_hits, tuple(rank), is_minor)
            cached.append(one)
            self._by_key[content.key] = self._by_block[block_id] = one
            self._children.setdefault(parent_key, []).append(one)
        for siblings in self._children.values():
            siblings.sort(key=lambda one: one.content.token_ids)
        parents = Counter(one.content.parent_key for one in cached if one.block_id in self._pool.idle_blocks)
        self._num_idle_children = dict(parents)
        for one in cached:
            self._offer(one)
        self._num_uses, self.num_evictions = state["num_uses"], state["num_evictions"]

    def _evict(self, cached: CachedBlock) -> None:
        """Evict a block and everything that continues it, which could not be found without its parent."""
        for one in [*self._descendants(cached), cached]:
            parent_key = one.content.parent_key
            del self._by_key[one.content.key], self._by_block[one.block_id]
            self._children[parent_key].remove(one)
            if not self._children[parent_key]:
                del self._children[parent_key]
            if one.block_id in self._pool.idle_blocks:
                self._count_idle_child(parent_key, -1)
                self._pool.free_idle_block(one.block_id)
            if self.forget_state is not None:
                self.forget_state(one.content.key)
            if self.forget_window is not None:
                self.forget_window(one.block_id)

    def _descendants(self, cached: CachedBlock) -> list[CachedBlock]:
        """List all blocks that continue a block, ends first."""
        found, open_ends = [], [cached]
        while open_ends:
            children = self._children.get(open_ends.pop().content.key, [])
            found += children
            open_ends += children
        return found[::-1]

    def _next_victim(self) -> CachedBlock:
        while True:
            rank, block_id = heappop(self._heap)
            cached = self._by_block.get(block_id)
            if cached is not None and cached.rank == rank and self._is_evictable(cached):
                return cached

    def _is_evictable(self, cached: CachedBlock) -> bool:
        return cached.block_id in self._pool.idle_blocks and not self._num_idle_children.get(cached.content.key)

    def _offer(self, cached: CachedBlock) -> None:
        # Why: entries of blocks that are in use again stay in the heap until they come up; this bounds them.
        if len(self._heap) > 4 * self._pool.num_blocks:
            self._heap = [(one.rank, one.block_id) for one in self._by_key.values() if self._is_evictable(one)]
            heapify(self._heap)
        if self._is_evictable(cached):
            heappush(self._heap, (cached.rank, cached.block_id))

    def _count_idle_child(self, parent_key: bytes, change: int) -> None:
        count = self._num_idle_children.get(parent_key, 0) + change
        if count:
            self._num_idle_children[parent_key] = count
            return
        self._num_idle_children.pop(parent_key, None)
        parent = self._by_key.get(parent_key)
        if parent is not None:
            self._offer(parent)


def _place(siblings: ListOf[CachedBlock], token_ids: TokenIds) -> int:
    return bisect_left(siblings, token_ids, key=lambda one: one.content.token_ids)


def _num_equal(some: TokenIds, others: TokenIds) -> int:
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (token_id, other) in pairs if token_id != other), min(len(some), len(others)))


class BlockMemory:
    """The blocks of one memory: how many there are, and what they hold.

    Invariant: every reference to one of its blocks belongs to a holder that ``_bookkeeping`` is given.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.num_blocks, self.policy = num_blocks, policy
        self._pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self._pool, policy)

    @property
    def num_available_blocks(self) -> int:
        """Blocks without a reference: free ones, and cached ones that would be evicted."""
        return self._pool.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a reference whose contents can be found."""
        return len(self._pool.idle_blocks)

    def reset(self) -> None:
        """Make every block free and forget all contents, in whatever state the bookkeeping is."""
        before = self.cache
        self._pool = BlockPool(self.num_blocks)
        self.cache = PrefixCache(self._pool, self.policy)
        self.cache.num_evictions, self.cache.num_recomputed = before.num_evictions, before.num_recomputed

    def hold_blocks(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block_id in block_ids:
            self.cache.hold_block(block_id)

    def allocate_blocks(self, shared: ListOf[int], num_new: int) -> tuple[int, ...] | None:
        """Hold ``shared`` and allocate ``num_new`` blocks behind them; or change nothing when too few are available."""
        # Why: what is shared must be held before anything is allocated, or it could be evicted for that.
        self.hold_blocks(shared)
        new = self.cache.allocate(num_new)
        if new is None:
            self.free_references(shared)
            return None
        return (*shared, *new)

    def free_references(self, block_ids: ListOf[int]) -> None:
        """Free a reference to each block, last first."""
        for block_id in reversed(block_ids):
            self.cache.free_block(block_id)

    def snapshot(self) -> dict[str, Any]:
        """Copy the blocks' state as plain values."""
        return self._pool.snapshot() | self.cache.snapshot()

    def restore(self, state: Mapping[str, Any], key_of: KeyOf) -> None:
        """Let an empty memory of the same size be as it was copied; ``key_of`` makes the blocks' keys anew."""
        self._pool.restore(state, [entry[0] for entry in state["entries"]])
        self.cache.restore(state, key_of)

    def _bookkeeping(self, holders: Mapping[int, int]) -> MemorySnapshot:
        pool, known = self._pool, [(one.block_id, one.content) for one in self.cache.registered]
        return MemorySnapshot(
            tuple(pool.free_blocks), frozenset(pool.idle_blocks), tuple(pool.reference_counts), dict(holders),
            {what.key: Known(block_id, what.parent_key, what.token_ids, what.is_first) for block_id, what in known},
        )

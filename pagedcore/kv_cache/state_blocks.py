"""State blocks of a model with recurrent layers: whose they are, and which can be found to continue from.

A state is what all recurrent layers keep of a sequence at one position. A step reads the state of a row and writes
another block, so a row holds two for the time of a step and one between steps. A state that is kept has the key of the
KV block that ends at its position, and leaves with that block. The host's states are those of sequences whose KV is
pinned there, and what is kept for others. Numbers only: it moves no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as ListOf
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.memory_snapshot import KnownState, StateSnapshot
from pagedcore.kv_cache.prefix_cache import Content, PrefixCache


class KeptState(NamedTuple):
    """A state that can be found."""

    state_id: int
    key: bytes
    """Of the KV block that ends at its position."""
    parent_key: bytes
    """Of the block before that, or the root of the chain."""
    tail: tuple[int, ...]
    """The tokens of that block, if it is partly filled; empty: it is full."""
    num_saved: int
    """Tokens from the kept state before it, when it was kept: those that have to be computed again without it."""


class StateBlocks:
    """The state blocks of one memory, beside KV blocks of ``block_size`` tokens.

    Invariant: a block's references are the sequences whose state it is, the rows in flight that write it, and the
        transfers that it is part of.
    Invariant: a block without a reference is free, or kept. One that is kept is not written.
    Invariant: a sequence's state is that of its computed positions; where none are computed it has none.

    What is evicted first is worth least: the tokens that it saves, and what the last evicted one was worth when this
    one was used last. So states that save little go soon, and those that save much when many others have come and gone.
    Source: GreedyDual (Young 1994) with one size, as in caches of web pages (Cao and Irani 1997).
    """

    def __init__(self, num_states: int, block_size: int) -> None:
        self.num_states, self.block_size = num_states, block_size
        self.num_evictions = 0
        self.reset()

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_states - self._pool.num_available

    @property
    def num_available(self) -> int:
        """Blocks without a reference: free ones, and kept ones that would be evicted."""
        return self._pool.num_available

    @property
    def num_kept(self) -> int:
        """Blocks without a reference whose states can be found."""
        return len(self._idle)

    def reset(self) -> None:
        """Make every block free and forget all states, in whatever state the bookkeeping is."""
        self._pool = BlockPool(self.num_states)
        self._kept: dict[bytes, KeptState] = {}
        self._key_of: dict[int, bytes] = {}
        self._tails: dict[bytes, list[KeptState]] = {}
        """States that end inside a block, by the key of the block before it."""
        self._idle: dict[int, tuple[int, int]] = {}
        """Kept states without a reference: what each is worth, and the number of its last use."""
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._num_uses = self._age = 0
        """Uses so far, and what the last evicted state was worth."""
        self.current: dict[int, int] = {}
        """The state of each sequence, by its id; like ``written``, not for changing."""
        self.written: dict[int, int] = {}
        """What rows in flight leave their states in, by the ids of their sequences."""

    def has_room_for(self, num_rows: int, begun_from: Iterable[int] = ()) -> bool:
        """Whether so many rows can write a state each, while those that they begin from are held."""
        num_taken = sum(state_id in self._idle for state_id in set(begun_from))
        return num_rows + num_taken <= self._pool.num_available

    def begin(self, rows: Iterable[tuple[int, int]]) -> None:
        """Let rows write a state each; the caller knows that there is room for all.

        Args:
            rows: (sequence id, state that a sequence without one begins from, -1 for none) of each.
        """
        rows = list(rows)
        # Why first: what a row begins from must be held before anything is allocated, or it could be evicted for that.
        for number, state_id in rows:
            if state_id >= 0:
                self.give(number, state_id)
        for (number, _), state_id in zip(rows, self.allocate(len(rows)), strict=True):
            self.written[number] = state_id

    def hold(self, state_id: int) -> None:
        """Add a reference to a state that is kept or held."""
        self._idle.pop(state_id, None)
        self._pool.add_reference(state_id)

    def give(self, number: int, state_id: int) -> None:
        """Let a state that is kept or held be a sequence's too, instead of the one that it has."""
        self.hold(state_id)
        self.free(self.current.pop(number, None))
        self.current[number] = state_id

    def take(self, number: int) -> int:
        """Return a sequence's state, which it has no more; the reference passes to the caller."""
        return self.current.pop(number)

    def advance(self, number: int) -> None:
        """Let what was written for a sequence be its state; nothing if nothing was."""
        if (state_id := self.written.pop(number, None)) is not None:
            self.free(self.current.pop(number, None))
            self.current[number] = state_id

    def go_back(self, number: int) -> None:
        """Free what was written for a sequence; its state is what it was."""
        self.free(self.written.pop(number, None))

    def release(self, number: int) -> None:
        """Free all that a sequence holds; what is kept of it can still be found."""
        self.free(self.written.pop(number, None))
        self.free(self.current.pop(number, None))

    def keep(self, content: Content, state_id: int, num_saved: int) -> bool:
        """Let a state that something holds be found behind a KV block; return whether it is.

        It is not if one is there under that block's key, or this one is under another.
        """
        if content.key in self._kept or state_id in self._key_of:
            return False
        tail = content.token_ids if len(content.token_ids) < self.block_size else ()
        kept = KeptState(state_id, content.key, content.parent_key, tail, num_saved)
        self._kept[kept.key], self._key_of[state_id] = kept, kept.key
        if tail:
            self._tails.setdefault(kept.parent_key, []).append(kept)
        return True

    def forget(self, key: bytes) -> None:
        """Let no state be found under a key: its KV block has left."""
        if (kept := self._kept.pop(key, None)) is None:
            return
        del self._key_of[kept.state_id]
        if kept.tail:
            self._tails[kept.parent_key].remove(kept)
            if not self._tails[kept.parent_key]:
                del self._tails[kept.parent_key]
        if kept.state_id in self._idle:
            del self._idle[kept.state_id]
            self._pool.free_idle_block(kept.state_id)

    def knows_any(self, keys: Iterable[bytes]) -> bool:
        """Whether a state is kept at the end of a block with one of these keys, or inside one behind it."""
        keys = list(keys)
        return not (self._kept.keys().isdisjoint(keys) and self._tails.keys().isdisjoint(keys))

    def find(self, key: bytes) -> KeptState | None:
        """Return what is kept under a key."""
        return self._kept.get(key)

    def tails_behind(self, parent_key: bytes) -> ListOf[KeptState]:
        """Return what is kept inside a block behind ``parent_key``; not for changing."""
        return self._tails.get(parent_key, ())

    def allocate(self, num_states: int) -> list[int]:
        """Take blocks with a reference each, evicting kept states for them. Raises ``InternalError`` if too few are
        available, which the caller knows before.
        """
        while len(self._pool.free_blocks) < num_states and self._idle:
            self._evict_next()
        taken = self._pool.allocate(num_states)
        if taken is None:
            raise InternalError(f"{num_states} state blocks were asked for, {len(self._pool.free_blocks)} are free")
        return taken

    def bookkeeping(self, moving: Iterable[int]) -> StateSnapshot:
        """Copy the bookkeeping for the state laws; ``moving`` are the blocks that transfers hold."""
        pool = self._pool
        return StateSnapshot(
            tuple(pool.free_blocks), frozenset(self._idle), tuple(pool.reference_counts), dict(self.current),
            dict(self.written), {one.key: KnownState(one.state_id, one.tail) for one in self._kept.values()},
            Counter(moving),
        )

    def snapshot(self, cache: PrefixCache) -> dict[str, Any]:
        """Copy whose blocks are whose, and in which order what is kept is evicted, as plain values.

        Keys are left out: what is kept is told by the block that ``cache`` has registered under its key, as (KV block,
        state block, tokens saved).
        """
        kept = [[one.block_id, found.state_id, found.num_saved] for one in cache.registered
                if (found := self.find(one.content.key)) is not None]
        return {
            **self._pool.snapshot(), "current": [list(pair) for pair in self.current.items()],
            "idle": [[state_id, *rank] for state_id, rank in self._idle.items()], "num_uses": self._num_uses,
            "age": self._age, "num_evictions": self.num_evictions, "kept": kept,
        }

    def restore(self, state: Mapping[str, Any], cache: PrefixCache, moving: Collection[int]) -> None:
        """Let empty blocks be as they were copied, over a cache that is already so; ``moving`` is what transfers hold.

        Raises ``ValueError`` if two are kept in one block or under one key, or the numbers do not add up.
        """
        known = {one.block_id: one.content for one in cache.registered}
        for block_id, state_id, saved in state["kept"]:
            if not self.keep(known[block_id], state_id, saved):
                raise ValueError("two states are kept in one place")
        self._pool.restore(state, self._key_of)
        self._num_uses, self._age = state["num_uses"], state["age"]
        self._idle = {state_id: (worth, number) for state_id, worth, number in state["idle"]}
        self._sort_idle()
        self.current = {int(number): int(state_id) for number, state_id in state["current"]}
        holds = Counter(self.current.values()) + Counter(moving)
        if set(self._idle) != self._pool.idle_blocks or any(
                count != holds[one] for one, count in enumerate(self._pool.reference_counts)):
            raise ValueError("references of state blocks do not add up")
        self.num_evictions = state["num_evictions"]

    def free(self, state_id: int | None) -> None:
        """Free a reference, if it is one: the block is kept then, or free."""
        if state_id is None or not self._pool.free_reference(state_id):
            return
        if (key := self._key_of.get(state_id)) is None:
            self._pool.free_idle_block(state_id)
            return
        self._num_uses += 1
        self._idle[state_id] = rank = self._age + self._kept[key].num_saved, self._num_uses
        heappush(self._heap, (rank, state_id))
        # Why: entries of states that are in use again stay in the heap until they come up; this bounds them.
        if len(self._heap) > 4 * self.num_states:
            self._sort_idle()

    def _sort_idle(self) -> None:
        self._heap = [(rank, state_id) for state_id, rank in self._idle.items()]
        heapify(self._heap)

    def _evict_next(self) -> None:
        while True:
            rank, state_id = heappop(self._heap)
            if self._idle.get(state_id) == rank:
                break
        self._age = rank[0]
        self.forget(self._key_of[state_id])
        self.num_evictions += 1

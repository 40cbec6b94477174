"""Block tables of a model with recurrent layers: its KV blocks and the state blocks beside them, as one.

A sequence can begin where both are: the KV of all positions before, and the state behind them. So a match ends at a
position whose state was kept. Which ones are, ``scheduler/chunk_ends`` decides for prompts; ends of turns always are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from functools import partial
from typing import Any

from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot
from pagedcore.kv_cache.prefix_cache import Content, KeyOf, PrefixCache
from pagedcore.kv_cache.prefix_match import NO_MATCH, FoundBlocks, PrefixMatch, contents
from pagedcore.kv_cache.reservation import Demand, Reservation
from pagedcore.kv_cache.state_blocks import StateBlocks
from pagedcore.kv_cache.state_match import blocks_before, find_with_state, kept_of, num_saved
from pagedcore.sequence import Sequence


class HybridBlocks(BlockManager):
    """A ``BlockManager`` whose sequences have a state each; arguments as ``KVCacheManager``.

    Invariant: a sequence with blocks for computed positions has the state behind them.
    Invariant: a kept state has the key of a registered KV block.
    """

    keeps_states = True

    def __init__(self, num_blocks: int, block_size: int, num_states: int, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.states = StateBlocks(num_states, block_size)
        self.cache.forget_state = self.states.forget
        self._to_keep: set[int] = set()
        """Sequences of which the state behind the step in flight is to be found by others."""
        self._unsettled: dict[int, tuple[int, int]] = {}
        """First and last position of rows with drafts, by sequence id, until ``shorten``."""

    def reset(self) -> None:
        """As ``BlockManager.reset``; no sequence has a state then."""
        super().reset()
        self.states.reset()
        self.cache.forget_state = self.states.forget
        self._to_keep, self._unsettled = set(), {}

    def state_counts(self) -> dict[str, int]:
        """Return how many state blocks there are, are held, are kept, and were evicted."""
        states = self.states
        return {"num_states": states.num_states, "num_states_used": states.num_used,
                "num_states_kept": states.num_kept, "num_states_evicted": states.num_evictions}

    def match(self, sequence: Sequence, host: PrefixCache | None = None) -> PrefixMatch:
        """Find the longest beginning of a sequence whose KV and state the device holds."""
        with_tail: PrefixMatch | None = None
        for kept, num_full in kept_of(self.hasher, sequence, sequence.num_reusable_tokens, self.states):
            if kept.tail and (with_tail is not None or not self.copies_blocks):
                continue
            if (found := blocks_before(self.hasher, sequence, kept, num_full, self.cache)) is None:
                continue
            if not kept.tail:
                match = PrefixMatch(found.block_ids, num_tokens=found.num_tokens, state=kept.state_id)
                break
            with_tail = PrefixMatch(found.block_ids[:-1], (found.block_ids[-1], len(kept.tail)),
                                    num_tokens=found.num_tokens, state=kept.state_id)
        else:
            match = NO_MATCH
        if with_tail is None:
            return match
        return PrefixMatch(with_tail.device_blocks, with_tail.tail, num_tokens=with_tail.num_tokens,
                           state=with_tail.state, shorter=match)

    def find(self, sequence: Sequence, num_tokens: int) -> FoundBlocks:
        """Find the longest beginning of at most ``num_tokens`` positions whose KV and state the device holds."""
        return find_with_state(self.hasher, sequence, num_tokens, self.cache, self.states)

    def share_blocks(self, sequence: Sequence, found: FoundBlocks) -> None:
        """As ``BlockManager.share_blocks``, with the state that was found."""
        super().share_blocks(sequence, found)
        self.states.give(sequence.sequence_id, found.state)

    def free_blocks(self, sequence: Sequence, *, num_kept_tokens: int = 0) -> int:
        """As ``BlockManager.free_blocks``. What is kept ends where a state is: at most behind ``num_kept_tokens``."""
        if 0 < num_kept_tokens < sequence.num_computed_tokens:
            self.register_all(sequence)
            found = self.find(sequence, num_kept_tokens)
            num_kept_tokens = found.num_tokens
            if num_kept_tokens:
                self.states.give(sequence.sequence_id, found.state)
        return super().free_blocks(sequence, num_kept_tokens=num_kept_tokens)

    def reserve(self, demands: Iterable[Demand]) -> Reservation | None:
        """As ``BlockManager.reserve``, with a state block for each demand: all of both, or nothing."""
        demands = list(demands)
        if not self.states.has_room_for(len(demands), {one.match.state for one in demands}):
            return None
        reservation = super().reserve(demands)
        if reservation is None:
            return None
        self.states.begin([(one.sequence_id, one.match.state) for one in demands])
        return reservation.also(partial(self._keep_states, demands), partial(self._undo_states, demands))

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``BlockManager.register``; the state behind these positions can be found if the step was to keep it.

        Nothing is registered of a row that may still be taken back.
        """
        if sequence.sequence_id in self._unsettled:
            return
        super().register(sequence, num_tokens)
        if sequence.sequence_id in self._to_keep:
            self._to_keep.remove(sequence.sequence_id)
            self._keep_state(sequence)

    def register_all(self, sequence: Sequence) -> None:
        """As ``BlockManager.register_all``, and the state behind the computed positions can be found."""
        if sequence.sequence_id in self._unsettled:
            self.shorten(sequence)
        super().register_all(sequence)
        if sequence.hidden_from is None:
            # Why not others: who only reads a text leaves nothing to continue.
            self._keep_state(sequence)

    def shorten(self, sequence: Sequence) -> None:
        """As ``BlockManager.shorten``. If not all positions of a row with drafts count, none does: the state before it
        is the sequence's, and what was right is computed again.
        """
        number = sequence.sequence_id
        if (row := self._unsettled.pop(number, None)) is not None:
            if sequence.num_computed_tokens == row[1]:
                self.states.advance(number)
                super().register(sequence, row[1])
            else:
                self.states.go_back(number)
                sequence.num_computed_tokens = row[0]
        super().shorten(sequence)

    def bookkeeping(self, in_transfers: Iterable[int] = (), moving: Iterable[int] = ()) -> BlockSnapshot:
        """As ``BlockManager.bookkeeping``, with the state blocks; ``moving`` are those that transfers hold."""
        return replace(super().bookkeeping(in_transfers), states=self.states.bookkeeping(moving))

    def snapshot(self) -> dict[str, Any]:
        """As ``BlockManager.snapshot``, with the state blocks."""
        return {**super().snapshot(), "states": self.states.snapshot(self.cache)}

    def restore(self, state: Mapping[str, Any], key_of: KeyOf, moving: ListOf[int] = ()) -> None:
        """As ``BlockManager.restore``, with the state blocks; ``moving`` are those that transfers hold."""
        super().restore(state, key_of)
        self.states.restore(state["states"], self.cache, moving)

    def take_state_for(self, content: Content) -> int | None:
        """Take a block for the state behind a registered KV block, which the caller writes and gives back by
        ``states.free``; ``None``: the state is there, the KV is not, or there is no room.
        """
        is_wanted = self.states.find(content.key) is None and self.cache.find(content) is not None
        return self.states.allocate(1)[0] if is_wanted and self.states.has_room_for(1) else None

    def _keep_states(self, demands: ListOf[Demand]) -> None:
        for one in demands:
            number = one.sequence_id
            if number not in self.states.written:
                continue  # its sequence has left
            if one.unsettled_from is not None:
                self._unsettled[number] = one.unsettled_from, one.num_tokens
                continue
            self.states.advance(number)
            if one.keeps_state:
                self._to_keep.add(number)

    def _undo_states(self, demands: ListOf[Demand]) -> None:
        for one in demands:
            self.states.go_back(one.sequence_id)

    def _keep_state(self, sequence: Sequence) -> None:
        """Let a sequence's state be found, if the KV before it can be."""
        state_id, num_tokens = self.states.current.get(sequence.sequence_id), sequence.num_computed_tokens
        if state_id is None or not num_tokens:
            return
        last = (num_tokens - 1) // self.block_size
        self.hasher.extend(sequence.block_keys, sequence.block_root, sequence.token_ids, last)
        (content,) = contents(self.hasher, sequence, num_tokens, last)
        if self.cache.find(content) is not None:
            self.states.keep(content, state_id, num_saved(self.hasher, sequence, num_tokens, self.states))

    def _truncate(self, sequence_id: int, num_blocks: int, *, is_minor: bool = False) -> int:
        if num_blocks == 0:
            self.states.release(sequence_id)
            self._unsettled.pop(sequence_id, None)
            self._to_keep.discard(sequence_id)
        return super()._truncate(sequence_id, num_blocks, is_minor=is_minor)

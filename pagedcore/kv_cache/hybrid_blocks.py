"""Block tables of a model with recurrent layers: its KV blocks and the state blocks beside them, as one.

A sequence can begin where both are: the KV of all positions before, and the state behind them. So a match ends at a
position whose state was kept. Which ones are, ``scheduler/chunk_ends`` decides for prompts; ends of turns always are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot
from pagedcore.kv_cache.prefix_cache import Content, KeyOf, PrefixCache
from pagedcore.kv_cache.prefix_match import NO_MATCH, FoundBlocks, PrefixMatch, contents, find_blocks
from pagedcore.kv_cache.reservation import Demand, Reservation
from pagedcore.kv_cache.state_blocks import KeptState, StateBlocks
from pagedcore.sequence import Sequence

_NO_BLOCKS: Final = FoundBlocks((), 0)


class HybridBlocks(BlockManager):
    """A ``BlockManager`` whose sequences have a state each; arguments as ``KVCacheManager``.

    Invariant: a sequence with blocks for computed positions has the state behind them.
    Invariant: a kept state has the key of a registered KV block.
    """

    keeps_states = True

    def __init__(self, num_blocks: int, block_size: int, num_states: int, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.states = StateBlocks(num_states)
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
        for kept, num_full in self._kept_of(sequence, sequence.num_reusable_tokens):
            if kept.tail and (with_tail is not None or not self.copies_blocks):
                continue
            if (found := self._blocks_before(sequence, kept, num_full)) is None:
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
        found = (self._blocks_before(sequence, kept, num_full) for kept, num_full in
                 self._kept_of(sequence, num_tokens))
        return next((one for one in found if one is not None), _NO_BLOCKS)

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

    def bookkeeping(self, in_transfers: Iterable[int] = ()) -> BlockSnapshot:
        """As ``BlockManager.bookkeeping``, with the state blocks."""
        return replace(super().bookkeeping(in_transfers), states=self.states.bookkeeping())

    def snapshot(self) -> dict[str, Any]:
        """As ``BlockManager.snapshot``, with the state blocks: (KV block, state block, tokens saved) of what is kept.
        """
        kept = [[one.block_id, found.state_id, found.num_saved] for one in self.cache.registered
                if (found := self.states.find(one.content.key)) is not None]
        return {**super().snapshot(), "states": {**self.states.snapshot(), "kept": kept}}

    def restore(self, state: Mapping[str, Any], key_of: KeyOf) -> None:
        """As ``BlockManager.restore``, with the state blocks."""
        super().restore(state, key_of)
        known = {one.block_id: one.content for one in self.cache.registered}
        self.states.restore(state["states"], [
            self._kept(known[block_id], state_id, num_saved) for block_id, state_id, num_saved in
            state["states"]["kept"]])

    def take_state_for(self, content: Content) -> int | None:
        """Take a block for the state behind a registered KV block, which the caller writes and gives back by
        ``states.free``; ``None``: the state is there, the KV is not, or there is no room.
        """
        is_wanted = self.states.find(content.key) is None and self.cache.find(content) is not None
        return self.states.allocate(1)[0] if is_wanted and self.states.has_room_for(1) else None

    def keep_state_of(self, content: Content, state_id: int, num_saved: int) -> None:
        """Let a state that the caller holds be found behind a registered KV block."""
        self.states.keep(self._kept(content, state_id, num_saved))

    def _kept(self, content: Content, state_id: int, num_saved: int) -> KeptState:
        tail = content.token_ids if len(content.token_ids) < self.block_size else ()
        return KeptState(state_id, content.key, content.parent_key, tail, num_saved)

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
            before = next(self._kept_of(sequence, num_tokens - 1), None)
            num_before = before[1] * self.block_size + len(before[0].tail) if before is not None else 0
            self.keep_state_of(content, state_id, num_tokens - num_before)

    def _kept_of(self, sequence: Sequence, limit: int) -> Iterator[tuple[KeptState, int]]:
        """Yield the kept states of a sequence's first positions, deepest first, and the full blocks before each."""
        keys, size, states = sequence.block_keys, self.block_size, self.states
        self.hasher.extend(keys, sequence.block_root, sequence.token_ids, limit // size)
        chain = [sequence.block_root, *keys[: limit // size]]
        # Why: most of a long queue finds nothing, and shall cost little.
        if not states.knows_any(chain):
            return
        for num_full in range(len(chain) - 1, -1, -1):
            if tails := states.tails_behind(chain[num_full]):
                rest = tuple(sequence.token_ids[num_full * size : min(limit, (num_full + 1) * size)])
                same = [one for one in tails if one.tail == rest[: len(one.tail)]]
                yield from ((one, num_full) for one in sorted(same, key=lambda one: -len(one.tail)))
            if num_full and (kept := states.find(chain[num_full])) is not None:
                yield kept, num_full

    def _blocks_before(self, sequence: Sequence, kept: KeptState, num_full: int) -> FoundBlocks | None:
        """Return the blocks of the positions before a kept state; ``None``: they hold something else."""
        num_tokens = num_full * self.block_size + len(kept.tail)
        found = find_blocks(self.hasher, sequence, num_tokens, self.cache)
        return found._replace(state=kept.state_id) if found.num_tokens == num_tokens else None

    def _truncate(self, sequence_id: int, num_blocks: int, *, is_minor: bool = False) -> int:
        if num_blocks == 0:
            self.states.release(sequence_id)
            self._unsettled.pop(sequence_id, None)
            self._to_keep.discard(sequence_id)
        return super()._truncate(sequence_id, num_blocks, is_minor=is_minor)

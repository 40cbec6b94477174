"""Where prompts of a model that keeps states are cut, so that a state is left from which another one can begin.

A state can be found only at a position where a row ended. One is worth its memory, and the step that a cut costs, where
prompts part that are known: those that wait now, and those whose blocks are cached. The last full block of a prompt is
such a place too, as its next turn begins with it. Everything here follows from queue and cache, so a plan that is made
again is the same. Source of the second rule: Marconi's admission by what was seen twice (Pan et al. 2024). Long prompts
leave some states on their way too, for who comes later and parts there: as many as there is memory for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from collections.abc import Sequence as ListOf
from dataclasses import replace
from itertools import chain
from typing import Final

from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Demand
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.window_rows import WindowPlanState
from pagedcore.sequence import Sequence

LEAST_SAVED: Final = 128
"""Tokens that a state has to save, of all that are known to begin from it, to be worth a cut."""
LEAST_APART: Final = 2
"""Times as many tokens lie between the states that a long prompt leaves on its way, at least."""
NUM_COMPARED: Final = 256
"""Waiting sequences whose prompts are compared; those behind them have their turn when they are nearer."""


def kind_of_plan(kv_cache: KVCacheManager) -> type[PlanState]:
    """Return what plans over a cache are made on."""
    if isinstance(kv_cache.device, WindowedBlocks):
        return WindowPlanState
    return HybridPlanState if kv_cache.device.keeps_states else PlanState


class HybridPlanState(PlanState):
    """A ``PlanState`` that ends rows where a state is to be left."""

    _passing: Counter[bytes] | None = None
    """How many of the waiting sequences begin with each full block."""

    def add_row(
        self, sequence: Sequence, start: int, num_tokens: int, num_blocks: int, match: PrefixMatch = NO_MATCH
    ) -> None:
        """Plan a row as ``PlanState`` does, cut at the first position where a state is to be left."""
        cut = next(self._ends(sequence, start), start)
        if not start < cut <= start + num_tokens:
            super().add_row(sequence, start, num_tokens, num_blocks, match)
            return
        num_blocks = self.blocks.num_new_blocks(Demand(sequence.sequence_id, cut, match))
        super().add_row(sequence, start, cut - start, num_blocks, match)
        self.rows[sequence.sequence_id] = replace(self.rows[sequence.sequence_id], keeps_state=True)

    def has_states_for(self, candidate: Sequence) -> bool:
        """As ``PlanState.has_states_for``: what has been loaded has its own."""
        is_loaded = self.blocks.num_blocks_of(candidate.sequence_id) > 0
        return is_loaded or self.kv_cache.has_states_for([*self.running, *self.admitted], 1)

    def keys_to_come(self, sequence: Sequence, start: int) -> ListOf[bytes]:
        """Return the keys of the states that a sequence will leave from a position on."""
        size = self.blocks.block_size
        return [sequence.block_keys[end // size - 1] for end in self._ends(sequence, start)]

    def lacks_any(self, candidate: Sequence, match: PrefixMatch, keys: Set[bytes]) -> bool:
        """Whether one of these is the key of a state from which a waiting sequence could begin behind its match."""
        own = self._keys_of(candidate, candidate.num_reusable_tokens)
        return not keys.isdisjoint(own[match.num_tokens // self.blocks.block_size :])

    def _ends(self, sequence: Sequence, start: int) -> Iterator[int]:
        """Yield the positions behind ``start`` where a state of a sequence is to be left, in order."""
        blocks, size, most = self.blocks, self.blocks.block_size, len(sequence.token_ids) - 1
        if most // size * size <= start or not isinstance(blocks, HybridBlocks):
            return
        keys, states = self._keys_of(sequence, most), blocks.states
        kept = (place for place in range(start // size, 0, -1) if states.find(keys[place - 1]) is not None)
        last = size * next(kept, 0)
        for place, num_begun in sorted(self._places(sequence, keys, start // size).items()):
            end = place * size
            if states.find(keys[place - 1]) is not None:
                last = end
            elif (end - last) * num_begun >= LEAST_SAVED:
                yield end
                last = end

    def _places(self, sequence: Sequence, keys: ListOf[bytes], first: int) -> Counter[int]:
        """Return behind which of a sequence's full blocks, from the first ones on, prompts part, and how many of those
        that wait or were here would begin there.
        """
        found, passing, cache = Counter[int](), self._survey(), self.blocks.cache
        num_own = len(self._keys_of(sequence, sequence.num_reusable_tokens)) if sequence in self._compared() else 0
        here = [passing[key] - (place < num_own) for place, key in enumerate(keys[first:], first)]
        for place, (this, following) in enumerate(zip(here, [*here[1:], 0], strict=True), first + 1):
            found[place] += max(0, this - following)
        behind = [cache.num_behind(key) for key in keys[first:]]
        for place, (num_behind, further) in enumerate(zip(behind, [*behind[1:], None], strict=True), first + 1):
            if num_behind is None:
                break
            found[place] += num_behind > 1 or further is None
        if sequence.hidden_from is None:
            last, apart = (sequence.num_prompt_tokens - 1) // self.blocks.block_size, self._blocks_apart()
            found[last] += first < last <= len(keys)
            found.update(range(first // apart * apart + apart, len(keys) + 1, apart))
        return +found

    def _blocks_apart(self) -> int:
        """Return how many blocks lie between the states that a prompt leaves on its way: half of the states that no
        running sequence needs are enough for that, all over the pool.
        """
        blocks = self.blocks
        assert isinstance(blocks, HybridBlocks)  # Invariant: asked before
        num_kept = max(1, blocks.states.num_states - 2 * self.rules.max_num_seqs)
        return max(-(-LEAST_APART * LEAST_SAVED // blocks.block_size), -(-2 * blocks.num_blocks // num_kept))

    def _survey(self) -> Counter[bytes]:
        if self._passing is None:
            keys = (self._keys_of(one, one.num_reusable_tokens) for one in self._compared())
            self._passing = Counter(chain.from_iterable(keys))
        return self._passing

    def _compared(self) -> ListOf[Sequence]:
        return self.waiting[:NUM_COMPARED]

    def _keys_of(self, sequence: Sequence, num_tokens: int) -> ListOf[bytes]:
        """Return the keys of the full blocks of a sequence's first positions."""
        num_blocks = num_tokens // self.blocks.block_size
        self.blocks.hasher.extend(sequence.block_keys, sequence.block_root, sequence.token_ids, num_blocks)
        return sequence.block_keys[:num_blocks]

"""Finds the positions of a sequence behind which a memory keeps a state, and the KV before them. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.prefix_cache import PrefixCache
from pagedcore.kv_cache.prefix_match import FoundBlocks, find_blocks
from pagedcore.kv_cache.state_blocks import KeptState, StateBlocks
from pagedcore.sequence import Sequence

NO_BLOCKS: Final = FoundBlocks((), 0)


def kept_of(
    hasher: BlockHasher, sequence: Sequence, limit: int, states: StateBlocks
) -> Iterator[tuple[KeptState, int]]:
    """Yield the kept states of a sequence's first ``limit`` positions, deepest first, and the full blocks before each.
    """
    keys, size = sequence.block_keys, hasher.block_size
    hasher.extend(keys, sequence.block_root, sequence.token_ids, limit // size)
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


def blocks_before(
    hasher: BlockHasher, sequence: Sequence, kept: KeptState, num_full: int, cache: PrefixCache
) -> FoundBlocks | None:
    """Return the blocks of the positions before a kept state; ``None``: they hold something else."""
    num_tokens = num_full * hasher.block_size + len(kept.tail)
    found = find_blocks(hasher, sequence, num_tokens, cache)
    return found._replace(state=kept.state_id) if found.num_tokens == num_tokens else None


def find_with_state(
    hasher: BlockHasher, sequence: Sequence, limit: int, cache: PrefixCache, states: StateBlocks
) -> FoundBlocks:
    """Find the longest beginning of at most ``limit`` positions whose KV and state a memory holds."""
    found = (blocks_before(hasher, sequence, kept, num_full, cache) for kept, num_full in
             kept_of(hasher, sequence, limit, states))
    return next((one for one in found if one is not None), NO_BLOCKS)


def num_saved(hasher: BlockHasher, sequence: Sequence, num_tokens: int, states: StateBlocks) -> int:
    """Return the positions before ``num_tokens`` behind which a memory keeps no state: those that are computed again
    where the state there is not kept either.
    """
    before = next(kept_of(hasher, sequence, num_tokens - 1, states), None)
    return num_tokens - (before[1] * hasher.block_size + len(before[0].tail) if before is not None else 0)

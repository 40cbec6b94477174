"""Finds the leading positions of a sequence that a memory holds already, and their blocks. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.prefix_cache import Content, PrefixCache
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest beginning of a sequence that need not be computed.

    Invariant: positions whose logits are needed are left to compute, at least the last known one.
    Invariant: there are host blocks or a tail, not both; with a state on the host there is no tail.
    """

    device_blocks: tuple[int, ...] = ()
    """Full blocks on the device, to be shared."""
    tail: tuple[int, int] | None = None
    """A device block and how many of its first tokens come next; to be copied, because it will be written to."""
    host_blocks: tuple[int, ...] = ()
    """Blocks on the host that come next, to be loaded."""
    num_tokens: int = 0
    """Positions covered, once everything is shared, copied and loaded."""
    state: int = -1
    """The state block that the sequence begins from, if its model keeps states and ``num_tokens`` is not 0."""
    shorter: PrefixMatch | None = None
    """What covers less without a tail, of a match with a state and a tail; without a load, of one with a state on the
    host."""
    host_state: int = -1
    """The state block of the host that is to be loaded for the sequence to begin from, if there is one."""

    @property
    def is_to_load(self) -> bool:
        """Whether something of it is on the host."""
        return bool(self.host_blocks) or self.host_state >= 0

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """Device blocks that must keep their contents until the match is used."""
        return self.device_blocks if self.tail is None else (*self.device_blocks, self.tail[0])

    def without_tail(self, block_size: int) -> PrefixMatch:
        """Return the part that needs no load; where nothing is loaded, the part that needs no copy."""
        if self.shorter is not None:
            return self.shorter
        return PrefixMatch(self.device_blocks, num_tokens=len(self.device_blocks) * block_size, state=self.state)

    def extended_by(self, host: PrefixMatch) -> PrefixMatch:
        """Return this match with what ``host``, found in the host's blocks, adds to it if it covers more."""
        if host.num_tokens <= self.num_tokens:
            return self
        blocks = host.held_blocks[len(self.device_blocks) :]
        return PrefixMatch(self.device_blocks, host_blocks=blocks, num_tokens=host.num_tokens)


NO_MATCH = PrefixMatch()


class FoundBlocks(NamedTuple):
    """Blocks of one memory that hold exactly the first positions of a sequence."""

    block_ids: tuple[int, ...]
    num_tokens: int
    """Positions that they hold together."""
    state: int = -1
    """The state block behind these positions, if the model keeps states and there are any."""


def contents(hasher: BlockHasher, sequence: Sequence, num_tokens: int, first_block: int = 0) -> Iterator[Content]:
    """Yield what each block of the first ``num_tokens`` positions holds; the last one may be partly filled."""
    size = hasher.block_size
    parent_key = sequence.block_keys[first_block - 1] if first_block else sequence.block_root
    for block in range(first_block, num_tokens // size):
        start = block * size
        hasher.extend(sequence.block_keys, sequence.block_root, sequence.token_ids, block + 1)
        key = sequence.block_keys[block]
        yield Content(key, parent_key, tuple(sequence.token_ids[start : start + size]), block == 0)
        parent_key = key
    tail = tuple(sequence.token_ids[num_tokens - num_tokens % size : num_tokens])
    if tail:
        yield Content(hasher.key(parent_key, tail), parent_key, tail, num_tokens < size)


def find_blocks(hasher: BlockHasher, sequence: Sequence, num_tokens: int, cache: PrefixCache) -> FoundBlocks:
    """Find the blocks of a memory that hold the first ``num_tokens`` positions of a sequence, as far as there are any.

    Unlike ``match_in`` it takes no block that only begins like the sequence, so what is found may be kept for it.
    """
    block_ids, num_found = list[int](), 0
    for content in contents(hasher, sequence, num_tokens):
        block_id = cache.find(content)
        if block_id is None:
            break
        block_ids.append(block_id)
        num_found += len(content.token_ids)
    return FoundBlocks(tuple(block_ids), num_found)


def match_in(hasher: BlockHasher, sequence: Sequence, cache: PrefixCache) -> PrefixMatch:
    """Find the longest beginning of a sequence that one memory holds, as if that were the device."""
    size, limit = hasher.block_size, sequence.num_reusable_tokens
    full = find_blocks(hasher, sequence, limit - limit % size, cache)
    start, num_full = full.num_tokens, len(full.block_ids)
    parent_key = sequence.block_keys[num_full - 1] if num_full else sequence.block_root
    tail = cache.find_beginning(parent_key, tuple(sequence.token_ids[start : min(start + size, limit)]))
    return PrefixMatch(full.block_ids, tail, num_tokens=start + (tail[1] if tail is not None else 0))

"""Block tables of a model with windows: its blocks, and window blocks beside them that sequences leave behind.

A sequence reads all blocks of its positions, and the window blocks of the last ``window`` positions alone. So it holds
those, and gives up the others in the step in which it leaves them. It can begin behind positions whose blocks are all
known, where those that cover the window before have their window blocks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot
from pagedcore.kv_cache.prefix_cache import KeyOf, PrefixCache
from pagedcore.kv_cache.prefix_match import FoundBlocks, PrefixMatch, contents
from pagedcore.kv_cache.reservation import Demand, Reservation
from pagedcore.kv_cache.window_blocks import WindowBlocks
from pagedcore.protocols import Int32Array, Int64Array
from pagedcore.sequence import Sequence


class WindowedBlocks(BlockManager):
    """A ``BlockManager`` whose sequences hold window blocks too; arguments as ``KVCacheManager``.

    Invariant: a sequence holds the window blocks of exactly those of its blocks that it has not passed, and has passed
        none that its next token reads.
    """

    def __init__(self, num_blocks: int, block_size: int, num_windows: int, window: int, **settings: Any) -> None:
        super().__init__(num_blocks, block_size, **settings)
        self.window = window
        """Positions, the own one included, that layers with a window read at most."""
        self.windows = WindowBlocks(num_windows, num_blocks, self._is_registered)
        self.cache.forget_window = self.windows.forget
        self._passed: dict[int, int] = {}
        """Leading blocks of each sequence whose window blocks it has given up, by its id."""

    def reset(self) -> None:
        """As ``BlockManager.reset``; every window block is free then."""
        super().reset()
        self.windows.reset()
        self.cache.forget_window = self.windows.forget
        self._passed = {}

    def state_counts(self) -> dict[str, int]:
        """Return how many window blocks there are, are held, are kept, and were evicted."""
        windows = self.windows
        return {"num_windows": windows.num_windows, "num_windows_used": windows.num_used,
                "num_windows_kept": windows.num_kept, "num_windows_evicted": windows.num_evictions}

    def first_read(self, position: int) -> int:
        """Return the first block whose window block the token at a position reads."""
        return max(0, position + 1 - self.window) // self.block_size

    def match(self, sequence: Sequence, host: PrefixCache | None = None) -> PrefixMatch:
        """Find the longest beginning of a sequence that it can begin behind."""
        match = super().match(sequence)
        num_full = self._num_covered(match.device_blocks)
        shorter = PrefixMatch(match.device_blocks[:num_full], num_tokens=num_full * self.block_size)
        if match.tail is None or not self._covers((*match.device_blocks, match.tail[0]), match.num_tokens):
            return shorter
        return replace(match, shorter=shorter)

    def find(self, sequence: Sequence, num_tokens: int) -> FoundBlocks:
        """Find a beginning of at most ``num_tokens`` positions that a sequence can go on behind."""
        found = super().find(sequence, num_tokens)
        if self._covers(found.block_ids, found.num_tokens):
            return found
        num_full = self._num_covered(found.block_ids[: found.num_tokens // self.block_size])
        return FoundBlocks(found.block_ids[:num_full], num_full * self.block_size)

    def reserve(self, demands: Iterable[Demand]) -> Reservation | None:
        """As ``BlockManager.reserve``, with a window block for each new block: all of both, or nothing."""
        demands = list(demands)
        begun = [(one.sequence_id, one.match, self.first_read(one.match.num_tokens)) for one in demands
                 if one.match.num_tokens]
        sources = [match.tail[0] for _, match, _ in begun if match.tail is not None]
        shared = [*chain.from_iterable(match.device_blocks[first:] for _, match, first in begun), *sources]
        if not self.windows.has_room_for(sum(map(self.num_new_blocks, demands)), shared):
            return None
        before = [(one.sequence_id, self.num_blocks_of(one.sequence_id) + len(one.match.device_blocks))
                  for one in demands]
        reservation = super().reserve(demands)
        if reservation is None:
            return None
        self.windows.hold(shared)
        self.windows.allocate([block_id for number, count in before for block_id in self._blocks_of(number)[count:]])
        self._passed.update((number, first) for number, _, first in begun)
        free_sources = partial(self.windows.free, sources, is_end=True)
        return reservation.also(free_sources, free_sources)

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``BlockManager.register``; what has left the window behind these positions is given up."""
        super().register(sequence, num_tokens)
        number = sequence.sequence_id
        # Why one position more: who shares this prompt begins one earlier, as its last token gives the first logits.
        first, passed = self.first_read(num_tokens - 1), self._passed.get(number, 0)
        if first > passed and (table := self._tables.get(number)) is not None:
            self._passed[number] = first
            self.windows.free(table.block_ids[passed:first].tolist(), is_end=False)

    def add_table(self, sequence_id: int, block_ids: ListOf[int], num_registered: int) -> None:
        """As ``BlockManager.add_table``; of what is given, no window block is held."""
        super().add_table(sequence_id, block_ids, num_registered)
        self._passed[sequence_id] = len(block_ids)

    def window_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the window blocks to copy with these (source, destination) blocks."""
        of_block = self.windows.of_block
        return [(int(of_block[source]), int(of_block[destination])) for source, destination in pairs]

    def tables_of_windows(self, tables: Int32Array, starts: Int64Array) -> Int32Array:
        """Return the window blocks that rows read and write, as ``RaggedRows.window_tables``.

        Args:
            tables: [R, W] of the rows, with -1 past their ends.
            starts: [R] first position of each row.
        """
        first = np.maximum(0, starts + 1 - self.window) // self.block_size
        found, least = np.full_like(tables, -1), int(first.min())
        blocks = tables[:, least:]
        is_read = (np.arange(least, tables.shape[1]) >= first[:, None]) & (blocks >= 0)
        found[:, least:][is_read] = self.windows.of_block[blocks[is_read]]
        return found

    def bookkeeping(self, in_transfers: Iterable[int] = (), moving: Iterable[int] = ()) -> BlockSnapshot:
        """As ``BlockManager.bookkeeping``, with the window blocks."""
        holders = Counter[int]()
        for number in self._tables:
            holders.update(self.windows.of_block[self._blocks_of(number)[self._passed.get(number, 0) :]].tolist())
        for block_id, times in self._sources.items():
            holders[int(self.windows.of_block[block_id])] += times
        windows = self.windows.bookkeeping(holders, self.window, self._passed)
        return replace(super().bookkeeping(in_transfers), windows=windows)

    def snapshot(self) -> dict[str, Any]:
        """As ``BlockManager.snapshot``, with the window blocks."""
        return {**super().snapshot(), "windows": {
            **self.windows.snapshot(), "left": [[number, count] for number, count in self._passed.items()]}}

    def restore(self, state: Mapping[str, Any], key_of: KeyOf, moving: ListOf[int] = ()) -> None:
        """As ``BlockManager.restore``, with the window blocks."""
        super().restore(state, key_of, moving)
        self.windows.restore(state["windows"])
        self._passed = {int(number): int(count) for number, count in state["windows"]["left"]}
        snapshot = self.bookkeeping().windows
        assert snapshot is not None  # Invariant: as above
        counts = enumerate(snapshot.reference_counts)
        if snapshot.holders.get(-1) or any(count != snapshot.holders.get(one, 0) for one, count in counts):
            raise ValueError("references of window blocks do not add up")

    def _register(self, table: BlockTable, sequence: Sequence, num_tokens: int) -> None:
        before = table.num_registered
        super()._register(table, sequence, num_tokens)
        for place in range(before, table.num_registered):
            # Why: what is computed again because its window block was gone has one now, and the known block has none.
            if not self.cache.is_registered(block_id := int(table.block_ids[place])):
                content = next(contents(self.hasher, sequence, (place + 1) * self.block_size, place))
                if (known := self.cache.find(content)) is not None:
                    self.windows.share(block_id, known)

    def _truncate(self, sequence_id: int, num_blocks: int, *, is_minor: bool = False) -> int:
        passed = self._passed.get(sequence_id, 0)
        held = self._blocks_of(sequence_id)[max(num_blocks, passed) :]
        self.windows.free(reversed(held), is_end=True)
        if num_blocks == 0:
            self._passed.pop(sequence_id, None)
        return super()._truncate(sequence_id, num_blocks, is_minor=is_minor)

    def _is_registered(self, block_id: int) -> bool:
        return self.cache.is_registered(block_id)

    def _covers(self, block_ids: ListOf[int], num_tokens: int) -> bool:
        """Whether the blocks of the first positions have the window blocks to go on behind these."""
        return bool((self.windows.of_block[list(block_ids[self.first_read(num_tokens) :])] >= 0).all())

    def _num_covered(self, block_ids: ListOf[int]) -> int:
        """Return how many full leading blocks have the window blocks to go on behind them."""
        known, count = self.windows.of_block[list(block_ids)] >= 0, len(block_ids)
        while count:
            first = self.first_read(count * self.block_size)
            missing = np.flatnonzero(~known[first:count])
            if not len(missing):
                break
            count = first + int(missing[-1])
        return count

"""Block tables of the device: which sequence holds which blocks, what they hold, and blocks reserved for one step.

Moves no bytes. A step's blocks are reserved for all its rows or for none; they are in the tables from then on, so that
the batch can be built, and ``cancel`` takes exactly them out again. A block with two holders is never written to: a
sequence that shares a full block only reads it, one that continues inside a block gets a copy of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.eviction import EvictionPolicy, least_recently_used
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot
from pagedcore.kv_cache.prefix_cache import BlockMemory, KeyOf, PrefixCache
from pagedcore.kv_cache.prefix_match import FoundBlocks, PrefixMatch, contents, find_blocks, match_in
from pagedcore.kv_cache.reservation import Demand, Reservation
from pagedcore.sequence import Sequence


class _Growth(NamedTuple):
    sequence_id: int
    table: BlockTable
    num_blocks_before: int


class BlockManager(BlockMemory):
    """Block tables of all sequences over the device's blocks; arguments as ``KVCacheManager``.

    Invariant: a sequence without blocks has no table.
    Invariant: a block's references are the tables it is in, the transfers it is part of and the open reservation's
        copies that read it.
    """

    keeps_states = False
    """Whether each row of a step needs a state block too, and each row is in a reservation."""

    def __init__(
        self, num_blocks: int, block_size: int, *, policy: EvictionPolicy = least_recently_used, secret: bytes = b"",
        copies_blocks: bool = True,
    ) -> None:
        super().__init__(num_blocks, policy)
        self.block_size = block_size
        self.copies_blocks = copies_blocks
        self.hasher = BlockHasher(block_size, secret)
        self._tables: dict[int, BlockTable] = {}
        self._sources: Counter[int] = Counter()

    def reset(self) -> None:
        """As ``BlockMemory.reset``; no sequence has a table then."""
        super().reset()
        self._tables, self._sources = {}, Counter()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks, or did and still have a table."""
        return len(self._tables)

    def num_blocks_of(self, sequence_id: int) -> int:
        """Blocks the sequence holds now."""
        table = self._tables.get(sequence_id)
        return table.num_blocks if table is not None else 0

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that nothing holds and that hold nothing: what can be had without an eviction."""
        return len(self._pool.free_blocks)

    def num_blocks_needed(self, sequence_id: int, num_tokens: int) -> int:
        """Further blocks the sequence needs to hold ``num_tokens`` positions in all."""
        table = self._tables.get(sequence_id)
        needed = -(-num_tokens // self.block_size)
        if table is not None:
            needed -= table.num_blocks
        return needed if needed > 0 else 0

    def outgrown(self, sequences: Iterable[Sequence]) -> set[int]:
        """Ids of the sequences whose blocks do not hold all of their tokens."""
        tables, size = self._tables, self.block_size
        return {
            one.sequence_id for one in sequences
            if (table := tables.get(one.sequence_id)) is None or table.num_blocks * size < len(one.token_ids)
        }

    def num_new_blocks(self, demand: Demand) -> int:
        """Blocks that a demand needs besides what its sequence holds and its match shares."""
        needed = self.num_blocks_needed(demand.sequence_id, demand.num_tokens)
        return max(0, needed - len(demand.match.device_blocks))

    def own_blocks_of(self, sequence_id: int) -> list[int]:
        """Blocks that only this sequence holds, which would be available without it."""
        return [block_id for block_id in self._blocks_of(sequence_id) if self._pool.reference_counts[block_id] == 1]

    def only_held_by(self, sequence_ids: Iterable[int]) -> set[int]:
        """Blocks that nothing but these sequences holds, which would be available without all of them."""
        held = Counter(block_id for number in sequence_ids for block_id in self._blocks_of(number))
        return {block_id for block_id, times in held.items() if self._pool.reference_counts[block_id] == times}

    def is_held(self, block_id: int) -> bool:
        """Whether the block has a reference."""
        return self._pool.reference_counts[block_id] > 0

    def table(self, sequence_id: int) -> BlockTable:
        """Return the table of a sequence. Raises ``InternalError`` if it holds no blocks."""
        return self.tables([sequence_id])[0]

    def tables(self, sequence_ids: Iterable[int]) -> list[BlockTable]:
        """Return the tables of sequences. Raises ``InternalError`` if one holds no blocks."""
        try:
            return [self._tables[sequence_id] for sequence_id in sequence_ids]
        except KeyError as error:
            raise InternalError(f"sequence {error} holds no blocks") from None

    def match(self, sequence: Sequence, host: PrefixCache | None = None) -> PrefixMatch:
        """Find the longest beginning of a sequence that the device, or another memory beside it, holds."""
        match = match_in(self.hasher, sequence, self.cache)
        if host is not None:
            match = match.extended_by(match_in(self.hasher, sequence, host))
        return match if self.copies_blocks else match.without_tail(self.block_size)

    def state_counts(self) -> dict[str, int]:
        """Return what statistics say of states; nothing for a model that keeps none."""
        return {}

    def find(self, sequence: Sequence, num_tokens: int) -> FoundBlocks:
        """Find what the device holds of exactly the first ``num_tokens`` positions of a sequence."""
        return find_blocks(self.hasher, sequence, num_tokens, self.cache)

    def reserve(self, demands: Iterable[Demand]) -> Reservation | None:
        """Let tables hold the positions asked for, each table once, or change nothing if the pool is too small."""
        demands = list(demands)
        held = [block_id for demand in demands for block_id in demand.match.held_blocks]
        blocks = self.allocate_blocks(held, sum(map(self.num_new_blocks, demands)))
        return self._grow_tables(demands, blocks[len(held) :]) if blocks is not None else None

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Register what the sequence's full blocks hold, once its first ``num_tokens`` positions are computed.

        Of a prompt that several sequences start from, the end is registered too, so that it is computed once.
        """
        table = self._tables.get(sequence.sequence_id)
        if table is None:
            return
        if num_tokens == sequence.num_prompt_tokens and sequence.params.num_sequences > 1:
            self._register(table, sequence, num_tokens)
        elif num_tokens // self.block_size > table.num_registered:
            self._register(table, sequence, num_tokens - num_tokens % self.block_size)

    def register_all(self, sequence: Sequence) -> None:
        """Register what all computed positions hold, those of the partly filled last block included."""
        if sequence.sequence_id in self._tables:
            self._register(self._tables[sequence.sequence_id], sequence, sequence.num_computed_tokens)

    def free_blocks(self, sequence: Sequence, *, num_kept_tokens: int = 0) -> int:
        """Free the blocks behind the first ``num_kept_tokens``, last first; return how many. They stay cached."""
        self.register_all(sequence)
        sequence.num_computed_tokens = min(num_kept_tokens, sequence.num_computed_tokens)
        is_minor = sequence.hidden_from is not None
        return self._truncate(sequence.sequence_id, self.blocks_for(num_kept_tokens), is_minor=is_minor)

    def shorten(self, sequence: Sequence) -> None:
        """Free the blocks behind those of the computed positions, of which nothing is registered."""
        self._truncate(sequence.sequence_id, self.blocks_for(sequence.num_computed_tokens))

    def evict_blocks(self, sequence_id: int, *, spares_shared: bool) -> int:
        """Free a sequence's blocks and evict what they hold, perhaps except shared ones; return how many."""
        for block_id in self.own_blocks_of(sequence_id) if spares_shared else self._blocks_of(sequence_id):
            self.cache.evict_block(block_id)
        return self._truncate(sequence_id, 0)

    def free_and_evict_tail(self, sequence: Sequence) -> int:
        """Free a sequence's blocks and return how many; full blocks stay cached, the partly filled end is evicted."""
        table = self._tables.get(sequence.sequence_id)
        for block_id in table.block_ids[table.num_registered :].tolist() if table is not None else ():
            self.cache.evict_block(block_id)
        return self._truncate(sequence.sequence_id, 0)

    def take_table(self, sequence_id: int) -> tuple[int, ...]:
        """Remove a sequence's table and return its blocks; the references pass to the caller."""
        table = self._tables.pop(sequence_id)
        return tuple(table.block_ids.tolist())

    def add_table(self, sequence_id: int, block_ids: ListOf[int], num_registered: int) -> None:
        """Make a table; the caller's references pass to it. Raises ``InternalError`` if the sequence has one."""
        if sequence_id in self._tables:
            raise InternalError(f"sequence {sequence_id} holds blocks already")
        table = self._tables[sequence_id] = BlockTable()
        table.append(block_ids)
        table.num_registered = num_registered

    def share_blocks(self, sequence: Sequence, found: FoundBlocks) -> None:
        """Give a sequence without blocks those that hold its first positions, which then count as computed."""
        self.hold_blocks(found.block_ids)
        self.add_table(sequence.sequence_id, found.block_ids, found.num_tokens // self.block_size)
        sequence.num_computed_tokens = found.num_tokens

    def bookkeeping(self, in_transfers: Iterable[int] = (), moving: Iterable[int] = ()) -> BlockSnapshot:
        """Copy the bookkeeping for the state laws; ``in_transfers`` are the blocks that transfers hold, ``moving`` the
        states.
        """
        tables = {sid: tuple(table.block_ids.tolist()) for sid, table in self._tables.items()}
        holds = Counter(block_id for table in tables.values() for block_id in table) + self._sources
        holds.update(in_transfers)
        return BlockSnapshot(self.block_size, self._bookkeeping(holds), None, tables, {})

    def snapshot(self) -> dict[str, Any]:
        """As ``BlockMemory.snapshot``, and the tables: (sequence, blocks, registered blocks) each."""
        tables = [[number, one.block_ids.tolist(), one.num_registered] for number, one in self._tables.items()]
        return {**super().snapshot(), "tables": tables}

    def restore(self, state: Mapping[str, Any], key_of: KeyOf, moving: ListOf[int] = ()) -> None:
        """As ``BlockMemory.restore``, with the tables; ``moving`` are the states that transfers hold."""
        super().restore(state, key_of)
        for number, block_ids, num_registered in state["tables"]:
            self.add_table(number, block_ids, num_registered)

    def _grow_tables(self, demands: list[Demand], block_ids: ListOf[int]) -> Reservation:
        growths, copies, fresh = [], list[tuple[int, int]](), iter(block_ids)
        for demand in demands:
            match, new = demand.match, list(islice(fresh, self.num_new_blocks(demand)))
            if match.tail is not None:
                copies.append((match.tail[0], new[0]))
            if not new and not match.device_blocks:
                continue
            table = self._tables.get(demand.sequence_id)
            if table is None:
                table = self._tables[demand.sequence_id] = BlockTable()
            growths.append(_Growth(demand.sequence_id, table, table.num_blocks))
            table.append((*match.device_blocks, *new))
            # Safety: a sequence that shares blocks never registers them again, should they have been evicted as wrong.
            table.num_registered += len(match.device_blocks)
        sources = [source for source, _ in copies]
        self._sources.update(sources)
        return Reservation(
            tuple(copies), partial(self._free_sources, sources), partial(self._shorten_tables, growths, sources)
        )

    def _shorten_tables(self, growths: ListOf[_Growth], sources: ListOf[int]) -> None:
        """Shorten tables to what they were, last first, except of sequences that have been freed since."""
        for growth in reversed(growths):
            if self._tables.get(growth.sequence_id) is growth.table:
                self._truncate(growth.sequence_id, growth.num_blocks_before)
        self._free_sources(sources)

    def _free_sources(self, sources: ListOf[int]) -> None:
        for source in sources:
            self._sources[source] -= 1
            # Why minor: whoever reads a block for a copy has not held it, and leaves it what it is.
            self.cache.free_block(source, is_minor=True)

    def _register(self, table: BlockTable, sequence: Sequence, num_tokens: int) -> None:
        for content in contents(self.hasher, sequence, num_tokens, table.num_registered):
            self.cache.note_computed(content.key)
            if not self.cache.register_block(int(table.block_ids[table.num_registered]), content):
                return
            # Invariant: only full blocks count, because a partly filled one will hold more.
            if len(content.token_ids) == self.block_size:
                table.num_registered += 1

    def _blocks_of(self, sequence_id: int) -> list[int]:
        table = self._tables.get(sequence_id)
        return table.block_ids.tolist() if table is not None else []

    def _truncate(self, sequence_id: int, num_blocks: int, *, is_minor: bool = False) -> int:
        table = self._tables.get(sequence_id)
        if table is None:
            return 0
        removed = table.truncate(num_blocks)
        for block_id in removed:
            self.cache.free_block(block_id, is_minor=is_minor)
        if num_blocks == 0:
            del self._tables[sequence_id]
        return len(removed)

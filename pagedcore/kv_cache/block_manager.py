"""Who holds which device blocks: sequence id to block table, what the blocks hold, and blocks taken for one step.

Moves no bytes. A step's blocks are reserved for all its rows or for none; they are in the tables from then on, so that
the batch can be built, and ``cancel`` takes exactly them out again. A block with two holders is never written to: who
shares a full block only reads it, who goes on inside a block gets a copy of it. Read ``host_tier`` next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_hash import BlockHasher
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.eviction import EvictionPolicy, least_recently_used
from pagedcore.kv_cache.host_cache import HostCache
from pagedcore.kv_cache.memory_snapshot import MemorySnapshot, take_snapshot
from pagedcore.kv_cache.prefix_cache import PrefixCache
from pagedcore.kv_cache.prefix_match import FoundBlocks, PrefixMatch, contents, find_prefix
from pagedcore.kv_cache.reservation import Demand, Growth, Reservation
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All block bookkeeping at one moment, as plain values."""

    block_size: int
    device: MemorySnapshot
    host: MemorySnapshot | None
    tables: Mapping[int, tuple[int, ...]]
    pins: Mapping[int, tuple[int, ...]]
    """Host blocks kept for sequences."""


class BlockManager:
    """Block tables of all sequences over one pool, and the prefix cache over its blocks.

    Invariant: a sequence without blocks has no table.
    Invariant: a block's references are the tables it is in, the transfers it is part of and the open reservation's
        copies that read it.
    """

    __slots__ = ("_copies_blocks", "_pool", "_sources", "_tables", "block_size", "cache", "hasher", "host")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        policy: EvictionPolicy = least_recently_used,
        secret: bytes = b"",
        copies_blocks: bool = True,
    ) -> None:
        """Start with every block free.

        Args:
            num_blocks: of the device.
            block_size: tokens per block.
            num_host_blocks: of the host; 0 for no host tier.
            policy: the order in which cached blocks are forgotten, on either side.
            secret: of the content keys; see ``BlockHasher``.
            copies_blocks: whether a partly matching block can be copied; else only full ones are shared.
        """
        self.block_size = block_size
        self._copies_blocks = copies_blocks
        self.hasher = BlockHasher(block_size, secret)
        self._pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self._pool, policy)
        self._tables: dict[int, BlockTable] = {}
        self._sources: Counter[int] = Counter()
        self.host = HostCache(self, num_host_blocks, policy) if num_host_blocks else None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be had now: free ones, and those that only keep what nobody uses at the moment."""
        return self.cache.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self._pool.num_blocks - self.cache.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and whose contents can be found."""
        return self._pool.num_idle

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, sequence_id: int) -> int:
        """Blocks the sequence holds now."""
        table = self._tables.get(sequence_id)
        return table.num_blocks if table is not None else 0

    def num_blocks_needed(self, sequence_id: int, num_tokens: int) -> int:
        """Further blocks the sequence needs to hold ``num_tokens`` positions in all."""
        table = self._tables.get(sequence_id)
        needed = -(-num_tokens // self.block_size)
        if table is not None:
            needed -= table.num_blocks
        return needed if needed > 0 else 0

    def own_blocks_of(self, sequence_id: int) -> list[int]:
        """Blocks that would be available if the sequence gave up what it holds; others hold the rest too."""
        table = self._tables.get(sequence_id)
        held: list[int] = table.block_ids.tolist() if table is not None else []
        return [block_id for block_id in held if self._pool.num_references(block_id) == 1]

    def is_held(self, block_id: int) -> bool:
        """Whether anybody holds the block."""
        return self._pool.num_references(block_id) > 0

    def table(self, sequence_id: int) -> BlockTable:
        """Return the table of a sequence that holds blocks.

        Raises:
            InternalError: it holds none.
        """
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise InternalError(f"sequence {sequence_id} holds no blocks") from None

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest beginning of a sequence that the device or the host holds."""
        there = self.host.cache if self.host is not None and not self.host.is_stuck else None
        match = find_prefix(self.hasher, sequence, self.cache, there)
        return match if self._copies_blocks else match.without_tail(self.block_size)

    def reserve(self, demands: Iterable[Demand]) -> Reservation | None:
        """Let every table hold as many positions as asked for, or change nothing when the pool is too small.

        Args:
            demands: each sequence at most once.
        """
        demands = list(demands)
        held = [block_id for demand in demands for block_id in demand.match.held_blocks]
        # Why: what is shared must be held before anything is allocated, or it could be evicted for that.
        for block_id in held:
            self.cache.hold(block_id)
        block_ids = self.cache.allocate(sum(map(self._num_new_blocks, demands)))
        if block_ids is None:
            for block_id in reversed(held):
                self.cache.release(block_id)
            return None
        return self._grow_tables(demands, block_ids)

    def register(self, sequence: Sequence, num_tokens: int) -> None:
        """Note what the sequence's full blocks hold, once its first ``num_tokens`` positions are computed.

        Of a prompt that siblings wait for, the end is noted too, so that they need not compute it again.
        """
        table = self._tables.get(sequence.sequence_id)
        if table is None:
            return
        if num_tokens == sequence.num_prompt_tokens and sequence.params.num_sequences > 1:
            self._register(table, sequence, num_tokens)
        elif num_tokens // self.block_size > table.num_registered:
            self._register(table, sequence, num_tokens - num_tokens % self.block_size)

    def release(self, sequence: Sequence) -> int:
        """Give up all blocks of a sequence, last first, and return how many; what they hold can be found again."""
        return self.cut(sequence, 0)

    def cut(self, sequence: Sequence, num_tokens: int) -> int:
        """Give up the blocks behind the first ``num_tokens`` computed positions in the same way."""
        table = self._tables.get(sequence.sequence_id)
        if table is None:
            return 0
        self.register_all(sequence)
        sequence.num_computed_tokens = min(num_tokens, sequence.num_computed_tokens)
        return self._cut(sequence.sequence_id, table, self.blocks_for(num_tokens))

    def register_all(self, sequence: Sequence) -> None:
        """Note what all computed positions hold, those of the partly filled last block included."""
        if sequence.sequence_id in self._tables:
            self._register(self._tables[sequence.sequence_id], sequence, sequence.num_computed_tokens)

    def forget(self, sequence_id: int, *, spares_shared: bool) -> int:
        """Give up a sequence's blocks and return how many; nobody finds them, but shared ones if those are spared."""
        table = self._tables.get(sequence_id)
        if table is None:
            return 0
        for block_id in self.own_blocks_of(sequence_id) if spares_shared else table.block_ids.tolist():
            self.cache.discard(block_id)
        return self._cut(sequence_id, table, 0)

    def drop(self, sequence: Sequence) -> int:
        """Give up all blocks of a sequence that nobody will continue, and return how many.

        What its full blocks hold can be found again, what its end holds cannot.
        """
        table = self._tables.get(sequence.sequence_id)
        if table is None:
            return 0
        for block_id in table.block_ids[table.num_registered :].tolist():
            self.cache.discard(block_id)
        return self._cut(sequence.sequence_id, table, 0)

    def take_table(self, sequence_id: int) -> tuple[int, ...]:
        """Take a sequence's blocks out of its table; the references pass to the caller."""
        table = self._tables.pop(sequence_id)
        return tuple(table.block_ids.tolist())

    def give_table(self, sequence_id: int, block_ids: ListOf[int], num_registered: int) -> None:
        """Make a table of blocks; the caller's references pass to it.

        Raises:
            InternalError: the sequence has one.
        """
        if sequence_id in self._tables:
            raise InternalError(f"sequence {sequence_id} holds blocks already")
        table = self._tables[sequence_id] = BlockTable()
        table.append(block_ids)
        table.num_registered = num_registered

    def share(self, sequence: Sequence, found: FoundBlocks) -> None:
        """Give a sequence without blocks those that hold its first positions, which count as computed then."""
        for block_id in found.block_ids:
            self.cache.hold(block_id)
        self.give_table(sequence.sequence_id, found.block_ids, found.num_tokens // self.block_size)
        sequence.num_computed_tokens = found.num_tokens

    def undo_growth(self, growth: Growth) -> None:
        """Cut a table back to what it was, unless the sequence gave it up meanwhile."""
        if self._tables.get(growth.sequence_id) is growth.table:
            self._cut(growth.sequence_id, growth.table, growth.num_blocks_before)

    def release_sources(self, copies: Iterable[tuple[int, int]]) -> None:
        """Give up the references to blocks that were copied."""
        for source, _ in copies:
            self._sources[source] -= 1
            self.cache.release(source)

    def snapshot(self) -> BlockSnapshot:
        """Copy the bookkeeping for the checker of invariants."""
        tables = {sid: tuple(table.block_ids.tolist()) for sid, table in self._tables.items()}
        holds = Counter(block_id for table in tables.values() for block_id in table) + self._sources
        if self.host is None:
            return BlockSnapshot(self.block_size, take_snapshot(self._pool, self.cache, holds), None, tables, {})
        holds.update(block_id for one in self.host.in_flight for block_id in one.device_blocks)
        device = take_snapshot(self._pool, self.cache, holds)
        return BlockSnapshot(self.block_size, device, self.host.snapshot(), tables, self.host.pins)

    def _num_new_blocks(self, demand: Demand) -> int:
        needed = self.num_blocks_needed(demand.sequence_id, demand.num_tokens)
        return max(0, needed - len(demand.match.device_blocks))

    def _grow_tables(self, demands: list[Demand], block_ids: list[int]) -> Reservation:
        growths, copies, used = [], list[tuple[int, int]](), 0
        for demand in demands:
            new = block_ids[used : used + self._num_new_blocks(demand)]
            used += len(new)
            if demand.match.tail is not None:
                copies.append((demand.match.tail[0], new[0]))
            if new or demand.match.device_blocks:
                growths.append(self._extend_table(demand, new))
        self._sources.update(source for source, _ in copies)
        return Reservation(self, growths, tuple(copies))

    def _extend_table(self, demand: Demand, block_ids: list[int]) -> Growth:
        table = self._tables.get(demand.sequence_id)
        if table is None:
            table = self._tables[demand.sequence_id] = BlockTable()
        growth = Growth(demand.sequence_id, table, table.num_blocks)
        if shared := demand.match.device_blocks:
            table.append(shared)
            # Safety: who shares blocks never makes them known again, should they have been forgotten as untrustworthy.
            table.num_registered = len(shared)
        table.append(block_ids)
        return growth

    def _register(self, table: BlockTable, sequence: Sequence, num_tokens: int) -> None:
        for content in contents(self.hasher, sequence, num_tokens, table.num_registered):
            if not self.cache.register(int(table.block_ids[table.num_registered]), content):
                return
            # Invariant: only full blocks count, because a partly filled one will hold more.
            if len(content.token_ids) == self.block_size:
                table.num_registered += 1

    def _cut(self, sequence_id: int, table: BlockTable, num_blocks: int) -> int:
        removed = table.cut(num_blocks)
        for block_id in removed:
            self.cache.release(block_id)
        if num_blocks == 0:
            del self._tables[sequence_id]
        return len(removed)

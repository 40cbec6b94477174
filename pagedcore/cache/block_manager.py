"""Who holds which KV blocks: sequence id to block table, and blocks taken provisionally for one step.

Moves no bytes and knows no tokens. A step's blocks are reserved for all its rows or for none; they are in the tables
from then on, so that the batch can be built, and ``cancel`` takes exactly them out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from pagedcore.cache.block_pool import BlockPool
from pagedcore.cache.block_table import BlockTable
from pagedcore.errors import InternalError


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All block bookkeeping at one moment, as plain values."""

    block_size: int
    free_blocks: tuple[int, ...]
    reference_counts: tuple[int, ...]
    tables: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Growth:
    sequence_id: int
    table: BlockTable
    num_blocks_before: int


class _ReservationState(Enum):
    OPEN = auto()
    COMMITTED = auto()
    CANCELLED = auto()


class Reservation:
    """Blocks taken for one step: kept by ``commit``, given back by ``cancel``.

    Invariant: it closes once; closing it again the same way does nothing, the other way is an ``InternalError``.
    Invariant: blocks of a sequence that was freed meanwhile are not its business any more.
    """

    __slots__ = ("_growths", "_manager", "_state")

    def __init__(self, manager: BlockManager, growths: list[_Growth]) -> None:
        self._manager = manager
        self._growths = growths
        self._state = _ReservationState.OPEN

    def commit(self) -> None:
        """Keep the blocks.

        Raises:
            InternalError: the reservation was cancelled.
        """
        self._close(_ReservationState.COMMITTED)

    def cancel(self) -> None:
        """Take the blocks out of the tables again and free them, last first.

        Raises:
            InternalError: the reservation was committed.
        """
        if self._close(_ReservationState.CANCELLED):
            for growth in reversed(self._growths):
                self._manager.undo_growth(growth.sequence_id, growth.table, growth.num_blocks_before)

    def _close(self, state: _ReservationState) -> bool:
        if self._state not in (_ReservationState.OPEN, state):
            raise InternalError(f"reservation: {self._state.name.lower()} before it was {state.name.lower()}")
        was_open, self._state = self._state is _ReservationState.OPEN, state
        return was_open


class BlockManager:
    """Block tables of all sequences over one pool.

    Invariant: a sequence without blocks has no table.
    Invariant: a block's reference count is the number of tables it is in.
    """

    __slots__ = ("_pool", "_tables", "block_size")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

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

    def table(self, sequence_id: int) -> BlockTable:
        """Return the table of a sequence that holds blocks.

        Raises:
            InternalError: it holds none.
        """
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise InternalError(f"sequence {sequence_id} holds no blocks") from None

    def reserve(self, demands: Iterable[tuple[int, int]]) -> Reservation | None:
        """Let every table hold as many positions as asked for, or change nothing when the pool is too small.

        Args:
            demands: (sequence id, positions in all), each sequence at most once.
        """
        needs = [(sid, n) for sid, num_tokens in demands if (n := self.num_blocks_needed(sid, num_tokens))]
        block_ids = self._pool.allocate(sum(num_blocks for _, num_blocks in needs))
        if block_ids is None:
            return None
        growths, used = [], 0
        for sequence_id, num_blocks in needs:
            growths.append(self._extend_table(sequence_id, block_ids[used : used + num_blocks]))
            used += num_blocks
        return Reservation(self, growths)

    def free(self, sequence_id: int) -> int:
        """Give up all blocks of a sequence, last block first, and return how many; none is no error."""
        table = self._tables.get(sequence_id)
        return self._cut(sequence_id, table, 0) if table is not None else 0

    def undo_growth(self, sequence_id: int, table: BlockTable, num_blocks: int) -> None:
        """Cut ``table`` back to ``num_blocks`` blocks, unless the sequence gave it up meanwhile."""
        if self._tables.get(sequence_id) is table:
            self._cut(sequence_id, table, num_blocks)

    def snapshot(self) -> BlockSnapshot:
        """Copy the bookkeeping for the checker of invariants."""
        tables = {sid: tuple(table.block_ids.tolist()) for sid, table in self._tables.items()}
        return BlockSnapshot(self.block_size, self._pool.free_blocks, self._pool.reference_counts, tables)

    def _extend_table(self, sequence_id: int, block_ids: list[int]) -> _Growth:
        table = self._tables.get(sequence_id)
        if table is None:
            table = self._tables[sequence_id] = BlockTable()
        growth = _Growth(sequence_id, table, table.num_blocks)
        table.append(block_ids)
        return growth

    def _cut(self, sequence_id: int, table: BlockTable, num_blocks: int) -> int:
        removed = table.cut(num_blocks)
        for block_id in removed:
            self._pool.free(block_id)
        if num_blocks == 0:
            del self._tables[sequence_id]
        return len(removed)

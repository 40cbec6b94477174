"""Flattens one step's rows into the arrays a model reads.

Owns the arithmetic from sequences and block tables to tokens, positions and slots; it decides nothing about which
sequences run and never touches a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.hybrid_blocks import HybridBlocks
from pagedcore.kv_cache.windowed_blocks import WindowedBlocks
from pagedcore.protocols import Int32Array, Int64Array
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence

NO_SLOTS: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step as arrays; see ``protocols.RaggedRows`` for what each one means.

    Invariant: there are at least two tokens; a lone one is followed by a copy of it as padding.
    """

    token_ids: Int64Array
    positions: Int64Array
    seq_ids: Int64Array
    slot_mapping: Int64Array
    query_start: Int64Array
    kv_lens: Int64Array
    block_tables: Int32Array
    logits_rows: Int64Array
    is_long: npt.NDArray[np.bool_] | None = None
    hidden_rows: Int64Array | None = None
    """Indices of the tokens whose hidden states are wanted; ``None``: of none."""
    adapter_slots: Int32Array | None = None
    """[R] the slot of each row's adapter, 0 for none; ``None``: no row has one."""
    state_reads: Int32Array | None = None
    """[R] the state block that each row begins from, -1 for none; ``None``: the model keeps no states."""
    state_writes: Int32Array | None = None
    """[R] the state block for what is kept after each row's last token, -1 for none; ``None`` with ``state_reads``."""
    window_tables: Int32Array | None = None
    """As ``block_tables``, of window blocks; ``None``: no layer gives up what has left its window."""
    window_slots: Int64Array | None = None
    """As ``slot_mapping``, in window blocks; ``None`` with ``window_tables``."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding left out."""
        return int(self.query_start[-1])


class TableStack:
    """Stacks the block tables of one step after the other. A decode step has the rows of the last one, of which one in
    ``block_size`` has one more block: nothing else is written. Rows that come, go or change places cost a copy.

    Invariant: an array that was returned does not change before its rows' ends, and only this writes to it.
    """

    def __init__(self) -> None:
        self._tables: list[BlockTable] = []
        self._changes, self._needed = np.empty(0, np.int64), np.empty(0, np.int64)
        self._stacked: Int32Array = np.empty((0, 0), np.int32)
        self._shown = self._stacked

    def stack(self, tables: list[BlockTable], needed: Int64Array) -> Int32Array:
        """Return [R, W] block ids, -1 past each row's end; W is the longest row's need. Nobody may write to it.

        Args:
            tables: R of them.
            needed: [R] blocks of each that are read.

        Raises:
            InternalError: a table has fewer.
        """
        changes = np.array([table.num_changes for table in tables])
        stacked, seen, had = self._stacked, self._changes, self._needed
        if tables != self._tables or needed.max() != stacked.shape[1]:
            stacked, seen, had = self._moved(tables, int(needed.max()))
        rows = np.flatnonzero((changes != seen) | (needed != had))
        ends = list(zip(rows.tolist(), had[rows].tolist(), needed[rows].tolist(), strict=True))
        for row, _, count in ends:
            if tables[row].num_blocks < count:
                raise InternalError(f"batch: a row needs {count} blocks and its table has {tables[row].num_blocks}")
        if stacked is self._stacked and not all(
            before <= count and np.array_equal(stacked[row, :before], tables[row].block_ids[:before])
            for row, before, count in ends
        ):
            stacked = stacked.copy()
        for row, _, count in ends:
            stacked[row, :count], stacked[row, count:] = tables[row].block_ids[:count], -1
        if stacked is not self._stacked:
            self._stacked, self._shown = stacked, stacked.view()
            self._shown.flags.writeable = False
        self._tables, self._changes, self._needed = tables, changes, needed
        return self._shown

    def _moved(self, tables: list[BlockTable], width: int) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Return a new array with the rows of the last one where these tables are, and what is known of its rows."""
        places = {table: place for place, table in enumerate(self._tables)}
        sources = np.array([places.get(table, -1) for table in tables])
        stacked, common = np.full((len(tables), width), -1, np.int32), min(width, self._stacked.shape[1])
        known, nothing = sources >= 0, np.full(len(tables), -1)
        if not known.any():
            return stacked, nothing, nothing
        stacked[:, :common] = self._stacked[sources, :common]
        return stacked, np.where(known, self._changes[sources], -1), self._needed[sources]


def stack_tables(tables: ListOf[Int32Array], needed: Int64Array) -> Int32Array:
    """Do what ``TableStack.stack`` does with arrays of block ids, from nothing."""
    stacked = np.full((len(tables), int(needed.max())), -1, dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, needed.tolist(), strict=True)):
        if len(table) < count:
            raise InternalError(f"batch: a row needs {count} blocks and its table has {len(table)}")
        stacked[row, :count] = table[:count]
    return stacked


def build_batch(
    rows: ListOf[ScheduledRow], block_manager: BlockManager, slot_of: Mapping[int, int] = NO_SLOTS,
    stack: TableStack | None = None,
) -> RaggedBatch:
    """Flatten scheduled rows; logits are wanted of the last known token of every sampled row, then of the first draft
    of those that have one, of the second, and so on, then of all scored positions; hidden states of the rows'
    ``hidden_positions``.

    Args:
        rows: at least one; tokens of each follow its first uncomputed position, and its drafts follow the last one.
        block_manager: knows the blocks of every sequence and how many tokens one holds.
        slot_of: the slots of adapters, by their numbers.
        stack: has the tables of the step before.

    Raises:
        InternalError: a sequence has fewer blocks than the positions it is to have, or its adapter is in no slot.
    """
    sequences, block_size = [row.sequence for row in rows], block_manager.block_size
    numbers, num_sampled = [one.sequence_id for one in sequences], [row.num_sampled for row in rows]
    starts, num_tokens = np.array([row.start for row in rows], np.int64), [row.num_tokens for row in rows]
    if num_tokens.count(1) == len(rows):
        counts, tokens = np.ones(len(rows), np.int64), [row.sequence.token_ids[row.start] for row in rows]
    else:
        counts = np.array(num_tokens, np.int64)
        known = [row.sequence.token_ids[row.start : row.end] for row in rows]
        tokens = list(chain.from_iterable(chain(one, row.drafts) for one, row in zip(known, rows, strict=True)))
    batch = assemble(
        np.array(tokens, np.int64), starts, counts, seq_ids=np.array(numbers, np.int64),
        tables=(stack or TableStack()).stack(block_manager.tables(numbers), -(-(starts + counts) // block_size)),
        block_size=block_size,
        is_sampled=None if num_sampled.count(1) == len(rows) else np.array(num_sampled, np.bool_),
    )
    if (most := max(num_sampled)) > 1:
        ends = [(end, count) for end, count in zip(batch.query_start[1:].tolist(), num_sampled, strict=True)]
        places = [end - count + depth for depth in range(most) for end, count in ends if count > depth]
        batch = replace(batch, logits_rows=np.array(places, dtype=np.int64))
    if isinstance(block_manager, WindowedBlocks):
        batch = _with_windows(batch, starts, block_manager)
    if block_manager.keeps_states or any(one.is_long or one.adapter is not None for one in sequences):
        batch = _with_kinds(_with_states(batch, numbers, block_manager), sequences, slot_of)
    if all(one.prompt_logprobs is None is one.hidden_from for one in sequences):
        return batch
    scored = _places(rows, batch, [row.scored_positions for row in rows])
    hidden = _places(rows, batch, [row.hidden_positions for row in rows])
    logits_rows = np.concatenate((batch.logits_rows, scored))
    return replace(batch, logits_rows=logits_rows, hidden_rows=hidden if len(hidden) else None)


def _with_states(batch: RaggedBatch, numbers: ListOf[int], blocks: BlockManager) -> RaggedBatch:
    """Say where the states of rows are and where they go, if the model keeps states."""
    if not isinstance(blocks, HybridBlocks):
        return batch
    current, written = blocks.states.current, blocks.states.written
    if missing := [number for number in numbers if number not in written]:
        raise InternalError(f"batch: the row of sequence {missing[0]} has no block for its state")
    return replace(batch, state_reads=np.array([current.get(number, -1) for number in numbers], dtype=np.int32),
                   state_writes=np.array([written[number] for number in numbers], dtype=np.int32))


def _with_kinds(batch: RaggedBatch, sequences: ListOf[Sequence], slot_of: Mapping[int, int]) -> RaggedBatch:
    """Say which rows are long, and in which slots their adapters are, as far as any is or has one."""
    if any(one.is_long for one in sequences):
        batch = replace(batch, is_long=np.array([one.is_long for one in sequences]))
    numbers = [one.adapter for one in sequences]
    if not any(one is not None for one in numbers):
        return batch
    if missing := [one for one in numbers if one is not None and one not in slot_of]:
        raise InternalError(f"batch: adapter {missing[0]} of a row is in no slot")
    slots = [0 if one is None else slot_of[one] for one in numbers]
    return replace(batch, adapter_slots=np.array(slots, dtype=np.int32))


def _places(rows: ListOf[ScheduledRow], batch: RaggedBatch, positions: ListOf[range]) -> Int64Array:
    """Return where the tokens at some positions of each row are in a batch."""
    return np.concatenate([
        np.arange(first, first + len(wanted)) + wanted.start - row.start
        for first, row, wanted in zip(batch.query_start.tolist(), rows, positions, strict=False)
    ])


def assemble(
    token_ids: Int64Array, starts: Int64Array, counts: Int64Array, *, seq_ids: Int64Array,
    tables: Int32Array | ListOf[Int32Array], block_size: int,
    is_sampled: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None, **states: Any,
) -> RaggedBatch:
    """Compute positions, slots and tables of rows that are given as plain arrays.

    Args:
        token_ids: [T] tokens of all rows, one row after the other.
        starts: [R] first position of each row.
        counts: [R] tokens of each row.
        seq_ids: [R] number of each row's sequence.
        tables: R arrays of block ids, or the one that ``TableStack`` makes of them; a table may be longer than the row
            needs.
        block_size: tokens per block.
        is_sampled: [R] whether the logits of the row's last token are wanted; ``None``: of all.
        states: ``state_reads`` and ``state_writes`` of the batch, if the model keeps states.

    Raises:
        InternalError: a table is too short for its row, or the tokens do not add up.
    """
    query_start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    kv_lens = starts + counts
    if query_start[-1] != len(token_ids):
        raise InternalError(f"batch: {len(token_ids)} tokens were given for rows of {query_start[-1]}")
    stacked = tables if isinstance(tables, np.ndarray) else stack_tables(tables, -(-kv_lens // block_size))
    if len(token_ids) == len(counts) and counts.max() == 1:
        row_of_token, positions = np.arange(len(counts)), starts
    else:
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(token_ids)) + (starts - query_start[:-1])[row_of_token]
    slots = _slots(stacked, row_of_token, positions, block_size)
    if len(token_ids) == 1:
        # Why: matrix products of one row take another path than those of many, and round differently.
        token_ids, positions = np.repeat(token_ids, 2), np.repeat(positions, 2)
        slots = np.append(slots, -1)
    ends = query_start[1:] if is_sampled is None else query_start[1:][is_sampled]
    return RaggedBatch(token_ids, positions, seq_ids, slots, query_start, kv_lens, stacked, ends - 1, **states)


def _slots(tables: Int32Array, row_of_token: Int64Array, positions: Int64Array, block_size: int) -> Int64Array:
    blocks = tables[row_of_token, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _with_windows(batch: RaggedBatch, starts: Int64Array, blocks: WindowedBlocks) -> RaggedBatch:
    """Say where rows from these positions on have what layers with a window keep."""
    tables, num_tokens = blocks.tables_of_windows(batch.block_tables, starts), batch.num_tokens
    row_of_token = np.repeat(np.arange(len(starts)), np.diff(batch.query_start))
    slots = np.full(len(batch.positions), -1, np.int64)
    slots[:num_tokens] = _slots(tables, row_of_token, batch.positions[:num_tokens], blocks.block_size)
    if num_tokens and slots[:num_tokens].min() < 0:
        raise InternalError("batch: a token has no window block to be written to")
    return replace(batch, window_tables=tables, window_slots=slots)


def largest_batch(num_tokens: int, num_rows: int, block_size: int) -> tuple[RaggedBatch, int]:
    """Return a batch of prompts that takes a step's most tokens, and the logits of its most rows; and its blocks, which
    all rows share, as nothing is read of it but how much memory it takes.
    """
    rows = np.arange(min(num_rows, num_tokens))
    counts = num_tokens // len(rows) + (rows < num_tokens % len(rows))
    table = np.arange(-(-int(counts[0]) // block_size), dtype=np.int32)
    return assemble(np.zeros(num_tokens, np.int64), 0 * rows, counts, seq_ids=rows, tables=[table] * len(rows),
                    block_size=block_size), len(table)

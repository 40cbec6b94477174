"""What all layers of one step share, worked out once on the host: checked batch, query tiles, runs of writes.

Owns the range checks that stand between a ragged batch and code that trusts it with raw addresses. It computes
nothing per element and touches no tensor. Read ``cpu/backend.py`` next for who uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import Int32Array, Int64Array, RaggedRows

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class QueryTiles:
    """Query tiles in the order they are worked on: the row of each, and the first of its tokens covered."""

    rows: Int64Array
    starts: Int64Array


@dataclass(frozen=True)
class WriteRuns:
    """Runs of tokens that fill consecutive slots of one block: first token, first slot, length."""

    tokens: Int64Array
    slots: Int64Array
    lengths: Int64Array


class StepPlan:
    """One ragged batch, checked against the pool it will be computed in.

    Invariant: every block id a kernel reads through ``block_tables`` and every slot but -1 lies in the pool, and
    each row's tokens are the last ones of its ``kv_lens``. With a window, nothing before that of a row's first token
    is read.
    """

    def __init__(
        self, batch: RaggedRows, num_blocks: int, block_size: int, window: int = 0, before: StepPlan | None = None
    ) -> None:
        """Check a batch, beside the step ``before`` with the same pool: rows of an array of tables that nobody may
        write to stay as they were.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._window = window
        self.slots: Int64Array = np.ascontiguousarray(batch.slot_mapping, np.int64)
        self.query_start: Int64Array = np.ascontiguousarray(batch.query_start, np.int64)
        self.kv_lens: Int64Array = np.ascontiguousarray(batch.kv_lens, np.int64)
        self.block_tables: Int32Array = np.ascontiguousarray(batch.block_tables, np.int32)
        self._tiles: dict[int, QueryTiles] = {}
        self._check_rows()
        self.used: Int64Array = -(-self.kv_lens // block_size)
        """Shape [R]; blocks that each row reads."""
        self._check_blocks(before)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.kv_lens)

    @property
    def num_computed(self) -> int:
        """Tokens that belong to a row; the rest is padding."""
        return int(self.query_start[-1])

    @cached_property
    def query_lens(self) -> Int64Array:
        """Shape [R]; tokens of each row."""
        return self.query_start[1:] - self.query_start[:-1]

    def tiles(self, queries: int) -> QueryTiles:
        """Cut each row into tiles of at most ``queries`` tokens, the dearest first so that threads end together."""
        if queries not in self._tiles:
            self._tiles[queries] = self._cut(queries)
        return self._tiles[queries]

    def _cut(self, queries: int) -> QueryTiles:
        per_row = -(-self.query_lens // queries)
        rows = np.repeat(np.arange(self.num_rows), per_row)
        first = np.repeat(np.cumsum(per_row) - per_row, per_row)
        starts = (np.arange(len(rows)) - first) * queries
        sizes = np.minimum(self.query_lens[rows] - starts, queries)
        cost = (self.kv_lens - self.query_lens)[rows] + starts + sizes
        order = np.argsort(-cost * sizes, kind="stable")
        return QueryTiles(rows[order], starts[order])

    @cached_property
    def writes(self) -> WriteRuns:
        """The slots as runs within blocks; tokens without a slot are in none."""
        slots = self.slots
        starts_run: Mask = np.ones(len(slots), np.bool_)
        starts_run[1:] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % self.block_size == 0)
        first = np.flatnonzero(starts_run)
        lengths = np.diff(first, append=len(slots))
        # Why: a slot of -1 follows no slot, and slot 0 starts a block, so each -1 is a run of its own.
        written = slots[first] >= 0
        return WriteRuns(first[written], slots[first][written], lengths[written])

    def _check_rows(self) -> None:
        tables = self.block_tables.shape
        is_whole = len(tables) == 2 and tables[0] <= self.num_rows and not self.kv_lens[tables[0] :].any()
        if len(self.query_start) != self.num_rows + 1 or not is_whole:
            raise InternalError(
                f"ragged batch: {self.num_rows} kv_lens, {len(self.query_start)} query_start and block_tables of "
                f"shape {tables}, expected R, R + 1 and [R, W], or fewer tables if the last rows have no KV."
            )
        starts = self.query_start
        if starts[0] != 0 or starts[-1] > self.num_tokens or (self.query_lens < 0).any():
            raise InternalError(
                f"query_start: goes from {starts[0]} to {starts[-1]}, expected 0 to at most {self.num_tokens} "
                "without a step back."
            )
        limit = self.block_tables.shape[1] * self.block_size
        refused = (self.kv_lens < self.query_lens) | (self.kv_lens > limit)
        if refused.any():
            row = int(refused.argmax())
            raise InternalError(
                f"kv_lens: row {row} has {self.kv_lens[row]}, expected from its {self.query_lens[row]} tokens to "
                f"the {limit} that its block table has room for."
            )

    def _check_blocks(self, before: StepPlan | None) -> None:
        slots = self.slots
        if len(slots) and (slots.min() < -1 or slots.max() >= self.num_blocks * self.block_size):
            raise InternalError(
                f"slot_mapping: slots from {slots.min()} to {slots.max()}, expected -1 to "
                f"{self.num_blocks * self.block_size - 1}."
            )
        tables, used, rows = self.block_tables, self.used[: len(self.block_tables)], np.arange(len(self.block_tables))
        if before is not None and before.block_tables is tables and not tables.flags.writeable:
            rows = np.flatnonzero(used > before.used[: len(tables)])
            tables, used = tables[rows], used[rows]
        if not len(rows) or not (width := int(used.max())):
            return
        # Why: seen as unsigned a negative id is a huge one, so one comparison finds both kinds.
        wrong = tables[:, :width].view(np.uint32) >= self.num_blocks
        if self._window:
            past = (self.kv_lens - self.query_lens)[rows]
            seen_from = np.maximum(0, past + 1 - self._window) // self.block_size
            wrong &= np.arange(width) >= seen_from[:, None]
        # Why the first of each row: what is past a row's end is not read, and mostly -1.
        first = wrong.argmax(1)
        refused = wrong[np.arange(len(rows)), first] & (first < used)
        if refused.any():
            place = int(refused.argmax())
            column = int(first[place])
            raise InternalError(
                f"block_tables: row {rows[place]} names block {tables[place, column]} at index {column}, expected "
                f"0 to {self.num_blocks - 1}."
            )

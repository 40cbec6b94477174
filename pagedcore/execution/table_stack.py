"""The block tables of a step's rows as one array, made from that of the step before.

A decode step has the rows of the last one, of which one in ``block_size`` has one more block: the others are copied in
one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.protocols import Int32Array, Int64Array


class TableStack:
    """Stacks the tables of one step after the other.

    Invariant: an array that was returned does not change.
    """

    def __init__(self) -> None:
        self._tables: list[BlockTable] = []
        self._changes, self._needed = np.empty(0, np.int64), np.empty(0, np.int64)
        self._stacked: Int32Array = np.empty((0, 0), np.int32)

    def stack(self, tables: list[BlockTable], needed: Int64Array) -> Int32Array:
        """Return [R, W] block ids, -1 past each row's end; W is the longest row's need.

        Args:
            tables: R of them.
            needed: [R] blocks of each that are read.

        Raises:
            InternalError: a table has fewer.
        """
        changes = np.array([table.num_changes for table in tables])
        if tables == self._tables and needed.max() == self._stacked.shape[1]:
            rows = np.flatnonzero((changes != self._changes) | (needed != self._needed))
            stacked = self._stacked.copy() if len(rows) else self._stacked
            for row, count in zip(rows.tolist(), needed[rows].tolist(), strict=True):
                stacked[row, count:] = -1
                _fill(stacked, row, tables[row].block_ids, count)
        else:
            stacked = stack_tables([table.block_ids for table in tables], needed)
        self._tables, self._changes, self._needed, self._stacked = tables, changes, needed, stacked
        return stacked


def stack_tables(tables: Sequence[Int32Array], needed: Int64Array) -> Int32Array:
    """Do what ``TableStack.stack`` does with arrays of block ids, from nothing."""
    stacked = np.full((len(tables), int(needed.max())), -1, dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, needed.tolist(), strict=True)):
        _fill(stacked, row, table, count)
    return stacked


def _fill(stacked: Int32Array, row: int, table: Int32Array, count: int) -> None:
    if len(table) < count:
        raise InternalError(f"batch: a row needs {count} blocks and its table has {len(table)}")
    stacked[row, :count] = table[:count]

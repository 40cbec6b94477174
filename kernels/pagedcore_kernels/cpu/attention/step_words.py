"""What kernels are told of a step's plan: addresses of its arrays, copied to where those of the last step were.

Calls that were recorded in one step read the next one's arrays at the same addresses.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedcore_kernels.cpu.runtime.kept_arrays import KeptArrays
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.step_plan import StepPlan

_COLUMNS: Final = 8
"""Columns of block tables are copied by so many, so that a longer context seldom changes their width."""

Words = tuple[int, ...]


class StepWords:
    """The words of the present plan."""

    def __init__(self) -> None:
        self._arrays = KeptArrays()
        self._plan: StepPlan | None = None
        self._of_tiles: dict[int, Words] = {}
        self._of_writes: Words = ()
        self.rows: Words = ()
        """Block tables, their width, ``query_start`` and ``kv_lens`` as kernels take them."""

    def follow(self, plan: StepPlan) -> None:
        """Go on to the next plan."""
        self._plan, self._of_tiles, self._of_writes = plan, {}, ()
        num_rows, num_columns = plan.block_tables.shape
        width = -(-num_columns // _COLUMNS) * _COLUMNS
        tables = self._arrays.room("block tables", num_rows * width, np.int32)
        tables.reshape(num_rows, width)[:, :num_columns] = plan.block_tables
        starts, lens = self._arrays.keep("query start", plan.query_start), self._arrays.keep("KV lengths", plan.kv_lens)
        self.rows = tables.ctypes.data, width, starts, lens

    def tiles(self, queries: int) -> Words:
        """Return rows and starts of the tiles of so many tokens, and the number of tiles."""
        if queries not in self._of_tiles:
            tiles = self._known_plan.tiles(queries)
            kept = (self._arrays.keep(f"{name} of tiles of {queries}", array)
                    for name, array in (("rows", tiles.rows), ("starts", tiles.starts)))  # fmt: skip
            self._of_tiles[queries] = *kept, len(tiles.rows)
        return self._of_tiles[queries]

    def writes(self) -> Words:
        """Return tokens, slots and lengths of the runs that are written, and the number of runs."""
        if not self._of_writes:
            runs = self._known_plan.writes
            kept = (self._arrays.keep(f"{name} of writes", array)
                    for name, array in (("tokens", runs.tokens), ("slots", runs.slots), ("lengths", runs.lengths)))
            self._of_writes = *kept, len(runs.tokens)
        return self._of_writes

    def sizes_of_attention(self, shape: StepShape, queries: int, num_heads: int, first: tuple[int, int]) -> Sizes:
        """Say what a call of attention has of the present plan; ``first`` are the words of rows and of tiles."""
        of_rows, of_tiles = first
        tiles = self.tiles(queries)
        return Sizes([*enumerate(self.rows, of_rows), *enumerate(tiles, of_tiles)], tiles[-1] * num_heads)

    def sizes_of_writes(self, shape: StepShape, num_kv_heads: int, first: int) -> Sizes:
        """Say what a call that writes K and V has of the present plan, from the word ``first`` on."""
        words = self.writes()
        return Sizes([*enumerate(words, first)], words[-1] * num_kv_heads)

    @property
    def _known_plan(self) -> StepPlan:
        assert self._plan is not None  # Invariant: its backend has planned a step
        return self._plan

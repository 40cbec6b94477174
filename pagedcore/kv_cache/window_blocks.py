"""Window blocks: the memory that layers with a window have for a block's positions, and which blocks have some now.

A block is the name of its positions, and K and V of all other layers; its window block has those of layers that read no
further back than a window. A sequence holds the window blocks of its last blocks only. What it has left behind stays
with its block until the memory is needed, so that others can begin there. Numbers only: it moves no bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from typing import Any

import numpy as np

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.memory_snapshot import WindowSnapshot
from pagedcore.protocols import Int32Array


class WindowBlocks:
    """The window blocks of one device.

    Invariant: a window block's references are the sequences that hold it, and the copies in flight that read it.
    Invariant: one without a reference is free, or it is that of a block whose contents can be found.
    """

    def __init__(self, num_windows: int, num_blocks: int, is_registered: Callable[[int], bool]) -> None:
        """Let all be free; ``is_registered`` says whether the contents of a block can be found."""
        self.num_windows, self._num_blocks, self._is_registered = num_windows, num_blocks, is_registered
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Make every window block free, in whatever state the bookkeeping is."""
        self._pool = BlockPool(self.num_windows)
        self.of_block: Int32Array = np.full(self._num_blocks, -1, np.int32)
        """The window block of each block, -1 for none; not for changing."""
        self._owner = [-1] * self.num_windows
        """The block that each window block stays with, -1 for a free one."""
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()
        """Window blocks without a reference, in the order in which they lost the last one: those that were left behind
        and found by nobody since, and those behind which a sequence has ended or begun."""
        self._found: set[int] = set()
        """Those that a sequence began behind."""

    @property
    def num_used(self) -> int:
        """Window blocks with a reference."""
        return self.num_windows - self._pool.num_available

    @property
    def num_kept(self) -> int:
        """Window blocks without a reference whose contents can be found."""
        return len(self._passed) + len(self._ended)

    def has_room_for(self, num_new: int, held: Iterable[int]) -> bool:
        """Whether so many blocks can get window blocks, while those of others are held."""
        counts, windows = self._pool.reference_counts, {int(self.of_block[block_id]) for block_id in held}
        return num_new + sum(counts[window] == 0 for window in windows) <= self._pool.num_available

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to the window block of each block, which has one."""
        for block_id in block_ids:
            window = int(self.of_block[block_id])
            self._passed.pop(window, None)
            self._ended.pop(window, None)
            self._found.add(window)
            self._pool.add_reference(window)

    def allocate(self, block_ids: ListOf[int]) -> None:
        """Give new blocks a window block with a reference each, evicting what is kept. Raises ``InternalError`` if too
        few are available, which the caller knows before.
        """
        while len(self._pool.free_blocks) < len(block_ids) and (order := self._passed or self._ended):
            victim, _ = order.popitem(last=False)
            self._free(victim)
            self.num_evictions += 1
        taken = self._pool.allocate(len(block_ids))
        if taken is None:
            raise InternalError(f"{len(block_ids)} window blocks were asked for, {self._pool.num_available} are there")
        for block_id, window in zip(block_ids, taken, strict=True):
            self.of_block[block_id], self._owner[window] = window, block_id

    def clear(self, block_ids: Iterable[int]) -> None:
        """Let new blocks have no window block."""
        for block_id in block_ids:
            self.of_block[block_id] = -1

    def free(self, block_ids: Iterable[int], *, is_end: bool) -> None:
        """Free a reference to the window block of each block. After the last one it stays with its block if that can be
        found, else it is free.

        ``is_end``: a sequence ends here, or began here, and has not only gone on.
        """
        for block_id in block_ids:
            window = int(self.of_block[block_id])
            is_last, owner = self._pool.free_reference(window), self._owner[window]
            if owner != block_id:
                self.of_block[block_id] = -1
            if not is_last:
                continue
            if self.of_block[owner] == window and self._is_registered(owner):
                (self._ended if is_end or window in self._found else self._passed)[window] = None
            else:
                self._free(window)

    def share(self, block_id: int, other: int) -> None:
        """Let a block's window block stay with another one, in which its contents are found, if that has none."""
        if self.of_block[other] < 0:
            window = int(self.of_block[block_id])
            self.of_block[other], self._owner[window] = window, other

    def forget(self, block_id: int) -> None:
        """Free a block's window block if nothing holds it: what the block holds cannot be found any more."""
        window = int(self.of_block[block_id])
        if window >= 0 and self._owner[window] == block_id and window in self._pool.idle_blocks:
            self._passed.pop(window, None)
            self._ended.pop(window, None)
            self._free(window)

    def bookkeeping(self, holders: Mapping[int, int], window: int, passed: Mapping[int, int]) -> WindowSnapshot:
        """Copy the bookkeeping for the state laws; ``holders`` says how often each is held."""
        pool = self._pool
        kept = {window: self._owner[window] for window in (*self._passed, *self._ended)}
        return WindowSnapshot(tuple(pool.free_blocks), frozenset(pool.idle_blocks), tuple(pool.reference_counts),
                              dict(holders), kept, tuple(self.of_block.tolist()), window, dict(passed))

    def snapshot(self) -> dict[str, Any]:
        """Copy whose window blocks are whose, and in which order what is kept is evicted, as plain values."""
        pairs = [[window, self._owner[window], block_id] for block_id, window in enumerate(self.of_block.tolist())
                 if window >= 0]
        return {**self._pool.snapshot(), "of": pairs, "passed": list(self._passed), "ended": list(self._ended),
                "found": sorted(self._found), "num_evictions": self.num_evictions}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let empty ones be as they were copied. Raises ``ValueError`` if the numbers do not add up."""
        for window, owner, block_id in state["of"]:
            if not (0 <= window < self.num_windows and min(owner, block_id) >= 0):
                raise ValueError("a window block is none of those that there are")
            self.of_block[block_id], self._owner[window] = window, owner
        self._passed = OrderedDict.fromkeys(state["passed"])
        self._ended, self._found = OrderedDict.fromkeys(state["ended"]), set(state["found"])
        self._pool.restore(state, (*self._passed, *self._ended))
        owners = [(window, self._owner[window]) for window in (*self._passed, *self._ended)]
        is_kept = all(self.of_block[owner] == window and self._is_registered(owner) for window, owner in owners)
        if not is_kept or len(self._pool.idle_blocks) != self.num_kept:
            raise ValueError("references of window blocks do not add up")
        self.num_evictions = state["num_evictions"]

    def _free(self, window: int) -> None:
        if self.of_block[self._owner[window]] == window:
            self.of_block[self._owner[window]] = -1
        self._owner[window] = -1
        self._found.discard(window)
        self._pool.free_idle_block(window)

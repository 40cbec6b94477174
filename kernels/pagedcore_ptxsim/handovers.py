"""Data that one block of a launch leaves in global memory for another: read without a hand-over, it is a race.

A hand-over is a release by the writer's block and an acquire of it by the reader's, through one place: an atomic or a
``st.release`` and an atomic or a ``ld.acquire``, of device scope, or relaxed ones with a fence on the right side, of
the thread itself or of every thread of the block before a barrier. A release covers what its own thread wrote, and
what the other threads of the block wrote before their last barrier with it; an acquire is the thread's own until the
block's next barrier. What was acquired is released along. So the missing barrier before a counter is found in
whatever order blocks happen to run (happens-before as in Lamport 1978, with one clock entry per block and barrier in
the manner of the vector clocks of Fidge and Mattern).

Only reads of what another block wrote are looked at: not writes over each other, not reads before the write, and
nothing between threads of one block. Atomics and marked loads never race.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from pagedcore_ptxsim.errors import RaceFault
from pagedcore_ptxsim.scalar_types import Array, Index
from pagedcore_ptxsim.syntax import Instruction

MAX_BLOCKS = 1024
"""Grids beyond this are not watched: clocks grow with the square of their blocks."""
_NOBODY = -1
_MARKS = ("acq_rel", "acquire", "release", "relaxed", "volatile", "mmio")


def order_of(instruction: Instruction) -> str:
    """How an access takes part in hand-overs: a mark such as "acquire"; "" for a plain or block-wide one."""
    return "" if instruction.has("cta") else next((mark for mark in _MARKS if instruction.has(mark)), "")


@dataclass
class _Clock:
    """What may be read: of each block, writes before so many of its barriers; of single threads, up to a moment."""

    blocks: Array
    threads: dict[int, int] = field(default_factory=dict)

    def join(self, other: _Clock) -> None:
        np.maximum(self.blocks, other.blocks, out=self.blocks)
        for thread, moment in other.threads.items():
            self.threads[thread] = max(moment, self.threads.get(thread, _NOBODY))

    def copy(self) -> _Clock:
        return _Clock(self.blocks.copy(), dict(self.threads))


class HandoverDetector:
    """Shadow of the global memory of one launch.

    Threads are numbered over the whole grid. Invariant: a block's clock holds what every thread of it may read, and
    what a thread acquired since its block's last barrier is that thread's alone.
    """

    def __init__(self, size: int, blocks: int, threads: int, granule: int) -> None:
        self._threads, self._granule = threads, granule
        self._who = np.full(-(-size // granule) + 16, _NOBODY, np.int32)
        self._phase, self._moment = np.zeros_like(self._who), np.zeros_like(self._who)
        self._passed = np.zeros(blocks, np.int32)
        self._known = np.zeros((blocks, blocks), np.int32)
        self._of_block = [_Clock(row) for row in self._known]
        self._own: dict[int, dict[int, _Clock]] = defaultdict(dict)
        self._pending: dict[int, _Clock] = {}
        self._released: dict[int, _Clock] = {}
        self._fence_phase = np.full(blocks * threads, _NOBODY, np.int32)
        self._fence_moment = np.full(blocks * threads, _NOBODY, np.int32)
        self._all_fenced = np.full(blocks, _NOBODY, np.int32)
        """Of each block, the barriers before which its threads all had a fence of their own."""
        self._now = 0
        self._running: Index = np.arange(blocks)

    def begin(self, blocks: Index) -> None:
        """These blocks run now; lanes are numbered among them."""
        self._running = blocks

    def _numbers(self, lanes: Index) -> Array:
        numbers: Array = self._running[lanes // self._threads] * self._threads + lanes % self._threads
        return numbers

    def _cells(self, offsets: Index, size: int) -> Index:
        return (offsets // self._granule)[:, None] + np.arange(max(size // self._granule, 1))

    def write(self, offsets: Index, size: int, lanes: Index) -> None:
        """Stores of ``size`` bytes."""
        cells, thread = self._cells(offsets, size), self._numbers(lanes)[:, None]
        self._who[cells] = thread
        self._phase[cells] = self._passed[thread // self._threads]
        self._moment[cells] = self._now

    def read(self, offsets: Index, size: int, lanes: Index) -> None:
        """Plain loads of ``size`` bytes."""
        cells, reader = self._cells(offsets, size), self._numbers(lanes)[:, None]
        who = self._who[cells]
        block, writer = np.broadcast_to(reader // self._threads, who.shape), who // self._threads
        foreign = (who != _NOBODY) & (writer != block)
        if not foreign.any():
            return
        unseen = foreign & (self._known[block, writer] <= self._phase[cells])
        for row, column in np.argwhere(unseen):
            if not self._sees(int(reader[row, 0]), int(cells[row, column])):
                raise RaceFault(
                    f"global race: read of what thread {int(who[row, column]) % self._threads} of block "
                    f"{int(writer[row, column])} wrote in this launch, and nothing handed it over", lanes[[row]])

    def _sees(self, reader: int, cell: int) -> bool:
        writer, moment = int(self._who[cell]), int(self._moment[cell])
        block = reader // self._threads
        own = self._own[block].get(reader)
        if own is not None and own.blocks[writer // self._threads] > self._phase[cell]:
            return True
        return any(clock is not None and clock.threads.get(writer, _NOBODY) >= moment
                   for clock in (own, self._of_block[block]))

    def synchronise(self, offsets: Index, lanes: Index, order: str, *, loads: bool, stores: bool) -> None:
        """Atomics or marked accesses, in the order of the lanes; ``order`` as from ``order_of``."""
        for place, thread in zip(offsets.tolist(), self._numbers(lanes).tolist(), strict=True):
            if loads and (found := self._released.get(place)) is not None:
                self._acquire(thread, found, order in ("acquire", "acq_rel"))
            if stores:
                self._release(thread, place, order in ("release", "acq_rel"), keeps=loads)

    def _acquire(self, thread: int, found: _Clock, is_ordered: bool) -> None:
        kept = self._own[thread // self._threads] if is_ordered else self._pending
        if thread in kept:
            kept[thread].join(found)
        else:
            kept[thread] = found.copy()

    def _release(self, thread: int, place: int, is_ordered: bool, keeps: bool) -> None:
        """Leave what the thread may hand over; an atomic also keeps what was there, a store does not."""
        block = thread // self._threads
        fenced = max(int(self._fence_phase[thread]), int(self._all_fenced[block]))
        phase = int(self._passed[block]) if is_ordered else fenced
        moment = self._now if is_ordered else int(self._fence_moment[thread])
        released = self._released.pop(place, None)
        before = released if keeps else None
        if phase == _NOBODY:
            if before is not None:
                self._released[place] = before
            return
        clock = self._of_block[block].copy()
        if thread in self._own[block]:
            clock.join(self._own[block][thread])
        clock.blocks[block], clock.threads[thread] = phase, moment
        if before is not None:
            clock.join(before)
        self._released[place] = clock
        self._now += 1

    def fence(self, lanes: Index) -> None:
        """Fences of device scope: relaxed accesses after them release, and those before them acquire."""
        threads = self._numbers(lanes)
        self._fence_phase[threads] = self._passed[threads // self._threads]
        self._fence_moment[threads] = self._now
        self._now += 1
        for thread in (self._pending.keys() & set(threads.tolist())) if self._pending else ():
            self._acquire(thread, self._pending.pop(thread), True)

    def block_barrier(self, running: int) -> None:
        """All threads of a block, numbered among those that run, passed a barrier."""
        block = int(self._running[running])
        own = slice(block * self._threads, (block + 1) * self._threads)
        if (self._fence_phase[own] == self._passed[block]).all():
            self._all_fenced[block] = self._passed[block] + 1
        self._passed[block] += 1
        for clock in self._own.pop(block, {}).values():
            self._of_block[block].join(clock)

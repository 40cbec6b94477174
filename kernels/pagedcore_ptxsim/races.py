"""Data races on shared memory: two threads touch a byte, one of them writes, and nothing orders the two.

What orders: a barrier of the whole block, and ``bar.warp.sync`` of a whole warp for the threads of that warp.
Shuffles, votes and ``mma`` order nothing. Atomics do not race with each other, but with plain accesses they do.
Threads that store the same value in one instruction do not race. Barriers of part of a block order nothing here, so
a kernel that relies on them can be reported although it is right: launch it with ``check_races=False``.

Shadow state is kept per granule, the narrowest shared access of the kernel. Memory that cannot race costs nothing:
the detector exists only while ``check_races`` is on.
"""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.errors import RaceFault
from pagedcore_ptxsim.scalar_types import Array, Index, Mask

_NO_THREAD, _MANY, _WARP = -1, -2, -3
"""What touched a granule: a thread (0 and up), none, threads of several warps, or ``_WARP - w`` for several of w."""


class _Touches:
    """Who touched each granule since the last barrier, and in which epoch of its warp the latest touch was."""

    def __init__(self, granules: int) -> None:
        self.who = np.full(granules, _NO_THREAD, np.int32)
        self.when = np.zeros(granules, np.int32)

    def conflicts(self, where: Index, thread: Array, warp: Array, epoch: Array) -> Mask:
        """Whether another thread touched a granule unordered with ``thread`` now. All broadcast together."""
        who = self.who[where]
        if (who == _NO_THREAD).all():
            return np.zeros(who.shape, np.bool_)
        same_warp = np.where(who >= 0, who >> 5, _WARP - who) == warp
        ordered = same_warp & (self.when[where] != epoch)
        return (who != _NO_THREAD) & (who != thread) & ~ordered

    def join(self, where: Index, thread: Array, warp: Array, epoch: Array) -> None:
        """Add a touch that leaves earlier ones standing (reads, atomics)."""
        who, when = self.who[where], self.when[where]
        if (who == _MANY).all():
            return
        same_warp = np.where(who >= 0, who >> 5, _WARP - who) == warp
        # Why: what this warp touched before its last warp barrier is ordered for this warp, and for every
        # other warp this newer touch stands for it.
        alone = (who == _NO_THREAD) | (who == thread) | (same_warp & (when != epoch))
        wanted = np.where(alone, thread, np.where(same_warp, _WARP - warp, _MANY))
        self.who[where] = wanted
        self.when[where] = epoch
        crowd = self.who[where] != wanted
        if crowd.any():
            self._crowd(where[crowd], np.broadcast_to(warp, crowd.shape)[crowd])

    def _crowd(self, where: Index, warp: Array) -> None:
        """Lanes of one instruction touched one granule: the lane that was stored stands for all, unless warps mix."""
        stored = self.who[where]
        mixed = np.where(stored >= 0, stored >> 5, _WARP - stored) != warp
        self.who[where] = _WARP - warp
        self.who[where[mixed]] = _MANY

    def replace(self, where: Index, thread: Array, epoch: Array) -> None:
        """Note a write that every earlier touch is ordered before."""
        self.who[where] = thread
        self.when[where] = epoch

    def forget(self, low: int, high: int) -> None:
        self.who[low:high] = _NO_THREAD


class RaceDetector:
    """Shadow of the shared memory of a batch of blocks.

    Threads are numbered across the batch. ``granule`` is in bytes. Invariant: after ``block_barrier`` of a block,
    nothing of that block's memory remembers a touch.
    """

    def __init__(self, size: int, threads: int, granule: int) -> None:
        self.granule = granule
        self._writes, self._reads = _Touches(size // granule), _Touches(size // granule)
        self._atomic = np.zeros(size // granule, np.bool_)
        self._epoch = np.zeros(-(-threads // 32), np.int32)

    def _cells(self, starts: Index, size: int, lanes: Index) -> tuple[Index, Array, Array, Array]:
        where = (starts // self.granule)[:, None] + np.arange(max(size // self.granule, 1))
        thread = lanes.astype(np.int32)[:, None]
        warp = thread >> 5
        return where, thread, warp, self._epoch[warp]

    def read(self, starts: Index, size: int, lanes: Index) -> None:
        """A load of ``size`` bytes at each of ``starts`` by the threads ``lanes``."""
        where, thread, warp, epoch = self._cells(starts, size, lanes)
        clash = self._writes.conflicts(where, thread, warp, epoch)
        if clash.any():
            self._refuse("read", "write", clash, where, lanes, self._writes)
        self._reads.join(where, thread, warp, epoch)

    def write(self, starts: Index, size: int, lanes: Index, data: Array) -> None:
        """A store of ``data``, uint8[n, size]."""
        where, thread, warp, epoch = self._cells(starts, size, lanes)
        for touches, name in ((self._writes, "write"), (self._reads, "read")):
            clash = touches.conflicts(where, thread, warp, epoch)
            if clash.any():
                self._refuse("write", name, clash, where, lanes, touches)
        self._writes.replace(where, thread, epoch)
        overwritten = (self._writes.who[where] != thread).any(1)
        if overwritten.any():
            self._check_same_value(starts, data, overwritten, lanes)
        self._reads.who[where] = _NO_THREAD
        self._atomic[where] = False

    def deliver(self, starts: Index, size: int, lanes: Index) -> None:
        """Asynchronous copies of ``lanes`` landed: they are writes of this moment, already checked at their issue."""
        where, thread, _, epoch = self._cells(starts, size, lanes)
        self._writes.replace(where, thread, epoch)

    def _check_same_value(self, starts: Index, data: Array, overwritten: Mask, lanes: Index) -> None:
        """Several lanes stored to one place in one instruction: harmless only if they stored one value."""
        for lane in np.flatnonzero(overwritten):
            rivals = np.flatnonzero(starts == starts[lane])
            if len(rivals) == 1 or (data[rivals] != data[lane]).any():
                raise RaceFault("shared race: threads store different values to one place in one instruction",
                                lanes[rivals])

    def atomic(self, starts: Index, size: int, lanes: Index) -> None:
        """An atomic read-modify-write."""
        where, thread, warp, epoch = self._cells(starts, size, lanes)
        clash = self._writes.conflicts(where, thread, warp, epoch) & ~self._atomic[where]
        if clash.any():
            self._refuse("atomic", "write", clash, where, lanes, self._writes)
        clash = self._reads.conflicts(where, thread, warp, epoch)
        if clash.any():
            self._refuse("atomic", "read", clash, where, lanes, self._reads)
        self._writes.join(where, thread, warp, epoch)
        self._atomic[where] = True

    def _refuse(self, mine: str, theirs: str, clash: Mask, where: Index, lanes: Index, touches: _Touches) -> None:
        row, column = np.argwhere(clash)[0]
        who = int(touches.who[where[row, column]])
        other = f"thread {who}" if who >= 0 else "several warps" if who == _MANY else f"warp {_WARP - who}"
        raise RaceFault(f"shared race: {mine} after a {theirs} by {other} of the batch with no barrier between",
                        lanes[clash.any(1)])

    def warp_barrier(self, warps: Index) -> None:
        """Whole warps passed ``bar.warp.sync``."""
        self._epoch[warps] += 1

    def block_barrier(self, low: int, high: int) -> None:
        """A block passed a barrier of all its threads; its memory is the bytes ``low`` to ``high``."""
        self._writes.forget(low // self.granule, high // self.granule)
        self._reads.forget(low // self.granule, high // self.granule)
        self._atomic[low // self.granule:high // self.granule] = False

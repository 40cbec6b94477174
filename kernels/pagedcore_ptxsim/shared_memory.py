"""Shared memory of a batch of blocks: bytes, which of them were written, and which a ``cp.async`` still owes.

Owns bounds, alignment, initialisation and the hand-over of asynchronous copies; asks ``races`` about ordering.
Each block has ``stride`` bytes in one array, of which the first ``size`` may be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedcore_ptxsim.errors import AsyncCopyFault, MemoryFault, UninitializedRead
from pagedcore_ptxsim.races import RaceDetector
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, Index, Mask

_EMPTY, _WRITTEN, _PENDING = 0, 1, 2
_POISON = 0xFF  # NaN in every float format


@dataclass
class _Copy:
    """cp.async operations of one instruction that have not landed: threads, their group, place and data."""

    lanes: Index
    group: Array
    where: Index
    data: Array

    def part(self, chosen: Mask) -> _Copy:
        return _Copy(self.lanes[chosen], self.group[chosen], self.where[chosen], self.data[chosen])


class SharedMemory:
    """Shared memory of ``blocks`` blocks of ``threads`` threads each.

    Invariant: a byte is pending exactly while a copy in ``_copies`` will write it.
    """

    def __init__(self, blocks: int, threads: int, size: int, granule: int) -> None:
        self.size, self.stride = size, -(-size // 16) * 16 + 16
        total = blocks * self.stride
        self.bytes = np.full(total, _POISON, np.uint8)
        self.state = np.zeros(total, np.uint8)
        self._views = {1: self.bytes, **{n: self.bytes.view(UNSIGNED[n]) for n in (2, 4, 8)},
                       16: self.bytes.view(np.complex128)}
        self._base = np.repeat(np.arange(blocks, dtype=np.int64) * self.stride, threads)
        self._committed = np.zeros(blocks * threads, np.int64)
        self._copies: list[_Copy] = []
        self.races = RaceDetector(total, blocks * threads, granule) if granule else None

    def locate(self, addresses: Array, size: int, lanes: Index) -> Index:
        """Byte positions of int64 block-relative ``addresses`` of the threads ``lanes``."""
        inside = addresses.view(np.uint64) <= np.uint64(max(self.size - size, 0))
        if not inside.all() or size > self.size:
            raise MemoryFault(f"shared access of {size} bytes at {int(addresses[~inside][0]):#x}: "
                              f"the block has {self.size} bytes", lanes[~inside])
        odd = addresses & (size - 1)
        if odd.any():
            raise MemoryFault(f"shared access of {size} bytes at {int(addresses[odd != 0][0]):#x}, "
                              f"which is no multiple of {size}", lanes[odd != 0])
        return addresses + self._base[lanes]

    def read(self, starts: Index, size: int, lanes: Index) -> Array:
        """Load uint8[n, size]."""
        self._expect(starts, size, lanes, _WRITTEN, "read")
        if self.races:
            self.races.read(starts, size, lanes)
        return self._views[size][starts // size].view(np.uint8).reshape(-1, size)

    def write(self, starts: Index, size: int, lanes: Index, data: Array) -> None:
        """Store uint8[n, size]."""
        self._expect(starts, size, lanes, None, "write")
        if self.races:
            self.races.write(starts, size, lanes, data)
        view = self._views[size]
        view[starts // size] = np.ascontiguousarray(data).view(view.dtype).reshape(-1)
        self._mark(starts, size, _WRITTEN)

    def before_atomic(self, starts: Index, size: int, lanes: Index) -> Array:
        """Check an atomic operation and return the array of ``size``-byte items; index it by ``starts // size``."""
        self._expect(starts, size, lanes, _WRITTEN, "atomic")
        if self.races:
            self.races.atomic(starts, size, lanes)
        return self._views[size]

    def _states(self, starts: Index, size: int) -> Array:
        """State codes of the bytes, as words of up to 8 bytes: [n, words]."""
        width = min(size, 8)
        cells = self.state.view(UNSIGNED[width])
        first = starts // width
        return cells[first][:, None] if size <= 8 else np.stack([cells[first], cells[first + 1]], 1)

    def _mark(self, starts: Index, size: int, code: int) -> None:
        width = min(size, 8)
        cells = self.state.view(UNSIGNED[width])
        for word in range(size // width):
            cells[starts // width + word] = _repeated(code, width)

    def _expect(self, starts: Index, size: int, lanes: Index, wanted: int | None, verb: str) -> None:
        states = self._states(starts, size)
        width = min(size, 8)
        pending = (states & _repeated(_PENDING, width)).any(1)
        if pending.any():
            raise AsyncCopyFault(f"shared {verb} of bytes that a cp.async has not delivered: no wait_group before it, "
                                 "or one that leaves too many groups open", lanes[pending])
        if wanted is None:
            return
        empty = (states != _repeated(wanted, width)).any(1)
        if empty.any():
            raise UninitializedRead(f"shared {verb} of bytes that were never written", lanes[empty])

    def start_copies(self, starts: Index, size: int, lanes: Index, data: Array) -> None:
        """cp.async: the bytes are unusable until the issuing thread waits for the group."""
        self._expect(starts, size, lanes, None, "cp.async")
        if self.races:
            self.races.write(starts, size, lanes, data)
        self._mark(starts, size, _PENDING)
        self._copies.append(_Copy(lanes, self._committed[lanes], starts, data))

    def commit(self, lanes: Index) -> None:
        """cp.async.commit_group of some threads."""
        self._committed[lanes] += 1

    def wait(self, active: Mask, open_groups: int, uncommitted_too: bool = False) -> None:
        """cp.async.wait_group: all but the newest ``open_groups`` groups of the active threads land.

        They land no earlier than here: the latest moment that the memory model allows.
        """
        left = []
        for copy in self._copies:
            newest = self._committed[copy.lanes] - open_groups + uncommitted_too
            landing = active[copy.lanes] & (copy.group < newest)
            if landing.any():
                self._land(copy.part(landing))
            if not landing.all():
                left.append(copy.part(~landing))
        self._copies = left

    def _land(self, copy: _Copy) -> None:
        size = copy.data.shape[1]
        view = self._views[size]
        view[copy.where // size] = np.ascontiguousarray(copy.data).view(view.dtype).reshape(-1)
        self._mark(copy.where, size, _WRITTEN)
        if self.races:
            self.races.deliver(copy.where, size, copy.lanes)

    def finish(self) -> None:
        """The blocks ended; faults if a copy was never waited for."""
        if self._copies:
            raise AsyncCopyFault("the kernel ended with cp.async copies that it never waited for",
                                 np.concatenate([copy.lanes for copy in self._copies]))

    def block_barrier(self, block: int) -> None:
        """All threads of a block passed a barrier."""
        if self.races:
            self.races.block_barrier(block * self.stride, (block + 1) * self.stride)


def _repeated(code: int, width: int) -> np.generic:
    return UNSIGNED[width].type(int.from_bytes(bytes([code]) * width, "little"))

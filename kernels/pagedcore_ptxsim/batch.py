"""The threads of the blocks that run together: registers, special registers, who is active now.

All threads of a batch advance in lockstep, one NumPy operation per instruction. ``scheduler`` decides which threads
are active; steps made by ``ops`` read ``mask``, ``full`` and ``lanes`` and change registers of active threads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedcore_ptxsim.global_memory import GlobalMemory
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, Index, Mask, numpy_type
from pagedcore_ptxsim.shared_memory import SharedMemory
from pagedcore_ptxsim.syntax import Kernel

Dim3 = tuple[int, int, int]
_POISON = 0xA5  # what a register holds before its first write
WARP = 32


@dataclass(frozen=True)
class Geometry:
    """Grid and block of a launch, and its dynamic shared memory in bytes."""

    grid: Dim3
    block: Dim3
    dynamic_shared: int

    @property
    def threads(self) -> int:
        """Threads of one block, rounded up to whole warps: the surplus lanes end before they begin."""
        return -(-self.real_threads // WARP) * WARP

    @property
    def real_threads(self) -> int:
        """Threads of one block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass
class Symbols:
    """What names stand for in this launch.

    shared: offset in a block's shared memory. memory: device address of module variables. parameters: the bytes of
    each kernel parameter. local: offset in a thread's local memory, which has ``local_size`` bytes.
    """

    shared: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, bytes] = field(default_factory=dict)
    local: Mapping[str, int] = field(default_factory=dict)
    shared_size: int = 0
    local_size: int = 0
    granule: int = 4


class Batch:
    """State of the running threads.

    Invariant: ``full`` says that ``mask`` is all true; ``lanes`` lists the true positions of ``mask``.
    Invariant: register arrays are written in place, so a step may keep views of them.
    """

    def __init__(self, kernel: Kernel, geometry: Geometry, symbols: Symbols, memory: GlobalMemory,
                 block_count: int, check_races: bool) -> None:
        self.kernel, self.geometry, self.symbols, self.memory = kernel, geometry, symbols, memory
        self.threads = geometry.threads
        self.count = block_count * self.threads
        self.warps = self.count // WARP
        self._granule = symbols.granule if check_races else 0
        self._pools: list[Array] = []
        self.registers = self._make_registers(kernel.registers)
        self.special: dict[str, Array] = {}
        self._everyone = np.arange(self.count)
        self.start(np.arange(block_count))

    def bind(self, geometry: Geometry, symbols: Symbols, memory: GlobalMemory) -> None:
        """Serve another launch of the kernel, with the same block and the same number of blocks at once."""
        self.geometry, self.symbols, self.memory = geometry, symbols, memory

    def start(self, blocks: Index) -> None:
        """Put the threads of ``blocks`` at the beginning; as many blocks as the batch was made for."""
        self.blocks = blocks
        if self.memory.handovers is not None:
            self.memory.handovers.begin(blocks)
        self.shared = SharedMemory(len(blocks), self.threads, self.symbols.shared_size, self._granule)
        self.local = LocalMemory(self.count, self.symbols.local_size)
        for pool in self._pools:
            pool.view(np.uint8)[...] = _POISON if pool.dtype != np.bool_ else 0
        for name, values in self.special.items():
            values[...] = self._special(name)
        self.pc = np.zeros(self.count, np.int64)
        inside = np.arange(self.count) % self.threads < self.geometry.real_threads
        self.done = ~inside
        self.waiting = np.full(self.count, -1, np.int8)
        self.waiting_for = np.zeros(self.count, np.int32)
        self.parked = np.zeros(self.count, np.bool_)
        self.any_parked = False
        self.arrived = np.zeros((len(blocks), 16), np.int32)
        self.vote, self.tally, self.arrivals = (np.zeros(self.count, np.int32) for _ in range(3))
        self.reducing, self.released = np.zeros(self.count, np.bool_), np.zeros(self.count, np.bool_)
        self._lanes: Index | None = None
        self.mask: Mask = inside
        self.full = False
        self.set_mask(inside)

    def _make_registers(self, kinds: Mapping[str, str]) -> dict[str, Array]:
        """One array per register, rows of one array per width."""
        names: dict[np.dtype[Any], list[str]] = {}
        for name, kind in kinds.items():
            dtype = numpy_type(kind)
            names.setdefault(dtype if dtype == np.bool_ else UNSIGNED[dtype.itemsize], []).append(name)
        registers: dict[str, Array] = {}
        for dtype, group in names.items():
            pool = np.empty((len(group), self.count), dtype)
            self._pools.append(pool)
            registers |= dict(zip(group, pool, strict=True))
        return registers

    def set_mask(self, mask: Mask) -> None:
        """Make the true positions of ``mask`` the active threads."""
        self.mask = mask
        self.full = bool(mask.all())
        self._lanes = None

    def save(self) -> tuple[Mask, bool, Index | None]:
        """Who is active, to ``restore``."""
        return self.mask, self.full, self._lanes

    def restore(self, saved: tuple[Mask, bool, Index | None]) -> None:
        """Activate the threads that were active at ``save``."""
        self.mask, self.full, self._lanes = saved

    @property
    def lanes(self) -> Index:
        """Positions of the active threads."""
        if self._lanes is None:
            self._lanes = self._everyone if self.full else np.flatnonzero(self.mask)
        return self._lanes

    def coordinates(self, lanes: list[int]) -> str:
        """Threads in words, for an error."""
        if not lanes:
            return ""
        block, thread = divmod(lanes[0], self.threads)
        where = f"thread {_unravel(thread, self.geometry.block)} of block "
        where += str(_unravel(int(self.blocks[block]), self.geometry.grid))
        return where + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")

    def special_register(self, name: str) -> Array | None:
        """The values of ``%tid.x`` and its like, uint32[count] (64-bit for clocks), or None if there is none."""
        if name not in self.special:
            values = self._special(name)
            if values is None:
                return None
            self.special[name] = values
        return self.special[name]

    def _special(self, name: str) -> Array | None:
        axis = "xyz".find(name[-1]) if name[-2:-1] == "." else -1
        thread = np.arange(self.count) % self.threads
        lane = thread % WARP
        if axis >= 0:
            block = np.repeat(self.blocks, self.threads)
            vectors = {"%tid": _unravel_all(thread, self.geometry.block)[axis],
                       "%ctaid": _unravel_all(block, self.geometry.grid)[axis],
                       "%ntid": np.full(self.count, self.geometry.block[axis]),
                       "%nctaid": np.full(self.count, self.geometry.grid[axis])}
            found = vectors.get(name[:-2])
            return None if found is None else found.astype(np.uint32)
        one = np.ones(self.count, np.uint64)
        bit = one << lane.astype(np.uint64)
        total = np.full(self.count, self.symbols.shared_size)
        plain = {"%laneid": lane, "%warpid": thread // WARP, "%nwarpid": one * np.uint64(self.threads // WARP),
                 "%lanemask_eq": bit, "%lanemask_lt": bit - one, "%lanemask_le": (bit << one) - one,
                 "%lanemask_gt": ~((bit << one) - one), "%lanemask_ge": ~(bit - one),
                 "%dynamic_smem_size": np.full(self.count, self.geometry.dynamic_shared), "%total_smem_size": total,
                 "%smid": thread * 0, "%nsmid": one, "%gridid": thread * 0}
        found = plain.get(name)
        return None if found is None else found.astype(np.uint32)


class LocalMemory:
    """Private memory of every thread: ``size`` bytes each."""

    def __init__(self, threads: int, size: int) -> None:
        self.size, self.stride = size, -(-size // 16) * 16
        self.bytes = np.full(threads * self.stride, _POISON, np.uint8)
        self.written = np.zeros(threads * self.stride, np.bool_)


def _unravel(index: int, shape: Dim3) -> Dim3:
    return index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1])


def _unravel_all(index: Array, shape: Dim3) -> tuple[Array, Array, Array]:
    return index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1])

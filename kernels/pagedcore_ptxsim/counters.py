"""What a launch asks of a GPU, counted per warp: instructions by class, bytes, sectors, wavefronts, bank conflicts.

Counting wraps steps as they are made, so that a launch without it runs none of this. Instructions are those of PTX:
an assembler drops moves and folds address arithmetic. One that its predicate turns off in a whole warp is not counted.

A wavefront of shared memory serves 32 banks of 4 bytes, each with one word; lanes that want the same word share it.
An access of 4 bytes or fewer is served 32 lanes at a time, of 8 bytes 16, of 16 bytes 8, as is a matrix of ldmatrix.
Each such phase takes as many wavefronts as its busiest bank has words, and all but the first are conflicts. Hardware
may serve phases that want the same words together, so these are upper bounds. A sector is 32 aligned bytes of global
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pagedcore_ptxsim.batch import WARP, Batch, Geometry
from pagedcore_ptxsim.binder import Binder, split_vector
from pagedcore_ptxsim.ops.async_copy import source_sizes
from pagedcore_ptxsim.ops.memory import by_space, space_of
from pagedcore_ptxsim.scalar_types import Array, Index, numpy_type
from pagedcore_ptxsim.scheduler import Maker, Step
from pagedcore_ptxsim.syntax import Instruction, integer

CLASSES = ("mma", "ldmatrix", "cp.async", "global loads", "global stores", "shared loads", "shared stores", "local",
           "atomics", "shuffles", "barriers", "integer", "float", "other")
"""``shuffles`` are all exchanges in a warp, ``barriers`` fences and the waits of cp.async too, ``integer`` addresses,
comparisons and logic; ``other`` are moves, parameters, branches."""
_FAMILIES = {
    "mma": "mma", "atom": "atomics", "red": "atomics",
    **dict.fromkeys(("shfl", "vote", "match", "redux", "activemask", "elect", "movmatrix"), "shuffles"),
    **dict.fromkeys(("bar", "barrier", "membar", "fence"), "barriers"),
    **dict.fromkeys(("mov", "cvta", "bra", "ret", "exit"), "other"),
}
_ROW = {name: i for i, name in enumerate(CLASSES)}
_FLOATS = ("f", "bf", "tf", "e4", "e5")
_BANKS = 32
_SECTOR_SHIFT = 5
_WORDS = np.int64(1) << 32
"""More than any address of shared memory; tells the words of phases apart."""


@dataclass(frozen=True)
class Work:
    """What one class of instructions did, int64 [warps of the grid] each, the warps of a block together.

    ``bytes`` are those that the lanes named, ``sectors`` those of global memory, ``wavefronts`` those of shared
    memory, of which ``conflicts`` are more than one a phase. What a class does not have is 0.
    """

    instructions: Index
    bytes: Index
    sectors: Index
    wavefronts: Index
    conflicts: Index


@dataclass(frozen=True)
class _Access:
    """One access of some lanes: ``shared`` and ``global_`` are addresses, or nothing."""

    size: int
    lanes: Index
    shared: Array | None = None
    global_: Array | None = None
    reads: Index | None = None
    """Which lanes access global memory; ``None``: all."""


class Counters:
    """Counts of one launch."""

    def __init__(self, geometry: Geometry) -> None:
        self._warps = geometry.threads // WARP
        self._table = np.zeros((len(CLASSES), 5, geometry.blocks * self._warps), np.int64)
        self.conflict_lines: Counter[int] = Counter()

    def makers(self, makers: Mapping[str, Maker]) -> dict[str, Maker]:
        """The same operations, counted here."""
        return {name: self._counted(maker) for name, maker in makers.items()}

    def work(self) -> dict[str, Work]:
        """What was counted, by class."""
        return {name: Work(*self._table[i]) for i, name in enumerate(CLASSES)}

    def _counted(self, maker: Maker) -> Maker:
        def make(bind: Binder, instruction: Instruction, position: int) -> Step:
            step, batch = maker(bind, instruction, position), bind.batch
            look, kind = _accesses(bind, instruction), _ROW[_class_of(instruction)]

            def run() -> int | None:
                # Why before: a load may overwrite its own address.
                lanes, mask = batch.lanes, batch.mask
                accesses = list(look())
                after = step()
                if batch.mask is not mask:            # some were parked and come again
                    lanes = lanes[batch.mask[lanes]]
                    accesses = list(_of_mask(accesses, batch))
                if accesses:
                    for name, access in accesses:
                        self._access(_ROW[name], instruction.line, batch, access)
                else:
                    self._table[kind, 0, self._places(batch, np.unique(lanes // WARP))] += 1
                return after
            return run
        return make

    def _places(self, batch: Batch, warps: Index) -> Index:
        """Where warps of the batch are in the grid."""
        return batch.blocks[warps // self._warps] * self._warps + warps % self._warps

    def _access(self, kind: int, line: int, batch: Batch, access: _Access) -> None:
        table, warps = self._table[kind], access.lanes // WARP
        found, counts = np.unique(warps, return_counts=True)
        places = self._places(batch, found)
        table[0, places] += 1
        table[1, places] += counts * access.size
        if access.shared is not None:
            waves_of, waves = wavefronts(access.shared, access.size, access.lanes)
            places = self._places(batch, waves_of)
            np.add.at(table[3], places, waves)
            np.add.at(table[4], places, waves - 1)
            self.conflict_lines[line] += int((waves - 1).sum())
        if access.global_ is not None:
            chosen = slice(None) if access.reads is None else access.reads
            sectors = np.unique((warps[chosen] << 48) | (access.global_[chosen] & 0xFFFFFFFFFFFF) >> _SECTOR_SHIFT)
            np.add.at(table[2], self._places(batch, sectors >> 48), 1)


def wavefronts(addresses: Array, size: int, lanes: Index) -> tuple[Index, Index]:
    """The warp of each phase of an access to shared memory, and how many wavefronts it takes."""
    at_once = min(WARP, max(1, WARP * 4 // size))
    phases = lanes // at_once
    words = (addresses >> 2)[:, None] + np.arange(max(1, size // 4))
    distinct = np.unique(phases[:, None] * _WORDS + words)
    banks, counts = np.unique(distinct // _WORDS * _BANKS + distinct % _BANKS, return_counts=True)
    starts = np.flatnonzero(np.diff(banks // _BANKS, prepend=-1))
    return banks[starts] // _BANKS * at_once // WARP, np.maximum.reduceat(counts, starts)


def _class_of(instruction: Instruction) -> str:
    """The class of an instruction that accesses no memory with lanes' addresses of global or shared memory."""
    if instruction.name in _FAMILIES:
        return _FAMILIES[instruction.name]
    if instruction.name == "cp":
        return "barriers"
    if instruction.name in ("ld", "ldu", "st"):
        return "local" if space_of(instruction) == "local" else "other"
    types = instruction.types
    return "other" if not types else "float" if any(each.startswith(_FLOATS) for each in types) else "integer"


Look = Callable[[], Iterator[tuple[str, _Access]]]


def _accesses(bind: Binder, instruction: Instruction) -> Look:
    """What gives the accesses that the active lanes are about to make."""
    name = instruction.name
    if name in ("ld", "ldu", "st") and space_of(instruction) in ("global", "shared", "generic"):
        return _loads_and_stores(bind, instruction)
    if name in ("ldmatrix", "stmatrix"):
        return _matrices(bind, instruction)
    if name == "cp" and not instruction.has("commit_group", "wait_group", "wait_all"):
        return _copies(bind, instruction)
    return lambda: iter(())


def _loads_and_stores(bind: Binder, instruction: Instruction) -> Look:
    stores, space, batch = instruction.name == "st", space_of(instruction), bind.batch
    address, data = instruction.operands if stores else instruction.operands[::-1]
    size = numpy_type(instruction.types[-1]).itemsize * len(split_vector(data))
    read, verb = bind.addresses(address), "stores" if stores else "loads"

    def look() -> Iterator[tuple[str, _Access]]:
        addresses, lanes = read(), batch.lanes
        parts = by_space(addresses) if space == "generic" else [(space, 0, np.ones(len(lanes), np.bool_))]
        for where, base, chosen in parts:
            if where == "global":
                yield f"global {verb}", _Access(size, lanes[chosen], global_=addresses[chosen])
            elif where == "shared":
                yield f"shared {verb}", _Access(size, lanes[chosen], shared=addresses[chosen] - base)
            else:
                yield "local", _Access(size, lanes[chosen])
    return look


def _matrices(bind: Binder, instruction: Instruction) -> Look:
    stores, batch = instruction.name == "stmatrix", bind.batch
    address, data = instruction.operands if stores else instruction.operands[::-1]
    read, count = bind.addresses(address), len(split_vector(data))

    def look() -> Iterator[tuple[str, _Access]]:
        giving = batch.lanes % WARP < 8 * count
        yield "shared stores" if stores else "ldmatrix", _Access(16, batch.lanes[giving], shared=read()[giving])
    return look


def _copies(bind: Binder, instruction: Instruction) -> Look:
    batch, size = bind.batch, integer(instruction.operands[2])
    to, source, given = *map(bind.addresses, instruction.operands[:2]), source_sizes(bind, instruction, size)

    def look() -> Iterator[tuple[str, _Access]]:
        lanes = batch.lanes
        reads = np.flatnonzero(np.broadcast_to(given, batch.count)[lanes])
        yield "cp.async", _Access(size, lanes, to(), source(), reads)
    return look


def _of_mask(accesses: list[tuple[str, _Access]], batch: Batch) -> Iterator[tuple[str, _Access]]:
    """What of the accesses of whole warps, which are matrices, is left of those that run."""
    for name, access in accesses:
        stays = batch.mask[access.lanes]
        if stays.any() and access.shared is not None:
            yield name, _Access(access.size, access.lanes[stays], access.shared[stays])

"""Loads and stores of every state space, vectors included, and hints that do nothing here.

A generic address is looked up in the shared and local windows first, as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedcore_ptxsim.batch import Batch
from pagedcore_ptxsim.binder import LOCAL_WINDOW, SHARED_WINDOW, Binder, split_vector
from pagedcore_ptxsim.errors import MemoryFault, UninitializedRead, UnsupportedPtx
from pagedcore_ptxsim.handovers import order_of
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.scalar_types import UNSIGNED, Array, Index, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

_WINDOW_SIZE = np.uint64(1 << 32)
Load = Callable[[Array, int, Index], Array]
Store = Callable[[Array, int, Index, Array], None]


def space_of(instruction: Instruction) -> str:
    """The state space an access names: global (const included), shared, local, param, or generic."""
    for part in instruction.parts[1:]:
        space = part.partition("__")[0]
        if space in ("global", "shared", "local", "param"):
            return space
        if space == "const":
            return "global"
    return "generic"


def _local_positions(batch: Batch, addresses: Array, size: int, lanes: Index) -> Index:
    local = batch.local
    wrong = (addresses < 0) | (addresses + size > local.size) | (addresses & (size - 1) != 0)
    if wrong.any():
        raise MemoryFault(f"local access of {size} bytes at {int(addresses[wrong][0]):#x}: a thread has {local.size} "
                          "bytes", lanes[wrong])
    return (addresses + lanes * local.stride)[:, None] + np.arange(size)


def loader(batch: Batch, space: str, order: str = "") -> Load:
    """A function (addresses, size, lanes) -> uint8[n, size] for a state space; ``order`` as from ``order_of``."""
    def from_global(addresses: Array, size: int, lanes: Index) -> Array:
        places, watch = batch.memory.locate(addresses, size, lanes, False), batch.memory.handovers
        if watch is not None and order:
            watch.synchronise(places * size, lanes, order, loads=True, stores=False)
        elif watch is not None:
            watch.read(places * size, size, lanes)
        return batch.memory.read(places, size)

    def from_shared(addresses: Array, size: int, lanes: Index) -> Array:
        return batch.shared.read(batch.shared.locate(addresses, size, lanes), size, lanes)

    def from_local(addresses: Array, size: int, lanes: Index) -> Array:
        where = _local_positions(batch, addresses, size, lanes)
        empty = ~batch.local.written[where].all(1)
        if empty.any():
            raise UninitializedRead("local read of bytes that the thread never wrote", lanes[empty])
        return batch.local.bytes[where]

    spaces: dict[str, Load] = {"global": from_global, "shared": from_shared, "local": from_local}

    def from_anywhere(addresses: Array, size: int, lanes: Index) -> Array:
        result = np.zeros((len(lanes), size), np.uint8)
        for name, base, chosen in by_space(addresses):
            result[chosen] = spaces[name](addresses[chosen] - base, size, lanes[chosen])
        return result
    return from_anywhere if space == "generic" else spaces[space]


def storer(batch: Batch, space: str, order: str = "") -> Store:
    """A function (addresses, size, lanes, uint8[n, size]) for a state space; ``order`` as from ``order_of``."""
    def to_global(addresses: Array, size: int, lanes: Index, data: Array) -> None:
        places, watch = batch.memory.locate(addresses, size, lanes, True), batch.memory.handovers
        if watch is not None:
            watch.write(places * size, size, lanes)
            if order:
                watch.synchronise(places * size, lanes, order, loads=False, stores=True)
        batch.memory.write(places, size, data)

    def to_shared(addresses: Array, size: int, lanes: Index, data: Array) -> None:
        batch.shared.write(batch.shared.locate(addresses, size, lanes), size, lanes, data)

    def to_local(addresses: Array, size: int, lanes: Index, data: Array) -> None:
        where = _local_positions(batch, addresses, size, lanes)
        batch.local.bytes[where], batch.local.written[where] = data, True

    spaces: dict[str, Store] = {"global": to_global, "shared": to_shared, "local": to_local}

    def to_anywhere(addresses: Array, size: int, lanes: Index, data: Array) -> None:
        for name, base, chosen in by_space(addresses):
            spaces[name](addresses[chosen] - base, size, lanes[chosen], data[chosen])
    return to_anywhere if space == "generic" else spaces[space]


def by_space(addresses: Array) -> list[tuple[str, int, Array]]:
    """Generic addresses by space: (space, window base, which)."""
    unsigned = addresses.view(np.uint64)
    shared = unsigned - np.uint64(SHARED_WINDOW) < _WINDOW_SIZE
    local = unsigned - np.uint64(LOCAL_WINDOW) < _WINDOW_SIZE
    parts = [("shared", SHARED_WINDOW, shared), ("local", LOCAL_WINDOW, local), ("global", 0, ~(shared | local))]
    return [part for part in parts if part[2].any()]


@operation("ld", "ldu")
def _ld(bind: Binder, instruction: Instruction, position: int) -> Step:
    space = space_of(instruction)
    if space == "param":
        return _ld_param(bind, instruction)
    dtype = numpy_type(instruction.types[-1])
    targets = split_vector(instruction.operands[0])
    writers = [bind.lane_writer(target, dtype) for target in targets]
    load = loader(bind.batch, space, order_of(instruction))
    addresses, batch = bind.addresses(instruction.operands[1]), bind.batch
    size = dtype.itemsize * len(targets)

    def step() -> None:
        items = load(addresses(), size, batch.lanes).view(dtype)
        for i, write in enumerate(writers):
            write(items[:, i])
    return step


def _ld_param(bind: Binder, instruction: Instruction) -> Step:
    """Kernel parameters are the same for all threads, and read anew in each launch."""
    dtype = numpy_type(instruction.types[-1])
    name, offset = bind.address(instruction.operands[1])
    batch = bind.batch
    if name not in batch.symbols.parameters:
        raise UnsupportedPtx(f"{name} is no parameter of the kernel")
    targets = split_vector(instruction.operands[0])
    writers = [bind.writer(target, dtype) for target in targets]

    def step() -> None:
        values = np.frombuffer(batch.symbols.parameters[name], dtype, len(targets), offset)
        for write, value in zip(writers, values, strict=True):
            write(np.asarray(value))
    return step


def store_data(bind: Binder, operands: list[str], dtype: np.dtype[Any]) -> Callable[[], Array]:
    """A function giving the bytes that the active threads store: uint8[n, size]."""
    batch = bind.batch
    sources = [bind.source(operand, dtype) for operand in operands]

    def gather() -> Array:
        items = np.empty((len(batch.lanes), len(sources)), dtype)
        for i, source in enumerate(sources):
            items[:, i] = source if batch.full or source.ndim == 0 else source[batch.lanes]
        return items.view(np.uint8)
    return gather


@operation("st")
def _st(bind: Binder, instruction: Instruction, position: int) -> Step:
    dtype = numpy_type(instruction.types[-1])
    sources = split_vector(instruction.operands[1])
    data = store_data(bind, sources, UNSIGNED[dtype.itemsize])
    batch, addresses = bind.batch, bind.addresses(instruction.operands[0])
    store = storer(batch, space_of(instruction), order_of(instruction))
    size = dtype.itemsize * len(sources)

    def step() -> None:
        store(addresses(), size, batch.lanes, data())
    return step


@operation("membar", "fence")
def _fence(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Global memory here is sequentially consistent and needs no fence; the search for hand-overs counts them."""
    batch, is_wide = bind.batch, not instruction.has("cta", "cluster", "proxy", "mbarrier_init")

    def step() -> None:
        if is_wide and batch.memory.handovers is not None:
            batch.memory.handovers.fence(batch.lanes)
    return step


@operation("prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "pmevent", "griddepcontrol",
           "createpolicy", "setmaxnreg")
def _nothing(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Hints."""
    return lambda: None

"""Atomic operations on global and shared memory: atom and red.

Threads of one instruction that name one place go in the order of their numbers. Different places go together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedcore_ptxsim.batch import Batch
from pagedcore_ptxsim.binder import SHARED_WINDOW, Binder
from pagedcore_ptxsim.errors import UnsupportedPtx
from pagedcore_ptxsim.formats import bf16_to_f32, f32_to_bf16
from pagedcore_ptxsim.handovers import order_of
from pagedcore_ptxsim.ops.memory import space_of
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.scalar_types import Array, Index, numpy_type
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction

Update = Callable[[Array, Array, Array], Array]


def _halves(function: Callable[[Array, Array], Array], brain: bool) -> Update:
    def update(old: Array, value: Array, _: Array) -> Array:
        x, y = (np.ascontiguousarray(word).view(np.uint16) for word in (old, value))
        if brain:
            return f32_to_bf16(function(bf16_to_f32(x), bf16_to_f32(y))).view(old.dtype)
        return np.ascontiguousarray(function(x.view(np.float16), y.view(np.float16))).view(old.dtype)
    return update


_UPDATES: dict[str, Update] = {
    "add": lambda old, value, _: old + value,
    "min": lambda old, value, _: np.fmin(old, value),
    "max": lambda old, value, _: np.fmax(old, value),
    "and": lambda old, value, _: old & value,
    "or": lambda old, value, _: old | value,
    "xor": lambda old, value, _: old ^ value,
    "exch": lambda old, value, _: value,
    "inc": lambda old, value, _: np.where(old >= value, 0, old + old.dtype.type(1)).astype(old.dtype),
    "dec": lambda old, value, _: np.where((old == 0) | (old > value), value, old - old.dtype.type(1)),
    "cas": lambda old, compare, value: np.where(old == compare, value, old),
}
_HALF_FUNCTIONS = {"add": np.add, "min": np.fmin, "max": np.fmax}


def _update(instruction: Instruction) -> Update:
    name = next(part for part in instruction.parts if part in _UPDATES)
    kind = instruction.types[-1]
    if kind in ("f16x2", "bf16", "bf16x2"):
        return _halves(_HALF_FUNCTIONS[name], kind.startswith("bf16"))
    return _UPDATES[name]


@operation("atom", "red")
def _atom(bind: Binder, instruction: Instruction, position: int) -> Step:
    operands = list(instruction.operands)
    target = operands.pop(0) if instruction.name == "atom" else "_"
    dtype = numpy_type(instruction.types[-1])
    batch, space, update = bind.batch, space_of(instruction), _update(instruction)
    if operands[1].startswith("{"):
        raise UnsupportedPtx("vector atomics")
    addresses, write = bind.addresses(operands[0]), bind.lane_writer(target, dtype)
    order, is_wide = order_of(instruction) or "relaxed", not instruction.has("cta", "cluster")
    values = [bind.source(operand, dtype) for operand in operands[1:3]]
    values += [values[0]] * (2 - len(values))

    def step() -> None:
        lanes = batch.lanes
        places, cells = _cells(batch, space, addresses(), dtype.itemsize, lanes)
        watch = batch.memory.handovers
        if watch is not None and cells is batch.memory.bytes:
            watch.write(places * dtype.itemsize, dtype.itemsize, lanes)
            if is_wide:
                watch.synchronise(places * dtype.itemsize, lanes, order, loads=True, stores=True)
        value, other = (np.broadcast_to(each, batch.count)[lanes] for each in values)
        write(_apply(cells.view(dtype), places, update, value, other))
    return step


def _cells(batch: Batch, space: str, addresses: Array, size: int, lanes: Index) -> tuple[Index, Array]:
    """Positions, and the array that they index in items of ``size`` bytes."""
    if space == "generic":
        shared = addresses - SHARED_WINDOW
        in_shared = shared.view(np.uint64) < np.uint64(1 << 32)
        if in_shared.any() and not in_shared.all():
            raise UnsupportedPtx("one atomic instruction on shared and global memory at once")
        space, addresses = ("shared", shared) if in_shared.any() else ("global", addresses)
    if space == "shared":
        starts = batch.shared.locate(addresses, size, lanes)
        return starts // size, batch.shared.before_atomic(starts, size, lanes)
    return batch.memory.locate(addresses, size, lanes, True), batch.memory.bytes


def _apply(cells: Array, places: Index, update: Update, value: Array, other: Array) -> Array:
    """Update the cells in lane order; returns what each lane found. Lanes at different cells go together."""
    found = np.empty(len(places), cells.dtype)
    left = np.arange(len(places))
    while len(left):
        _, first = np.unique(places[left], return_index=True)
        now = left[first]
        found[now] = cells[places[now]]
        cells[places[now]] = update(found[now], value[now], other[now])
        left = np.delete(left, first)
    return found

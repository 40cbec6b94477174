"""Operations of the threads of a warp together: shuffles, votes, matches, reductions, the warp barrier.

Every one waits for the threads its member mask names. Source: PTX ISA, ``shfl.sync`` and its neighbours.
"""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.batch import WARP
from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.errors import DivergenceFault
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.scalar_types import Array, Mask, numpy_type
from pagedcore_ptxsim.scheduler import Step, whole_warps
from pagedcore_ptxsim.syntax import Instruction

_U32, _BOOL = np.dtype(np.uint32), np.dtype(np.bool_)
_LANE = np.arange(WARP)
_BITS = (np.uint32(1) << _LANE.astype(np.uint32))


def _rows(values: Array, count: int) -> Array:
    return np.broadcast_to(values, count).reshape(-1, WARP)


def _members(bind: Binder, operand: str) -> Array:
    return bind.source(operand, _U32)


@operation("shfl")
def _shfl(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Read another lane's register. A lane outside the clamp keeps its own and gets a false predicate."""
    batch, mode = bind.batch, next(part for part in instruction.parts if part in ("up", "down", "bfly", "idx"))
    targets = instruction.operands[0].split("|")
    value, lane, clamp = (bind.source(operand, _U32) for operand in instruction.operands[1:4])
    write = bind.writer(targets[0].strip(), _U32)
    write_inside = bind.writer(targets[1].strip(), _BOOL) if len(targets) > 1 else None

    def step() -> None:
        origin, inside = shuffle_lanes(mode, _rows(lane, batch.count), _rows(clamp, batch.count))
        if not batch.full:
            _require_active(batch.mask.reshape(-1, WARP), origin)
        write(np.take_along_axis(_rows(value, batch.count), origin, 1).reshape(-1))
        if write_inside:
            write_inside(inside.reshape(-1))
    return whole_warps(batch, position, step, _members(bind, instruction.operands[4]))


def shuffle_lanes(mode: str, lane: Array, clamp: Array) -> tuple[Array, Mask]:
    """For each thread the lane that it reads, and whether that lane was inside the clamp. int[warps, 32]."""
    by = (lane & np.uint32(31)).astype(np.int64)
    limit, segment = (clamp & np.uint32(31)).astype(np.int64), (clamp >> np.uint32(8) & np.uint32(31)).astype(np.int64)
    last, first = (_LANE & segment) | (limit & ~segment), _LANE & segment
    wanted = {"up": _LANE - by, "down": _LANE + by, "bfly": _LANE ^ by, "idx": first | (by & ~segment)}[mode]
    inside = wanted >= last if mode == "up" else wanted <= last
    return np.where(inside, wanted, _LANE), inside


def _require_active(active: Mask, origin: Array) -> None:
    idle = active & ~np.take_along_axis(active, origin, 1)
    if idle.any():
        raise DivergenceFault("a shuffle reads a thread that does not take part in it",
                              np.flatnonzero(idle.reshape(-1)).tolist())


def _ballot(active: Mask, predicate: Array) -> Array:
    """uint32[warps]: one bit for each active lane whose predicate is true."""
    return ((active & predicate) * _BITS).sum(1, dtype=np.uint32)


@operation("vote")
def _vote(bind: Binder, instruction: Instruction, position: int) -> Step:
    batch, operand = bind.batch, instruction.operands[1]
    predicate, negated = bind.source(operand.lstrip("!"), _BOOL), operand[0] == "!"
    ballot = instruction.has("ballot")
    write = bind.writer(instruction.operands[0], _U32 if ballot else _BOOL)
    members = _members(bind, instruction.operands[2])

    def step() -> None:
        values = _rows(predicate, batch.count) ^ negated
        named = (_rows(members, batch.count) & _BITS) != 0
        active = batch.mask.reshape(-1, WARP) & named
        true, every = _ballot(active, values), _ballot(active, np.ones_like(values))
        result = {"all": true == every, "any": true != 0, "uni": (true == every) | (true == 0), "ballot": true}
        write(np.repeat(result[next(part for part in instruction.parts if part in result)], WARP))
    return whole_warps(batch, position, step, members)


@operation("activemask")
def _activemask(bind: Binder, instruction: Instruction, position: int) -> Step:
    batch, write = bind.batch, bind.writer(instruction.operands[0], _U32)
    everyone = np.ones((batch.warps, WARP), np.bool_)
    return lambda: write(np.repeat(_ballot(batch.mask.reshape(-1, WARP), everyone), WARP))


@operation("match")
def _match(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Which lanes hold the same value; ``.all`` gives the whole mask or nothing."""
    batch, dtype = bind.batch, numpy_type(instruction.types[-1])
    targets = instruction.operands[0].split("|")
    value, members = bind.source(instruction.operands[1], dtype), _members(bind, instruction.operands[2])
    write = bind.writer(targets[0].strip(), _U32)
    write_same = bind.writer(targets[1].strip(), _BOOL) if len(targets) > 1 else None

    def step() -> None:
        values = _rows(value, batch.count)
        active = batch.mask.reshape(-1, WARP)
        equal = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        found = (equal * _BITS).sum(2, dtype=np.uint32)
        if instruction.has("all"):
            every = _ballot(active, np.ones_like(active))[:, None]
            same = found == every
            found = np.where(same, every, np.uint32(0))
            if write_same:
                write_same(same.reshape(-1))
        write(found.reshape(-1))
    return whole_warps(batch, position, step, members)


@operation("redux")
def _redux(bind: Binder, instruction: Instruction, position: int) -> Step:
    """One reduction over the active lanes of each warp."""
    batch, dtype = bind.batch, numpy_type(instruction.types[-1])
    value, write = bind.source(instruction.operands[1], dtype), bind.writer(instruction.operands[0], dtype)
    limits = np.iinfo(dtype)
    ones = dtype.type(-1) if dtype.kind == "i" else dtype.type(limits.max)
    reductions = {"add": (np.add, 0), "min": (np.minimum, limits.max), "max": (np.maximum, limits.min),
                  "and": (np.bitwise_and, ones), "or": (np.bitwise_or, 0), "xor": (np.bitwise_xor, 0)}
    function, neutral = reductions[next(part for part in instruction.parts if part in reductions)]

    def step() -> None:
        values = np.where(batch.mask.reshape(-1, WARP), _rows(value, batch.count), dtype.type(neutral))
        write(np.repeat(function.reduce(values, axis=1, dtype=dtype), WARP))
    return whole_warps(batch, position, step, _members(bind, instruction.operands[2]))


@operation("elect")
def _elect(bind: Binder, instruction: Instruction, position: int) -> Step:
    """The lowest active lane leads."""
    batch = bind.batch
    targets = instruction.operands[0].split("|")
    write, write_leads = bind.writer(targets[0].strip(), _U32), bind.writer(targets[1].strip(), _BOOL)

    def step() -> None:
        leader = batch.mask.reshape(-1, WARP).argmax(1)
        write(np.repeat(leader.astype(np.uint32), WARP))
        write_leads((leader[:, None] == _LANE).reshape(-1))
    return whole_warps(batch, position, step, _members(bind, instruction.operands[1]))


def warp_barrier(bind: Binder, instruction: Instruction, position: int) -> Step:
    """``bar.warp.sync``: orders the shared accesses of a warp that arrives whole."""
    batch = bind.batch

    def step() -> None:
        if batch.shared.races:
            gone = batch.done.reshape(-1, WARP)
            active = batch.mask.reshape(-1, WARP)
            batch.shared.races.warp_barrier(np.flatnonzero((active | gone).all(1) & active.any(1)))
    return whole_warps(batch, position, step, _members(bind, instruction.operands[0]))

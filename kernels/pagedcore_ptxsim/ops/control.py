"""Control flow: branches, ends, block barriers. Source: PTX ISA, Control Flow and ``barrier``."""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.errors import BarrierFault, PtxFault, UnsupportedPtx
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.ops.warp import warp_barrier
from pagedcore_ptxsim.scalar_types import Array
from pagedcore_ptxsim.scheduler import REGROUP, Step
from pagedcore_ptxsim.syntax import Instruction

_U32, _BOOL = np.dtype(np.uint32), np.dtype(np.bool_)


@operation("bra")
def _bra(bind: Binder, instruction: Instruction, position: int) -> Step:
    batch = bind.batch
    target = batch.kernel.labels[instruction.operands[0]]
    if not instruction.guard:
        return lambda: target
    guard = batch.registers[instruction.guard]

    def step() -> int | None:
        taken = batch.mask & ~guard if instruction.guard_negated else batch.mask & guard
        if not taken.any():
            return None
        rest = batch.mask & ~taken
        if not rest.any():
            return target
        batch.pc[rest] = position + 1
        batch.pc[taken] = target
        return REGROUP
    return step


@operation("ret", "exit")
def _ret(bind: Binder, instruction: Instruction, position: int) -> Step:
    batch = bind.batch

    def step() -> int:
        batch.done |= batch.mask
        return REGROUP
    return step


@operation("trap", "brkpt")
def _trap(bind: Binder, instruction: Instruction, position: int) -> Step:
    def step() -> None:
        raise PtxFault("the kernel trapped", bind.batch.lanes.tolist())
    return step


@operation("bar", "barrier")
def _bar(bind: Binder, instruction: Instruction, position: int) -> Step:
    if instruction.has("warp"):
        return warp_barrier(bind, instruction, position)
    if instruction.has("cluster"):
        raise UnsupportedPtx("barriers of a cluster")
    if instruction.has("red"):
        return _reduction(bind, instruction, position)
    batch = bind.batch
    number, threads = _barrier_operands(bind, instruction, 0)
    if instruction.has("arrive"):
        return _arrive(bind, number, threads)

    def step() -> int:
        _wait(bind, number, threads)
        batch.pc[batch.mask] = position + 1
        return REGROUP
    return step


def _barrier_operands(bind: Binder, instruction: Instruction, first: int) -> tuple[Array, Array]:
    operands = instruction.operands[first:]
    number = bind.source(operands[0], _U32)
    return number, bind.source(operands[1], _U32) if len(operands) > 1 else np.array(0, np.uint32)


def _wait(bind: Binder, number: Array, threads: Array) -> None:
    batch = bind.batch
    if (np.broadcast_to(number, batch.count)[batch.lanes] > 15).any():
        raise BarrierFault("a block has barriers 0 to 15", batch.lanes.tolist())
    np.copyto(batch.waiting, number.astype(np.int8), where=batch.mask)
    np.copyto(batch.waiting_for, threads.astype(np.int32), where=batch.mask)


def _arrive(bind: Binder, number: Array, threads: Array) -> Step:
    batch = bind.batch

    def step() -> None:
        lanes = batch.lanes
        np.add.at(batch.arrived, (lanes // batch.threads, np.broadcast_to(number, batch.count)[lanes]), 1)
    return step


def _reduction(bind: Binder, instruction: Instruction, position: int) -> Step:
    """Barrier, then the count, conjunction or disjunction of the predicates of the block."""
    batch, operand = bind.batch, instruction.operands[-1]
    predicate, negated = bind.source(operand.lstrip("!"), _BOOL), operand[0] == "!"
    popc = instruction.has("popc")
    write = bind.writer(instruction.operands[0], _U32 if popc else _BOOL)
    number = bind.source(instruction.operands[1], _U32)
    threads = bind.source(instruction.operands[2], _U32) if len(instruction.operands) > 3 else np.array(0, np.uint32)

    def step() -> int:
        everyone = batch.mask
        back = everyone & batch.released
        if back.any():
            batch.set_mask(back)
            write(batch.tally.astype(np.uint32) if popc else
                  batch.tally == batch.arrivals if instruction.has("and") else batch.tally > 0)
            batch.pc[back] = position + 1
            batch.released[back] = batch.reducing[back] = False
        batch.set_mask(everyone & ~back)
        if batch.mask.any():
            batch.pc[batch.mask] = position
            np.copyto(batch.vote, predicate ^ negated, where=batch.mask)
            batch.reducing[batch.mask] = True
            _wait(bind, number, threads)
        return REGROUP
    return step

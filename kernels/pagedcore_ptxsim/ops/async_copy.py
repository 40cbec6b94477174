"""Asynchronous copies from global to shared memory: cp.async with its groups and waits.

The data is read when the instruction runs and arrives when a wait demands it: as late as the memory model allows,
so that a missing wait shows. Bulk copies and memory barriers (``cp.async.bulk``, ``mbarrier``) are not modelled.
"""

from __future__ import annotations

import numpy as np

from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.errors import PtxFault, UnsupportedPtx
from pagedcore_ptxsim.ops.memory import Load, loader
from pagedcore_ptxsim.ops.registry import operation
from pagedcore_ptxsim.scalar_types import Array
from pagedcore_ptxsim.scheduler import Step
from pagedcore_ptxsim.syntax import Instruction, integer


@operation("cp")
def _cp(bind: Binder, instruction: Instruction, position: int) -> Step:
    batch = bind.batch
    if instruction.has("bulk", "mbarrier", "tensor"):
        raise UnsupportedPtx("bulk copies and memory barriers")
    if instruction.has("commit_group"):
        return lambda: batch.shared.commit(batch.lanes)
    if instruction.has("wait_all"):
        return lambda: batch.shared.wait(batch.mask, 0, uncommitted_too=True)
    if instruction.has("wait_group"):
        open_groups = integer(instruction.operands[0])
        return lambda: batch.shared.wait(batch.mask, open_groups)
    return _copy(bind, instruction)


def _copy(bind: Binder, instruction: Instruction) -> Step:
    """Copy 4, 8 or 16 bytes; a source size below that fills the rest with zeros."""
    batch = bind.batch
    size = integer(instruction.operands[2])
    to, source, load = bind.addresses(instruction.operands[0]), bind.addresses(instruction.operands[1]), \
        loader(batch, "global")
    given = source_sizes(bind, instruction, size)

    def step() -> None:
        lanes = batch.lanes
        data = np.zeros((len(lanes), size), np.uint8)
        sizes = np.broadcast_to(given, batch.count)[lanes]
        if (sizes > size).any():
            raise PtxFault(f"cp.async with a source size above its {size} bytes", lanes[sizes > size].tolist())
        for length in np.unique(sizes[sizes > 0]):
            rows = sizes == length
            data[rows, :length] = _read(load, source()[rows], int(length), size, lanes[rows])
        batch.shared.start_copies(batch.shared.locate(to(), size, lanes), size, lanes, data)
    return step


def source_sizes(bind: Binder, instruction: Instruction, size: int) -> Array:
    """Bytes that a copy of ``size`` reads, per thread or one number for all."""
    operands = instruction.operands[3:]
    if not operands:
        return np.array(size, np.uint32)
    if bind.batch.kernel.registers.get(operands[0].lstrip("!")) == "pred":
        raise UnsupportedPtx("cp.async with an ignore-src predicate")
    source = bind.source(operands[0], np.dtype(np.uint32))
    # Why: the operand after the size may be a cache policy, a 64-bit register; it changes no value.
    register = bind.register(operands[0])
    return np.array(size, np.uint32) if register is not None and register.dtype.itemsize == 8 else source


def _read(load: Load, addresses: Array, length: int, size: int, lanes: Array) -> Array:
    """The first ``length`` bytes at addresses aligned to ``size``; only they need be readable."""
    if length == size:
        return load(addresses, size, lanes)
    if (addresses & (size - 1)).any():
        load(addresses, size, lanes)
    return np.concatenate([load(addresses + i, 1, lanes) for i in range(length)], 1)

"""Who runs next: program counters, divergence and reconvergence, block barriers, the step limit.

Among the threads that can run, those at the smallest program counter run together until they branch apart or reach
where others wait, so divergent paths join again where the compiler laid the join. An operation of a whole warp that
only part of it has reached parks that part until the rest arrives. When no thread can run, barriers whose blocks are
complete open; if none does, the launch is stuck and the error says who waits where.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedcore_ptxsim.batch import WARP, Batch
from pagedcore_ptxsim.binder import Binder
from pagedcore_ptxsim.errors import BarrierFault, DivergenceFault, PtxError, PtxFault, Runaway, UnsupportedPtx
from pagedcore_ptxsim.scalar_types import Array, Index, Mask
from pagedcore_ptxsim.syntax import Instruction

REGROUP = -1
"""What a step returns when program counters of the group differ or threads stopped: choose again who runs."""
Step = Callable[[], int | None]
Maker = Callable[[Binder, Instruction, int], Step]
_FAR = np.iinfo(np.int64).max


class Scheduler:
    """Runs batches to their end. ``counts`` is how often each instruction was issued for a group of threads."""

    def __init__(self, batch: Batch, makers: dict[str, Maker]) -> None:
        self.batch, self._makers = batch, makers
        self.limit = 0
        self.code = batch.kernel.code
        self.counts = [0] * len(self.code)
        self.barriers = 0
        self.thread_instructions = 0
        self._binder = Binder(batch)
        self._steps: list[Step | None] = [None] * len(self.code)
        self._position = 0
        self._horizon = _FAR
        self._issued = 0

    def run(self, blocks: Index, limit: int) -> None:
        """Run every thread of ``blocks`` to its end. Raises ``PtxFault`` with its place filled in.

        limit: instructions after which the batch is given up. The counts are of this run alone.
        """
        self.batch.start(blocks)
        self.counts = [0] * len(self.code)
        self.limit, self._issued, self.barriers, self.thread_instructions = limit, 0, 0, 0
        try:
            with np.errstate(all="ignore"):
                while self._choose():
                    self._run_group()
            self.batch.shared.finish()
        except PtxFault as fault:
            self._locate(fault)
            raise

    def unsupported(self) -> list[str]:
        """Return why instructions cannot run, without running any."""
        found = []
        for position in range(len(self.code)):
            try:
                self._decode(position)
            except UnsupportedPtx as error:
                found.append(str(error))
        return found

    def _locate(self, fault: PtxFault) -> None:
        instruction = self.code[self._position]
        lanes = fault.lanes or self.batch.lanes.tolist()
        fault.locate(instruction.line, instruction.text, self.batch.coordinates(lanes))

    def _choose(self) -> bool:
        """Activate the threads that run next; false when all have ended."""
        batch = self.batch
        while True:
            stopped = batch.done | (batch.waiting >= 0)
            blocked = stopped | batch.parked if batch.any_parked else stopped
            counters = np.where(blocked, _FAR, batch.pc)
            lowest = int(counters.min())
            if lowest != _FAR:
                break
            if batch.done.all():
                return False
            self._open_barriers()
        self._position = lowest
        mask = (batch.pc == lowest) & ~stopped
        counters[mask] = _FAR
        self._horizon = int(counters.min())
        if batch.any_parked:
            # Why: who comes to where others are parked has to join them.
            parked = batch.pc[batch.parked & (batch.pc > lowest)]
            self._horizon = min([self._horizon, *parked.tolist()])
            batch.parked &= ~mask
            batch.any_parked = bool(batch.parked.any())
        batch.set_mask(mask)
        return True

    def _run_group(self) -> None:
        """Run the active threads until they split, stop, or come to where other threads are."""
        batch, counts, steps = self.batch, self.counts, self._steps
        position, horizon, active = self._position, self._horizon, len(self.batch.lanes)
        first = self._issued
        while position < horizon:
            step = steps[position] or self._decode(position)
            self._position = position
            counts[position] += 1
            self._issued += 1
            after = step()
            if after is None:
                position += 1
            elif after == REGROUP:
                break
            else:
                position = after
                if batch.any_parked:
                    batch.pc[batch.mask] = position
                    break
                if self._issued > self.limit:
                    raise Runaway(f"a batch of blocks issued {self._issued} instructions, more than the limit of "
                                  f"{self.limit}: a loop that never ends, or pass a larger max_steps")
        else:
            batch.pc[batch.mask] = position
        self.thread_instructions += (self._issued - first) * active

    def _decode(self, position: int) -> Step:
        if position >= len(self.code):
            raise PtxFault("threads run past the end of the kernel: no ret")
        instruction = self.code[position]
        maker = self._makers.get(instruction.name)
        if maker is None:
            raise UnsupportedPtx(f"line {instruction.line}: no implementation of {instruction.text}")
        try:
            step = maker(self._binder, instruction, position)
            if instruction.guard and instruction.name != "bra":
                step = self._guarded(step, instruction, position)
        except (PtxError, IndexError, KeyError, ValueError, OverflowError, StopIteration) as error:
            raise UnsupportedPtx(f"line {instruction.line}: {instruction.text} has a form that is not implemented "
                                 f"({type(error).__name__}: {error})") from error
        self._steps[position] = step
        return step

    def _guarded(self, step: Step, instruction: Instruction, position: int) -> Step:
        """``@p``: run the step for the threads whose predicate allows it."""
        batch = self.batch
        guard = batch.registers[instruction.guard]
        negated = instruction.guard_negated

        def run() -> int | None:
            saved = batch.save()
            everyone = batch.mask
            chosen = everyone & ~guard if negated else everyone & guard
            if not chosen.any():
                return None
            batch.set_mask(chosen)
            after = step()
            if after is None:
                batch.restore(saved)
                return None
            batch.pc[everyone & ~chosen] = position + 1
            return REGROUP
        return run

    def _open_barriers(self) -> None:
        """Release the blocks whose threads have all arrived; faults if there is none."""
        batch = self.batch
        opened = False
        for number in np.unique(batch.waiting[batch.waiting >= 0]):
            opened |= self._open_barrier(int(number))
        if not opened:
            self._stuck()

    def _open_barrier(self, number: int) -> bool:
        batch = self.batch
        shape = (len(batch.blocks), batch.threads)
        here = (batch.waiting == number).reshape(shape)
        wanted = np.where(here, batch.waiting_for.reshape(shape), 0).max(1)
        arrived = here.sum(1) + batch.arrived[:, number]
        complete = (here | batch.done.reshape(shape)).all(1) & here.any(1)
        ready = np.where(wanted > 0, arrived >= wanted, complete)
        if not ready.any():
            return False
        self._require_one_place(here, ready & (wanted == 0))
        for block in np.flatnonzero(ready):
            self.barriers += 1
            batch.arrived[block, number] = 0
            if wanted[block] in (0, batch.geometry.threads):
                batch.shared.block_barrier(int(block))
                if batch.memory.handovers is not None:
                    batch.memory.handovers.block_barrier(int(block))
        self._reduce(here & ready[:, None])
        return True

    def _reduce(self, released: Mask) -> None:
        """Wake threads, and give those of a ``bar.red`` what the predicates of their block came to."""
        batch = self.batch
        votes = np.where(released, batch.vote.reshape(released.shape), 0).sum(1)
        chosen = released.reshape(-1)
        batch.tally[chosen] = np.repeat(votes, batch.threads)[chosen]
        batch.arrivals[chosen] = np.repeat(released.sum(1), batch.threads)[chosen]
        batch.released |= chosen & batch.reducing
        batch.waiting[chosen] = -1

    def _require_one_place(self, here: Mask, ready: Mask) -> None:
        counters = self.batch.pc.reshape(here.shape)
        low = np.where(here, counters, _FAR).min(1)
        high = np.where(here, counters, -1).max(1)
        wrong = ready & (low != high)
        if wrong.any():
            block = int(np.flatnonzero(wrong)[0])
            rows = here & (np.arange(len(here)) == block)[:, None]
            raise BarrierFault("threads of one block wait at different barriers:" + self._places(rows.reshape(-1)),
                               np.flatnonzero(rows.reshape(-1)).tolist())

    def _stuck(self) -> None:
        batch = self.batch
        places = self._places(~batch.done)
        lanes = np.flatnonzero(batch.parked if batch.any_parked else batch.waiting >= 0)
        self._position = max(int(batch.pc[lanes[0]]) - (not batch.any_parked), 0)
        if batch.any_parked:
            raise DivergenceFault("an operation of a whole warp was reached by part of the warp, and the rest "
                                  f"never comes:{places}", lanes.tolist())
        raise BarrierFault(f"deadlock: threads wait at a barrier that others never reach:{places}", lanes.tolist())

    def _places(self, chosen: Mask) -> str:
        """Where the chosen threads stand, one line per place."""
        lines = []
        batch = self.batch
        for counter in np.unique(batch.pc[chosen]):
            at = chosen & (batch.pc == counter)
            back = 1 if (batch.waiting[at] >= 0).any() and not batch.reducing[at].any() else 0
            instruction = self.code[int(counter) - back]
            lines.append(f"\n    {int(at.sum())} threads at line {instruction.line}: {instruction.text}")
        return "".join(lines)


def whole_warps(batch: Batch, position: int, step: Callable[[], None], members: Array | int | None = None) -> Step:
    """A step for an operation that the threads of a warp (or those in its member mask) execute together.

    members: bits of the lanes taking part, per thread or one for all; None for the full warp, none of it ended.
    """
    def run() -> int | None:
        if batch.full and members is None:
            step()
            return None
        missing = _missing(batch, members)
        if not missing.any():
            step()
            return None
        _park(batch, missing, position)
        if batch.mask.any():
            step()
            batch.pc[batch.mask] = position + 1
        return REGROUP
    return run


def _missing(batch: Batch, members: Array | int | None) -> Mask:
    """Per warp, whether some of the threads that must take part are not here."""
    active = batch.mask.reshape(-1, WARP)
    if members is None:
        if (active.any(1) & batch.done.reshape(-1, WARP).any(1)).any():
            raise DivergenceFault("an operation of a whole warp in a warp of which threads have ended")
        return np.any(active, axis=1) & ~np.all(active, axis=1)
    bits = np.broadcast_to(np.asarray(members, np.uint32), batch.count).reshape(-1, WARP)
    named = (bits[:, :, None] >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1)
    needed = (named.astype(np.bool_) & active[:, :, None]).any(1)
    outside = active & ((bits >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1) == 0)
    if outside.any():
        raise DivergenceFault("a thread runs a warp operation whose member mask does not name it",
                              np.flatnonzero(outside.reshape(-1)).tolist())
    late = needed & ~active & ~batch.done.reshape(-1, WARP)
    return np.any(late, axis=1)


def _park(batch: Batch, missing: Mask, position: int) -> None:
    early = batch.mask & np.repeat(missing, WARP)
    batch.parked |= early
    batch.any_parked = True
    batch.pc[early] = position
    batch.set_mask(batch.mask & ~early)

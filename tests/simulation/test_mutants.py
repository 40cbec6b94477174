"""The suite itself on trial: each of these bugs, put in by hand, has to be found within a few seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedcore.cache.block_manager import BlockManager, Reservation
from pagedcore.cache.block_pool import BlockPool
from pagedcore.cache.block_table import BlockTable
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.planner import StepPlanner
from pagedcore.scheduling.scheduler import Scheduler
from pagedcore.scheduling.step_in_flight import StepInFlight
from pagedcore.scheduling.waiting_queue import WaitingQueue
from simulation.simulator import Simulation, SimulationFailure

#: Lives per mutant, half of them with faults: well under a second each.
NUM_SEEDS = 120

Patch = pytest.MonkeyPatch


def leak_on_abort(patch: Patch) -> None:
    """A sequence that is ended from outside keeps its blocks."""
    finish, drop = Scheduler.finish, Scheduler._drop_blocks

    def leaky(self: Scheduler, sequence: Sequence, reason: str) -> None:
        patch.setattr(Scheduler, "_drop_blocks", lambda self, sequence: self._kept.pop(sequence.sequence_id, None))
        finish(self, sequence, reason)  # type: ignore[arg-type]
        patch.setattr(Scheduler, "_drop_blocks", drop)

    patch.setattr(Scheduler, "finish", leaky)


def double_free(patch: Patch) -> None:
    """The first block of a freed sequence is put into the free list twice."""
    free = BlockManager.free

    def twice(self: BlockManager, sequence_id: int) -> int:
        first = self._tables[sequence_id].block_ids[:1].tolist() if sequence_id in self._tables else []
        num_freed = free(self, sequence_id)
        self._pool._free.extend(first)
        return num_freed

    patch.setattr(BlockManager, "free", twice)


def last_block_lost(patch: Patch) -> None:
    """The last block of a freed sequence is not given back."""
    cut = BlockTable.cut
    patch.setattr(BlockTable, "cut", lambda self, n: cut(self, n)[1:] if n == 0 else cut(self, n))


def block_in_two_tables(patch: Patch) -> None:
    """Allocation hands out a block and leaves it in the free list."""
    allocate = BlockPool.allocate

    def generous(self: BlockPool, num_blocks: int) -> list[int] | None:
        taken = allocate(self, num_blocks)
        self._free.extend((taken or [])[:1])
        return taken

    patch.setattr(BlockPool, "allocate", generous)


def preempted_remembers(patch: Patch) -> None:
    """Positions count as computed after their blocks are gone."""
    patch.setattr(Sequence, "forget_computed", lambda self: None)


def preempted_lost(patch: Patch) -> None:
    """A preempted sequence does not come back to the queue."""
    patch.setattr(WaitingQueue, "push_preempted", lambda self, sequence: None)


def budget_overrun(patch: Patch) -> None:
    """Tokens of planned rows are not taken off the budget."""
    add_row = StepPlanner._add_row

    def spendthrift(self: StepPlanner, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        budget = self._budget
        add_row(self, sequence, num_tokens, num_blocks)
        self._budget = budget

    patch.setattr(StepPlanner, "_add_row", spendthrift)


def blocks_not_counted(patch: Patch) -> None:
    """Blocks of planned rows are not taken off what is free."""
    add_row = StepPlanner._add_row

    def blind(self: StepPlanner, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        free = self._free
        add_row(self, sequence, num_tokens, num_blocks)
        self._free = free

    patch.setattr(StepPlanner, "_add_row", blind)


def rollback_forgotten(patch: Patch) -> None:
    """A cancelled reservation leaves its blocks in the tables."""
    patch.setattr(Reservation, "cancel", lambda self: None)


def promises_forgotten(patch: Patch) -> None:
    """Admission counts what is held now, not what was promised."""
    patch.setattr(StepPlanner, "_promised_blocks", lambda self, sequence: 0)


def kept_never_released(patch: Patch) -> None:
    """Nobody who is idle makes room."""
    patch.setattr(StepPlanner, "_idle_holders", lambda self: iter(()))


def gone_still_counts(patch: Patch) -> None:
    """A sequence that left while the step ran takes part in its commit."""
    patch.setattr(StepInFlight, "rows", property(lambda self: list(self.plan.rows)))


def slots_shifted(patch: Patch) -> None:
    """A table that grows in its middle replaces its last block when it gets another."""
    append = BlockTable.append

    def overwriting(self: BlockTable, block_ids: list[int]) -> None:
        append(self, block_ids)
        if self._num_blocks > 2:
            self._ids[1], self._ids[2] = int(self._ids[2]), int(self._ids[1])

    patch.setattr(BlockTable, "append", overwriting)


def prompts_before_decodes(patch: Patch) -> None:
    """Long prompts take the budget before the running answers get their token."""

    def prompts_first(self: StepPlanner) -> None:
        rows = sorted(self._running, key=lambda sequence: -sequence.num_uncomputed_tokens)
        self._advance_in_order(rows)

    patch.setattr(StepPlanner, "_advance_running", prompts_first)


def stop_ignored(patch: Patch) -> None:
    """Stop tokens do not end a turn."""

    def append(self: Sequence, token_id: int) -> str | None:
        self.token_ids.append(token_id)
        return "length" if self.num_output_tokens >= self.max_tokens else None

    patch.setattr(Sequence, "append_token", append)


def ends_twice(patch: Patch) -> None:
    """A finished sequence can be finished again with another reason."""
    finish = Scheduler.finish

    def again(self: Scheduler, sequence: Sequence, reason: str) -> None:
        if sequence.status is SequenceStatus.FINISHED:
            self._waiting.push_preempted(sequence)
        finish(self, sequence, reason)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "finish", again)


MUTANTS: list[Callable[[Patch], None]] = [
    leak_on_abort, double_free, last_block_lost, block_in_two_tables, preempted_remembers, preempted_lost,
    budget_overrun, blocks_not_counted, rollback_forgotten, promises_forgotten, kept_never_released,
    gone_still_counts, slots_shifted, prompts_before_decodes, stop_ignored, ends_twice,
]


def lives() -> None:
    for seed in range(NUM_SEEDS):
        Simulation(seed, has_faults=seed % 2 == 1).run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_every_mutant(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """A bug of this kind cannot live through the ordinary test run; the failure names the command."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure, match=r"python -m simulation\.simulator \d+"):
        lives()


def test_without_a_mutant_the_same_lives_pass() -> None:
    """What finds the mutants finds nothing in the real code."""
    lives()

"""The suite itself on trial: each of these bugs, put in by hand, has to be found within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.execution.ragged_batch import TableStack
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.host_cache import HostCache, Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_cache import CachedBlock, PrefixCache
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Reservation
from pagedcore.scheduler.admission import Admission
from pagedcore.scheduler.plan import StepInFlight
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_planner import StepPlanner
from pagedcore.scheduler.swapping import Swapping
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence, SequenceStatus
from scheduler_lives.laws import SimulationFailure
from scheduler_lives.simulator import Simulation

#: Lives per mutant at most, half of them with faults; most are found within ten.
NUM_SEEDS = 300
#: The life of seed 8,194 cannot go on unless idle sequences make room. Such lives are one in thousands.
SEED_OF_HOLDERS = 8_340

Patch = pytest.MonkeyPatch


# Blocks that are lost, given twice or shared by mistake -----------------------------------------------------------


def leak_on_finish(patch: Patch) -> None:
    """A sequence that is ended from outside keeps its blocks."""
    patch.setattr(Swapping, "free_finished", lambda self, sequence, **_: sequence.reset_computed())


def double_free(patch: Patch) -> None:
    """The first block of a freed sequence is put into the free list twice."""
    free_idle_block = BlockPool.free_idle_block

    def twice(self: BlockPool, block_id: int) -> None:
        free_idle_block(self, block_id)
        self.free_blocks.append(block_id)

    patch.setattr(BlockPool, "free_idle_block", twice)


def last_block_lost(patch: Patch) -> None:
    """The last block of a freed sequence is not freed."""
    truncate = BlockTable.truncate
    patch.setattr(BlockTable, "truncate", lambda self, n: truncate(self, n)[1:] if n == 0 else truncate(self, n))


def block_in_two_tables(patch: Patch) -> None:
    """Allocation hands out a block and leaves it in the free list."""
    allocate = BlockPool.allocate

    def generous(self: BlockPool, num_blocks: int) -> list[int] | None:
        taken = allocate(self, num_blocks)
        self.free_blocks.extend((taken or [])[:1])
        return taken

    patch.setattr(BlockPool, "allocate", generous)


def shared_without_a_reference(patch: Patch) -> None:
    """A sequence that shares a found block does not hold it."""
    patch.setattr(PrefixCache, "hold_block", lambda self, block_id: None)


def held_block_evicted(patch: Patch) -> None:
    """Eviction takes blocks with references."""

    def reckless(self: PrefixCache) -> CachedBlock:
        victim = next(iter(self._by_key.values()))
        if victim.block_id not in self._pool.idle_blocks:
            self._pool.free_blocks.append(victim.block_id)
        return victim

    patch.setattr(PrefixCache, "_next_victim", reckless)


def parent_evicted_first(patch: Patch) -> None:
    """A block is evicted before the ones that continue it, which stay."""
    patch.setattr(PrefixCache, "_descendants", lambda self, cached: [])
    patch.setattr(PrefixCache, "_is_evictable", lambda self, cached: cached.block_id in self._pool.idle_blocks)


def rollback_forgotten(patch: Patch) -> None:
    """A cancelled reservation leaves its blocks in the tables."""
    patch.setattr(Reservation, "cancel", lambda self: None)


def copy_source_never_released(patch: Patch) -> None:
    """The block that a tail was copied from stays held."""
    patch.setattr(BlockManager, "_free_sources", lambda self, sources: None)


# Contents that are not what they are taken for ---------------------------------------------------------------------


def no_tail_copy(patch: Patch) -> None:
    """A partly matching block is counted as found and not copied."""
    patch.setattr(KVTransfers, "copy", lambda self, pairs: None)


def partly_filled_block_shared(patch: Patch) -> None:
    """A sequence continues inside a block that another one holds."""
    match = KVCacheManager.match

    def sharing(self: KVCacheManager, sequence: Sequence) -> PrefixMatch:
        found = match(self, sequence)
        return found if found.tail is None else replace(found, device_blocks=found.held_blocks, tail=None)

    patch.setattr(KVCacheManager, "match", sharing)


def registered_before_computed(patch: Patch) -> None:
    """Full blocks can be found as soon as their tokens are known."""
    register = BlockManager.register
    patch.setattr(BlockManager, "register", lambda self, sequence, n: register(self, sequence, len(sequence.token_ids)))


def past_not_compared(patch: Patch) -> None:
    """A block is known by its own tokens alone."""
    from pagedcore.kv_cache.block_hash import BlockHasher

    key = BlockHasher.key
    patch.setattr(BlockHasher, "key", lambda self, parent, tokens: key(self, b"", tokens))
    patch.setattr(PrefixCache, "find", lambda self, content: getattr(self._by_key.get(content.key), "block_id", None))


def salts_ignored(patch: Patch) -> None:
    """Blocks of one tenant are found by another one."""
    match = KVCacheManager.match

    def curious(self: KVCacheManager, sequence: Sequence) -> PrefixMatch:
        root, keys = sequence.cache_root, sequence.block_keys
        sequence.cache_root, sequence.block_keys = b"one", []
        found = match(self, sequence)
        sequence.cache_root, sequence.block_keys = root, keys
        return found

    patch.setattr(KVCacheManager, "match", curious)


def slots_shifted(patch: Patch) -> None:
    """A table that grows swaps two of its blocks."""
    append = BlockTable.append

    def overwriting(self: BlockTable, block_ids: list[int]) -> None:
        append(self, block_ids)
        if self.num_blocks > 2:
            self._ids[1], self._ids[2] = int(self._ids[2]), int(self._ids[1])

    patch.setattr(BlockTable, "append", overwriting)


# Transfers ------------------------------------------------------------------------------------------------------------


def published_before_arrival(patch: Patch) -> None:
    """The host says that it has blocks when they have only set out."""
    begin = KVCacheManager.begin_swap_out

    def hasty(self: KVCacheManager, sequence: Sequence, *, is_pinned: bool) -> Transfer | None:
        transfer = begin(self, sequence, is_pinned=is_pinned)
        for move in transfer.moves if transfer is not None else ():
            self.host.cache.register_block(move.destination, move.content)
        return transfer

    patch.setattr(KVCacheManager, "begin_swap_out", hasty)


def device_blocks_free_before_departure(patch: Patch) -> None:
    """Blocks of an outgoing transfer can be allocated at once."""
    begin = KVCacheManager.begin_swap_out

    def hasty(self: KVCacheManager, sequence: Sequence, *, is_pinned: bool) -> Transfer | None:
        transfer = begin(self, sequence, is_pinned=is_pinned)
        if transfer is None:
            return None
        self.device.free_references(transfer.device_blocks)
        emptied = replace(transfer, device_blocks=())
        self.host.in_flight[transfer.transfer_id] = emptied
        return emptied

    patch.setattr(KVCacheManager, "begin_swap_out", hasty)


def failed_transfer_believed(patch: Patch) -> None:
    """A transfer that failed counts as arrived."""
    complete = KVCacheManager.complete_transfer
    patch.setattr(KVCacheManager, "complete_transfer", lambda self, one, *, is_ok: complete(self, one, is_ok=True))


def pin_never_freed(patch: Patch) -> None:
    """What the host keeps for a sequence is never freed."""
    patch.setattr(HostCache, "free_sequence", lambda self, sequence_id: None)


def host_blocks_leak(patch: Patch) -> None:
    """Host blocks of a transfer are not freed."""
    patch.setattr(HostCache, "free_references", lambda self, block_ids: None)


def late_arrival_revives(patch: Patch) -> None:
    """A transfer that completes for an ended sequence gives it a table all the same."""
    free_sequence = HostCache.free_sequence

    def uncancelled(self: HostCache, sequence_id: int) -> None:
        free_sequence(self, sequence_id)
        self._cancelled.clear()

    patch.setattr(HostCache, "free_sequence", uncancelled)


def moving_sequences_start(patch: Patch) -> None:
    """A sequence with a transfer in flight starts without it."""
    patch.setattr(HostCache, "is_moving", lambda self, sequence_id: False)


def overdue_transfer_believed(patch: Patch) -> None:
    """What a transfer brings after it was timed out is registered."""
    pop_transfer = HostCache.pop_transfer

    def late(self: HostCache, transfer_id: int) -> tuple[Transfer, bool, bool]:
        self._timed_out.discard(transfer_id)
        return pop_transfer(self, transfer_id)

    patch.setattr(HostCache, "pop_transfer", late)


def overdue_blocks_handed_out(patch: Patch) -> None:
    """A transfer that is timed out keeps nothing, although it may still write."""
    patch.setattr(Transfer, "written_blocks", ())


def overdue_load_tried_again(patch: Patch) -> None:
    """A stuck host is used again."""
    patch.setattr(HostCache, "is_stuck", False)


def never_timed_out(patch: Patch) -> None:
    """A transfer that does not end is waited for as long as it takes."""
    patch.setattr(KVTransfers, "_time_out_late", lambda self: None)


# Scheduling -----------------------------------------------------------------------------------------------------------


def preempted_remembers(patch: Patch) -> None:
    """Positions count as computed after their blocks are gone."""
    patch.setattr(Sequence, "reset_computed", lambda self: None)


def preempted_lost(patch: Patch) -> None:
    """A preempted sequence does not come back to the queue."""
    patch.setattr(WaitingQueue, "push_preempted", lambda self, sequence: None)


def budget_overrun(patch: Patch) -> None:
    """Tokens of planned rows are not taken off the budget."""
    _keeping(patch, "budget")


def blocks_not_counted(patch: Patch) -> None:
    """Blocks of planned rows are not taken off what is free."""
    _keeping(patch, "free")


def _keeping(patch: Patch, name: str) -> None:
    add_row = PlanState.add_row

    def keeping(self: PlanState, *args: Any) -> None:
        value = getattr(self, name)
        add_row(self, *args)
        setattr(self, name, value)

    patch.setattr(PlanState, "add_row", keeping)


def adopted_blocks_not_counted(patch: Patch) -> None:
    """Idle blocks that a match takes still count as available."""
    patch.setattr(PlanState, "num_blocks_taken", lambda self, match: 0)


def promises_forgotten(patch: Patch) -> None:
    """Admission counts what is held now, not what was promised."""
    patch.setattr(Admission, "still_promised", lambda self, running: 0)


def holders_never_asked(patch: Patch) -> None:
    """No idle sequence makes room."""
    patch.setattr(PlanState, "holders", lambda self: iter(()))


def overtaking(patch: Patch) -> None:
    """A sequence that lacks room lets all others pass."""
    admit = Admission._admit

    def polite(self: Admission, candidate: Sequence, match: PrefixMatch | None) -> bool:
        available = self._available
        if not admit(self, candidate, match):
            self._available = available
        return True

    patch.setattr(Admission, "_admit", polite)


def match_not_used(patch: Patch) -> None:
    """A row starts behind what was found, and nothing is shared."""
    demand = property(lambda self: replace(_demand(self), match=NO_MATCH))
    from pagedcore.kv_cache.reservation import Demand
    from pagedcore.scheduler.plan import ScheduledRow

    def _demand(row: ScheduledRow) -> Demand:
        return Demand(row.sequence.sequence_id, row.end, row.match)

    patch.setattr(ScheduledRow, "demand", demand)


def gone_still_counts(patch: Patch) -> None:
    """A sequence that left while the step ran takes part in its commit."""
    patch.setattr(StepInFlight, "rows", property(lambda self: list(self.plan.rows)))


def prompts_before_decodes(patch: Patch) -> None:
    """Long prompts take the budget before running completions get their token."""

    def prompts_first(self: StepPlanner) -> None:
        rows = sorted(self._state.running, key=lambda one: one.num_computed_tokens - len(one.token_ids))
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
    finish = Scheduler.finish_sequence

    def again(self: Scheduler, sequence: Sequence, reason: str) -> None:
        if sequence.status is SequenceStatus.FINISHED:
            self.waiting.push_preempted(sequence)
        finish(self, sequence, reason)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "finish_sequence", again)


# Arrays that are kept from step to step --------------------------------------------------------------------------


def rows_stay_where_they_were(patch: Patch) -> None:
    """When rows come, go or change places, those of the last step are taken for the new ones."""
    moved = TableStack._moved

    def stay(self: TableStack, tables: list[BlockTable], width: int) -> Any:
        self._tables = tables[: len(self._tables)]
        return moved(self, tables, width)

    patch.setattr(TableStack, "_moved", stay)


def only_longer_rows_are_stacked(patch: Patch) -> None:
    """A row that is as long as before is not looked at, though its last block became another."""
    stack = TableStack.stack

    def longer(self: TableStack, tables: list[BlockTable], needed: Any) -> Any:
        for table in tables:
            table.num_changes = 0
        return stack(self, tables, needed)

    patch.setattr(TableStack, "stack", longer)


MUTANTS: list[Callable[[Patch], None]] = [
    leak_on_finish, double_free, last_block_lost, block_in_two_tables, shared_without_a_reference, held_block_evicted,
    parent_evicted_first, rollback_forgotten, copy_source_never_released, no_tail_copy, partly_filled_block_shared,
    registered_before_computed, past_not_compared, salts_ignored, slots_shifted,
    published_before_arrival, device_blocks_free_before_departure,
    failed_transfer_believed, pin_never_freed, host_blocks_leak, late_arrival_revives, moving_sequences_start,
    overdue_transfer_believed, overdue_blocks_handed_out, overdue_load_tried_again, never_timed_out,
    preempted_remembers, preempted_lost, budget_overrun, blocks_not_counted, adopted_blocks_not_counted,
    promises_forgotten, holders_never_asked, overtaking, match_not_used, gone_still_counts, prompts_before_decodes,
    stop_ignored, ends_twice, rows_stay_where_they_were, only_longer_rows_are_stacked,
]


# Batch formation ---------------------------------------------------------------------------------------------------


def started_are_gated(patch: Patch) -> None:
    """The gate holds back what was preempted, too."""
    push = WaitingQueue.push_preempted

    def push_and_gate(self: WaitingQueue, sequence: Sequence) -> None:
        push(self, sequence)
        self.gated.add(sequence.sequence_id)

    patch.setattr(WaitingQueue, "push_preempted", push_and_gate)


def gate_never_opens(patch: Patch) -> None:
    """Time opens no gate."""
    patch.setattr(WaitingQueue, "open_gate", lambda self, *sequences: None)


def gate_ignored(patch: Patch) -> None:
    """The planner is handed what is gated."""
    patch.setattr(WaitingQueue, "startable", lambda self: self.sequences)


def gated_ids_kept(patch: Patch) -> None:
    """A gated sequence that is aborted stays gated."""
    patch.setattr(WaitingQueue, "remove_sequence", lambda self, sequence: (
        self._never_started.pop(sequence.sequence_id, None), PolicyOrder.remove_sequence(self, sequence))[1])


def phases_never_change(patch: Patch) -> None:
    """Prefill is planned first after every step, so that arrivals starve what decodes."""
    plan = Scheduler._plan

    def prefill_first(self: Scheduler, rules: Any, *, may_wait: bool) -> Any:
        self._phases = tuple(sorted(self._phases, reverse=True))
        return plan(self, rules, may_wait=may_wait)

    patch.setattr(Scheduler, "_plan", prefill_first)


def one_phase_only(patch: Patch) -> None:
    """The other phase is not planned when the first one can do nothing."""
    plan = Scheduler._plan

    def first_only(self: Scheduler, rules: Any, *, may_wait: bool) -> Any:
        phases, self._phases = self._phases, self._phases[:1]
        try:
            return plan(self, rules, may_wait=may_wait)
        finally:
            self._phases = phases

    patch.setattr(Scheduler, "_plan", first_only)


def phases_mixed_by_arrivals(patch: Patch) -> None:
    """Admission does not look at the phase."""
    patch.setattr(PlanState, "is_in_phase", lambda self, sequence, start: True)


def share_not_kept(patch: Patch) -> None:
    """Prefill takes what decode rows leave of the budget, whatever its share."""
    advance = StepPlanner._advance_in_order

    def with_the_whole_budget(self: StepPlanner, sequences: Any) -> None:
        planned = sum(row.num_tokens for row in self._state.rows.values())
        self._state.budget = self._rules.max_num_batched_tokens - planned
        advance(self, sequences)

    patch.setattr(StepPlanner, "_advance_in_order", with_the_whole_budget)


MUTANTS_OF_FORMATION: list[Callable[[Patch], None]] = [
    started_are_gated, gate_never_opens, gate_ignored, gated_ids_kept, phases_never_change, one_phase_only,
    phases_mixed_by_arrivals, share_not_kept,
]


def live(num_seeds: int, *, first_seed: int = 0, has_formation: bool = False) -> None:
    for seed in range(first_seed, first_seed + num_seeds):
        Simulation(seed, has_faults=seed % 2 == 1, has_formation=has_formation).run()


@pytest.mark.parametrize("mutant", MUTANTS_OF_FORMATION, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_mutants_of_batch_formation(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """The same for gates and phases, which are drawn for these lives."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure, match=r"python -m scheduler_lives\.simulator --formation \d+"):
        live(NUM_SEEDS, has_formation=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_every_mutant(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """A bug of this kind cannot live through the ordinary test run; the failure names the command."""
    mutant(monkeypatch)
    with pytest.raises(SimulationFailure, match=r"python -m scheduler_lives\.simulator \d+"):
        live(NUM_SEEDS, first_seed=SEED_OF_HOLDERS if mutant is holders_never_asked else 0)


def test_without_a_mutant_the_same_lives_pass() -> None:
    """What finds the mutants finds nothing in the real code."""
    live(50)
    live(1, first_seed=SEED_OF_HOLDERS)

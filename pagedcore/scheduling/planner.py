"""One step's decisions: who runs with how many tokens, who is admitted, who loses its blocks.

Reads queues, tables and sequences and changes none of them; ``scheduler`` carries the plan out. There is no prefill
and no decode phase: a step lets each sequence's computed count catch up with its known count under one token budget.

Why it always makes progress: the first running sequence can take the blocks of everybody who is idle or behind it,
and when nothing runs the first waiting one can; no sequence is accepted that would not fit the pool alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import chain, takewhile

from pagedcore.cache.block_manager import BlockManager
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.plan import ScheduledRow, SchedulePlan


@dataclass(frozen=True, slots=True)
class PlanningRules:
    """What a plan must respect; fixed for the life of a scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    is_guaranteed: bool
    """Whether admission counts the longest answer of everybody, so that nobody is ever preempted."""
    admits_while_running: bool


class StepPlanner:
    """The working state of one plan, used once.

    Invariant: ``_free`` is what the pool would have free if all that is planned so far had happened.
    """

    __slots__ = (
        "_admitted", "_blocks", "_budget", "_free", "_idle", "_kept", "_planned_blocks", "_preempted",
        "_released", "_rows", "_rules", "_running", "_waiting",
    )

    def __init__(
        self,
        rules: PlanningRules,
        blocks: BlockManager,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        kept: Iterable[Sequence],
    ) -> None:
        self._rules = rules
        self._blocks = blocks
        self._running = list(running)
        self._waiting = list(waiting)
        self._kept = kept
        self._free = blocks.num_free_blocks
        self._budget = rules.max_num_batched_tokens
        self._rows: dict[int, ScheduledRow] = {}
        self._planned_blocks: dict[int, int] = {}
        self._preempted: dict[int, Sequence] = {}
        self._released: dict[int, Sequence] = {}
        self._admitted: list[Sequence] = []
        self._idle: list[Sequence] | None = None

    def plan(self) -> SchedulePlan:
        """Decide the step."""
        self._advance_running()
        # Why: what a preempted sequence has just given up is not for newcomers, and it comes before them.
        if not self._preempted:
            self._admit_waiting()
        return SchedulePlan(
            rows=tuple(self._rows.values()),
            preempted=tuple(self._preempted.values()),
            released=tuple(self._released.values()),
            admitted=tuple(self._admitted),
        )

    def _advance_running(self) -> None:
        # Why: decode rows come first, so that a long prompt never makes others miss their next token.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            is_decoding = len(sequence.token_ids) - sequence.num_computed_tokens == 1
            (decoding if is_decoding else prefilling).append(sequence)
        self._advance_in_order(decoding)
        self._advance_in_order(prefilling)

    def _advance_in_order(self, sequences: ListOf[Sequence]) -> None:
        for sequence in sequences:
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed_tokens, self._budget)
            if num_tokens == 0:
                return
            if sequence.sequence_id in self._preempted:
                continue
            end = sequence.num_computed_tokens + num_tokens
            needed = self._blocks.num_blocks_needed(sequence.sequence_id, end)
            # Why: without room it keeps its blocks and waits in place. Those before it may finish before they need
            # them, and those behind it may go on in what is free, since it can take that back from them.
            if needed <= self._free or self._make_room(needed, self._victims_for(sequence)):
                self._add_row(sequence, num_tokens, needed)

    def _admit_waiting(self) -> None:
        if not self._waiting or not self._may_admit():
            return
        # Why: whatever is not promised to a running sequence is free or held by somebody idle, hence available.
        available = self._blocks.num_blocks - sum(map(self._promised_blocks, self._running))
        for candidate in self._waiting:
            available -= self._promised_blocks(candidate)
            # Why: strict order. If others overtook a head that lacks room, it could starve for ever.
            if available < 0 or not self._may_admit() or not self._admit(candidate):
                return

    def _may_admit(self) -> bool:
        has_row = len(self._running) + len(self._admitted) < self._rules.max_num_seqs
        if self._rules.admits_while_running:
            return has_row and self._budget > 0
        # Why: a static batch is filled once, so its size must not depend on the first step's token budget.
        return has_row and not self._running

    def _admit(self, candidate: Sequence) -> bool:
        num_tokens = min(candidate.num_uncomputed_tokens, self._budget)
        end = candidate.num_computed_tokens + num_tokens
        needed = self._blocks.num_blocks_needed(candidate.sequence_id, end)
        # Invariant: all promises fit, so kept sequences and those behind it hold what is missing. Neither itself nor
        # anybody before it is asked, and it was not released for one of them.
        if needed > self._free and not self._make_room(needed, self._idle_holders()):
            return False
        self._admitted.append(candidate)
        if num_tokens > 0:
            self._add_row(candidate, num_tokens, needed)
        return True

    def _promised_blocks(self, sequence: Sequence) -> int:
        # Why: counting the first chunk only would admit more prompts than can be completed.
        guaranteed = self._rules.is_guaranteed
        return self._blocks.blocks_for(sequence.max_total_tokens if guaranteed else len(sequence.token_ids))

    def _add_row(self, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        self._rows[sequence.sequence_id] = ScheduledRow(sequence, num_tokens)
        self._budget -= num_tokens
        if num_blocks:
            self._planned_blocks[sequence.sequence_id] = num_blocks
            self._free -= num_blocks

    def _make_room(self, needed: int, victims: Iterator[Sequence]) -> bool:
        chosen, free = [], self._free
        while free < needed:
            victim = next(victims, None)
            if victim is None:
                return False
            chosen.append(victim)
            free += self._blocks_regained_from(victim)
        for victim in chosen:
            self._take_blocks_of(victim)
        return True

    def _victims_for(self, asker: Sequence) -> Iterator[Sequence]:
        """Who gives up blocks for a running sequence: idle holders, then those behind it, last one first."""
        yield from self._idle_holders()
        for sequence in takewhile(lambda other: other is not asker, reversed(self._running)):
            if self._blocks_regained_from(sequence):
                yield sequence

    def _idle_holders(self) -> Iterator[Sequence]:
        """Kept sequences, longest finished first, then waiting ones with blocks, last one first."""
        if self._idle is None:
            # Why: a long queue is searched once in a step, not once for every row that lacks a block.
            idle = chain(self._kept, reversed(self._waiting))
            self._idle = [sequence for sequence in idle if self._blocks.num_blocks_of(sequence.sequence_id)]
        return (sequence for sequence in self._idle if sequence.sequence_id not in self._released)

    def _blocks_regained_from(self, victim: Sequence) -> int:
        return self._blocks.num_blocks_of(victim.sequence_id) + self._planned_blocks.get(victim.sequence_id, 0)

    def _take_blocks_of(self, victim: Sequence) -> None:
        self._free += self._blocks_regained_from(victim)
        if victim.status is not SequenceStatus.RUNNING:
            self._released[victim.sequence_id] = victim
            return
        self._running.remove(victim)
        self._preempted[victim.sequence_id] = victim
        row = self._rows.pop(victim.sequence_id, None)
        if row is not None:
            self._budget += row.num_tokens

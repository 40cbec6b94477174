"""One step's decisions: who runs with how many tokens, who is admitted, who loses its blocks and how.

Reads queues, tables and sequences and changes none of them; ``scheduler`` carries the plan out. There is no prefill
and no decode phase: a step lets each sequence's computed count catch up with its known count under one token budget.

Why it always makes progress: the first running sequence can take the blocks of everybody who is idle or behind it,
and when nothing runs the first waiting one can; no sequence is accepted that would not fit the pool alone. A
sequence may stand still for lack of blocks only in a step in which another one runs or blocks are on their way.
A plan that asks for room is not computed: once the room is made, the next plan is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import takewhile

from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.scheduler.admission import Admission
from pagedcore.scheduler.plan import Preemption, PreemptionKind, ScheduledRow, SchedulePlan, SwapIn
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.preemption import PreemptionRules, Shortage, Victim
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanningRules:
    """What a plan must respect; fixed for the life of a scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    is_guaranteed: bool
    """Whether admission counts the longest answer of everybody, so that nobody is ever preempted."""
    policy: Policy
    preemption: PreemptionRules
    max_scored_tokens: int
    """Positions of a step whose logits are reported, besides one for each sequence: a row of logits is large."""


class StepPlanner:
    """The working state of one plan, used once.

    Invariant: ``free`` is what the pool could still give if all rows planned so far had their blocks.
    """

    def __init__(
        self,
        rules: PlanningRules,
        kv_cache: KVCacheManager,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        *,
        may_wait: bool = True,
    ) -> None:
        self.rules = rules
        self.kv_cache = kv_cache
        self.blocks = kv_cache.device
        self.running = list(running)
        self.waiting = list(waiting)
        self.free = self.blocks.num_available_blocks
        self.budget = rules.max_num_batched_tokens
        self._num_scorable = rules.max_scored_tokens
        self.admitted: list[Sequence] = []
        self.swap_ins: list[SwapIn] = []
        self._rows: dict[int, ScheduledRow] = {}
        self._adopted: set[int] = set()
        self._may_wait = may_wait
        self._arriving = kv_cache.host.num_leaving_blocks if kv_cache.host is not None else 0
        self._room_on_host = kv_cache.host.num_available_blocks if kv_cache.host is not None else 0
        self._preempted: dict[int, Preemption] = {}
        self._released: dict[int, Sequence] = {}
        self._holders: list[Sequence] | None = None
        self._num_stalled_rows = 0

    def plan(self) -> SchedulePlan:
        """Decide the step."""
        self._advance_running()
        # Why: what others are asked to give up is for those who run already.
        if not self._preempted and not self._released:
            Admission(self).run()
        return SchedulePlan(
            rows=tuple(self._rows.values()),
            preempted=tuple(self._preempted.values()),
            released=tuple(self._released.values()),
            admitted=tuple(self.admitted),
            swap_ins=tuple(self.swap_ins),
            num_stalled_rows=self._num_stalled_rows,
        )

    def num_blocks_taken(self, match: PrefixMatch) -> int:
        """How many available blocks are so no longer when a match is held; a copied tail counts for a moment."""
        return sum(
            block_id not in self._adopted and not self.blocks.is_held(block_id) for block_id in match.held_blocks
        )

    def num_scorable_of(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next ``num_tokens`` of a sequence that reports its prompt this step may compute."""
        # Why: at least one, so that everybody gets on however many prompts are reported at a time.
        return min(num_tokens, max(1, self._num_scorable)) if sequence.is_scored else num_tokens

    def add_row(self, sequence: Sequence, start: int, num_tokens: int, num_blocks: int, match: PrefixMatch) -> None:
        """Plan a row that needs ``num_blocks`` new blocks besides what it shares."""
        self._rows[sequence.sequence_id] = ScheduledRow(sequence, start, num_tokens, match)
        self.budget -= num_tokens
        if sequence.prompt_logprobs is not None and sequence.is_scored:
            self._num_scorable -= num_tokens
        self.free -= num_blocks + self.num_blocks_taken(match)
        self._adopted.update(match.held_blocks)

    def num_planned_blocks(self, sequence: Sequence) -> int:
        """New blocks that the row of a running sequence gets in this step."""
        row = self._rows.get(sequence.sequence_id)
        return self.blocks.num_blocks_needed(sequence.sequence_id, row.end) if row is not None else 0

    def holders(self) -> Iterator[Sequence]:
        """Waiting sequences with blocks that are not asked for them yet, last one first."""
        if self._holders is None:
            # Why: a long queue is searched once in a step, not once for every row that lacks a block.
            self._holders = [one for one in reversed(self.waiting) if self.blocks.num_blocks_of(one.sequence_id)]
        return (sequence for sequence in self._holders if sequence.sequence_id not in self._released)

    def release(self, holder: Sequence) -> int:
        """Ask a holder for its blocks, and return how many will be available."""
        self._released[holder.sequence_id] = holder
        return len(self.blocks.own_blocks_of(holder.sequence_id))

    def _advance_running(self) -> None:
        # Why: decode rows come first, so that a long prompt never makes others miss their next token.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            is_decoding = len(sequence.token_ids) - sequence.num_computed_tokens == 1
            (decoding if is_decoding else prefilling).append(sequence)
        self._advance_in_order(decoding)
        self._advance_in_order(prefilling)

    def _advance_in_order(self, sequences: ListOf[Sequence]) -> None:
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = min(len(sequence.token_ids) - start, self.budget)
            if sequence.prompt_logprobs is not None:
                num_tokens = self.num_scorable_of(sequence, num_tokens)
            if num_tokens == 0:
                return
            if sequence.sequence_id in self._preempted:
                continue
            needed = self.blocks.num_blocks_needed(sequence.sequence_id, start + num_tokens)
            if needed <= self.free:
                self.add_row(sequence, start, num_tokens, needed, NO_MATCH)
            else:
                # Why: without room it keeps its blocks and waits in place. Those before it may finish before they
                # need them, and those behind it may go on in what is free, since it can take that back from them.
                self._ask_for_room(sequence, needed - self.free)

    def _ask_for_room(self, asker: Sequence, lacking: int) -> None:
        """Decide who makes room for a running sequence: what is on its way, idle holders, those behind it."""
        for holder in self.holders():
            if lacking <= self._arriving:
                break
            self._arriving += self.release(holder)
        if lacking > self._arriving:
            shortage = Shortage(lacking - self._arriving, self._num_steps_to_wait(asker), len(self.running))
            chosen = self.rules.preemption.choose(
                shortage, lambda: self._victims_for(asker), may_wait=self._may_wait
            )
            for preemption in chosen:
                self._preempt(preemption)
            self._num_stalled_rows += not chosen
        self._arriving = max(0, self._arriving - lacking)

    def _preempt(self, preemption: Preemption) -> None:
        victim = preemption.sequence
        self._arriving += self._num_regained(victim)
        if preemption.kind is PreemptionKind.SWAP:
            self._room_on_host -= self._num_blocks_to_host(victim) or 0
        self.running.remove(victim)
        self._preempted[victim.sequence_id] = preemption
        row = self._rows.pop(victim.sequence_id, None)
        if row is not None:
            self.budget += row.num_tokens

    def _victims_for(self, asker: Sequence) -> Iterator[Victim]:
        """Everybody behind a running sequence who has something to give, last one first."""
        for sequence in takewhile(lambda other: other is not asker, reversed(self.running)):
            num_blocks = self._num_regained(sequence)
            if num_blocks:
                held = self.blocks.num_blocks_of(sequence.sequence_id)
                yield Victim(sequence, num_blocks, held, self._num_blocks_to_host(sequence))

    def _num_regained(self, victim: Sequence) -> int:
        return self.num_planned_blocks(victim) + len(self.blocks.own_blocks_of(victim.sequence_id))

    def _num_blocks_to_host(self, victim: Sequence) -> int | None:
        host = self.kv_cache.host
        if host is None or host.is_stuck or not self.blocks.num_blocks_of(victim.sequence_id):
            return None
        missing = self.kv_cache.num_blocks_to_copy(victim, victim.num_computed_tokens)
        return missing if missing <= self._room_on_host else None

    def _num_steps_to_wait(self, asker: Sequence) -> int | None:
        """Steps until the first sequence is done that needs no further block for it."""
        steps = [
            one.max_total_tokens - len(one.token_ids)
            for one in self.running
            if one is not asker and not self.blocks.num_blocks_needed(one.sequence_id, one.max_total_tokens)
        ]
        return min(steps, default=None)

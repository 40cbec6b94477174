"""One step's decisions: which sequences run with how many tokens, which are admitted, which lose blocks and how.

Reads queues, tables and sequences and changes none of them; ``scheduler`` carries the plan out. There is no prefill
and no decode phase: a step lets each sequence's computed count catch up with its known count under one token budget.

Why it always makes progress: the first running sequence can take the blocks of every idle sequence and of all behind
it, and when nothing runs the first waiting one can; no sequence is accepted that would not fit the pool alone. A
sequence may stall for lack of blocks only in a step in which another one runs or blocks are in transfers.
A plan that asks for room is not computed: once the room is made, the next plan is.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from itertools import takewhile

from pagedcore.scheduler.admission import Admission
from pagedcore.scheduler.plan import Preemption, PreemptionKind, SchedulePlan
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.preemption import Shortage, Victim
from pagedcore.sequence import Sequence


class StepPlanner:
    """Plans the running sequences of one step, and then lets ``Admission`` plan waiting ones."""

    def __init__(self, state: PlanState, *, may_wait: bool = True) -> None:
        self._state = state
        self._blocks = state.blocks
        self._may_wait = may_wait
        self._host = state.kv_cache.host
        self._arriving = self._host.num_leaving_blocks if self._host is not None else 0
        self._room_on_host = self._host.num_available_blocks if self._host is not None else 0

    def plan(self) -> SchedulePlan:
        """Decide the step."""
        state = self._state
        self._advance_running()
        # Why: the blocks that sequences are asked to free are for those that run already.
        if state.waiting and not state.preempted and not state.freed:
            Admission(state).run()
        return SchedulePlan(
            rows=tuple(state.rows.values()),
            admitted=tuple(state.admitted),
            preempted=tuple(state.preempted.values()),
            freed=tuple(state.freed.values()),
            swap_ins=tuple(state.swap_ins),
            num_stalled_rows=state.num_stalled_rows,
        )

    def _advance_running(self) -> None:
        # Why: decode rows come first, so that a long prompt never delays the next token of other sequences.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._state.running:
            is_decoding = len(sequence.token_ids) - sequence.num_computed_tokens == 1
            (decoding if is_decoding else prefilling).append(sequence)
        self._advance_in_order(decoding + prefilling)

    def _advance_in_order(self, sequences: ListOf[Sequence]) -> None:
        state = self._state
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = min(len(sequence.token_ids) - start, state.budget)
            if sequence.prompt_logprobs is not None:
                num_tokens = state.num_scorable_of(sequence, num_tokens)
            if num_tokens == 0:
                return
            if sequence.sequence_id in state.preempted:
                continue
            needed = self._blocks.num_blocks_needed(sequence.sequence_id, start + num_tokens)
            if needed <= state.free:
                state.add_row(sequence, start, num_tokens, needed)
            else:
                # Why: without room it keeps its blocks and waits in place. Those before it may finish before they
                # need them, and those behind it may run in what is free, since it can take that back from them.
                self._ask_for_room(sequence, needed - state.free)

    def _ask_for_room(self, asker: Sequence, lacking: int) -> None:
        """Make room for a running sequence: by what leaves the device, by idle holders, by those behind it."""
        state = self._state
        for holder in state.holders():
            if lacking <= self._arriving:
                break
            self._arriving += state.free_holder(holder)
        if lacking > self._arriving:
            shortage = Shortage(lacking - self._arriving, self._num_steps_to_wait(asker), len(state.running))
            chosen = state.rules.preemption.choose(
                shortage, lambda: self._victims_for(asker), may_wait=self._may_wait
            )
            for preemption in chosen:
                self._preempt(preemption)
            state.num_stalled_rows += not chosen
        self._arriving = max(0, self._arriving - lacking)

    def _preempt(self, preemption: Preemption) -> None:
        state, victim = self._state, preemption.sequence
        self._arriving += self._num_regained(victim)
        if preemption.kind is PreemptionKind.SWAP:
            self._room_on_host -= self._num_blocks_to_host(victim) or 0
        state.running.remove(victim)
        state.preempted[victim.sequence_id] = preemption
        row = state.rows.pop(victim.sequence_id, None)
        if row is not None:
            state.budget += row.num_tokens

    def _victims_for(self, asker: Sequence) -> Iterator[Victim]:
        """Yield the sequences behind a running one that can free blocks, last one first."""
        for sequence in takewhile(lambda other: other is not asker, reversed(self._state.running)):
            num_blocks = self._num_regained(sequence)
            if num_blocks:
                held = self._blocks.num_blocks_of(sequence.sequence_id)
                yield Victim(sequence, num_blocks, held, self._num_blocks_to_host(sequence))

    def _num_regained(self, victim: Sequence) -> int:
        return self._state.num_planned_blocks(victim) + len(self._blocks.own_blocks_of(victim.sequence_id))

    def _num_blocks_to_host(self, victim: Sequence) -> int | None:
        if self._host is None or self._host.is_stuck or not self._blocks.num_blocks_of(victim.sequence_id):
            return None
        missing = self._state.kv_cache.num_blocks_to_copy(victim, victim.num_computed_tokens)
        return missing if missing <= self._room_on_host else None

    def _num_steps_to_wait(self, asker: Sequence) -> int | None:
        """Return the steps until the first sequence ends that needs no further block for it."""
        steps = [
            one.max_total_tokens - len(one.token_ids)
            for one in self._state.running
            if one is not asker and not self._blocks.num_blocks_needed(one.sequence_id, one.max_total_tokens)
        ]
        return min(steps, default=None)

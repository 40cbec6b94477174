"""One step's decisions: which sequences run with how many tokens, which are admitted, which lose blocks and how.

Reads queues, tables and sequences and changes none of them; ``scheduler`` carries the plan out. There is no prefill
and no decode phase: a step lets each sequence's computed count catch up with its known count under one token budget.

Why it always makes progress: the first running sequence can take the blocks of every idle sequence and of all behind
it, and when nothing runs the first waiting one can; no sequence is accepted that would not fit the pool alone. A
sequence may stall for lack of blocks only in a step in which another one runs or blocks are in transfers.
A plan that asks for room is not computed: once the room is made, the next plan is.
Where keys change from step to step, a running sequence comes first as long as it has not regained what its last
preemption took, and one more token; its admission has promised the blocks for that. Nor does a policy that preempts to
admit take its place. So every preemption of a sequence is paid for by a token of it, and they are finite in number.

In separate phases a step has prefill chunks or decode rows only. The phase that was not computed last is planned first,
and the other one if it can do nothing, so neither waits for more than one step of the other while it can do something;
the first running sequence belongs to one of them, and progress follows as above. With a share for prefill, every step
still has a token for it: a sequence that prefills is one of ``max_num_seqs``, and the budget has a token for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from itertools import takewhile

from pagedcore.scheduler.admission import Admission
from pagedcore.scheduler.plan import Preemption, PreemptionKind, SchedulePlan
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.scheduler.preemption import Victim
from pagedcore.scheduler.speculation import Speculation
from pagedcore.sequence import Sequence


class StepPlanner:
    """Plans the running sequences of one step, and then lets waiting ones start; used once."""

    def __init__(
        self, state: PlanState, *, may_wait: bool, view: PolicyView, speculation: Speculation | None = None
    ) -> None:
        """Take a state in which nothing is planned.

        Args:
            state: of the plan to make.
            may_wait: whether a running sequence may stall instead of others being preempted.
            view: what the policy decides by.
            speculation: gives rows drafts, of what everything else has left; ``None``: there are none.
        """
        self._speculation = speculation
        self._state, self._rules = state, state.rules
        self._kv_cache, self._blocks, self._host = state.kv_cache, state.blocks, state.host
        self._may_wait, self._view = may_wait, view
        self.policy_failure: Exception | None = None
        """Why the policy could not say whether one sequence preempts another."""

    def plan(self) -> SchedulePlan:
        """Decide the step."""
        state = self._state
        self._advance_running()
        # Why: the blocks that sequences are asked to free are for those that run already.
        if state.waiting and not state.preempted and not state.freed:
            admission = Admission(state)
            admission.admit_waiting()
            if self._rules.policy.preempts is not None and state.stopped_by in ("rows", "blocks"):
                self._preempt_by_order(admission)
        if self._speculation is not None and not state.preempted and not state.freed and not state.swap_ins:
            self._speculation.add_drafts(state)
        return SchedulePlan(
            tuple(state.rows.values()), tuple(state.admitted), tuple(state.preempted.values()),
            tuple(state.freed.values()), tuple(state.swap_ins), state.num_stalled_rows, state.num_deferred,
            tuple(state.capped), self._view.number, state.stopped_by or ("adapter" if state.awaiting else ""),
            state.num_drafts, tuple(state.to_draft), state.awaiting,
        )

    def _advance_running(self) -> None:
        # Why: decode rows come first, so that a long prompt never delays the next token of other sequences.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        state, rules = self._state, self._rules
        splits_phases = rules.phase != "mixed" or rules.prefill_share < 1.0
        for sequence in state.running:
            start = sequence.num_computed_tokens
            is_decoding = len(sequence.token_ids) - start == 1
            # Why: a prompt's last token goes first as well, unless prefill chunks have to be told apart.
            is_decoding = is_decoding and (not splits_phases or start >= sequence.num_prompt_tokens)
            (decoding if is_decoding else prefilling).append(sequence)
        if rules.phase != "prefill":
            self._advance_in_order(decoding)
        if state.rows and rules.prefill_share < 1.0:
            most_tokens = int(rules.prefill_share * rules.max_num_batched_tokens)
            state.budget = min(state.budget, max(1, most_tokens))
        if prefilling and rules.phase != "decode":
            self._advance_in_order(prefilling)

    def _advance_in_order(self, sequences: ListOf[Sequence]) -> None:
        state, blocks = self._state, self._blocks
        outgrown = blocks.outgrown(sequences)
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = min(len(sequence.token_ids) - start, state.budget)
            if sequence.prompt_logprobs is not None:
                num_tokens = state.num_scorable_of(sequence, num_tokens)
            if num_tokens == 0:
                if state.budget:
                    continue  # its next token is drawn and not known yet
                return
            number = sequence.sequence_id
            if number in state.preempted:
                continue
            needed = blocks.num_blocks_needed(number, start + num_tokens) if number in outgrown else 0
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
            if lacking <= state.arriving:
                break
            state.arriving += state.free_holder(holder)
        if lacking > state.arriving:
            chosen = self._rules.preemption.choose(
                lacking - state.arriving, lambda: self._victims_for(asker), may_wait=self._may_wait,
                num_steps_to_wait=self._num_steps_to_wait(asker), num_running=len(state.running),
            )
            for preemption in chosen:
                self._preempt(preemption)
            state.num_stalled_rows += not chosen
        state.arriving = max(0, state.arriving - lacking)

    def _preempt(self, preemption: Preemption) -> None:
        state, victim = self._state, preemption.sequence
        state.arriving += self._num_regained(victim)
        if preemption.kind is PreemptionKind.SWAP:
            state.room_on_host -= self._num_blocks_to_host(victim) or 0
            state.state_room_on_host -= 1
        state.running.remove(victim)
        state.preempted[victim.sequence_id] = preemption
        row = state.rows.pop(victim.sequence_id, None)
        if row is not None:
            state.budget += row.num_tokens

    def _preempt_by_order(self, admission: Admission) -> None:
        """Make room for the first waiting sequence, if the policy lets it take the place of enough running ones."""
        state, rules = self._state, self._rules
        candidate = state.waiting[0]
        # Why: "guaranteed" promises that none is preempted, and "wait" keeps what was computed.
        if state.admitted or state.freed or state.swap_ins or rules.is_guaranteed or rules.preemption.mode == "wait":
            return
        if self._host.is_moving(candidate.sequence_id) or not (victims := self._victims_of_order(candidate)):
            return
        if (lacking := admission.num_lacking(candidate)) is None:
            return
        lacking -= state.arriving
        num_rows = len(state.running) + 1 - rules.max_num_seqs
        chosen: list[Preemption] = []
        for victim in victims:
            if lacking <= 0 and len(chosen) >= num_rows and self._has_room_without(chosen, candidate):
                break
            chosen.append(rules.preemption.cheapest(self._as_victim(victim), max(0, lacking)))
            lacking -= self._num_regained(victim) + admission.still_promised(victim)
        if lacking <= 0 and self._has_room_without(chosen, candidate):
            for one in chosen:
                self._preempt(one)

    def _has_room_without(self, chosen: ListOf[Preemption], candidate: Sequence) -> bool:
        return self._state.has_room_for(candidate, [one.sequence for one in chosen])

    def _victims_of_order(self, candidate: Sequence) -> list[Sequence]:
        """List the running sequences whose place a waiting one may take, last one first, up to one that it may not."""
        return list(takewhile(
            lambda one: self._may_preempt(candidate, one),
            (one for one in reversed(self._state.running) if not one.is_protected),
        ))

    def _may_preempt(self, candidate: Sequence, running: Sequence) -> bool:
        preempts = self._rules.policy.preempts
        try:
            return preempts is not None and bool(preempts(candidate, running, self._view))
        except MemoryError:
            raise
        except Exception as error:  # the policy may be the user's own
            self.policy_failure = error
            return False

    def _as_victim(self, sequence: Sequence) -> Victim:
        held = self._blocks.num_blocks_of(sequence.sequence_id)
        return Victim(sequence, self._num_regained(sequence), held, self._num_blocks_to_host(sequence))

    def _victims_for(self, asker: Sequence) -> Iterator[Victim]:
        """Yield the sequences behind a running one that can free blocks, last one first."""
        for sequence in takewhile(lambda other: other is not asker, reversed(self._state.running)):
            if self._num_regained(sequence):
                yield self._as_victim(sequence)

    def _num_regained(self, victim: Sequence) -> int:
        return self._state.num_planned_blocks(victim) + len(self._blocks.own_blocks_of(victim.sequence_id))

    def _num_blocks_to_host(self, victim: Sequence) -> int | None:
        is_host_used = self._host.num_blocks > 0 and not self._host.is_stuck
        if not is_host_used or not self._blocks.num_blocks_of(victim.sequence_id):
            return None
        if self._blocks.keeps_states and self._state.state_room_on_host < 1:
            return None
        missing = self._kv_cache.num_blocks_to_copy(victim, victim.num_computed_tokens)
        return missing if missing <= self._state.room_on_host else None

    def _num_steps_to_wait(self, asker: Sequence) -> int | None:
        """Return the steps until the first sequence ends that needs no further block for it."""
        steps = [
            one.max_total_tokens - len(one.token_ids)
            for one in self._state.running
            if one is not asker and not self._blocks.num_blocks_needed(one.sequence_id, one.max_total_tokens)
        ]
        return min(steps, default=None)

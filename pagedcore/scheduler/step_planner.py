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
from pagedcore.scheduler.preemption import Victim
from pagedcore.sequence import Sequence


class StepPlanner(Admission):
    """Plans the running sequences of one step, and then the waiting ones."""

    def plan(self) -> SchedulePlan:
        """Decide the step."""
        self._advance_running()
        # Why: the blocks that sequences are asked to free are for those that run already.
        if self.waiting and not self.preempted and not self.freed:
            self.admit_waiting()
            if self.rules.policy.preempts is not None and self.stopped_by in ("rows", "blocks"):
                self._preempt_by_order()
        return SchedulePlan(
            tuple(self.rows.values()), tuple(self.admitted), tuple(self.preempted.values()),
            tuple(self.freed.values()), tuple(self.swap_ins), self.num_stalled_rows, self.num_deferred,
            tuple(self.capped), self.view.number, self.stopped_by,
        )

    def _advance_running(self) -> None:
        # Why: decode rows come first, so that a long prompt never delays the next token of other sequences.
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        splits_phases = self.splits_phases
        for sequence in self.running:
            start = sequence.num_computed_tokens
            is_decoding = len(sequence.token_ids) - start == 1
            # Why: a prompt's last token goes first as well, unless prefill chunks have to be told apart.
            is_decoding = is_decoding and (not splits_phases or start >= sequence.num_prompt_tokens)
            (decoding if is_decoding else prefilling).append(sequence)
        if self.rules.phase != "prefill":
            self._advance_in_order(decoding)
        if self.rows and self.rules.prefill_share < 1.0:
            most_tokens = int(self.rules.prefill_share * self.rules.max_num_batched_tokens)
            self.budget = min(self.budget, max(1, most_tokens))
        if prefilling and self.rules.phase != "decode":
            self._advance_in_order(prefilling)

    def _advance_in_order(self, sequences: ListOf[Sequence]) -> None:
        for sequence in sequences:
            start = sequence.num_computed_tokens
            num_tokens = min(len(sequence.token_ids) - start, self.budget)
            if sequence.prompt_logprobs is not None:
                num_tokens = self.num_scorable_of(sequence, num_tokens)
            if num_tokens == 0:
                return
            if sequence.sequence_id in self.preempted:
                continue
            needed = self.blocks.num_blocks_needed(sequence.sequence_id, start + num_tokens)
            if needed <= self.free:
                self.add_row(sequence, start, num_tokens, needed)
            else:
                # Why: without room it keeps its blocks and waits in place. Those before it may finish before they
                # need them, and those behind it may run in what is free, since it can take that back from them.
                self._ask_for_room(sequence, needed - self.free)

    def _ask_for_room(self, asker: Sequence, lacking: int) -> None:
        """Make room for a running sequence: by what leaves the device, by idle holders, by those behind it."""
        for holder in self.holders():
            if lacking <= self.arriving:
                break
            self.arriving += self.free_holder(holder)
        if lacking > self.arriving:
            chosen = self.rules.preemption.choose(
                lacking - self.arriving, lambda: self._victims_for(asker), may_wait=self.may_wait,
                num_steps_to_wait=self._num_steps_to_wait(asker), num_running=len(self.running),
            )
            for preemption in chosen:
                self._preempt(preemption)
            self.num_stalled_rows += not chosen
        self.arriving = max(0, self.arriving - lacking)

    def _preempt(self, preemption: Preemption) -> None:
        victim = preemption.sequence
        self.arriving += self._num_regained(victim)
        if preemption.kind is PreemptionKind.SWAP:
            self.room_on_host -= self._num_blocks_to_host(victim) or 0
        self.running.remove(victim)
        self.preempted[victim.sequence_id] = preemption
        row = self.rows.pop(victim.sequence_id, None)
        if row is not None:
            self.budget += row.num_tokens

    def _preempt_by_order(self) -> None:
        """Make room for the first waiting sequence, if the policy lets it take the place of enough running ones."""
        rules, candidate = self.rules, self.waiting[0]
        # Why: "guaranteed" promises that none is preempted, and "wait" keeps what was computed.
        if self.admitted or self.freed or self.swap_ins or rules.is_guaranteed or rules.preemption.mode == "wait":
            return
        if self.host.is_moving(candidate.sequence_id) or not (victims := self._victims_of_order(candidate)):
            return
        self.survey_running()
        match = self._match(candidate)
        if self._is_capped(candidate) or self._is_being_computed(candidate, match):
            return
        lacking = self._num_promised(candidate, match) - self.available - self.arriving
        num_rows = len(self.running) + 1 - rules.max_num_seqs
        chosen: list[Preemption] = []
        for victim in victims:
            if lacking <= 0 and len(chosen) >= num_rows:
                break
            chosen.append(rules.preemption.cheapest(self._as_victim(victim), max(0, lacking)))
            lacking -= self._num_regained(victim) + self._still_promised(victim)
        if lacking <= 0:
            for one in chosen:
                self._preempt(one)

    def _victims_of_order(self, candidate: Sequence) -> list[Sequence]:
        """List the running sequences whose place a waiting one may take, last one first, up to one that it may not."""
        return list(takewhile(
            lambda one: self._may_preempt(candidate, one),
            (one for one in reversed(self.running) if not one.is_protected),
        ))

    def _may_preempt(self, candidate: Sequence, running: Sequence) -> bool:
        preempts = self.rules.policy.preempts
        try:
            return preempts is not None and bool(preempts(candidate, running, self.view))
        except MemoryError:
            raise
        except Exception as error:  # the policy may be the user's own
            self.policy_failure = error
            return False

    def _as_victim(self, sequence: Sequence) -> Victim:
        held = self.blocks.num_blocks_of(sequence.sequence_id)
        return Victim(sequence, self._num_regained(sequence), held, self._num_blocks_to_host(sequence))

    def _victims_for(self, asker: Sequence) -> Iterator[Victim]:
        """Yield the sequences behind a running one that can free blocks, last one first."""
        for sequence in takewhile(lambda other: other is not asker, reversed(self.running)):
            if self._num_regained(sequence):
                yield self._as_victim(sequence)

    def _num_regained(self, victim: Sequence) -> int:
        return self.num_planned_blocks(victim) + len(self.blocks.own_blocks_of(victim.sequence_id))

    def _num_blocks_to_host(self, victim: Sequence) -> int | None:
        is_host_used = self.host.num_blocks > 0 and not self.host.is_stuck
        if not is_host_used or not self.blocks.num_blocks_of(victim.sequence_id):
            return None
        missing = self.kv_cache.num_blocks_to_copy(victim, victim.num_computed_tokens)
        return missing if missing <= self.room_on_host else None

    def _num_steps_to_wait(self, asker: Sequence) -> int | None:
        """Return the steps until the first sequence ends that needs no further block for it."""
        steps = [
            one.max_total_tokens - len(one.token_ids)
            for one in self.running
            if one is not asker and not self.blocks.num_blocks_needed(one.sequence_id, one.max_total_tokens)
        ]
        return min(steps, default=None)

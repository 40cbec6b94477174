"""Admission: which waiting sequences start in a step, in policy order with three exceptions.

A sequence whose next block is being computed by another one waits for it; one whose blocks are loaded from the host
starts when they have arrived; and one whose prefix is cached may start before earlier ones, though no request is ever
overtaken by more than ``Policy.cache_bonus`` later ones. Source of the deferral: TensorRT-LLM's capacity scheduler; of
the ordering: SGLang's longest-prefix-match policy, bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from itertools import chain, islice

from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Demand
from pagedcore.scheduler.plan import SwapIn
from pagedcore.scheduler.plan_state import PlanState
from pagedcore.sequence import Sequence


class Admission:
    """Starts waiting sequences in one plan, in what its running ones leave."""

    def __init__(self, state: PlanState) -> None:
        self._state, self._rules = state, state.rules
        self._kv_cache, self._blocks, self._host = state.kv_cache, state.blocks, state.host
        self._available = 0
        """Blocks that may still be promised."""
        self._being_computed: set[bytes] = set()
        """Keys of what running sequences are about to complete for others."""
        self._tenants: defaultdict[str, list[Sequence]] | None = None
        """Running and admitted sequences by tenant, if the policy caps tenants."""
        self._idle: set[int] = set()
        """Available blocks that waiting sequences hold, and nothing else does."""
        self._promised: set[int] = set()
        """Blocks that those admitted in this step keep or share."""

    def admit_waiting(self) -> None:
        """Admit as many as fit, in order."""
        if not self._may_admit():
            return
        self._survey_running()
        if self._available <= 0:
            self._state.stopped_by = "blocks"
            return
        for candidate, match in self._in_order():
            # Why: strict order. If others overtook a head that lacks room, it could starve.
            if not self._may_admit():
                return
            if not self._admit(candidate, match):
                self._state.stopped_by = self._state.stopped_by or "blocks"
                return

    def num_lacking(self, candidate: Sequence) -> int | None:
        """Count the blocks that a candidate lacks, for a plan in which nobody was admitted; below 0: what is left over.

        ``None``: more blocks would not let it start, because its tenant is capped or its next block is being computed.
        """
        self._survey_running()
        match = self._match(candidate)
        if self._is_capped(candidate) or self._is_being_computed(candidate, match):
            return None
        return self._num_promised(candidate, match) - self._available

    def still_promised(self, running: Sequence) -> int:
        """Count the blocks that a running sequence may still ask for, as far as admission counts on it."""
        needed = self._blocks.num_blocks_needed(running.sequence_id, self._promise(running))
        return max(0, needed - self._state.num_planned_blocks(running))

    def _survey_running(self) -> None:
        """Find out what the running sequences leave: blocks that are available, and tenants that may have more."""
        # Why: a block that is not promised to a running sequence is free or only held by idle ones, hence available.
        self._idle = self._blocks.only_held_by(holder.sequence_id for holder in self._state.holders())
        self._promised = set()
        self._available = self._state.free + len(self._idle) - sum(map(self.still_promised, self._state.running))
        for sequence in self._state.running:
            self._note_being_computed(sequence, sequence.num_computed_tokens)
        policy = self._rules.policy
        if policy.max_tenant_rows is not None or policy.max_tenant_share is not None:
            self._tenants = defaultdict[str, list[Sequence]](list)
            for sequence in self._state.running:
                self._tenants[sequence.options.tenant].append(sequence)

    def _is_capped(self, candidate: Sequence) -> bool:
        """Whether the tenant of a candidate has as much as it may; one without a running sequence never has."""
        if self._tenants is None or not (running := self._tenants[candidate.options.tenant]):
            return False
        rows, share = self._rules.policy.max_tenant_rows, self._rules.policy.max_tenant_share
        if rows is not None and len(running) >= rows:
            return True
        longest = sum(self._blocks.blocks_for(one.max_total_tokens) for one in (*running, candidate))
        return share is not None and longest > share * self._blocks.num_blocks

    def _may_admit(self) -> bool:
        if len(self._state.running) + len(self._state.admitted) >= self._rules.max_num_seqs:
            self._state.stopped_by = "rows"
        # Why: a static batch is filled once, so its size must not depend on the first step's token budget.
        elif not self._rules.policy.admits_while_running:
            self._state.stopped_by = "batch" if self._state.running else ""
        elif self._state.budget <= 0:
            self._state.stopped_by = "tokens"
        return not self._state.stopped_by

    def _in_order(self) -> Iterable[tuple[Sequence, PrefixMatch | None]]:
        """Put the head of the queue in the order of admission, with the matches that were looked up for it."""
        waiting, bonus = self._state.waiting, self._rules.policy.cache_bonus
        if not bonus:
            return ((sequence, None) for sequence in waiting)
        near = list(_first_arrivals(waiting[: 2 * bonus], bonus))
        matched = [(one, self._match(one)) for one in near]
        size = self._blocks.block_size
        matched.sort(key=lambda pair: pair[0].arrival - min(bonus, pair[1].num_tokens // size))
        return chain(matched, ((one, None) for one in islice(waiting, len(near), None)))

    def _match(self, candidate: Sequence) -> PrefixMatch:
        return self._kv_cache.match(candidate) if not self._holds(candidate) else NO_MATCH

    def _holds(self, candidate: Sequence) -> bool:
        return self._blocks.num_blocks_of(candidate.sequence_id) > 0

    def _admit(self, candidate: Sequence, match: PrefixMatch | None) -> bool:
        """Admit, load or defer a candidate; return whether to continue with the next one."""
        if self._host.is_moving(candidate.sequence_id):
            self._available -= self._blocks.blocks_for(self._promise(candidate))
            return self._available >= 0
        if self._is_capped(candidate):
            self._state.capped.append(candidate.sequence_id)
            return True
        match = match if match is not None else self._match(candidate)
        if self._is_being_computed(candidate, match):
            self._state.num_deferred += 1
            return True
        self._available -= self._num_promised(candidate, match)
        if self._available < 0 or not self._state.has_room_for(candidate):
            return False
        if not self._state.has_states_for(candidate):
            return self._ask_holders(candidate)
        if not match.is_to_load:
            return self._start(candidate, match)
        # Why: what is pinned for the candidate is loaded, the rest only if that takes less time than to compute it.
        is_kept = candidate.sequence_id in self._host.pins
        size, num_blocks = self._blocks.block_size, len(match.host_blocks)
        unloaded = match.without_tail(size)
        num_tokens = match.num_tokens - unloaded.num_tokens if self._blocks.keeps_states else num_blocks * size
        if not is_kept and not self._rules.preemption.is_worth_loading(num_blocks, num_tokens):
            return self._start(candidate, unloaded)
        if num_blocks + self._state.num_blocks_taken(match) > self._state.free:
            return self._ask_holders(candidate)
        # Why: one at a time. Room for a second load might be taken from what the second one found.
        self._state.swap_ins.append(SwapIn(candidate, match))
        self._state.stopped_by = "transfer"
        return False

    def _start(self, candidate: Sequence, match: PrefixMatch) -> bool:
        is_in_phase = False
        # Why: if even the block to copy from would have to be evicted for it, its tokens are computed instead.
        for option in (match, match.without_tail(self._blocks.block_size)):
            start = candidate.num_computed_tokens if self._holds(candidate) else option.num_tokens
            if not self._state.is_in_phase(candidate, start):
                continue
            is_in_phase = True
            num_tokens = min(len(candidate.token_ids) - start, self._state.budget)
            num_tokens = self._state.num_scorable_of(candidate, num_tokens)
            needed = self._blocks.num_new_blocks(Demand(candidate.sequence_id, start + num_tokens, option))
            if num_tokens == 0:
                self._note_admitted(candidate)
                return True
            if needed + self._state.num_blocks_taken(option) <= self._state.free:
                self._note_admitted(candidate)
                self._state.add_row(candidate, start, num_tokens, needed, option)
                self._note_being_computed(candidate, start)
                return True
        if not is_in_phase:
            self._state.stopped_by = "phase"
            return False
        return self._ask_holders(candidate)

    def _note_admitted(self, candidate: Sequence) -> None:
        self._state.admitted.append(candidate)
        if self._tenants is not None:
            self._tenants[candidate.options.tenant].append(candidate)

    def _ask_holders(self, candidate: Sequence) -> bool:
        # Invariant: all promises fit, so waiting sequences behind this one hold what is missing.
        for holder in self._state.holders():
            if holder is not candidate and holder not in self._state.admitted:
                self._state.free_holder(holder)
                break
        return False

    def _promise(self, sequence: Sequence) -> int:
        """Positions that admission counts on."""
        if self._rules.is_guaranteed:
            return sequence.max_total_tokens
        # Why: counting the first chunk only would admit more prompts than can be completed. A sequence that was
        # preempted before gets room to grow, more each time, so that it is not preempted again at once.
        growth = self._blocks.block_size * sequence.num_preemptions
        return min(len(sequence.token_ids) + growth, max(sequence.max_total_tokens, len(sequence.token_ids)))

    def _num_promised(self, candidate: Sequence, match: PrefixMatch) -> int:
        """Available blocks that a candidate will need; those that are promised to others already are not counted."""
        found = set[int](match.device_blocks)
        if self._holds(candidate):
            found.update(self._blocks.table(candidate.sequence_id).block_ids.tolist())
        # Why: a block that a tail is copied from is held for this step only, so it is not looked for in what is taken.
        taken = {one for one in found - self._promised if one in self._idle or not self._blocks.is_held(one)}
        self._promised |= found
        return self._blocks.blocks_for(self._promise(candidate)) - len(found) + len(taken)

    def _note_being_computed(self, sequence: Sequence, start: int) -> None:
        """Remember what a running sequence is about to complete for others."""
        self._being_computed.update(self._state.keys_to_come(sequence, start))

    def _is_being_computed(self, candidate: Sequence, match: PrefixMatch) -> bool:
        """Whether a running sequence computes what the candidate lacks next."""
        is_static = not self._rules.policy.admits_while_running
        if is_static or self._holds(candidate) or not self._being_computed:
            return False
        return self._state.lacks_any(candidate, match, self._being_computed)


def _first_arrivals(waiting: ListOf[Sequence], bonus: int) -> Iterator[Sequence]:
    """Yield the head of a queue as far as it is in order of arrival, all of one priority and within the bonus."""
    head = last = waiting[0]
    for sequence in waiting:
        is_in_order = last.arrival <= sequence.arrival <= head.arrival + bonus
        if not is_in_order or sequence.priority != head.priority:
            return
        yield sequence
        last = sequence

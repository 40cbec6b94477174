"""How blocks change hands outside a step: preemption, swapping, and what a finished sequence leaves.

Changes queues and block tables as a plan says, books transfers between the memories, and scores the estimates that
preemptions were chosen by. ``kv_transfers`` starts the transfers that are due and reports how they have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

from pagedcore.errors import InternalError
from pagedcore.kv_cache.host_cache import Direction, Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.scheduler.plan import Preemption, PreemptionKind, SchedulePlan
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.scheduler.retention import ReuseRate
from pagedcore.scheduler.stats import SchedulerCounters
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class Decision:
    """One preemption, and what it has cost so far."""

    preemption: Preemption
    num_computed_tokens: int
    """Positions that were computed when it was decided."""
    actual_s: float = 0.0
    """Seconds of the transfers, and of computing again what was lost."""

    @classmethod
    def of(cls, state: ListOf[Any], sequence: Sequence) -> Decision:
        """Make it again of what ``snapshot`` returned."""
        kind, estimated_s, num_left_tokens, num_computed_tokens, actual_s = state
        preemption = Preemption(sequence, PreemptionKind(kind), estimated_s, num_left_tokens)
        return cls(preemption, num_computed_tokens, actual_s)

    def snapshot(self) -> list[Any]:
        """Copy it as plain values, without its sequence."""
        made = self.preemption
        return [made.kind.value, made.estimated_s, made.num_left_tokens, self.num_computed_tokens, self.actual_s]


class Swapping:
    """Moves of one scheduler.

    Invariant: a preempted sequence has an open decision until it runs again or ends.
    """

    def __init__(
        self, kv_cache: KVCacheManager, running: PolicyOrder, waiting: WaitingQueue, counters: SchedulerCounters,
        rules: PreemptionRules,
    ) -> None:
        self._kv_cache = kv_cache
        self._blocks = kv_cache.device
        self._host = kv_cache.host
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._rules = rules
        self._reuse = ReuseRate(kv_cache.host.num_blocks)
        self.parked: set[int] = set()
        """Ids of finished sequences that the host may keep blocks for."""
        self._open: dict[int, Decision] = {}
        self._moving: dict[int, Sequence] = {}
        self.due: list[Transfer] = []
        """Transfers that are booked and not started."""

    def reset(self) -> None:
        """Forget every transfer, parked sequence and open decision."""
        for collection in (self.parked, self._open, self._moving, self.due):
            collection.clear()

    def take_due(self) -> list[Transfer]:
        """Return the transfers to start, each once."""
        due, self.due = self.due, []
        return due

    def carry_out(self, plan: SchedulePlan) -> list[Transfer]:
        """Preempt, free and begin to load as a plan says; return the transfers to start."""
        for sequence in plan.freed:
            self._blocks.free_blocks(sequence)
        for preemption in plan.preempted:
            self.preempt(preemption)
        for swap_in in plan.swap_ins:
            sequence, match = swap_in.sequence, swap_in.match
            self._reuse.want(sequence.block_keys[len(match.device_blocks) :])
            if not self._book(sequence, self._kv_cache.begin_swap_in(sequence, match)):
                raise InternalError(f"load: no room for sequence {sequence.sequence_id}, although it was planned")
        return self.take_due()

    def time_out_transfer(self, transfer_id: int) -> None:
        """Let a sequence continue without a transfer that takes too long; it counts as failed from now on.

        Raises ``InternalError`` if it is not in flight, or was timed out before.
        """
        self._kv_cache.time_out_transfer(transfer_id)
        del self._moving[transfer_id]
        self._counters.num_failed_transfers += 1

    def complete_transfer(self, transfer_id: int, seconds: float, *, is_ok: bool) -> None:
        """Book the end of a transfer that took so many seconds; one that was timed out only frees its blocks.

        Raises ``InternalError`` if it is not in flight.
        """
        transfer, is_served = self._kv_cache.complete_transfer(transfer_id, is_ok=is_ok)
        sequence = self._moving.pop(transfer_id, None)
        if sequence is None:
            return
        if not is_ok:
            self._counters.num_failed_transfers += 1
            return
        costs, num_states = self._rules.costs, len(transfer.state_moves)
        costs.moves[transfer.direction].observe(costs.units(len(transfer.moves), num_states), seconds)
        if (decision := self._open.get(transfer.sequence_id)) is not None:
            decision.actual_s += seconds
        if transfer.direction is Direction.OUT:
            self._counters.num_blocks_swapped_out += len(transfer.moves)
            self._counters.num_states_swapped_out += num_states
            return
        self._counters.num_blocks_swapped_in += len(transfer.moves)
        self._counters.num_states_swapped_in += num_states
        if is_served:
            sequence.num_computed_tokens = transfer.num_tokens
            self._note_looked_up(sequence, transfer.num_tokens)

    def free_finished(self, sequence: Sequence, *, is_trusted: bool, is_movable: bool) -> None:
        """Free the blocks of a finished sequence; what it computed stays cached, if it can be trusted.

        With a host, movable blocks that are likely to be needed again are copied there, so that the next turn finds
        them even after the device has evicted them.
        """
        self.free_on_host(sequence)
        if not is_trusted:
            self._kv_cache.evict_sequence(sequence)
        elif is_movable and (num_tokens := self._num_tokens_to_copy(sequence)):
            self._blocks.free_blocks(sequence, num_kept_tokens=num_tokens)
            self._begin_swap_out(sequence, is_pinned=False)
        self._blocks.free_blocks(sequence)
        sequence.reset_computed()

    def _num_tokens_to_copy(self, sequence: Sequence) -> int:
        """Return how many of a finished sequence's first positions are worth a copy on the host."""
        if not self._host.num_blocks:
            return 0
        size, num_computed = self._blocks.block_size, sequence.num_computed_tokens
        num_proven = min(num_computed, sequence.num_cached_tokens or 0) // size * size
        share = 1.0 if sequence.is_in_session else self._reuse.share
        self._reuse.leave(sequence.block_keys[num_proven // size : num_computed // size])
        # Why: the prefix that it found itself has been asked for twice by now.
        for num_tokens, likely in ((num_computed, share), (num_proven, 1.0)):
            num_blocks = self._kv_cache.num_blocks_to_copy(sequence, num_tokens)
            num_saved = self._kv_cache.num_tokens_to_save(sequence, num_tokens)
            if self._rules.is_worth_keeping(num_blocks, num_saved, likely):
                return num_tokens
        return 0

    def free_on_host(self, sequence: Sequence) -> None:
        """Free what the host keeps for a sequence, and cancel its transfers."""
        self._open.pop(sequence.sequence_id, None)
        self.parked.discard(sequence.sequence_id)
        self._host.free_sequence(sequence.sequence_id)

    def park(self, sequence: Sequence) -> int:
        """Keep on the host what the memories hold of a finished sequence; return how many positions, 0 without room.

        Its device blocks become unreferenced and stay cached until evicted.
        """
        num_tokens = self._host.pin_arriving(sequence.sequence_id)
        if not num_tokens:
            here, there = self._kv_cache.find(sequence)
            if there.num_tokens >= max(1, here.num_tokens):
                self._host.pin(sequence.sequence_id, there.block_ids, there.state)
                num_tokens = there.num_tokens
            elif here.num_tokens and self._kv_cache.has_states_for(self._running.sequences, 1):
                self._blocks.share_blocks(sequence, here)
                if self._begin_swap_out(sequence, is_pinned=True):
                    num_tokens = here.num_tokens
                self._blocks.free_blocks(sequence)
                sequence.reset_computed()
        if num_tokens:
            self.parked.add(sequence.sequence_id)
        return num_tokens

    def fetch(self, sequence: Sequence) -> int:
        """Begin to load what the host keeps of a finished sequence, for its next turn, and unpin it.

        Returns:
            Positions that will be found on the device; 0 if there is no room now, and then nothing has changed.
        """
        if self._host.is_stuck:
            return 0
        match = self._kv_cache.match(sequence)
        num_idle = sum(not self._blocks.is_held(block_id) for block_id in match.device_blocks)
        # Why: every running sequence may need a block in the next step, and the idle ones are in use by none.
        if len(match.host_blocks) + num_idle + len(self._running) > self._blocks.num_available_blocks:
            return 0
        if match.is_to_load and not (
                self._kv_cache.has_states_for(self._running.sequences, 1)
                and self._book(sequence, self._kv_cache.begin_swap_in(sequence, match))):
            return 0
        self.free_on_host(sequence)
        return match.num_tokens

    def note_found(self, sequence: Sequence, num_tokens: int) -> None:
        """Take note that a sequence starts with ``num_tokens`` positions found."""
        self._reuse.want(sequence.block_keys[num_tokens // self._blocks.block_size :])
        self._note_looked_up(sequence, num_tokens)
        if (decision := self._open.get(sequence.sequence_id)) is not None:
            decision.actual_s += self._rules.costs.compute_s(max(0, decision.num_computed_tokens - num_tokens))
            if num_left := decision.preemption.num_left_tokens:
                self._rules.costs.observe_loss(max(0.0, 1 - num_tokens / num_left))
            self._rules.costs.score(decision.preemption.estimated_s, decision.actual_s)
        self.free_on_host(sequence)

    def _note_looked_up(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_tokens
            self._counters.num_looked_up_tokens += len(sequence.token_ids)
            self._counters.num_cached_tokens += num_tokens

    def preempt(self, preemption: Preemption) -> None:
        """Let a running sequence wait, and free its blocks in the way that was chosen."""
        sequence = preemption.sequence
        sequence.num_protected_tokens = max(sequence.num_protected_tokens, sequence.num_computed_tokens + 1)
        self._open[sequence.sequence_id] = Decision(preemption, sequence.num_computed_tokens)
        self._running.remove_sequence(sequence)
        if preemption.kind is PreemptionKind.RECOMPUTE:
            self._blocks.evict_blocks(sequence.sequence_id, spares_shared=True)
        elif preemption.kind is PreemptionKind.SHRINK or not self._begin_swap_out(sequence, is_pinned=True):
            self._blocks.free_blocks(sequence)
        sequence.num_preemptions += 1
        self._counters.num_preemptions[preemption.kind] += 1
        self._let_wait(sequence)

    def begin_anew(self, sequence: Sequence) -> None:
        """Let a running sequence wait whose length asks for other angles: all of it is computed again."""
        self._running.remove_sequence(sequence)
        self._blocks.free_blocks(sequence)
        sequence.follow_length()
        self._let_wait(sequence)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have a transfer in flight or an open decision."""
        return [*self._moving.values(), *(one.preemption.sequence for one in self._open.values())]

    def snapshot(self) -> dict[str, Any]:
        """Copy decisions, transfers by number, and what was learned of reuse, as plain values."""
        return {
            "open": [[number, *one.snapshot()] for number, one in self._open.items()],
            "moving": [[number, one.sequence_id] for number, one in self._moving.items()],
            "parked": sorted(self.parked), "due": [one.transfer_id for one in self.due], **self._reuse.snapshot(),
        }

    def restore(self, state: Mapping[str, Any], sequences: Mapping[int, Sequence]) -> None:
        """Be as it was copied, over a cache that is already so."""
        self._open = {number: Decision.of(rest, sequences[number]) for number, *rest in state["open"]}
        self._moving = {number: sequences[owner] for number, owner in state["moving"]}
        self.parked, self.due = set(state["parked"]), [self._host.in_flight[number] for number in state["due"]]
        self._reuse.restore(state)

    def _let_wait(self, sequence: Sequence) -> None:
        sequence.reset_computed()
        sequence.move_to(SequenceStatus.WAITING)
        self._waiting.push_preempted(sequence)

    def _begin_swap_out(self, sequence: Sequence, *, is_pinned: bool) -> bool:
        return self._book(sequence, self._kv_cache.begin_swap_out(sequence, is_pinned=is_pinned))

    def _book(self, sequence: Sequence, transfer: Transfer | None) -> bool:
        if transfer is None:
            return False
        self._moving[transfer.transfer_id] = sequence
        self.due.append(transfer)
        return True

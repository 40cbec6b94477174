"""How blocks change hands outside a step: preemption, release, swapping, and what a finished sequence leaves.

The scheduler's other half: it changes queues and block tables as a plan says, books transfers between the memories,
and scores the estimates that preemptions were chosen by. It copies nothing; the engine starts the transfers it
returns and tells it when they have completed, in whatever order, late, or failed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.prefix_match import FoundBlocks, find_blocks
from pagedcore.kv_cache.transfers import Direction, Transfer
from pagedcore.scheduler.plan import Preemption, PreemptionKind, SchedulePlan, SwapIn
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.scheduler.retention import Retention
from pagedcore.scheduler.stats import SchedulerCounters
from pagedcore.scheduler.waiting_queue import PolicyOrder, WaitingQueue
from pagedcore.sequence import Sequence, SequenceStatus

_NUM_REMEMBERED: Final = 256


@dataclass(slots=True)
class Decision:
    """One preemption: what was expected of it and what it has cost so far."""

    sequence_id: int
    kind: PreemptionKind
    num_computed_tokens: int
    """Positions that were computed when it was decided."""
    estimated_s: float
    num_left_tokens: int = 0
    """Positions that were left to be found."""
    actual_s: float = 0.0
    """Seconds of the transfers so far, and of computing again what was lost once that is known."""
    is_settled: bool = False
    """Whether the sequence runs again, so that ``actual_s`` is complete."""


class Swapping:
    """Moves of one scheduler.

    Invariant: a preempted sequence has an open decision until it runs again or ends.
    """

    __slots__ = (
        "_blocks", "_costs", "_counters", "_due", "_keeping", "_moving", "_open", "_running", "_waiting",
        "decisions", "parked",
    )

    def __init__(
        self,
        blocks: BlockManager,
        running: PolicyOrder,
        waiting: WaitingQueue,
        counters: SchedulerCounters,
        rules: PreemptionRules,
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._costs = rules.costs
        self._keeping = Retention(blocks, rules)
        self.decisions: deque[Decision] = deque(maxlen=_NUM_REMEMBERED)
        """The last preemptions, oldest first, to look at."""
        self.parked: set[int] = set()
        """Ids of finished sequences that the host may keep blocks for."""
        self._open: dict[int, Decision] = {}
        self._moving: dict[int, Sequence] = {}
        self._due: list[Transfer] = []

    @property
    def in_flight(self) -> bool:
        """Whether any transfer has neither completed nor been given up."""
        return self._blocks.host is not None and self._blocks.host.has_awaited

    @property
    def withholds_blocks(self) -> bool:
        """Whether a transfer that was given up still keeps device blocks that nobody else may have."""
        return self._blocks.host is not None and self._blocks.host.withholds_blocks

    def take_due(self) -> list[Transfer]:
        """Return the transfers to start, each once."""
        due, self._due = self._due, []
        return due

    def carry_out(self, plan: SchedulePlan) -> list[Transfer]:
        """Preempt, release and begin to load as a plan says; return the transfers to start."""
        for sequence in plan.released:
            self._blocks.release(sequence)
            sequence.reset_computed()
            self._counters.num_released += 1
        for preemption in plan.preempted:
            self._preempt(preemption)
        for swap_in in plan.swap_ins:
            self._load(swap_in)
        return self.take_due()

    def give_up(self, transfer_id: int) -> None:
        """Let a sequence go on without a transfer that takes too long; it counts as failed now, not when it ends.

        Raises:
            InternalError: there is no such transfer in flight, or it was given up before.
        """
        host = self._blocks.host
        assert host is not None  # Invariant: only a host tier makes transfers
        host.give_up(transfer_id)
        del self._moving[transfer_id]
        self._counters.num_failed_transfers += 1

    def complete(self, transfer_id: int, seconds: float, *, is_ok: bool) -> None:
        """Book the end of a transfer that took so many seconds; one that was given up only lets its blocks go.

        Raises:
            InternalError: there is no such transfer in flight.
        """
        host = self._blocks.host
        assert host is not None  # Invariant: only a host tier makes transfers
        transfer, is_served = host.complete(transfer_id, is_ok=is_ok)
        sequence = self._moving.pop(transfer_id, None)
        if sequence is None:
            return
        if not is_ok:
            self._counters.num_failed_transfers += 1
            return
        self._costs.moves[transfer.direction].observe(len(transfer.moves), seconds)
        if (decision := self._open.get(transfer.sequence_id)) is not None:
            decision.actual_s += seconds
        if transfer.direction is Direction.OUT:
            self._counters.num_blocks_swapped_out += len(transfer.moves)
            return
        self._counters.num_blocks_swapped_in += len(transfer.moves)
        if is_served:
            sequence.num_computed_tokens = transfer.num_tokens
            if sequence.num_cached_tokens is None:
                self._note_looked_up(sequence, transfer.num_tokens)

    def retire(self, sequence: Sequence, *, is_trusted: bool, is_movable: bool) -> None:
        """Give up the blocks of a finished sequence; what it computed stays to be found, if it can be trusted.

        Where there is a host tier, the blocks are movable and it is likely to pay, they go there too, so that the next
        turn finds them even when others have needed the device meanwhile.
        """
        self.abandon(sequence)
        if not is_trusted:
            self._distrust(sequence)
        elif is_movable and (num_tokens := self._keeping.num_tokens_worth_it(sequence)):
            self._blocks.cut(sequence, num_tokens)
            self._begin_swap_out(sequence, is_pinned=False)
        self._blocks.release(sequence)
        sequence.reset_computed()

    def park(self, sequence: Sequence) -> int:
        """Keep on the host what the memories hold of a finished sequence; return how many positions, 0 without room.

        The device blocks are then those of nobody, and can be found until they are needed.
        """
        host = self._blocks.host
        assert host is not None  # Invariant: asked before
        num_tokens = host.pin_arriving(sequence.sequence_id)
        if not num_tokens:
            here, there = self.find(sequence)
            if there.num_tokens >= max(1, here.num_tokens):
                host.pin(sequence.sequence_id, there.block_ids)
                num_tokens = there.num_tokens
            elif here.num_tokens:
                num_tokens = self._copy_out(sequence, here)
        if num_tokens:
            self.parked.add(sequence.sequence_id)
        return num_tokens

    def _copy_out(self, sequence: Sequence, here: FoundBlocks) -> int:
        self._blocks.share(sequence, here)
        is_moving = self._begin_swap_out(sequence, is_pinned=True)
        if not is_moving:
            self._blocks.release(sequence)
        sequence.reset_computed()
        return here.num_tokens if is_moving else 0

    def fetch(self, sequence: Sequence) -> int:
        """Begin to load what the host keeps of a finished sequence, for whoever goes on with it; it is kept no longer.

        Returns:
            Positions that will be found on the device; 0 if there is no room now, and then nothing has changed.
        """
        host = self._blocks.host
        assert host is not None  # Invariant: asked before
        if host.is_stuck:
            return 0
        match = self._blocks.match(sequence)
        num_idle = sum(not self._blocks.is_held(block_id) for block_id in match.device_blocks)
        # Why: every running sequence may need a block in the next step, and nobody waits for the idle ones.
        if len(match.host_blocks) + num_idle + len(self._running) > self._blocks.num_available_blocks:
            return 0
        if match.host_blocks and not self._book(sequence, host.begin_swap_in(sequence, match)):
            return 0
        self._unpin(sequence)
        return match.num_tokens

    def find(self, sequence: Sequence) -> tuple[FoundBlocks, FoundBlocks]:
        """Find what the device and the host hold of a sequence's positions, the last one left out."""
        blocks, num_tokens = self._blocks, len(sequence.token_ids) - 1
        here = find_blocks(blocks.hasher, sequence, num_tokens, blocks.cache)
        if blocks.host is None:
            return here, FoundBlocks((), 0)
        return here, find_blocks(blocks.hasher, sequence, num_tokens, blocks.host.cache)

    def drop(self, sequence: Sequence) -> None:
        """Give up the blocks of a finished sequence that nobody will continue."""
        self.abandon(sequence)
        self._blocks.drop(sequence)
        sequence.reset_computed()

    def _distrust(self, sequence: Sequence) -> None:
        """Forget the blocks of a sequence, and in either memory whatever goes back to what it computed."""
        blocks = self._blocks
        first_block = tuple(sequence.token_ids[: min(sequence.num_computed_tokens, blocks.block_size)])
        for cache in (blocks.cache,) if blocks.host is None else (blocks.cache, blocks.host.cache):
            cache.discard_beginnings(sequence.cache_root, first_block)
        blocks.forget(sequence.sequence_id, spares_shared=False)

    def abandon(self, sequence: Sequence) -> None:
        """Drop what the host keeps for a sequence, and what is on its way for it."""
        self._open.pop(sequence.sequence_id, None)
        self._unpin(sequence)

    def note_found(self, sequence: Sequence, num_tokens: int) -> None:
        """Take note that a sequence starts with ``num_tokens`` positions that need not be computed."""
        self._keeping.note_wanted(sequence, num_tokens // self._blocks.block_size)
        if sequence.num_cached_tokens is None:
            self._note_looked_up(sequence, num_tokens)
        if (decision := self._open.pop(sequence.sequence_id, None)) is not None:
            decision.actual_s += self._costs.compute_s(max(0, decision.num_computed_tokens - num_tokens))
            decision.is_settled = True
            if decision.num_left_tokens:
                self._costs.observe_loss(max(0.0, 1 - num_tokens / decision.num_left_tokens))
            self._costs.score(decision.estimated_s, decision.actual_s)
        self._unpin(sequence)

    def _unpin(self, sequence: Sequence) -> None:
        self.parked.discard(sequence.sequence_id)
        if self._blocks.host is not None:
            self._blocks.host.abandon(sequence.sequence_id)

    def _note_looked_up(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_cached_tokens = num_tokens
        self._counters.num_looked_up_tokens += len(sequence.token_ids)
        self._counters.num_cached_tokens += num_tokens

    def _preempt(self, preemption: Preemption) -> None:
        sequence = preemption.sequence
        decision = Decision(
            sequence.sequence_id, preemption.kind, sequence.num_computed_tokens, preemption.estimated_s,
            preemption.num_left_tokens,
        )
        self._open[sequence.sequence_id] = decision
        self.decisions.append(decision)
        self._running.discard(sequence)
        self._give_up_blocks(preemption)
        sequence.reset_computed()
        sequence.move_to(SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self._counters.num_preemptions[preemption.kind] += 1
        self._waiting.push_preempted(sequence)

    def _give_up_blocks(self, preemption: Preemption) -> None:
        sequence = preemption.sequence
        if preemption.kind is PreemptionKind.RECOMPUTE:
            self._blocks.forget(sequence.sequence_id, spares_shared=True)
        elif preemption.kind is PreemptionKind.SHRINK or not self._begin_swap_out(sequence, is_pinned=True):
            self._blocks.release(sequence)

    def _begin_swap_out(self, sequence: Sequence, *, is_pinned: bool) -> bool:
        host = self._blocks.host
        if host is None or not self._blocks.num_blocks_of(sequence.sequence_id):
            return False
        return self._book(sequence, host.begin_swap_out(sequence, is_pinned=is_pinned))

    def _load(self, swap_in: SwapIn) -> None:
        host = self._blocks.host
        assert host is not None  # Invariant: only a host tier is found anything on
        self._keeping.note_wanted(swap_in.sequence, len(swap_in.match.device_blocks))
        if not self._book(swap_in.sequence, host.begin_swap_in(swap_in.sequence, swap_in.match)):
            raise InternalError(f"load: no room for sequence {swap_in.sequence.sequence_id}, although it was planned")

    def _book(self, sequence: Sequence, transfer: Transfer | None) -> bool:
        if transfer is None:
            return False
        self._moving[transfer.transfer_id] = sequence
        self._due.append(transfer)
        return True

"""Where every sequence is, and the one transaction that moves them: schedule, reserve, then commit or roll back.

Decides with ``planner``, counts blocks with ``cache.block_manager``, and knows no device, no clock and no text. Read
``invariants`` next for the laws that hold between any two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pagedcore.cache.block_manager import BlockManager
from pagedcore.errors import InternalError, RequestTooLarge
from pagedcore.outputs import FinishReason
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.plan import NewToken, ScheduledRow, SchedulePlan
from pagedcore.scheduling.planner import PlanningRules, StepPlanner
from pagedcore.scheduling.policies import Policy
from pagedcore.scheduling.scheduler_stats import SchedulerCounters, SchedulerStats
from pagedcore.scheduling.step_in_flight import StepInFlight
from pagedcore.scheduling.waiting_queue import PolicyOrder, WaitingQueue

_WAITING, _RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
_FINISHED, _REMOVED = SequenceStatus.FINISHED, SequenceStatus.REMOVED


class Scheduler:
    """Waiting, running and kept sequences over one block manager.

    Invariant: a live sequence is waiting, running, or finished; the scheduler holds a finished one only while its
        blocks are kept for a further turn.
    Invariant: ``schedule`` changes nothing; between ``reserve`` and ``commit`` or ``rollback`` one step is in flight.
    Invariant: if anything waits or runs, ``schedule`` returns a plan that computes something.
    Invariant: every table has exactly the blocks of the computed positions, and in flight those of the rows.
    """

    __slots__ = ("_counters", "_in_flight", "_kept", "_running", "_waiting", "block_manager", "rules")

    def __init__(
        self,
        block_manager: BlockManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_waiting: int,
        admission: str = "optimistic",
    ) -> None:
        self.block_manager = block_manager
        self.rules = PlanningRules(
            max_num_seqs, max_num_batched_tokens, admission == "guaranteed", policy.admits_while_running
        )
        self._waiting = WaitingQueue(policy.order, max_num_waiting)
        self._running = PolicyOrder(policy.order)
        self._kept: dict[int, Sequence] = {}
        self._in_flight: StepInFlight | None = None
        self._counters = SchedulerCounters()

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(len(self._waiting) or len(self._running))

    @property
    def waiting(self) -> WaitingQueue:
        """The waiting sequences in policy order, to look at."""
        return self._waiting

    @property
    def running(self) -> PolicyOrder:
        """The running sequences in policy order, to look at."""
        return self._running

    @property
    def kept(self) -> tuple[Sequence, ...]:
        """The finished sequences whose blocks are kept, longest finished first."""
        return tuple(self._kept.values())

    @property
    def rows_in_flight(self) -> list[ScheduledRow]:
        """What was reserved and neither committed nor rolled back, without sequences that were finished since."""
        return self._in_flight.rows if self._in_flight is not None else []

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence that grows to ``num_tokens`` positions fits the pool when it is alone."""
        return self.block_manager.blocks_for(num_tokens) <= self.block_manager.num_blocks

    def require_room(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Check that ``num_sequences`` sequences of up to ``num_tokens`` positions each can be added now.

        Raises:
            RequestTooLarge: one of them would not fit the pool even if it were alone.
            EngineOverloaded: the waiting queue has no room for them.
        """
        if not self.can_ever_fit(num_tokens):
            limit = self.block_manager.num_blocks * self.block_manager.block_size
            raise RequestTooLarge(
                "prompt and max_tokens", num_tokens, f"at most the {limit} positions of the KV pool",
                "Ask for fewer tokens, or build the engine with more KV blocks.",
            )
        self._waiting.require_room(num_sequences)

    def never_started(self) -> tuple[Sequence, ...]:
        """Return the waiting sequences that were not started in this turn, in policy order."""
        return tuple(self._waiting.newcomers())

    def stats(self) -> SchedulerStats:
        """Describe the present and count the past."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_kept=len(self._kept),
            num_blocks=self.block_manager.num_blocks,
            num_used_blocks=self.block_manager.num_used_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            **asdict(self._counters),
        )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait: a new one, or a finished one after ``begin_turn``, with the blocks it still holds.

        Raises:
            RequestTooLarge: it could not fit the pool even if it were alone; nothing changed.
            EngineOverloaded: the waiting queue is full; nothing changed.
            InternalError: its status is not WAITING, or it waits already.
        """
        if sequence.status is not _WAITING:
            raise InternalError(f"add: sequence {sequence.sequence_id} is {sequence.status.value}")
        self.require_room(sequence.max_total_tokens)
        self._waiting.push(sequence)
        self._kept.pop(sequence.sequence_id, None)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence from outside, in whatever state it is; one that has finished stays as it is.

        After "stop" or "length" its blocks are kept for a further turn. After "abort" or "error" they are free at
        once, and also while a step is in flight: what the device writes for it then is accounted for by nobody.
        """
        if sequence.status in (_FINISHED, _REMOVED):
            return
        self._waiting.discard(sequence)
        self._running.discard(sequence)
        self._mark_finished(sequence, reason)
        if self._in_flight is not None:
            self._in_flight.gone.add(sequence.sequence_id)
        if reason in ("abort", "error") or self._in_flight is not None:
            self._drop_blocks(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what a finished sequence still holds and remove it for good; a second time does nothing.

        Raises:
            InternalError: it is not finished.
        """
        if sequence.status is not _REMOVED:
            sequence.move_to(_REMOVED)
            self._drop_blocks(sequence)

    def schedule(self) -> SchedulePlan:
        """Decide the next step. Nothing moves: asked again, it answers the same.

        Raises:
            InternalError: a step is in flight, or nothing could be planned although there is work.
        """
        self._require_landed("schedule")
        plan = StepPlanner(self.rules, self.block_manager, self._running, self._waiting, self._kept.values()).plan()
        if plan.is_empty and self.has_work:
            raise InternalError(
                f"no progress: {len(self._running)} running, {len(self._waiting)} waiting, {len(self._kept)} kept, "
                f"{self.block_manager.num_free_blocks} of {self.block_manager.num_blocks} blocks free"
            )
        return plan

    def reserve(self, plan: SchedulePlan) -> None:
        """Carry out preemptions and releases, and put every block of the step into the tables.

        Raises:
            InternalError: the plan is not about the present state (nothing changed), or the pool is too small for it
                (the preempted stay preempted, all laws hold).
        """
        self._require_landed("reserve")
        self._require_present(plan)
        for sequence in plan.released:
            self._release(sequence)
        for sequence in plan.preempted:
            self._preempt(sequence)
        reservation = self.block_manager.reserve([(row.sequence.sequence_id, row.end) for row in plan.rows])
        if reservation is None:
            raise InternalError(f"reserve: {self.block_manager.num_free_blocks} free blocks are too few for the plan")
        self._in_flight = StepInFlight(plan, reservation)

    def rollback(self, plan: SchedulePlan) -> None:
        """Undo ``reserve``: the step did not happen, admitted sequences wait where they waited.

        The preempted stay preempted and the released stay released: the device may have overwritten their blocks.

        Raises:
            InternalError: ``plan`` is not in flight.
        """
        step = self._require_in_flight(plan)
        self._in_flight = None
        step.reservation.cancel()

    def commit(self, plan: SchedulePlan, sampled: Mapping[int, int]) -> list[NewToken]:
        """Make the step true: positions are computed, tokens appended, ended sequences finished.

        Args:
            plan: what was reserved and has been computed.
            sampled: the next token by sequence id, for every row with ``is_sampled``. A sequence that was finished
                while the step ran needs none; that is how a row without usable logits leaves alone.

        Returns:
            What was appended, in the order of the rows.

        Raises:
            InternalError: ``plan`` is not in flight, or a sampled row has no token; nothing changed.
        """
        step = self._require_in_flight(plan)
        rows, tokens = step.rows, step.next_tokens(sampled)
        self._in_flight = None
        step.reservation.commit()
        for sequence in step.admitted:
            self._start(sequence)
        self._counters.num_steps += 1
        results = [self._advance(row, token_id) for row, token_id in zip(rows, tokens, strict=True)]
        return [result for result in results if result is not None]

    def _require_in_flight(self, plan: SchedulePlan) -> StepInFlight:
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise InternalError("this plan is not in flight: reserve it first, and commit or roll it back once")
        return self._in_flight

    def _require_landed(self, verb: str) -> None:
        if self._in_flight is not None:
            raise InternalError(f"{verb}: the step before was neither committed nor rolled back")

    def _require_present(self, plan: SchedulePlan) -> None:
        """Refuse a plan that was made before somebody moved."""
        admitted = {sequence.sequence_id for sequence in plan.admitted}
        is_present = (
            all(row.sequence.status is _RUNNING or row.sequence.sequence_id in admitted for row in plan.rows)
            and all(sequence in self._waiting for sequence in plan.admitted)
            and all(sequence in self._running for sequence in plan.preempted)
            and all(s.sequence_id in self._kept or s in self._waiting for s in plan.released)
        )
        if not is_present:
            raise InternalError("reserve: the plan is out of date; a sequence moved after it was made")

    def _start(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)
        sequence.move_to(_RUNNING)
        self._running.add(sequence)

    def _advance(self, row: ScheduledRow, token_id: int | None) -> NewToken | None:
        sequence = row.sequence
        self._counters.count_row(row)
        sequence.num_computed_tokens = row.end
        if token_id is None:
            return None
        reason = sequence.append_token(token_id)
        if reason is not None:
            self._running.discard(sequence)
            self._mark_finished(sequence, reason)
        return NewToken(sequence, token_id, reason)

    def _mark_finished(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.move_to(_FINISHED)
        sequence.finish_reason = reason
        if self.block_manager.num_blocks_of(sequence.sequence_id):
            self._kept[sequence.sequence_id] = sequence

    def _preempt(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        self._drop_blocks(sequence)
        sequence.move_to(_WAITING)
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._waiting.push_preempted(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        self._counters.num_released += 1

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._kept.pop(sequence.sequence_id, None)
        self.block_manager.free(sequence.sequence_id)
        sequence.forget_computed()

"""Where every sequence is, and the one transaction that moves them: schedule, reserve, then commit or roll back.

Decides with ``step_planner``, counts blocks with ``kv_cache``; knows no device, no clock and no text. What moves
between the memories before a step is in ``swapping``, the laws that hold between any two calls in ``invariants``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import Any

from pagedcore.errors import InternalError, RequestTooLarge
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.outputs import FinishReason
from pagedcore.scheduler.adapter_slots import AdapterMoves, AdapterSlots
from pagedcore.scheduler.batch_gate import ALWAYS_OPEN, BatchGate
from pagedcore.scheduler.chunk_ends import kind_of_plan
from pagedcore.scheduler.cost_model import CostModel
from pagedcore.scheduler.foresight import Foresees
from pagedcore.scheduler.plan import NewToken, ScheduledRow, SchedulePlan, StepInFlight
from pagedcore.scheduler.plan_state import PlanningRules
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_queues import PolicyQueues
from pagedcore.scheduler.preemption import PreemptionRules
from pagedcore.scheduler.speculation import Speculation
from pagedcore.scheduler.stats import SchedulerCounters, SchedulerStats
from pagedcore.scheduler.step_planner import StepPlanner
from pagedcore.scheduler.swapping import Swapping
from pagedcore.sequence import Sequence, SequenceStatus

_WAITING, _RUNNING, _FINISHED, _REMOVED = SequenceStatus


class Scheduler(Foresees):
    """Waiting and running sequences over one block manager.

    Invariant: a live sequence is waiting or running; a finished one holds no device blocks, but they may be cached.
    Invariant: ``schedule`` changes nothing; between ``reserve`` and ``commit`` or ``rollback`` one step is in flight.
    Invariant: if a sequence runs, or waits and is not gated, and no transfer is in flight or keeps blocks after its
        time-out, a plan computes something or makes room for it.
    Invariant: a gated sequence has no table: it was neither admitted nor loaded since it came.
    Invariant: every table has exactly the blocks of the computed positions, and in flight those of the rows.
    """

    def __init__(
        self, kv_cache: KVCacheManager, policy: Policy, *, max_num_seqs: int, max_num_batched_tokens: int,
        max_num_waiting: int, admission: str = "optimistic", preemption: str = "auto", max_scored_tokens: int,
        gate: BatchGate = ALWAYS_OPEN, phases: str = "mixed", prefill_share: float = 1.0,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._blocks = kv_cache.device
        self._is_hybrid, self._of_kind = kv_cache.device.keeps_states, kind_of_plan(kv_cache)
        self._num_pool_tokens = self._blocks.num_blocks * self._blocks.block_size
        self.costs = CostModel(state_weight=kv_cache.state_weight)
        preemption_rules = PreemptionRules(preemption, self.costs, self._blocks.block_size)
        self.rules = PlanningRules(
            max_num_seqs, max_num_batched_tokens, admission == "guaranteed" or policy.promises, policy,
            preemption_rules, max_scored_tokens, prefill_share,
        )
        self._phases = ("prefill", "decode") if phases == "separate" else ("mixed",)
        """In the order in which they are planned until one can do something."""
        self.gate = gate
        """When new sequences may start; ``step_recipe`` knows the time, and opens it."""
        self.queues = PolicyQueues(policy, max_num_waiting, gates_new=gate.min_batch_size > 1)
        self.waiting, self.running = self.queues.waiting, self.queues.running
        """In policy order; like ``counters``, not for changing."""
        self.counters = SchedulerCounters()
        self._in_flight: StepInFlight | None = None
        self._unread = []
        self.moves = Swapping(kv_cache, self.running, self.waiting, self.counters, preemption_rules)
        self.adapters = adapters if adapters is not None else AdapterSlots()
        """Where the adapters of sequences are."""
        self.speculation: Speculation | None = None
        """What gives rows drafts; ``None``: nothing does."""
        self._drafted: dict[int, ScheduledRow] = {}
        """Rows of the committed step whose drafts are not settled, by sequence id."""

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(len(self.waiting) or len(self.running))

    @property
    def phases(self) -> str:
        """The setting: "separate" or "mixed"."""
        return "separate" if len(self._phases) > 1 else "mixed"

    @property
    def has_landed(self) -> bool:
        """Whether no step is in flight, and the tokens of all are known."""
        return self._in_flight is None and not self._unread

    @property
    def is_gated(self) -> bool:
        """Whether nothing runs, and all that waits waits for the gate to open."""
        return bool(self.waiting.gated) and not len(self.running) and len(self.waiting) == len(self.waiting.gated)

    def gated_s(self, now_s: float) -> float:
        """Return in how many seconds the gate opens if no further sequence comes; 0 or less: it is open, or due."""
        oldest = next(self.waiting.never_started(), None)
        if oldest is None or not self.waiting.gated:
            return 0.0
        return self.gate.opens_s(self.waiting.num_never_started, oldest.arrival_s) - now_s

    @property
    def rows_in_flight(self) -> ListOf[ScheduledRow]:
        """What was reserved and neither committed nor rolled back, without sequences that were finished since."""
        return self._in_flight.rows if self._in_flight is not None else []

    def is_in_flight(self, plan: SchedulePlan) -> bool:
        """Whether a plan was reserved and neither committed nor rolled back."""
        return self._in_flight is not None and self._in_flight.plan is plan

    @property
    def num_unstarted(self) -> int:
        """Sequences that were added and not started; those of a step in flight are started. Readable in any thread."""
        step, count = self._in_flight, self.waiting.num_never_started
        return count - sum(map(self.waiting.is_never_started, step.plan.admitted)) if step is not None else count

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence that grows to ``num_tokens`` positions fits the pool when alone."""
        return num_tokens <= self._num_pool_tokens

    def require_room(self, num_tokens: int) -> None:
        """Check that a sequence of up to ``num_tokens`` positions can be added now. Raises as ``add_sequences``."""
        self._require_fit(num_tokens)
        self.waiting.require_room(1)

    def stats(self) -> SchedulerStats:
        """Describe the present and count the past."""
        return SchedulerStats.of(self.kv_cache, self.running, self.waiting, self.counters, self.costs)

    def add_sequences(self, *sequences: Sequence) -> None:
        """Let sequences wait, all or none of them: new ones, or finished ones after ``begin_turn``.

        Raises:
            RequestTooLarge: one could not fit the pool even if it were alone; nothing changed.
            EngineOverloaded: the waiting queue has no room for all, or promises forbid it; nothing changed.
            InternalError: its status is not WAITING, or it waits already.
        """
        for sequence in sequences:
            if sequence.status is not _WAITING:
                raise InternalError(f"add_sequences: sequence {sequence.sequence_id} is {sequence.status.value}")
            self._require_fit(sequence.num_prompt_tokens + sequence.max_tokens)
        self.queues.push(*sequences)
        if self._is_hybrid:
            # Why now: plans compare the keys of all that wait, and shall not have to make a long queue's at once.
            for one in sequences:
                size, keys = self._blocks.block_size, one.block_keys
                self._blocks.hasher.extend(keys, one.block_root, one.token_ids, one.num_prompt_tokens // size)
        # Why: a session's turn whose blocks are pinned on the host keeps them from others while it waits.
        if self.waiting.gated and (pinned := [one for one in sequences if one.sequence_id in self.kv_cache.host.pins]):
            self.waiting.open_gate(*pinned)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; one that has finished stays as it is.

        Its blocks are freed at once, also while a step is in flight: no table has the blocks that the device then
        writes for it. What it computed stays cached, except after "error", which evicts it.
        """
        if sequence.status not in (_FINISHED, _REMOVED):
            self._take_out(sequence)
            self._mark_finished(sequence, reason)

    def restart(self, sequences: ListOf[Sequence]) -> None:
        """Let exactly these live sequences wait, with nothing computed, cached, reserved or on its way, in whatever
        state the queues and blocks are. The caller knows that no transfer is in flight.
        """
        self._in_flight, self._unread = None, []
        self._drafted = {}
        if self.speculation is not None:
            self.speculation.reset()
        self.kv_cache.reset()
        self.moves.reset()
        self.running.reset()
        for sequence in sequences:
            sequence.status = _WAITING
            sequence.reset_computed()
        self.waiting.reset(*sequences)

    def take_back(self, *sequences: Sequence) -> None:
        """Let sequences of requests that were accepted before wait: never refused, nor counted against the bound."""
        for sequence in sequences:
            self.waiting.push_preempted(sequence)

    def add_branch(self, sequence: Sequence, parent: Sequence) -> None:
        """Let a sequence wait that continues all that ``parent`` has computed, and shares it.

        It belongs to a request that was accepted before: it is never refused, nor counted against the queue's bound.
        """
        self._blocks.register_all(parent)
        self.waiting.push_preempted(sequence)

    def cancel_branch(self, sequence: Sequence) -> None:
        """End a live sequence that no sequence continues: as ``finish_sequence``, but its last block is evicted."""
        self._take_out(sequence)
        sequence.move_to(_FINISHED)
        sequence.finish_reason = "abort"
        self.moves.free_on_host(sequence)
        self._blocks.free_and_evict_tail(sequence)
        sequence.reset_computed()

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a finished sequence, and free what the host keeps for it; a second time does nothing.

        Raises ``InternalError`` if it is not finished.
        """
        if sequence.status is not _REMOVED:
            sequence.move_to(_REMOVED)
            self.moves.free_on_host(sequence)

    def begin_step(self, now_s: float) -> None:
        """Let a dynamic policy see the present; its view, and so the order, stays for all plans until the next call.

        Raises ``InternalError`` if a step is in flight.
        """
        self._require_landed("begin_step")
        self.queues.renew_view(now_s, self._blocks.num_blocks_of, self.costs.steps.times_now())

    def schedule(self, most_tokens: int | None = None) -> SchedulePlan:
        """Decide the next step, or what has to make room for it. Nothing moves: a second call gives an equal plan.

        Args:
            most_tokens: of the step; ``None``: as many as the rules allow.

        Raises:
            InternalError: a step is in flight, or nothing could be planned although there is work.
        """
        self._require_landed("schedule")
        if (self.waiting.failure or self.running.failure) and self.queues.demote_failed():
            self.rules = replace(self.rules, policy=self.queues.policy)
        is_free = most_tokens is None and self.queues.most_tokens is None
        rules = self.rules if is_free else self.queues.bounded(self.rules, most_tokens)
        # Why: a step that is tried again with fewer tokens has none to spare.
        speculation = self.speculation if most_tokens is None else None
        plan = self._plan(rules, may_wait=True, speculation=speculation)
        if not (plan.rows or plan.moves_blocks or self.is_gated or not self.has_work
                or self.kv_cache.host.has_awaited or self._unread or self._awaits_adapters(plan)):
            plan = self._plan(rules, may_wait=False)
            # Why: a store that hangs may keep the blocks that are lacking; then only its end can help.
            if not plan.rows and not plan.moves_blocks and not self.kv_cache.host.withholds_blocks:
                raise InternalError(
                    f"no progress: {len(self.running)} running, {len(self.waiting)} waiting, "
                    f"{self._blocks.num_available_blocks} of {self._blocks.num_blocks} blocks available"
                )
        return plan

    def adapter_moves(self) -> AdapterMoves:
        """Return which adapters have to come, and which leave for them, so that waiting sequences can start."""
        return self.adapters.moves(self.running.sequences, self._startable(), self._keeps_adapter)

    def make_room(self, plan: SchedulePlan) -> list[Transfer]:
        """Carry out what a plan with ``moves_blocks`` asks for; return the transfers to start now.

        Raises:
            InternalError: a step is in flight, or the plan is out of date (nothing changed).
        """
        self._require_current("make_room", plan)
        return self.moves.carry_out(plan)

    def reserve(self, plan: SchedulePlan, *, is_queued: bool = False) -> tuple[tuple[int, int], ...]:
        """Put every block of the step into the tables; return the (source, destination) blocks to copy first.

        ``is_queued``: the step is launched at once, so that blocks which are moved later have what it writes.

        Raises:
            InternalError: the plan asks for room or is out of date, or the pool is too small for it; nothing changed.
        """
        self._require_current("reserve", plan)
        if plan.moves_blocks:
            raise InternalError("reserve: room has to be made first; ask for another plan then")
        # Why: a decode row rarely needs a block, and then there is nothing to reserve for it.
        demands = [row.demand for row in plan.rows if row.num_new_blocks or row.match.num_tokens or self._is_hybrid]
        reservation = self._blocks.reserve(demands) if demands else None
        if demands and reservation is None:
            raise InternalError(f"reserve: {self._blocks.num_available_blocks} blocks are too few for the plan")
        self._in_flight = StepInFlight(plan, reservation, is_queued)
        return reservation.copies if reservation is not None else ()

    def observe(self, plan: SchedulePlan, seconds: float) -> None:
        """Learn how long a step took."""
        self.costs.steps.observe(*plan.work, seconds)
        if self.speculation is not None:
            self.speculation.learn_costs(plan, seconds)
        for one in self.queues.observers:
            one.step_timed(plan, seconds)

    def rollback(self, plan: SchedulePlan) -> None:
        """Undo ``reserve``: admitted sequences wait where they waited. Raises ``InternalError`` if not in flight."""
        step = self._require_in_flight(plan)
        self._in_flight = None
        if step.reservation is not None:
            step.reservation.cancel()

    def commit(self, plan: SchedulePlan, sampled: Mapping[int, int | None]) -> list[NewToken]:
        """Book the step: its positions are computed, ended sequences finish; return what was appended, row by row.

        Args:
            plan: what was reserved and has been computed.
            sampled: the next token by sequence id, for every row with ``num_sampled``. A sequence that was finished
                while the step ran needs none; a row without usable logits is ended in this way. ``None`` for a
                sequence that branches continue: it is computed and finishes without a reason, and what it computed
                stays cached.

        Raises:
            InternalError: ``plan`` is not in flight, or a sampled row has no token; nothing changed.
        """
        step = self._require_in_flight(plan)
        rows = step.rows if step.gone else plan.rows
        for row in rows:
            if row.num_sampled and row.sequence.sequence_id not in sampled:
                raise InternalError(f"commit: no token for sequence {row.sequence.sequence_id}")
        self._land(step, rows)
        if plan.num_drafts:
            self._drafted = {row.sequence.sequence_id: row for row in rows if row.drafts}
        return self._advance(rows, sampled)

    def _land(self, step: StepInFlight, rows: ListOf[ScheduledRow]) -> None:
        """Book all of a step that its rows have in common."""
        plan, self._in_flight = step.plan, None
        if step.reservation is not None:
            step.reservation.commit()
        started = {one.sequence_id: one for one in plan.admitted if one.sequence_id not in step.gone}
        for sequence in started.values():
            self.waiting.remove_sequence(sequence)
            sequence.move_to(_RUNNING)
            self.running.add_sequence(sequence)
        if len(self._phases) > 1:
            self._phases = ("prefill", "decode") if plan.rows[0].is_decode else ("decode", "prefill")
        self.counters.num_steps += 1
        self.counters.num_stalled_rows += plan.num_stalled_rows
        if self.queues.ledger is not None:
            self.queues.ledger.charge(started.values(), rows)
        for row in rows:
            if row.sequence.sequence_id in started or row.sequence.num_cached_tokens is None:
                self.moves.note_found(row.sequence, row.start)
        if self.adapters.slot_of:
            self.adapters.note_used(row.sequence.adapter for row in rows)

    def accept(self, drawn: Mapping[int, int]) -> list[NewToken]:
        """Book one more position of rows of the step that was just committed, of the draft that the last token of their
        sequence equals; return what was appended, row by row. Rows of sequences that run no more are left alone.

        Args:
            drawn: by sequence id, the token that follows.

        Raises:
            InternalError: a row has no further draft.
        """
        news = list[NewToken]()
        for number, token_id in drawn.items():
            row = self._drafted.get(number)
            if row is None or row.sequence.status is not _RUNNING:
                continue
            if row.sequence.num_computed_tokens >= row.end:
                raise InternalError(f"accept: the row of sequence {number} has no further draft")
            row.sequence.num_computed_tokens += 1
            self._blocks.register(row.sequence, row.sequence.num_computed_tokens)
            reason = row.sequence.append_token(token_id)
            if reason is not None or row.sequence.has_other_angles:
                self._stop_running(row.sequence, reason)
            news.append(NewToken(row.sequence, token_id, reason))
        return news

    def settle(self, plan: SchedulePlan) -> None:
        """End a committed step with drafts: what was not accepted is as if it had never been computed."""
        for number, row in tuple(self._drafted.items()):
            if row.sequence.status is _RUNNING:
                self._settle_row(number)
        self._drafted = {}
        self.counters.num_drafted_tokens += plan.num_drafts

    def _settle_row(self, number: int) -> None:
        row = self._drafted.pop(number)
        num_accepted = row.sequence.num_computed_tokens - row.known_end
        self._blocks.shorten(row.sequence)
        self.counters.num_accepted_tokens += num_accepted
        if self.speculation is not None:
            self.speculation.learn(row.sequence, len(row.drafts), num_accepted)

    def snapshot(self) -> dict[str, Any]:
        """Copy the state of scheduler, cache and sequences as plain values: what the next decisions depend on.

        Raises ``InternalError`` if a step is in flight.
        """
        if not self.has_landed:
            raise InternalError("snapshot: a step is in flight, or its tokens are not known")
        live = {one.sequence_id: one for one in (*self.waiting, *self.running, *self.moves.sequences)}
        return {
            "sequences": [one.snapshot() for one in live.values()], **self.waiting.snapshot(),
            "running": [one.sequence_id for one in self.running], "policy": self.rules.policy.name,
            "phases": list(self._phases), "counters": self.counters.snapshot(), "costs": self.costs.snapshot(),
            "queues": self.queues.snapshot(), "moves": self.moves.snapshot(), **self.kv_cache.snapshot(),
            # Why if: most models have none, and what they have recorded stays as it is.
            **({"adapters": self.adapters.snapshot()} if self.adapters.num_slots else {}),
        }

    def restore(self, state: Mapping[str, Any], sequences: Mapping[int, Sequence]) -> None:
        """Let an empty scheduler that was built with the same settings be as it was copied.

        Args:
            state: what ``snapshot`` returned; a policy of another name takes the order from its own keys.
            sequences: made again of ``state["sequences"]``, by id, with their block keys.

        Raises ``KeyError``, ``ValueError`` or the like for a state that is not consistent.
        """
        self.kv_cache.restore(state, {number: sequences[owner] for number, owner in state["moves"]["moving"]})
        self.moves.restore(state["moves"], sequences)
        # Why before the sequences: a dynamic policy's keys are made of it.
        self.queues.restore(state["queues"])
        self.waiting.restore(state, sequences)
        self.running.reset(*(sequences[number] for number in state["running"]))
        self._phases = tuple(state["phases"])
        self.counters.restore(state["counters"])
        self.costs.restore(state["costs"])
        if self.adapters.num_slots:
            self.adapters.restore(state["adapters"])

    def _require_fit(self, num_tokens: int) -> None:
        if not self.can_ever_fit(num_tokens):
            raise RequestTooLarge(
                "prompt and max_tokens", num_tokens, f"at most the {self._num_pool_tokens} positions of the KV pool",
                "Ask for fewer tokens, or build the engine with more KV blocks.",
            )

    def _plan(
        self, rules: PlanningRules, *, may_wait: bool, speculation: Speculation | None = None
    ) -> SchedulePlan:
        waiting, awaiting = self._startable(), tuple[int, ...]()
        if self.adapters.num_slots and waiting:
            waiting, awaiting = self.adapters.startable(waiting, self._keeps_adapter)
        for phase in self._phases:
            of_phase = rules if phase == rules.phase else replace(rules, phase=phase)
            state = self._of_kind(of_phase, self.kv_cache, self.running.sequences, waiting, awaiting)
            planner = StepPlanner(state, may_wait=may_wait, view=self.queues.view, speculation=speculation)
            plan = planner.plan()
            self.waiting.failure = self.waiting.failure or planner.policy_failure
            if plan.rows or plan.moves_blocks:
                break
        return plan

    def _startable(self) -> ListOf[Sequence]:
        return self.waiting.startable() if self.waiting.gated else self.waiting.sequences

    def _keeps_adapter(self, waiting: Sequence) -> bool:
        number = waiting.sequence_id
        return self._blocks.num_blocks_of(number) > 0 or self.kv_cache.host.is_moving(number)

    def _awaits_adapters(self, plan: SchedulePlan) -> bool:
        """Whether nothing runs, and all that may start waits for adapters on their way."""
        num_left = len(self.waiting) - len(self.waiting.gated) - len(plan.awaiting)
        return bool(plan.awaiting) and not len(self.running) and num_left == 0

    def _require_in_flight(self, plan: SchedulePlan) -> StepInFlight:
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise InternalError("this plan is not in flight: reserve it first, and commit or roll it back once")
        return self._in_flight

    def _require_landed(self, verb: str) -> None:
        if self._in_flight is not None:
            raise InternalError(f"{verb}: the step before was neither committed nor rolled back")

    def _require_current(self, verb: str, plan: SchedulePlan) -> None:
        self._require_landed(verb)
        is_current = (
            plan.view_number == self.queues.view.number
            and all(row.sequence.status is _RUNNING or row.sequence in plan.admitted for row in plan.rows)
            and all(one.sequence.status is _RUNNING for one in plan.preempted)
            and all(sequence in self.waiting for sequence in (*plan.admitted, *plan.freed))
            and all(one.sequence in self.waiting for one in plan.swap_ins)
        )
        if not is_current:
            raise InternalError("the plan is out of date; a sequence moved after it was made")

    def _advance(self, rows: ListOf[ScheduledRow], sampled: Mapping[int, int | None] | None) -> list[NewToken]:
        """Book the positions of rows, and their tokens if these are known."""
        news = list[NewToken]()
        for row in rows:
            sequence = row.sequence
            known_end = row.known_end if row.drafts else row.end
            if row.start < sequence.num_prompt_tokens or known_end - row.start > 1:
                self.counters.num_prefill_tokens += known_end - row.start
            else:
                self.counters.num_decode_tokens += 1
            sequence.num_computed_tokens = known_end
            self._blocks.register(sequence, known_end)
            if sampled is None or not row.num_sampled:
                if (first := sequence.hidden_from) is not None:
                    news += self._note_read(sequence, max(first, row.end))
                continue
            token_id = sampled[sequence.sequence_id]
            if token_id is None:
                self.running.remove_sequence(sequence)
                sequence.move_to(_FINISHED)
                self.moves.free_finished(sequence, is_trusted=True, is_movable=False)
                continue
            reason = sequence.append_token(token_id)
            if reason is not None or sequence.has_other_angles:
                self._stop_running(sequence, reason)
            news.append(NewToken(sequence, token_id, reason))
        return news

    def _stop_running(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """End a sequence, or without a reason let it begin anew with other angles."""
        if reason is None:
            self.moves.begin_anew(sequence)
            return
        self.running.remove_sequence(sequence)
        self._mark_finished(sequence, reason)

    def _note_read(self, sequence: Sequence, num_read: int) -> list[NewToken]:
        """Note that hidden states were read up to a position; after the last one the sequence has finished."""
        sequence.hidden_from = num_read
        if sequence.num_computed_tokens < len(sequence.token_ids):
            return []
        self.running.remove_sequence(sequence)
        self._mark_finished(sequence, "stop")
        return [NewToken(sequence, None, "stop")]

    def _take_out(self, sequence: Sequence) -> None:
        self.waiting.remove_sequence(sequence)
        self.running.remove_sequence(sequence)
        if self._in_flight is not None:
            self._in_flight.gone.add(sequence.sequence_id)
        if self._unread:
            self._forget_unread(sequence)

    def _mark_finished(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.move_to(_FINISHED)
        sequence.finish_reason = reason
        if sequence.sequence_id in self._drafted:
            self._settle_row(sequence.sequence_id)
        if self.speculation is not None:
            self.speculation.forget(sequence, reason)
        self.queues.note_length(sequence)
        # Why: a step in flight has not filled all blocks of the table, so they cannot be copied to the host unless the
        # copy comes behind it; and its next turn finds none that were computed by other angles.
        is_filled = self._in_flight is None or self._in_flight.is_queued
        is_movable = is_filled and not sequence.has_other_angles and sequence.hidden_from is None
        self.moves.free_finished(sequence, is_trusted=reason != "error", is_movable=is_movable)
        sequence.follow_length()

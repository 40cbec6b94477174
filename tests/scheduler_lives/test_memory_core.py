"""The memory core under any sequence of calls: block pool against a dictionary, the whole against laws and an oracle.

Pools of up to ten blocks, blocks of one to three tokens and prompts over two tokens, so that beginnings collide all
the time. After every rule the state laws hold and the memories hold what the caches say; a finished sequence has
the completion that it would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedcore.analysis.diagnosis.invariants import Snapshot, check, snapshot
from pagedcore.errors import EngineOverloaded, InternalError, RequestTooLarge
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.execution.ragged_batch import build_batch
from pagedcore.kv_cache.block_pool import BlockPool
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.protocols import FloatArray
from pagedcore.scheduler.plan import NewToken, SchedulePlan
from pagedcore.scheduler.step_recipe import run_step
from pagedcore.sequence import Sequence, SequenceStatus
from scheduler_lives.laws import require_lawful_plan, require_true_contents
from support.doubles import FakeClock, ToyBackend, make_scheduler, make_sequence, toy_answer

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ROOTS = st.sampled_from([b"", b"", b"tenant"])


class MemoryCore(RuleBasedStateMachine):
    """Scheduler, block tables and host, driven as an engine drives them, with transfers that end at any time."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.integers(1, 3),
        num_host_blocks=st.sampled_from([0, 3, 12]),
        preemption=st.sampled_from(["auto", "swap", "shrink", "recompute", "wait"]),
        policy=st.sampled_from(["fcfs", "priority", "static"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
    )
    def build(
        self, num_blocks: int, block_size: int, num_host_blocks: int, preemption: str, policy: str, eviction: str
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks, block_size, policy, max_num_seqs=3, max_num_batched_tokens=5, max_num_waiting=4,
            preemption=preemption, num_host_blocks=num_host_blocks, eviction=eviction,
        )
        schedule = self.scheduler.schedule

        def lawful(most_tokens: int | None = None) -> SchedulePlan:
            plan = schedule(most_tokens)
            require_lawful_plan(plan, self.scheduler)
            return plan

        self.scheduler.schedule = lawful  # type: ignore[method-assign]
        self.backend = ToyBackend()
        self.backend.allocate_kv(num_blocks, block_size)
        self.store = self.backend.cache_store
        self.store.allocate_host(num_host_blocks)
        self.store.is_slow = True
        clock = FakeClock()
        self.mover, self.now = KVTransfers(self.store, self.scheduler.moves, clock), clock.now
        self.move_blocks = self.mover.advance
        self.sequences: list[Sequence] = []
        self.expected: dict[int, list[int]] = {}
        self.before: Snapshot | None = None

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 5), root=ROOTS, priority=st.integers(0, 1), n=st.integers(1, 3))
    def add(self, prompt: list[int], max_tokens: int, root: bytes, priority: int, n: int) -> None:
        """One to three completions of one prompt, as a fork would make them."""
        arrival = len(self.sequences)
        for _ in range(n):
            self._try_add(make_sequence(
                prompt, max_tokens, sequence_id=len(self.sequences), arrival=arrival, priority=priority,
                cache_root=root,
            ))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), max_tokens=st.integers(1, 3), root=ROOTS)
    def add_continuation_by_others(self, data: st.DataObject, max_tokens: int, root: bytes) -> None:
        """A new request whose prompt is the whole conversation of another one."""
        known = data.draw(st.sampled_from(self.sequences)).token_ids
        self._try_add(make_sequence(known, max_tokens, sequence_id=len(self.sequences), cache_root=root))

    def _try_add(self, sequence: Sequence) -> None:
        try:
            self.scheduler.add_sequences(sequence)
        except (EngineOverloaded, RequestTooLarge):
            return
        self.sequences.append(sequence)
        self.expected[sequence.sequence_id] = toy_answer(sequence.token_ids, sequence.max_tokens)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        """Some steps of the engine; transfers in flight stay so."""
        for _ in range(num_steps):
            run_step(self.scheduler, self)

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        self.mover.start(transfers)
        self.laws_hold()

    def compute(self, plan: SchedulePlan, copies: tuple[tuple[int, int], ...], begun_s: float) -> FloatArray:
        self.mover.copy(copies, self.scheduler.kv_cache.device)
        self.laws_hold()
        return self.backend.forward(build_batch(plan.rows, self.scheduler.kv_cache.device))

    def tokens(self, plan: SchedulePlan, sampled: FloatArray) -> dict[int, int | None]:
        ids = [row.sequence.sequence_id for row in plan.rows if row.num_sampled]
        return dict(zip(ids, sampled.argmax(axis=1).tolist(), strict=True))

    def publish(self, plan: SchedulePlan, news: ListOf[NewToken]) -> None:
        assert len(news) <= len(plan.rows)

    @rule()
    def roll_back(self) -> None:
        """A step that is planned and reserved, and does not happen."""
        plan = self.scheduler.schedule()
        if not plan.moves_blocks:
            self.mover.copy(self.scheduler.reserve(plan), self.scheduler.kv_cache.device)
            self.scheduler.rollback(plan)

    @precondition(lambda self: self.store.under_way)
    @rule(data=st.data(), is_ok=st.booleans())
    def end_transfer(self, data: st.DataObject, is_ok: bool) -> None:
        """Any transfer ends, in any order, with success or failure."""
        self.store.end(data.draw(st.sampled_from(sorted(self.store.under_way))), is_ok=is_ok)
        self.mover.settle()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "error", "stop"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        """Any sequence is ended, in any state and with transfers in flight for it."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.scheduler.finish_sequence(sequence, reason)  # type: ignore[arg-type]
        assert self.scheduler.kv_cache.device.num_blocks_of(sequence.sequence_id) == 0

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3), max_tokens=st.integers(1, 3))
    def extend(self, data: st.DataObject, more: list[int], max_tokens: int) -> None:
        """A finished conversation continues."""
        sequence = data.draw(st.sampled_from(self.sequences))
        fits = self.scheduler.can_ever_fit(len(sequence.token_ids) + len(more) + max_tokens)
        if sequence.status is not SequenceStatus.FINISHED or not fits or not self.scheduler.waiting.num_free_slots:
            return
        arrival = 1000 + len(sequence.token_ids)
        sequence.begin_turn(
            more, sequence.params, max_tokens=max_tokens, stop_token_ids=frozenset(), arrival=arrival
        )
        self.scheduler.add_sequences(sequence)
        self.expected[sequence.sequence_id] = toy_answer(sequence.token_ids, max_tokens)

    @invariant()
    def laws_hold(self) -> None:
        """S1 to S10, and what can be found is there."""
        now = snapshot(self.scheduler)
        assert check(now, self.before) == []
        require_true_contents(now, self.store)
        self.before = now

    @invariant()
    def answers_are_those_of_the_oracle(self) -> None:
        """Every completion so far begins the one that the prompt alone would get; a finished one equals it."""
        for sequence in self.sequences:
            expected, answer = self.expected[sequence.sequence_id], sequence.output_token_ids
            assert answer == expected[: len(answer)]
            assert (sequence.finish_reason == "length") <= (len(answer) == len(expected))

    def teardown(self) -> None:
        """From any state everything ends, and then no block of either memory has a reference."""
        if not hasattr(self, "sequences"):
            return
        for _ in range(500):
            if not self.scheduler.has_work and not self.store.under_way:
                break
            run_step(self.scheduler, self)
            if self.store.under_way:
                self.store.end(min(self.store.under_way))
                self.mover.settle()
        self.mover.settle()
        self.mover.start(self.scheduler.moves.take_due())
        while self.store.under_way:
            self.store.end(min(self.store.under_way))
            self.mover.settle()
        assert not self.scheduler.has_work
        self.answers_are_those_of_the_oracle()
        stats = self.scheduler.stats()
        has_transfers = self.scheduler.kv_cache.host.has_awaited
        assert (stats.num_blocks_used, stats.num_host_blocks_used, has_transfers) == (0, 0, False)


class BlockPoolModel(RuleBasedStateMachine):
    """Allocating, adding and freeing references against a dictionary of reference counts and a set of idle blocks."""

    @initialize(num_blocks=st.integers(1, 6))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.counts = dict.fromkeys(range(num_blocks), 0)
        self.idle: set[int] = set()

    @rule(num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> None:
        free = {block for block, count in self.counts.items() if count == 0} - self.idle
        taken = self.pool.allocate(num_blocks)
        assert (taken is not None) == (num_blocks <= len(free))
        assert set(taken or ()) <= free
        self.counts |= dict.fromkeys(taken or (), 1)

    @rule(block_id=st.integers(-1, 6), verb=st.sampled_from(["add_reference", "free_reference", "free_idle_block"]))
    def call(self, block_id: int, verb: str) -> None:
        is_held, is_idle = self.counts.get(block_id, 0) > 0, block_id in self.idle
        is_legal = {"add_reference": is_held or is_idle, "free_reference": is_held, "free_idle_block": is_idle}[verb]
        if not is_legal:
            with pytest.raises(InternalError):
                getattr(self.pool, verb)(block_id)
            return
        result = getattr(self.pool, verb)(block_id)
        self.counts[block_id] += {"add_reference": 1, "free_reference": -1, "free_idle_block": 0}[verb]
        self.idle.discard(block_id)
        if verb == "free_reference":
            assert result == (self.counts[block_id] == 0)
            self.idle |= {block_id} if result else set()

    @invariant()
    def state_is_that_of_the_model(self) -> None:
        assert self.pool.reference_counts == list(self.counts.values())
        assert self.pool.idle_blocks == self.idle
        free = {block for block, count in self.counts.items() if count == 0} - self.idle
        assert sorted(self.pool.free_blocks) == sorted(free)


TestMemoryCore = MemoryCore.TestCase
TestMemoryCore.settings = settings(max_examples=100, stateful_step_count=40, print_blob=True)
TestMemoryCore.__doc__ = "For any calls in any order the laws hold after every call, and no completion changes."

TestBlockPool = BlockPoolModel.TestCase
TestBlockPool.settings = settings(max_examples=50, stateful_step_count=50, print_blob=True)
TestBlockPool.__doc__ = "The pool agrees with a dictionary after every call."

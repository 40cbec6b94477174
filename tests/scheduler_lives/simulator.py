"""Random lives of a scheduler over a model that betrays every misplaced block, checked after every step.

One seed decides everything: sizes, arrivals, shared beginnings, priorities, aborts, continuations, how long transfers
take, faults. There is one thread, no clock that runs by itself and no sleep; two runs of a seed leave the same trace.
What is in the memories is compared with what the caches say of it. A failing seed is one command::

    PYTHONPATH=.:kernels:tests python -m scheduler_lives.simulator SEED [--faults] [--formation] [--policies]
    PYTHONPATH=.:kernels:tests python -m scheduler_lives.simulator SEED [--faults] --states
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagedcore.analysis.diagnosis.invariants import Snapshot, check, snapshot
from pagedcore.errors import EngineOverloaded, RequestTooLarge
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.execution.ragged_batch import TableStack, build_batch
from pagedcore.outputs import FinishReason
from pagedcore.protocols import FloatArray
from pagedcore.scheduler import policies
from pagedcore.scheduler.batch_gate import BatchGate
from pagedcore.scheduler.plan import ScheduledRow, SchedulePlan
from pagedcore.scheduler.policies import Policy
from pagedcore.scheduler.policy_view import PolicyView
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.window_rows import most_windows
from pagedcore.sequence import Sequence, SequenceStatus
from scheduler_lives.laws import (
    describe,
    failure_of,
    require,
    require_alternation,
    require_lawful_plan,
    require_same_batch,
    require_true_contents,
    require_true_states,
    short_prompts_leave_states,
)
from support.doubles import (
    FakeClock,
    FlakyBackend,
    FlakyHybrid,
    FlakyWindowed,
    ToyStore,
    make_scheduler,
    make_sequence,
    toy_answer,
    toy_logits,
)

#: Few different tokens, so that sequences resemble each other and a mixed-up block is not lucky to be noticed.
PROMPT_TOKENS = 3
#: Seconds, two steps on average, after which a transfer is timed out.
LONGEST_TRANSFER_S = 1.0


class MoodyStore(ToyStore):
    """A ``ToyStore`` that refuses to start a transfer, or lets one hang, if it is allowed to."""

    def __init__(
        self, backend: FlakyBackend, block_size: int, refuses: Callable[[], bool], hangs: Callable[[], bool]
    ) -> None:
        super().__init__(backend, block_size)
        self._refuses = refuses
        self._hangs = hangs
        self.hanging: set[int] = set()

    def end(self, transfer_id: int, *, is_ok: bool = True) -> None:
        """Let a transfer end, even one that hung."""
        self.hanging.discard(transfer_id)
        super().end(transfer_id, is_ok=is_ok)

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Return what ended; a wait ends the oldest one that does not hang."""
        able = self.under_way.keys() - self.hanging
        if wait and able and not self._ended:
            self.end(min(able))
        return super().poll_transfers(wait=False)

    def _start(self, transfer_id: int, is_out: bool, pairs: object) -> None:
        if self._refuses():
            raise OSError("no transfers today")
        if self.is_slow and self._hangs():
            self.hanging.add(transfer_id)
        super()._start(transfer_id, is_out, pairs)  # type: ignore[arg-type]


@dataclass
class Turn:
    """The completion that is expected of one sequence, and how often it was reported as ended."""

    sequence: Sequence
    expected: list[int]
    num_ends: int = 0
    unread: set[int] = field(default_factory=set)
    """Positions whose hidden states are still to come."""


@dataclass(frozen=True)
class World:
    """The sizes of one simulation."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    has_slow_transfers: bool
    copies_blocks: bool
    eviction: str
    preemption: str
    policy: str
    admission: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    num_requests: int
    arrival_rate: float
    num_busy_steps: int
    """Steps during which requests arrive, are aborted and continued; then the rest is worked off."""
    longest: int
    """Positions of the longest request; at most the pool."""
    has_long_answers: bool
    """Whether prompts are short and completions as long as they may be."""
    prefixes: tuple[tuple[int, ...], ...]
    """Beginnings that many prompts have in common."""
    roots: tuple[bytes, ...]
    """Cache roots: sequences with the same one may share."""

    @classmethod
    def draw(cls, rng: random.Random) -> World:
        """Draw sizes: half the pools hold one to three requests, the others several that grow into each other.

        A third of the busy ones live under constant pressure: long completions, and a host to swap to.
        """
        is_busy = rng.random() < 0.6
        is_tight = is_busy and rng.random() < 0.4
        block_size = rng.randint(1, 4)
        num_blocks = rng.randint(8, 14) if is_busy else rng.choice([2, 4, 8])
        max_num_seqs = rng.randint(3, 6) if is_busy else rng.randint(1, 4)
        longest = max(2, min(num_blocks * block_size // rng.choice([1, 2] if is_tight else [1, 2, 3]), 16))
        copies_blocks = is_tight or rng.random() < 0.8
        num_host_blocks = num_blocks * rng.choice([1, 3]) if is_tight else rng.choice([0, num_blocks // 2, num_blocks])
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks if copies_blocks else 0,
            has_slow_transfers=rng.random() < 0.7,
            copies_blocks=copies_blocks,
            eviction=rng.choice(["lru", "lfu", "fifo"]),
            preemption=rng.choice(["swap", "swap", "auto"] if is_tight else ["auto", "shrink", "recompute", "wait"]),
            policy=rng.choice(["fcfs", "priority"] if is_tight else ["fcfs", "fcfs", "priority", "priority", "static"]),
            admission=rng.choice(["optimistic", "optimistic", "guaranteed"]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 2, 6]),
            max_num_waiting=rng.randint(2, 8),
            num_requests=rng.randint(5, 9) if is_busy else rng.randint(2, 6),
            arrival_rate=0.8 if is_tight else rng.choice([0.3, 0.8]),
            num_busy_steps=rng.randint(15, 25) if is_tight else rng.randint(5, 15),
            longest=longest,
            has_long_answers=is_tight,
            prefixes=tuple(
                tuple(rng.randrange(PROMPT_TOKENS) for _ in range(rng.randint(1, 2 if is_tight else longest)))
                for _ in range(2)
            ),
            roots=rng.choice([(b"",), (b"",), (b"one", b"other")]),
        )


def moody(seed: int) -> Policy:
    """A policy that orders, chooses victims and preempts as its mood is, which changes with every view."""
    def mood(view: PolicyView, *sequences: Sequence) -> float:
        return random.Random(f"{seed} {view.number} {[one.sequence_id for one in sequences]}").random()

    return Policy(
        "moody", lambda one, view: mood(view, one), cache_bonus=0, is_dynamic=True, has_tenants=True,
        has_priorities=True, has_deadlines=True, victim_order=lambda one, view: -mood(view, one),
        preempts=lambda waiting, running, view: mood(view, waiting, running) < 0.5,
    )


def draw_policy(rng: random.Random) -> Policy:
    """Draw a policy with its options."""
    return rng.choice([
        lambda: policies.priority(rng.choice([None, 0.5, 5.0]), rng.choice([None, 0.5, 1.0, 2.0])),
        lambda: policies.deadline(rng.choice([0.5, 60.0])),
        lambda: policies.fair(rng.choice([None, 1, 2]), rng.choice([None, 0.3, 0.7])),
        lambda: policies.shortest_first(rng.choice([0.0, 1.0])),
        lambda: policies.cache_aware(rng.choice([0, 3, 32])),
        lambda: moody(rng.randrange(1000)),
    ])()


@dataclass
class Simulation:
    """One life, from an empty scheduler to an empty scheduler."""

    seed: int
    has_faults: bool = False
    has_formation: bool = False
    """Whether batch formation is drawn too, from a generator of its own: gate, phases and the share of prefill."""
    has_policies: bool = False
    """Whether the policy is drawn from all there are, and one that changes its mind at random, with their options."""
    num_short_tokens: int | None = None
    """As of a sequence."""
    keeps_states: bool = False
    """Whether the model does; then a state is worth a cut from a few tokens on."""
    has_windows: bool = False
    """Whether layers of the model give up what has left their window; then there is no host."""
    has_readers: bool = False
    """Whether half of the sequences generate nothing, and have hidden states read from some position on."""
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.stack = random.Random(self.seed), TableStack()
        self.world = World.draw(self.rng)
        state_rng = random.Random(f"states {self.seed}")
        if self.has_windows:
            self.world = replace(self.world, num_host_blocks=0)
        world, windows = self.world, {}
        if self.has_windows:
            window = state_rng.randint(1, 7)
            least = most_windows(window, world.block_size)
            windows = {"num_windows": least + state_rng.choice([0, 1, 3, 12]), "window": window}
        self.policy_rng = random.Random(f"policies {self.seed}")
        self.scheduler: Scheduler = make_scheduler(
            world.num_blocks,
            world.block_size,
            draw_policy(self.policy_rng) if self.has_policies else world.policy,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_num_waiting=world.max_num_waiting,
            admission=world.admission,
            preemption=world.preemption,
            num_host_blocks=world.num_host_blocks,
            eviction=world.eviction,
            copies_blocks=world.copies_blocks,
            num_states=world.max_num_seqs * state_rng.choice([2, 3, 4]) if self.keeps_states else 0,
            num_host_states=state_rng.randint(1, 8) if self.keeps_states and world.num_host_blocks else 0,
            **windows,
            **(self._draw_formation() if self.has_formation else {}),
        )
        self.arrived_s: dict[int, float] = {}
        self.last_phase = ""
        self.backend = FlakyHybrid() if self.keeps_states else FlakyWindowed()
        if isinstance(self.backend, FlakyWindowed) and self.has_windows:
            self.backend.windows.window = windows["window"]
            self.backend.windows.use(windows["num_windows"])
        if isinstance(self.backend, FlakyHybrid):
            self.backend.has_attention = state_rng.random() < 0.7
            self.backend.allocate_states(self.scheduler.kv_cache.device.states.num_states)
            self.backend.allocate_host(self.scheduler.kv_cache.host.states.num_states)
            copy_rng = random.Random(f"copies of states {self.seed}")
            self.backend.may_copy = lambda: not (self.has_faults and copy_rng.random() < 0.1)  # type: ignore[method-assign]
        self.backend.num_short_tokens = self.num_short_tokens
        self.backend.allocate_kv(world.num_blocks, world.block_size)
        # Why: a chance of its own, so that lives in which nothing hangs are what they would be without it.
        self.fate = random.Random(f"hanging {self.seed}")
        self.may_hang = self.fate.random() < 0.6
        self.store = MoodyStore(
            self.backend, world.block_size, lambda: self._has_fault(0.1),
            lambda: self.may_hang and self.fate.random() < 0.4,
        )
        self.store.is_slow = world.has_slow_transfers
        self.store.allocate_host(world.num_host_blocks)
        self.reader_rng = random.Random(f"readers {self.seed}")
        self.clock = FakeClock()
        states = self.backend if isinstance(self.backend, FlakyHybrid) else None
        windows_store = self.backend.windows.store if isinstance(self.backend, FlakyWindowed) else None
        self.mover = KVTransfers(
            self.store, self.scheduler.moves, self.clock, LONGEST_TRANSFER_S, states, windows=windows_store)
        self.turns: dict[int, Turn] = {}
        self.num_arrived = 0
        self.known_transfers: frozenset[int] | None = None
        """Those in flight when the host was last seen stuck; ``None``: it was not."""

    def _draw_formation(self) -> dict[str, Any]:
        rng = random.Random(f"formation {self.seed}")
        gate = BatchGate(rng.randint(1, self.world.max_num_seqs), rng.choice([0.0, 0.7, 3.0]))
        if rng.random() < 0.5:
            return {"gate": gate, "phases": "separate"}
        return {"gate": gate, "prefill_share": rng.choice([1.0, 0.7, 0.3, 0.01])}

    def run(self) -> Simulation:
        """Live to the end.

        Raises:
            SimulationFailure: something is not as it has to be; the message is the command that shows it again.
        """
        try:
            with short_prompts_leave_states(is_wanted=self.keeps_states):
                self._live()
        except Exception as error:
            when = f"after {len(self.trace)} steps"
            name = "scheduler_lives.simulator" + " --formation" * self.has_formation + " --policies" * self.has_policies
            name += " --states" * self.keeps_states
            raise failure_of(error, when, name, self.seed, has_faults=self.has_faults) from error
        return self

    @property
    def num_steps(self) -> int:
        """Plans that were made."""
        return len(self.trace)

    def _live(self) -> None:
        for _ in range(self.world.num_busy_steps):
            self._happenings()
            self._step()
        self._drain()
        for turn in self.turns.values():
            require(turn.num_ends == 1, f"sequence {turn.sequence.sequence_id} ended {turn.num_ends} times")
            self.scheduler.remove_sequence(turn.sequence)
        self._arrive_everywhere()
        stats = self.scheduler.stats()
        require(stats.num_blocks_used == 0, "blocks are left when all sequences are gone")
        require(stats.num_host_blocks_used == 0, "host blocks are left when all sequences are gone")
        require(stats.num_states_used + stats.num_host_states_used == 0, "states are left when all sequences are gone")
        if self.world.admission == "guaranteed":
            require(not stats.num_preemptions, "a guaranteed sequence was preempted")

    def _drain(self) -> None:
        """Without further arrivals and faults all work ends: in every step a sequence advances or a transfer ends.

        What hangs keeps hanging: it is timed out, and ends only where it keeps blocks without which nothing moves.
        """
        self.has_faults, had_faults = False, self.has_faults
        self.may_hang = False
        live = [turn.sequence for turn in self.turns.values() if turn.sequence.finish_reason is None]
        num_hanging = len(self.store.hanging)
        bound = 5 * sum(sequence.max_total_tokens for sequence in live) + 5 + 8 * LONGEST_TRANSFER_S * num_hanging
        bound += 6 * self.scheduler.gate.max_wait_s
        if self.has_policies:
            # Why: in the worst case each token of each sequence is paid for by computing all before it again.
            bound += sum(sequence.max_total_tokens**2 for sequence in live)
        for _ in range(int(bound)):
            if not self.scheduler.has_work:
                break
            self._step()
        require(not self.scheduler.has_work, f"work is left after {bound} steps")
        self.has_faults = had_faults

    def _arrive_everywhere(self) -> None:
        """Let every transfer end."""
        self._settle()
        while self.store.under_way:
            self.store.end(min(self.store.under_way))
            self._settle()
        require(not self.scheduler.kv_cache.host.has_awaited, "a transfer never ended")

    def _has_fault(self, probability: float) -> bool:
        return self.has_faults and self.rng.random() < probability

    # What callers do --------------------------------------------------------------------------------------------

    def _happenings(self) -> None:
        while self.num_arrived < self.world.num_requests and self.rng.random() < self.world.arrival_rate:
            self._arrive()
        for turn in list(self.turns.values()):
            # Why: a sequence that ends while a transfer is in flight for it is the rarest case, and the hardest.
            if self.rng.random() < (0.3 if self._is_moving(turn.sequence) else 0.02):
                self._end(turn, self.rng.choice(["abort", "error", "stop"]))
            elif turn.sequence.status is SequenceStatus.FINISHED and self.rng.random() < 0.25:
                self._continue_or_remove(turn)

    def _is_moving(self, sequence: Sequence) -> bool:
        return self.scheduler.kv_cache.host.is_moving(sequence.sequence_id)

    def _arrive(self) -> None:
        """One request comes in, with one or more completions of the same prompt."""
        rng, longest = self.rng, self.world.longest
        num_most = 1 if self.world.has_long_answers else rng.choice([1, (longest + 1) // 2, longest - 1])
        num_prompt = rng.randint(1, num_most)
        prompt = [rng.randrange(PROMPT_TOKENS) for _ in range(num_prompt)]
        if rng.random() < 0.6:
            prompt = [*rng.choice(self.world.prefixes), *prompt][: longest - 1]
        longest_answer = longest - len(prompt)
        max_tokens = rng.randint(rng.choice([1, longest_answer]), longest_answer)
        if self.world.has_long_answers:
            max_tokens = longest_answer
        arrival, priority, root = self.num_arrived, rng.randrange(3), rng.choice(self.world.roots)
        for _ in range(rng.choice([1, 1, 1, 3])):
            sequence = make_sequence(
                prompt, max_tokens, sequence_id=self.num_arrived, priority=priority, arrival=arrival,
                stop_token_ids=rng.sample(range(32), rng.choice([0, 0, 0, 4])), min_tokens=rng.choice([0, 0, 1]),
                cache_root=root, arrival_s=self.clock.now(), num_short_tokens=self.num_short_tokens,
                **self._draw_options(),
            )
            if self.has_readers and self.reader_rng.random() < 0.5:
                sequence.hidden_from = self.reader_rng.randrange(len(prompt))
            self.num_arrived += 1
            if self._try_add(sequence):
                self._open_turn(sequence)

    def _draw_options(self) -> dict[str, Any]:
        if not self.has_policies:
            return {}
        rng = self.policy_rng
        return {"tenant": rng.choice(["", "a", "b"]), "weight": rng.choice([0.5, 1.0, 4.0]),
                "deadline_s": rng.choice([None, 0.1, 3.0, 30.0])}

    def _try_add(self, sequence: Sequence) -> bool:
        before = snapshot(self.scheduler)
        try:
            self.scheduler.add_sequences(sequence)
        except EngineOverloaded:
            require(snapshot(self.scheduler) == before, "a refused sequence changed something")
            return False
        self.arrived_s[sequence.sequence_id] = self.clock.now()
        return True

    def _open_turn(self, sequence: Sequence) -> None:
        expected = toy_answer(
            sequence.token_ids,
            sequence.max_tokens,
            stop_token_ids=sequence.stop_token_ids,
            min_tokens=sequence.params.min_tokens,
        )
        if (first := sequence.hidden_from) is not None:
            self.turns[sequence.sequence_id] = Turn(sequence, [], unread={*range(first, len(sequence.token_ids))})
            return
        self.turns[sequence.sequence_id] = Turn(sequence, expected)

    def _continue_or_remove(self, turn: Turn) -> None:
        sequence = turn.sequence
        if self.rng.random() < 0.4 or sequence.hidden_from is not None:
            self.scheduler.remove_sequence(sequence)
            del self.turns[sequence.sequence_id]
            require(turn.num_ends == 1, "a removed sequence had not ended once")
            return
        more = [self.rng.randrange(PROMPT_TOKENS) for _ in range(self.rng.randint(0, 2))]
        max_tokens = self.rng.randint(1, 3)
        try:
            self.scheduler.require_room(len(sequence.token_ids) + len(more) + max_tokens)
        except (EngineOverloaded, RequestTooLarge):
            return
        require(turn.num_ends == 1, "a continued sequence had not ended once")
        arrival = 1000 + len(self.trace)
        sequence.begin_turn(
            more, sequence.params, max_tokens=max_tokens, stop_token_ids=sequence.stop_token_ids, arrival=arrival,
            arrival_s=self.clock.now(),
        )
        self.scheduler.add_sequences(sequence)
        self.arrived_s[sequence.sequence_id] = self.clock.now()
        self._open_turn(sequence)

    def _end(self, turn: Turn, reason: FinishReason) -> None:
        was_finished = turn.sequence.finish_reason is not None
        self.scheduler.finish_sequence(turn.sequence, reason)
        if was_finished:
            return
        turn.num_ends += 1
        answer = turn.sequence.output_token_ids
        require(answer == turn.expected[: len(answer)], "an ended answer is no prefix of the oracle's")
        held = self.scheduler.kv_cache.device.num_blocks_of(turn.sequence.sequence_id)
        require(held == 0, f"sequence {turn.sequence.sequence_id} holds {held} blocks after {reason}")

    # What the engine does ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self._now = snapshot(self.scheduler)
        self.clock.advance(self.rng.random())
        if self.store.under_way:
            self._end_some_transfers()
        self._settle()
        self._check(before)
        self._open_gate()
        if self.has_policies:
            self.scheduler.begin_step(self.clock.now())
            self._now = snapshot(self.scheduler)
        plan = self._plan()
        while plan.moves_blocks:
            self.mover.start(self.scheduler.make_room(plan))
            self._check(before)
            plan = self._plan()
        if not plan.rows:
            self.mover.settle(wait=self.scheduler.has_work)
            if not self.scheduler.kv_cache.host.has_awaited:
                self._end_what_hangs(1.0)
            return
        if self.has_formation:
            require_alternation(plan, self.scheduler, self.last_phase)
        copies = self.scheduler.reserve(plan)
        self._check(before)
        self.mover.copy(copies, self.scheduler.kv_cache.device)
        if self._has_fault(0.06):
            self._leave_in_flight(plan)
        self._execute(plan)
        self._check(before)

    def _open_gate(self) -> None:
        """As the engine does: enough new sequences wait, or the oldest has waited long enough."""
        waiting = self.scheduler.waiting
        if waiting.gated:
            oldest_s = self.arrived_s[next(waiting.never_started()).sequence_id]
            if self.scheduler.gate.opens_s(waiting.num_never_started, oldest_s) <= self.clock.now():
                waiting.open_gate()

    def _end_some_transfers(self) -> None:
        able = [transfer_id for transfer_id in self.store.under_way if transfer_id not in self.store.hanging]
        for transfer_id in self.rng.sample(able, len(able)):
            if self.rng.random() < 0.5:
                self.store.end(transfer_id, is_ok=not self._has_fault(0.2))
        if self.may_hang:
            self._end_what_hangs(0.2)

    def _end_what_hangs(self, probability: float) -> None:
        """Late or too late, with success or failure: its sequence may have continued without it, or be gone."""
        for transfer_id in sorted(self.store.hanging):
            if self.fate.random() < probability:
                self.store.end(transfer_id, is_ok=self.fate.random() < 0.7)

    def _settle(self) -> None:
        self.mover.settle()
        self.mover.start(self.scheduler.moves.take_due())

    def _plan(self) -> SchedulePlan:
        plan = self.scheduler.schedule()
        require(plan == self.scheduler.schedule(), "planning twice gives two plans")
        require(snapshot(self.scheduler) == self._now, "planning changed something")
        require_lawful_plan(plan, self.scheduler)
        self.trace.append(describe(plan))
        return plan

    def _leave_in_flight(self, plan: SchedulePlan) -> None:
        sequence = self.rng.choice(plan.rows).sequence
        self._end(self.turns[sequence.sequence_id], self.rng.choice(["abort", "stop"]))
        require(not check(snapshot(self.scheduler)), "leaving in flight broke a law")

    def _execute(self, plan: SchedulePlan) -> None:
        rows = [row for row in plan.rows if row.sequence.status is not SequenceStatus.FINISHED]
        if not rows:
            self.scheduler.rollback(plan)
            return
        if self._has_fault(0.15):
            self.backend.raise_on_step = self.backend.num_steps + 1
        try:
            batch = build_batch(rows, self.scheduler.kv_cache.device, stack=self.stack)
            require_same_batch(batch, build_batch(rows, self.scheduler.kv_cache.device))
            wanted = batch.hidden_rows if batch.hidden_rows is not None else np.zeros(0, np.int64)
            logits, hidden = self.backend.forward_hidden(batch, wanted)
        except RuntimeError:
            self._fail(plan)
            return
        self._read(rows, hidden)
        seconds = self.rng.random()
        self.scheduler.observe(plan, seconds)
        sampled = [row.sequence for row in rows if row.num_sampled]
        tokens = dict(zip((s.sequence_id for s in sampled), logits.argmax(axis=1).tolist(), strict=True))
        if sampled and self._has_fault(0.05):
            self._end(self.turns[self.rng.choice(sampled).sequence_id], "error")
        self._commit(plan, tokens)

    def _read(self, rows: ListOf[ScheduledRow], hidden: FloatArray) -> None:
        """Note the positions whose hidden states came, each of which is what follows from the tokens before it."""
        read = [(row.sequence, position) for row in rows for position in row.hidden_positions]
        require(len(read) == len(hidden), "as many hidden states come as are wanted")
        for (sequence, position), states in zip(read, hidden, strict=True):
            known = toy_logits(np.array(sequence.token_ids[: position + 1]))
            require(np.array_equal(states, known), "a hidden state is another one's")
            self.turns[sequence.sequence_id].unread.remove(position)

    def _fail(self, plan: SchedulePlan) -> None:
        self.scheduler.rollback(plan)
        if self.rng.random() < 0.3:
            for row in plan.rows:
                self._end(self.turns[row.sequence.sequence_id], "error")

    def _commit(self, plan: SchedulePlan, tokens: dict[int, int]) -> None:
        self.last_phase = "decode" if plan.rows[0].is_decode else "prefill"
        for new in self.scheduler.commit(plan, tokens):
            turn = self.turns[new.sequence.sequence_id]
            answer = turn.sequence.output_token_ids
            require(answer == turn.expected[: len(answer)], f"sequence {new.sequence.sequence_id} answers {answer}")
            require(not turn.unread, f"positions {turn.unread} were not read")
            require((answer or [None])[-1] == new.token_id, "the reported token is not the appended one")
            has_ended = new.finish_reason is not None
            require(has_ended == (len(answer) == len(turn.expected)), "the turn ended early or late")
            turn.num_ends += has_ended

    def _check(self, before: Snapshot) -> None:
        self._now = snapshot(self.scheduler)
        violations = check(self._now, before)
        require(not violations, f"{violations}")
        self._require_rest()
        require_true_contents(self._now, self.store)
        if isinstance(self.backend, FlakyHybrid):
            require_true_states(self._now, self.backend)

    def _require_rest(self) -> None:
        """While a transfer that was timed out has not ended, no other one begins."""
        host = self.scheduler.kv_cache.host
        is_stuck = bool(host._timed_out)
        under_way = frozenset(host.in_flight)
        if self.known_transfers is not None and is_stuck:
            require(under_way <= self.known_transfers, "a transfer began although the host is stuck")
        self.known_transfers = under_way if is_stuck else None


def hybrid_life(seed: int, has_faults: bool) -> Simulation:
    """A life with states, and with all that the other kinds of lives have, in turns."""
    border = 3 + seed % 6 if seed % 7 == 3 else None
    return Simulation(seed, has_faults, has_formation=seed % 3 == 0, has_policies=seed % 4 < 2,
                      has_readers=seed % 5 == 0, num_short_tokens=border, keeps_states=True)


if __name__ == "__main__":
    flags = [one for one in sys.argv[1:] if one.startswith("--")]
    seed = next(int(one) for one in sys.argv[1:] if one not in flags)
    if "--states" in flags:
        simulation = hybrid_life(seed, "--faults" in flags)
    else:
        simulation = Simulation(seed, has_faults="--faults" in flags, has_formation="--formation" in flags,
                                has_policies="--policies" in flags)
    try:
        simulation.run()
    finally:
        print(simulation.world, *simulation.trace, sep="\n")

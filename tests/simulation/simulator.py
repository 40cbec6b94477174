"""Random lives of a scheduler over a model that betrays every misplaced block, checked after every step.

One seed decides everything: sizes, arrivals, priorities, aborts, continuations, faults. There is one thread, no
clock and no sleep; two runs of a seed leave the same trace. A failing seed is one command::

    PYTHONPATH=.:tests python -m simulation.simulator SEED [--faults]
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from doubles import FlakyBackend, make_scheduler, make_sequence, toy_answer
from pagedcore.errors import EngineOverloaded, RequestTooLarge
from pagedcore.execution.ragged_batch import build_batch
from pagedcore.outputs import FinishReason
from pagedcore.request import Sequence, SequenceStatus
from pagedcore.scheduling.invariants import Snapshot, check, snapshot
from pagedcore.scheduling.plan import SchedulePlan
from pagedcore.scheduling.scheduler import Scheduler

#: Few different tokens, so that sequences resemble each other and a mixed-up block is not lucky to be noticed.
PROMPT_TOKENS = 3


class SimulationFailure(AssertionError):
    """A law, an answer or the progress of one seed is not as it has to be."""


@dataclass
class Turn:
    """What one sequence is expected to answer, and how often it was said to have ended."""

    sequence: Sequence
    expected: list[int]
    num_ends: int = 0


@dataclass(frozen=True)
class World:
    """The sizes of one simulation."""

    num_blocks: int
    block_size: int
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

    @classmethod
    def draw(cls, rng: random.Random) -> World:
        """Draw sizes: half the pools hold one to three requests, the others several that grow into each other."""
        is_busy = rng.random() < 0.5
        block_size = rng.randint(1, 4)
        num_blocks = rng.randint(10, 16) if is_busy else rng.choice([2, 4, 8])
        max_num_seqs = rng.randint(3, 6) if is_busy else rng.randint(1, 4)
        longest = num_blocks * block_size // rng.choice([1, 2, 3])
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            policy=rng.choice(["fcfs", "fcfs", "fcfs", "priority", "priority", "static"]),
            admission=rng.choice(["optimistic", "optimistic", "optimistic", "guaranteed"]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 2, 6]),
            max_num_waiting=rng.randint(2, 8),
            num_requests=rng.randint(5, 9) if is_busy else rng.randint(2, 6),
            arrival_rate=rng.choice([0.3, 0.8]),
            num_busy_steps=rng.randint(5, 15),
            longest=max(2, min(longest, 16)),
        )


@dataclass
class Simulation:
    """One life, from an empty scheduler to an empty scheduler."""

    seed: int
    has_faults: bool = False
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.world = World.draw(self.rng)
        world = self.world
        self.scheduler: Scheduler = make_scheduler(
            world.num_blocks,
            world.block_size,
            world.policy,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_num_waiting=world.max_num_waiting,
            admission=world.admission,
        )
        self.backend = FlakyBackend()
        self.backend.allocate_kv(world.num_blocks, world.block_size)
        self.turns: dict[int, Turn] = {}
        self.num_arrived = 0

    def run(self) -> Simulation:
        """Live to the end.

        Raises:
            SimulationFailure: something is not as it has to be; the message is the command that shows it again.
        """
        try:
            self._live()
        except Exception as error:
            faults = " --faults" if self.has_faults else ""
            command = f"PYTHONPATH=.:tests python -m simulation.simulator {self.seed}{faults}"
            what = f"{type(error).__name__}: {error}"
            raise SimulationFailure(f"after {len(self.trace)} steps, {what}\n  again with: {command}") from error
        return self

    def _live(self) -> None:
        for _ in range(self.world.num_busy_steps):
            self._happenings()
            self._step()
        self._drain()
        for turn in self.turns.values():
            require(turn.num_ends == 1, f"sequence {turn.sequence.sequence_id} ended {turn.num_ends} times")
            self.scheduler.forget(turn.sequence)
        require(self.scheduler.stats().num_used_blocks == 0, "blocks are left when everybody is gone")
        if self.world.admission == "guaranteed":
            require(self.scheduler.stats().num_preemptions == 0, "a guaranteed sequence was preempted")

    def _drain(self) -> None:
        """Without further arrivals and faults all work ends: the first running sequence advances in every step."""
        self.has_faults, had_faults = False, self.has_faults
        live = [turn.sequence for turn in self.turns.values() if turn.sequence.finish_reason is None]
        bound = 3 * sum(sequence.max_total_tokens for sequence in live) + 1
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self._step()
        require(not self.scheduler.has_work, f"work is left after {bound} steps")
        self.has_faults = had_faults

    # What callers do --------------------------------------------------------------------------------------------

    def _happenings(self) -> None:
        while self.num_arrived < self.world.num_requests and self.rng.random() < self.world.arrival_rate:
            self._arrive()
        for turn in list(self.turns.values()):
            if self.rng.random() < 0.02:
                self._end(turn, self.rng.choice(["abort", "error", "stop"]))
            elif turn.sequence.status is SequenceStatus.FINISHED and self.rng.random() < 0.25:
                self._continue_or_forget(turn)

    def _arrive(self) -> None:
        rng, longest = self.rng, self.world.longest
        num_prompt = rng.randint(1, rng.choice([1, (longest + 1) // 2, longest - 1]))
        sequence = make_sequence(
            [rng.randrange(PROMPT_TOKENS) for _ in range(num_prompt)],
            rng.randint(rng.choice([1, longest - num_prompt]), longest - num_prompt),
            sequence_id=self.num_arrived,
            priority=rng.randrange(3),
            stop_token_ids=rng.sample(range(32), rng.choice([0, 0, 0, 4])),
            min_tokens=rng.choice([0, 0, 1]),
        )
        self.num_arrived += 1
        if self._try_add(sequence):
            self._open_turn(sequence)

    def _try_add(self, sequence: Sequence) -> bool:
        before = snapshot(self.scheduler)
        try:
            self.scheduler.add(sequence)
        except EngineOverloaded:
            require(snapshot(self.scheduler) == before, "a refused sequence changed something")
            return False
        return True

    def _open_turn(self, sequence: Sequence) -> None:
        expected = toy_answer(
            sequence.token_ids,
            sequence.max_tokens,
            stop_token_ids=sequence.stop_token_ids,
            min_tokens=sequence.params.min_tokens,
        )
        self.turns[sequence.sequence_id] = Turn(sequence, expected)

    def _continue_or_forget(self, turn: Turn) -> None:
        sequence = turn.sequence
        if self.rng.random() < 0.4:
            self.scheduler.forget(sequence)
            del self.turns[sequence.sequence_id]
            require(turn.num_ends == 1, "a forgotten sequence had not ended once")
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
            more, sequence.params, max_tokens=max_tokens, stop_token_ids=sequence.stop_token_ids, arrival=arrival
        )
        self.scheduler.add(sequence)
        self._open_turn(sequence)

    def _end(self, turn: Turn, reason: FinishReason) -> None:
        was_finished = turn.sequence.finish_reason is not None
        self.scheduler.finish(turn.sequence, reason)
        if was_finished:
            return
        turn.num_ends += 1
        answer = turn.sequence.output_token_ids
        require(answer == turn.expected[: len(answer)], "an ended answer is no prefix of the oracle's")
        if reason != "stop":
            held = self.scheduler.block_manager.num_blocks_of(turn.sequence.sequence_id)
            require(held == 0, f"sequence {turn.sequence.sequence_id} holds {held} blocks after {reason}")

    # What the engine does ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = snapshot(self.scheduler)
        plan = self.scheduler.schedule()
        require(plan == self.scheduler.schedule(), "planning twice gives two plans")
        require(snapshot(self.scheduler) == before, "planning changed something")
        require_lawful_plan(plan, self.scheduler)
        self.trace.append(describe(plan))
        if plan.is_empty:
            return
        self.scheduler.reserve(plan)
        self._check(before)
        if self.has_faults and self.rng.random() < 0.06:
            self._leave_in_flight(plan)
        self._execute(plan)
        self._check(before)

    def _leave_in_flight(self, plan: SchedulePlan) -> None:
        sequence = self.rng.choice(plan.rows).sequence
        self._end(self.turns[sequence.sequence_id], self.rng.choice(["abort", "stop"]))
        require(not check(snapshot(self.scheduler)), "leaving in flight broke a law")

    def _execute(self, plan: SchedulePlan) -> None:
        rows = [row for row in plan.rows if row.sequence.status is not SequenceStatus.FINISHED]
        if not rows:
            self.scheduler.rollback(plan)
            return
        if self.has_faults and self.rng.random() < 0.15:
            self.backend.raise_on_step = self.backend.num_steps + 1
        try:
            logits = self.backend.forward(build_batch(rows, self.scheduler.block_manager))
        except RuntimeError:
            self._fail(plan)
            return
        sampled = [row.sequence for row in rows if row.is_sampled]
        tokens = dict(zip((s.sequence_id for s in sampled), logits.argmax(axis=1).tolist(), strict=True))
        if sampled and self.has_faults and self.rng.random() < 0.05:
            self._end(self.turns[self.rng.choice(sampled).sequence_id], "error")
        self._commit(plan, tokens)

    def _fail(self, plan: SchedulePlan) -> None:
        self.scheduler.rollback(plan)
        if self.rng.random() < 0.3:
            for row in plan.rows:
                self._end(self.turns[row.sequence.sequence_id], "error")

    def _commit(self, plan: SchedulePlan, tokens: dict[int, int]) -> None:
        for new in self.scheduler.commit(plan, tokens):
            turn = self.turns[new.sequence.sequence_id]
            answer = turn.sequence.output_token_ids
            require(answer == turn.expected[: len(answer)], f"sequence {new.sequence.sequence_id} answers {answer}")
            require(answer[-1] == new.token_id, "the reported token is not the appended one")
            has_ended = new.finish_reason is not None
            require(has_ended == (len(answer) == len(turn.expected)), "the turn ended early or late")
            turn.num_ends += has_ended

    def _check(self, before: Snapshot) -> None:
        violations = check(snapshot(self.scheduler), before)
        require(not violations, f"{violations}")


def require(holds: bool, message: str) -> None:
    """Fail with ``message`` unless it holds; unlike ``assert`` also under ``python -O``."""
    if not holds:
        raise SimulationFailure(message)


def require_lawful_plan(plan: SchedulePlan, scheduler: Scheduler) -> None:
    """What every plan has to respect, whatever the state."""
    rules, running = scheduler.rules, list(scheduler.running)
    require(bool(plan.rows) or not scheduler.has_work, "nothing is planned although there is work")
    require(plan.num_tokens <= rules.max_num_batched_tokens, f"{plan.num_tokens} tokens are over the budget")
    require(len(running) + len(plan.admitted) <= rules.max_num_seqs, "more sequences than rows")
    require(plan.admitted == tuple(scheduler.waiting)[: len(plan.admitted)], "somebody overtook")
    require(not plan.admitted or not plan.preempted, "admitted and preempted in one step")
    require(not plan.admitted or rules.admits_while_running or not running, "a static batch was joined")
    planned = {row.sequence.sequence_id for row in plan.rows}
    lost = {sequence.sequence_id for sequence in plan.preempted + plan.released}
    require(not planned & lost, "computed and robbed in one step")
    left_out = [s for s in running if s.num_uncomputed_tokens == 1 and s.sequence_id not in planned | lost]
    for sequence in left_out:
        needed = scheduler.block_manager.num_blocks_needed(sequence.sequence_id, len(sequence.token_ids))
        require(needed == 1 and len(left_out) == 1, f"sequence {sequence.sequence_id} misses its next token")


def describe(plan: SchedulePlan) -> str:
    """One line that says what a plan does."""
    rows = " ".join(f"{row.sequence.sequence_id}:{row.start}+{row.num_tokens}" for row in plan.rows)
    lists = (plan.admitted, plan.preempted, plan.released)
    return "|".join([rows, *(",".join(str(s.sequence_id) for s in sequences) for sequences in lists)])


if __name__ == "__main__":
    simulation = Simulation(int(sys.argv[1]), has_faults="--faults" in sys.argv)
    try:
        simulation.run()
    finally:
        print(simulation.world, *simulation.trace, sep="\n")

"""Thousands of short random lives: every law after every step, every completion equal to the sequential oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.errors import InternalError
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.execution.ragged_batch import build_batch
from pagedcore.kv_cache.block_pool import BlockPool
from scheduler_lives.laws import require_true_contents
from scheduler_lives.simulator import Simulation, hybrid_life
from support.doubles import FakeClock, FlakyBackend, ToyStore, make_scheduler, make_sequence, toy_answer

SEEDS_PER_TEST = 50
each_range = pytest.mark.parametrize("first_seed", [
    pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(0, 1050, SEEDS_PER_TEST)
])
#: Not among them: blocks taken from a loaded sequence that waits, one life in 300; test_plan makes that happen.
KINDS_OF_TROUBLE = {
    "swap", "shrink", "recompute", "reused", "evicted", "swapped out", "swapped in", "failed transfer", "hung",
    "waited for blocks", "refused", "continued", "chunked", "fcfs", "priority", "static", "optimistic", "guaranteed",
    "auto", "wait", "lru", "lfu", "fifo",
}


@each_range
def test_every_request_gets_the_completion_it_would_get_alone(first_seed: int) -> None:
    """Sharing, eviction, swapping, preemption, aborts and continuations change no token and lose no block."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        Simulation(seed).run()


@each_range
def test_faults_stay_with_those_they_concern(first_seed: int) -> None:
    """The same with failing steps and transfers, unusable rows and departures in flight: others are not affected."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        Simulation(seed, has_faults=True).run()


def test_what_a_waiting_sequence_holds_is_promised_once() -> None:
    """Blocks that wait with a loaded sequence are available or shared, not both: nothing guaranteed is preempted."""
    for life in (Simulation(10_099, has_faults=True), Simulation(22_273, has_policies=True)):
        assert life.run().world.admission == "guaranteed"


@pytest.mark.parametrize("has_faults", [False, True])
def test_lives_with_batch_formation(has_faults: bool) -> None:
    """Gates, separate phases and shares of prefill change no token, stop no request and keep every law."""
    for seed in (*range(40), 20_095, 20_431):
        Simulation(seed, has_faults, has_formation=True).run()


@pytest.mark.parametrize("has_faults", [False, True])
def test_lives_with_every_policy(has_faults: bool) -> None:
    """Policies that change their order from step to step, cap tenants or preempt to admit, one that does all of it at
    random among them, change no token, stop no request and keep every law."""
    preempting = set()
    for seed in (*range(50), 276):
        simulation = Simulation(seed, has_faults, has_policies=True).run()
        scheduler = simulation.scheduler
        if scheduler.stats().num_preemptions:
            preempting.add(scheduler.rules.policy.name)
    assert preempting >= {"priority", "deadline", "moody"}


@pytest.mark.parametrize("has_faults", [False, True])
def test_lives_with_a_short_context(has_faults: bool) -> None:
    """Sequences that become long are computed again under every policy, and no row reads what the other kind wrote."""
    for seed in range(40):
        Simulation(seed, has_faults, has_policies=seed % 2 == 0, num_short_tokens=3 + seed % 6).run()


@pytest.mark.parametrize("has_faults", [False, True])
def test_lives_with_readers(has_faults: bool) -> None:
    """Sequences whose hidden states are read get each wanted position once, whatever is preempted, shared or computed
    again, end after the last one, and change no token of the others."""
    for seed in range(50):
        Simulation(seed, has_faults, has_policies=seed % 2 == 0, has_readers=True).run()


def windowed_life(seed: int) -> Simulation:
    """A life with windows, and with all that the other kinds of lives have, in turns."""
    border = 3 + seed % 6 if seed % 7 == 3 else None
    return Simulation(seed, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0, has_policies=seed % 4 < 2,
                      has_readers=seed % 5 == 0, num_short_tokens=border, has_windows=True).run()


def test_lives_with_windows() -> None:
    """A model whose layers give up what has left their window gives the same completions, whatever is shared, evicted,
    preempted, cut or broken off; no row reads a window block that it does not hold, and prefixes are found."""
    lives = [windowed_life(seed).scheduler for seed in range(60)]
    assert sum(one.counters.num_cached_tokens > 0 for one in lives) > 18
    assert sum(one.stats().num_windows_evicted > 0 for one in lives) > 18


@pytest.mark.slow
def test_many_lives_with_windows() -> None:
    """The same with more seeds."""
    for seed in range(10_000, 40_000):
        windowed_life(seed)


def test_lives_with_states() -> None:
    """A model whose logits follow from the state that a row began from gives the same completions, whatever is shared,
    evicted, preempted, swapped, cut or broken off; and states are found, and come back from the host."""
    counters = [hybrid_life(seed, has_faults=seed % 2 == 1).run().scheduler.counters for seed in range(70)]
    assert sum(one.num_cached_tokens > 0 for one in counters) > 20
    assert sum(one.num_states_swapped_in > 0 for one in counters) > 3


@pytest.mark.slow
@pytest.mark.parametrize("has_faults", [False, True])
def test_many_lives_with_every_policy(has_faults: bool) -> None:
    """The same with more seeds, and with batch formation."""
    for seed in range(10_000, 40_000):
        Simulation(seed, has_faults, has_formation=seed % 2 == 0, has_policies=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("has_faults", [False, True])
def test_many_lives_with_batch_formation(has_faults: bool) -> None:
    """The same with more seeds."""
    for seed in range(10_000, 40_000):
        Simulation(seed, has_faults, has_formation=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("has_faults", [False, True])
def test_a_hundred_thousand_lives(has_faults: bool) -> None:
    """Many short seeds find what one long run does not."""
    for seed in range(10_000, 60_000):
        Simulation(seed, has_faults).run()


def test_a_seed_leaves_the_same_trace_every_time() -> None:
    """Nothing but the seed decides: no clock, no hash order, no state of the process."""
    for seed in range(10):
        first, second = Simulation(seed, has_faults=True).run(), Simulation(seed, has_faults=True).run()
        assert first.trace == second.trace


def test_the_simulation_gets_into_every_kind_of_trouble() -> None:
    """What is never reached is not tested: every preemption, reuse, eviction, transfer, refusal and policy occurs."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        simulation = Simulation(seed, has_faults=seed % 2 == 1).run()
        stats = simulation.scheduler.stats()
        counters = simulation.scheduler.counters
        seen.update(kind.value for kind, times in counters.num_preemptions.items() if times)
        seen["reused"] += counters.num_cached_tokens > 0
        seen["evicted"] += stats.num_blocks_evicted > 0
        seen["swapped out"] += counters.num_blocks_swapped_out > 0
        seen["swapped in"] += counters.num_blocks_swapped_in > 0
        seen["failed transfer"] += counters.num_failed_transfers > 0
        seen["hung"] += not simulation.has_faults and counters.num_failed_transfers > 0
        seen["waited for blocks"] += any(line == "||||" for line in simulation.trace)
        seen["refused"] += len(simulation.turns) < simulation.num_arrived
        seen["continued"] += any(turn.sequence.arrival >= 1000 for turn in simulation.turns.values())
        seen["chunked"] += any("+" in line and not line.split("|")[0].endswith("+1") for line in simulation.trace)
        world = simulation.world
        seen.update({world.policy, world.admission, world.preemption, world.eviction})
    rare = {kind: seen[kind] for kind in KINDS_OF_TROUBLE if seen[kind] < 1}
    assert rare == {}


#: Five requests for about two, with the host and without it.
CROWDS = [("recompute", 0), ("shrink", 0), ("swap", 8)]


class Crowd:
    """An engine's loop over a pool for about two of five requests: preemption is certain."""

    def __init__(self, preemption: str, num_host_blocks: int, raise_on_step: int | None = None) -> None:
        self.scheduler = make_scheduler(
            6, 2, max_num_batched_tokens=5, preemption=preemption, num_host_blocks=num_host_blocks
        )
        self.sequences = [make_sequence([i, 2, i], 5 + i % 3, sequence_id=i) for i in range(5)]
        for sequence in self.sequences:
            self.scheduler.add_sequences(sequence)
        self.backend = FlakyBackend(raise_on_step=raise_on_step)
        self.backend.allocate_kv(6, 2)
        self.backend.cache_store.allocate_host(num_host_blocks)
        self.mover = KVTransfers(self.backend.cache_store, self.scheduler.moves, FakeClock())

    def step(self) -> None:
        """One step of an engine that tries a failed batch again."""
        self.mover.start(self.scheduler.moves.take_due())
        plan = self.scheduler.schedule()
        while plan.moves_blocks:
            self.mover.start(self.scheduler.make_room(plan))
            plan = self.scheduler.schedule()
        self.mover.copy(self.scheduler.reserve(plan), self.scheduler.kv_cache.device)
        try:
            logits = self.backend.forward(build_batch(plan.rows, self.scheduler.kv_cache.device))
        except RuntimeError:
            self.scheduler.rollback(plan)
            return
        ids = [row.sequence.sequence_id for row in plan.rows if row.num_sampled]
        self.scheduler.commit(plan, dict(zip(ids, logits.argmax(axis=1).tolist(), strict=True)))

    def check(self) -> None:
        now = snapshot(self.scheduler)
        assert check(now) == []
        require_true_contents(now, self.backend.cache_store)

    def finish_all(self) -> Crowd:
        """Run to the end with every law checked, and compare every completion with the oracle."""
        for _ in range(200):
            if not self.scheduler.has_work:
                break
            self.step()
            self.check()
        for sequence in self.sequences:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert sequence.output_token_ids == toy_answer(prompt, sequence.max_tokens)
            self.scheduler.remove_sequence(sequence)
        assert sum(self.scheduler.counters.num_preemptions.values()) > 0
        self.mover.start(self.scheduler.moves.take_due())
        stats = self.scheduler.stats()
        assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
        return self


@pytest.mark.parametrize(("preemption", "num_host_blocks"), CROWDS)
def test_any_one_step_can_fail_and_be_run_again(preemption: str, num_host_blocks: int) -> None:
    """For every k: the k-th forward dies after it wrote its slots; rolled back and repeated, no completion changes."""
    num_steps = Crowd(preemption, num_host_blocks).finish_all().backend.num_steps
    for failing in range(1, num_steps + 1):
        Crowd(preemption, num_host_blocks, failing).finish_all()


@pytest.mark.parametrize(("preemption", "num_host_blocks"), CROWDS)
def test_any_one_transfer_can_fail_and_costs_no_token(
    preemption: str, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every k: the k-th transfer ends in failure with rubbish written; every sequence completes."""
    end, calls = ToyStore.end, count(1)
    monkeypatch.setattr(ToyStore, "end", lambda store, transfer: (next(calls), end(store, transfer))[1])
    Crowd(preemption, num_host_blocks).finish_all()
    for failing in range(1, next(calls)):
        calls = count(1)

        def flaky(store: ToyStore, transfer_id: int, calls: Iterator[int] = calls, k: int = failing) -> None:
            end(store, transfer_id, is_ok=next(calls) != k)

        monkeypatch.setattr(ToyStore, "end", flaky)
        Crowd(preemption, num_host_blocks).finish_all()


@pytest.mark.parametrize(("preemption", "num_host_blocks"), CROWDS)
def test_any_one_allocation_can_fail_and_be_asked_again(
    preemption: str, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every k: the k-th allocation is refused against the plan; the laws hold, the next plan goes through."""
    allocate, calls = BlockPool.allocate, count(1)
    monkeypatch.setattr(BlockPool, "allocate", lambda pool, n: (next(calls), allocate(pool, n))[1])
    Crowd(preemption, num_host_blocks).finish_all()
    num_calls = next(calls) - 1
    for failing in range(1, num_calls + 1):
        calls = count(1)

        def flaky(pool: BlockPool, n: int, calls: Iterator[int] = calls, k: int = failing) -> list[int] | None:
            return None if next(calls) == k else allocate(pool, n)

        monkeypatch.setattr(BlockPool, "allocate", flaky)
        crowd = Crowd(preemption, num_host_blocks)
        for _ in range(200):
            if not crowd.scheduler.has_work:
                break
            try:
                crowd.step()
            except InternalError as error:
                assert "too few for the plan" in str(error) or "although it was planned" in str(error)  # noqa: PT017
            crowd.check()
        crowd.finish_all()

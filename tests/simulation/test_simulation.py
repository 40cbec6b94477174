"""Thousands of short random lives: every law after every step, every answer equal to the sequential oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest

from doubles import FlakyBackend, make_scheduler, make_sequence, toy_answer
from pagedcore.cache.block_pool import BlockPool
from pagedcore.errors import InternalError
from pagedcore.execution.ragged_batch import build_batch
from pagedcore.request import Sequence
from pagedcore.scheduling.invariants import check, snapshot
from pagedcore.scheduling.scheduler import Scheduler
from simulation.simulator import Simulation

SEEDS_PER_TEST = 150


@pytest.mark.parametrize("first_seed", range(0, 1200, SEEDS_PER_TEST))
def test_every_request_gets_the_answer_it_would_get_alone(first_seed: int) -> None:
    """Arrivals, priorities, aborts, continuations and preemptions change no token, lose no block and nobody's end."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        Simulation(seed).run()


@pytest.mark.parametrize("first_seed", range(0, 1200, SEEDS_PER_TEST))
def test_faults_stay_with_those_they_concern(first_seed: int) -> None:
    """The same with failing steps, unusable rows and departures in flight: a rolled-back step can be run again."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        Simulation(seed, has_faults=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("has_faults", [False, True])
def test_a_hundred_thousand_lives(has_faults: bool) -> None:
    """Many short seeds find what one long run does not."""
    for seed in range(10_000, 60_000):
        Simulation(seed, has_faults).run()


def test_a_seed_leaves_the_same_trace_every_time() -> None:
    """Nothing but the seed decides: no clock, no hash order, no state of the process."""
    for seed in range(20):
        first, second = Simulation(seed, has_faults=True).run(), Simulation(seed, has_faults=True).run()
        assert first.trace == second.trace


def test_the_simulation_gets_into_every_kind_of_trouble() -> None:
    """What is never reached is not tested: pressure, refusals, continuations and all policies occur."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        simulation = Simulation(seed).run()
        stats = simulation.scheduler.stats()
        seen["preempted"] += stats.num_preemptions > 0
        seen["released"] += stats.num_released > 0
        seen["refused"] += len(simulation.turns) < simulation.num_arrived
        seen["continued"] += any(turn.sequence.arrival >= 1000 for turn in simulation.turns.values())
        seen["chunked"] += any("+" in line and not line.split("|")[0].endswith("+1") for line in simulation.trace)
        seen[simulation.world.policy] += 1
        seen[simulation.world.admission] += 1
    policies, kinds = {"fcfs", "priority", "static"}, {"preempted", "released", "refused", "continued", "chunked"}
    assert {kind for kind in kinds | policies | {"optimistic", "guaranteed"} if seen[kind] < 5} == set(), seen


def crowded() -> tuple[Scheduler, list[Sequence]]:
    """Five requests in a pool for about two: preemption is certain."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_num_batched_tokens=5)
    sequences = [make_sequence([i, 2, i], 5 + i % 3, sequence_id=i) for i in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler, sequences


def step(scheduler: Scheduler, backend: FlakyBackend) -> None:
    """One step of an engine that tries a failed batch again."""
    plan = scheduler.schedule()
    scheduler.reserve(plan)
    try:
        logits = backend.forward(build_batch(plan.rows, scheduler.block_manager))
    except RuntimeError:
        scheduler.rollback(plan)
        return
    ids = [row.sequence.sequence_id for row in plan.rows if row.is_sampled]
    scheduler.commit(plan, dict(zip(ids, logits.argmax(axis=1).tolist(), strict=True)))


def finish_all(scheduler: Scheduler, backend: FlakyBackend, sequences: list[Sequence]) -> None:
    """Run to the end with every law checked, and compare every answer with the oracle."""
    for _ in range(200):
        if not scheduler.has_work:
            break
        step(scheduler, backend)
        assert check(snapshot(scheduler)) == []
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.output_token_ids == toy_answer(prompt, sequence.max_tokens)
        scheduler.forget(sequence)
    assert scheduler.stats().num_used_blocks == 0


def count_steps() -> int:
    scheduler, sequences = crowded()
    backend = FlakyBackend()
    backend.allocate_kv(6, 2)
    finish_all(scheduler, backend, sequences)
    assert scheduler.stats().num_preemptions > 0
    return backend.num_steps


def test_any_one_step_can_fail_and_be_run_again() -> None:
    """For every k: the k-th forward dies after it wrote its slots; rolled back and repeated, no answer changes."""
    for failing in range(1, count_steps() + 1):
        scheduler, sequences = crowded()
        backend = FlakyBackend(raise_on_step=failing)
        backend.allocate_kv(6, 2)
        finish_all(scheduler, backend, sequences)


def test_any_one_allocation_can_fail_and_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every k: the k-th allocation is refused against the plan; the laws hold, the next plan goes through."""
    allocate = BlockPool.allocate
    for failing in range(1, count_steps() + 1):
        calls = count(1)

        def flaky(pool: BlockPool, n: int, calls: Iterator[int] = calls, k: int = failing) -> list[int] | None:
            return None if next(calls) == k else allocate(pool, n)

        monkeypatch.setattr(BlockPool, "allocate", flaky)
        scheduler, sequences = crowded()
        backend = FlakyBackend()
        backend.allocate_kv(6, 2)
        for _ in range(failing - 1):
            step(scheduler, backend)
        with pytest.raises(InternalError, match="too few for the plan"):
            step(scheduler, backend)
        assert check(snapshot(scheduler)) == []
        finish_all(scheduler, backend, sequences)

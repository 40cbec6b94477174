"""What a step costs before the model is called: figures to keep an eye on, not laws."""

from __future__ import annotations

import statistics
import time

import pytest

from doubles import make_scheduler, make_sequence
from pagedcore.scheduling.scheduler import Scheduler


def running(num_seqs: int) -> Scheduler:
    """A scheduler in which so many sequences decode in blocks of 16."""
    scheduler = make_scheduler(
        100 * num_seqs, 16, max_num_seqs=num_seqs, max_num_batched_tokens=40 * num_seqs, max_num_waiting=num_seqs
    )
    for index in range(num_seqs):
        scheduler.add(make_sequence(20 + index % 16, 1000))
    return scheduler


def planning_times_s(scheduler: Scheduler, num_steps: int = 300) -> list[float]:
    times_s = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        plan = scheduler.schedule()
        times_s.append(time.perf_counter() - start_s)
        scheduler.reserve(plan)
        scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows})
    return times_s


@pytest.mark.slow
@pytest.mark.parametrize(("num_seqs", "limit_s"), [(32, 0.00015), (256, 0.001)])
def test_planning_costs_little_beside_a_forward(num_seqs: int, limit_s: float) -> None:
    """The median plan of 32 running sequences takes under 0.15 ms, of 256 under 1 ms."""
    assert statistics.median(planning_times_s(running(num_seqs))) < limit_s

"""What a step costs before the model is called: figures to keep an eye on, not laws."""

from __future__ import annotations

import statistics
import time

import pytest

from pagedcore.kv_cache.reservation import Demand
from pagedcore.scheduler.scheduler import Scheduler
from support.doubles import make_scheduler, make_sequence

BLOCK = 16


def running(num_seqs: int, num_cached_blocks: int, num_waiting: int) -> Scheduler:
    """A scheduler in which so many sequences decode beside what others have left, and so many wait for a row."""
    scheduler = make_scheduler(
        100 * num_seqs + num_cached_blocks, BLOCK, max_num_seqs=num_seqs, max_num_batched_tokens=40 * num_seqs,
        max_num_waiting=num_seqs + num_waiting,
    )
    for index in range(num_cached_blocks // 10):
        gone = make_sequence([10_000 + index] * (10 * BLOCK))
        reservation = scheduler.kv_cache.device.reserve([Demand(gone.sequence_id, 10 * BLOCK)])
        assert reservation is not None
        reservation.commit()
        gone.num_computed_tokens = 10 * BLOCK
        scheduler.kv_cache.device.free_blocks(gone)
    for index in range(num_seqs + num_waiting):
        scheduler.add_sequences(make_sequence([index, *range(20 + index % 16)], 1000))
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
@pytest.mark.parametrize(("num_seqs", "num_cached_blocks", "limit_s"), [(32, 1_000, 0.00015), (256, 10_000, 0.001)])
@pytest.mark.parametrize("num_waiting", [0, 64])
def test_planning_costs_little_beside_a_forward(
    num_seqs: int, num_cached_blocks: int, num_waiting: int, limit_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The median plan of 32 running sequences takes under 0.15 ms, of 256 beside 10,000 cached blocks under 1 ms."""
    scheduler = running(num_seqs, num_cached_blocks, num_waiting)
    assert scheduler.stats().num_blocks_cached == num_cached_blocks
    median_s = statistics.median(planning_times_s(scheduler))
    with capsys.disabled():
        print(f"\n{num_seqs} running, {num_cached_blocks} cached, {num_waiting} waiting: {1000 * median_s:.3f} ms")
    assert median_s < limit_s

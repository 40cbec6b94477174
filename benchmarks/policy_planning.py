"""What a plan costs under each built-in policy: 256 requests run, 1,000 wait.

    python benchmarks/policy_planning.py --steps 50
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from pagedcore import SamplingParams
from pagedcore.kv_cache.kv_cache_manager import KVCacheManager
from pagedcore.request_options import RequestOptions
from pagedcore.scheduler import policies
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.sequence import Sequence

POLICIES: dict[str, Any] = {
    "fcfs": policies.fcfs, "priority": policies.priority,
    "priority, ageing and preempting": lambda: policies.priority(10.0, 5), "deadline": policies.deadline,
    "fair": policies.fair, "fair, capped": lambda: policies.fair(64, 0.5), "shortest-first": policies.shortest_first,
    "cache-aware": policies.cache_aware,
}


def crowded(make: Any, num_running: int, num_waiting: int) -> Scheduler:
    """Return a scheduler in which so many sequences run, with room for all of them, and so many wait for a row."""
    rng = random.Random(1)
    scheduler = Scheduler(
        KVCacheManager(40 * num_running, 16), make(), max_num_seqs=num_running, max_scored_tokens=64,
        max_num_batched_tokens=32 * num_running, max_num_waiting=num_running + num_waiting,
    )
    for number in range(num_running + num_waiting):
        options = RequestOptions(tenant=f"t{number % 20}", deadline_s=rng.uniform(100, 1000))
        tokens = [rng.randrange(1000) for _ in range(rng.randint(8, 30))]
        scheduler.add_sequences(Sequence(
            number, tokens, SamplingParams(max_tokens=500), max_tokens=500, seed=0, arrival=number,
            arrival_s=number * 1e-3, options=options,
        ))
    return scheduler


def planning_times_s(scheduler: Scheduler, num_steps: int) -> Iterator[float]:
    """Run steps and yield the CPU seconds that each took to plan, its view and keys included."""
    for number in range(num_steps + 2):
        start_s = time.thread_time()
        scheduler.begin_step(2.0 + 0.01 * number)
        plan = scheduler.schedule()
        while plan.moves_blocks:
            scheduler.make_room(plan)
            plan = scheduler.schedule()
        took_s = time.thread_time() - start_s
        scheduler.reserve(plan)
        scheduler.commit(plan, {row.sequence.sequence_id: 1 for row in plan.rows if row.num_sampled})
        # Why not the first ones: they admit, and plan prompts.
        if number > 1:
            yield took_s


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    print(f"{given.running} running, {given.waiting} waiting\n\n| policy | a plan, median, ms | slowest, ms |")
    print("| --- | --- | --- |")
    for name, make in POLICIES.items():
        times_ms = [1000 * s for s in planning_times_s(crowded(make, given.running, given.waiting), given.steps)]
        print(f"| {name} | {statistics.median(times_ms):.2f} | {max(times_ms):.2f} |")


if __name__ == "__main__":
    main()

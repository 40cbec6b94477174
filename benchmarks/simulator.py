"""The simulator beside the machine: three workloads for real and simulated, and how fast it simulates.

    python benchmarks/simulator.py [--model demo | --model-size 80m] [--seconds 3] [--requests 1000] [--rounds 5]

It first measures what the engine completes of each workload's lengths when all requests come at once: its capacity.
Arrivals are a stated share of that, 0.7 or 2: between 1 and 1.5 the latency has no stable mean, because errors of step
times accumulate in the queue. In each round every workload runs in real time between two calibrations, and is simulated
with the same arrivals and lengths under both; the mean of the two is compared, so that a machine that slows down or
speeds up steadily favours neither. Prints the errors of throughput and of the mean latency, the median of the rounds
and their range, of which the medians are to be within 10 %; beside them how far the rounds' measurements lie apart (no
simulation can be nearer to all of them than half of that), how far two calibrations in a row do, and by how much 1 % of
step time moves the mean latency. Then the steps per second of a simulation with 32 rows, to be at least 10,000.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from dataclasses import astuple, dataclass, field
from itertools import pairwise

from door_measuring import SIZES, model_of
from rich.console import Console
from rich.table import Table

from pagedcore import Engine, EngineConfig, SamplingParams
from pagedcore.analysis.load_simulation.calibration import Calibration, calibrate
from pagedcore.analysis.load_simulation.costs import LoadTimes, StepWork, WorkObserver
from pagedcore.analysis.load_simulation.replica import SimulatedModel
from pagedcore.analysis.load_simulation.results import Summary, Targets
from pagedcore.analysis.load_simulation.simulator import SimulatedEngine, simulate
from pagedcore.analysis.load_simulation.workload import RandomLoad, SimulatedRequest
from pagedcore.plugins.manager import PluginManager
from pagedcore.scheduler.step_time import StepTimes

SETTINGS = {"max_num_seqs": 32, "max_num_waiting": 4096, "num_kv_blocks": 1024}
WORKLOADS = {
    "Poisson": (0.7, {"input_tokens": 96, "output_tokens": 48}),
    "bursts": (0.7, {"input_tokens": 96, "output_tokens": 48, "burstiness": 3.0, "seed": 1}),
    "overload, long prompts": (2.0, {"input_tokens": 256, "output_tokens": 32, "seed": 2}),
}
"""What arrives: its share of the capacity, and how it is drawn."""
ALL_AT_ONCE = 1e5
_SLOWER = 1.05
_SEED = 100


@dataclass(slots=True, eq=False)
class Measured:
    """One workload, run once for real. ``steps`` has what each step computed, and its seconds."""

    requests: list[SimulatedRequest]
    latencies_s: list[float] = field(default_factory=list)
    steps: list[tuple[StepWork, float]] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens from the first arrival's origin to the last token."""
        return sum(one.num_output for one in self.requests) / self.duration_s

    @property
    def mean_latency_s(self) -> float:
        """From an arrival to its last token."""
        return statistics.fmean(self.latencies_s)

    @property
    def busy_share(self) -> float:
        """Share of the time in which a step was computed."""
        return sum(seconds for _, seconds in self.steps) / self.duration_s

    def cost_errors(self, costs: list[LoadTimes]) -> tuple[float, float]:
        """Return by how much the mean of some costs is off in all steps without prompts, and in those with them."""
        measured_s, predicted_s = [1e-9, 1e-9], [1e-9, 1e-9]
        for work, seconds in self.steps:
            measured_s[work[3] > 0] += seconds
            predicted_s[work[3] > 0] += _seconds_of(work, costs)
        return predicted_s[0] / measured_s[0] - 1, predicted_s[1] / measured_s[1] - 1


def _seconds_of(work: StepWork, costs: list[LoadTimes]) -> float:
    return statistics.fmean(one.load_seconds(work) for one in costs)


def run(engine: Engine, requests: list[SimulatedRequest], seed: int = 0) -> Measured:
    """Let requests arrive in real time and run until all have ended."""
    measured, observer, manager, rng = Measured(requests), WorkObserver(), PluginManager(), random.Random(seed)
    waiting, open_ = list(reversed(requests)), dict[str, SimulatedRequest]()
    prompts = [[rng.randrange(256) for _ in range(one.num_input)] for one in waiting]
    manager.add(observer, "steps")
    forget = engine.hooks.add(manager)
    start_s = time.perf_counter()
    while waiting or open_:
        now_s = time.perf_counter() - start_s
        while waiting and waiting[-1].arrival_s <= now_s:
            one = waiting.pop()
            params = SamplingParams(max_tokens=one.num_output, ignore_eos=True, temperature=0.0)
            open_[engine.add_request(prompts.pop(), params).request_id] = one
        if open_:
            before_s = time.perf_counter()
            pending = engine.step_pending()
            after_s = time.perf_counter()
            if (work := observer.take()) is not None:
                measured.steps.append((work, after_s - before_s))
            now_s = after_s - start_s
            # Why not all open requests: to ask hundreds of them in each step takes 5 % of the time of a small model.
            for handle in [output.request for output in pending if output.request.is_done]:
                measured.latencies_s.append(now_s - open_.pop(handle.request_id).arrival_s)
                handle.remove()
        elif waiting:
            time.sleep(max(0.0, waiting[-1].arrival_s - now_s))
    forget()
    measured.duration_s = now_s
    return measured


def drawn(engine: Engine, num_requests: int) -> dict[str, list[SimulatedRequest]]:
    """Measure the capacity for each workload's lengths, and draw its requests. The first run warms up."""
    loads, capacities = {}, dict[tuple[int, int], float]()
    for name, (share, options) in WORKLOADS.items():
        lengths = options["input_tokens"], options["output_tokens"]
        if lengths not in capacities:
            together = RandomLoad(rate=ALL_AT_ONCE, num_requests=max(64, num_requests // 4), **options).requests()
            # Why other tokens each time: prompts that the cache has would be no work.
            times_s = [run(engine, together, seed).duration_s for seed in range(1, 5)]
            capacities[lengths] = len(together) / statistics.median(times_s[1:])
            print(f"capacity at {lengths[0]} + {lengths[1]} tokens: {capacities[lengths]:.1f} requests/s", flush=True)
        rate = share * capacities[lengths]
        loads[name] = RandomLoad(rate=rate, num_requests=num_requests, **options).requests()
    return loads


@dataclass(slots=True)
class Round:
    """One workload in one round, between two calibrations."""

    measured: Measured
    calibrations: tuple[Calibration, ...]
    simulated: list[Summary] = field(default_factory=list)

    def simulate(self) -> None:
        """Run the same requests on the virtual clock, under each calibration."""
        for one in self.calibrations:
            engine = one.engine(EngineConfig(**SETTINGS))
            self.simulated.append(simulate(engine, self.measured.requests).summary(Targets()))

    @property
    def drift(self) -> float:
        """How much longer or shorter the measured steps would take by the later calibration than by the earlier."""
        earlier_s, later_s = (sum(_seconds_of(work, [one.times]) for work, _ in self.measured.steps)
                              for one in self.calibrations)
        return abs(later_s / earlier_s - 1)

    @property
    def throughput_error(self) -> float:
        """Simulated over measured tokens per second, less 1."""
        return statistics.fmean(one.output_tokens_per_s for one in self.simulated) / self.measured.tokens_per_s - 1

    @property
    def latency_error(self) -> float:
        """Simulated over measured mean latency, less 1."""
        return statistics.fmean(one.latency.mean_s for one in self.simulated) / self.measured.mean_latency_s - 1

    def latency_per_step_time(self) -> float:
        """Return by how many times as much, in relation, the mean latency moves as the time of all steps does."""
        costs = self.calibrations[0].times
        engine = self.calibrations[0].engine(EngineConfig(**SETTINGS))
        slower = SimulatedEngine(times=LoadTimes(*(_SLOWER * cost for cost in astuple(costs))), model=engine.model,
                                 config=engine.config)
        moved_s = simulate(slower, self.measured.requests).summary(Targets()).latency.mean_s
        return (moved_s / self.simulated[0].latency.mean_s - 1) / (_SLOWER - 1)


def steps_per_second() -> tuple[float, float]:
    """Return the steps that a second of this machine simulates at 32 rows, and the mean number of rows."""
    engine = SimulatedEngine(times=StepTimes(4e-3, 1e-4, 3e-4, 1e-7), config=EngineConfig(max_num_seqs=32),
                             model=SimulatedModel(max_model_len=4096, block_size=32))
    requests = RandomLoad(rate=8.0, num_requests=1000, input_tokens=256, output_tokens=256).requests()
    simulate(engine, requests[:20])
    start_s = time.process_time()
    summary = simulate(engine, requests).summary(Targets())
    return summary.num_steps / (time.process_time() - start_s), 32 * summary.slot_utilisation


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="demo", help="a directory with a model and its tokenizer")
    model.add_argument("--model-size", choices=sorted(SIZES), help="random weights of this size instead")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each calibration takes")
    parser.add_argument("--requests", type=int, default=1000, help="requests of each workload")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    # Why one engine: what a new one tries out to choose its threads is no cost of a load.
    with model_of(given) as directory, Engine.from_pretrained(directory, **SETTINGS) as engine:
        # Why: as a server does. Collecting garbage among all objects would be a step of 0.2 s now and then.
        gc.collect()
        gc.freeze()
        loads = drawn(engine, given.requests)
        calibrations, measured = [calibrate(engine, "model", seconds=given.seconds)], list[Measured]()
        for _ in range(given.rounds):
            for requests in loads.values():
                measured.append(run(engine, requests, seed=_SEED + len(measured)))
                calibrations.append(calibrate(engine, "model", seconds=given.seconds, seed=len(calibrations)))
    rounds = defaultdict[str, list[Round]](list)
    for place, (real, around) in enumerate(zip(measured, pairwise(calibrations), strict=True)):
        name = list(loads)[place % len(loads)]
        rounds[name].append(one := Round(real, around))
        one.simulate()
        errors = real.cost_errors([found.times for found in around])
        print(f"{name}: {len(real.steps)} steps in {real.duration_s:.1f} s; costs off by {errors[0]:+.1%} in steps "
              f"that only decode, {errors[1]:+.1%} in those with prompts; calibrations {one.drift:.1%} apart")
    Console(width=160).print(_table(rounds))
    speed, rows = steps_per_second()
    print(f"{speed:,.0f} simulated steps per second of CPU time, {rows:.0f} rows in the mean")


def _table(rounds: dict[str, list[Round]]) -> Table:
    """Lay out what was measured and how far the simulations were off: medians, and the least and the most."""
    num_rounds = min(map(len, rounds.values()))
    table = Table("workload", "arrivals / capacity", "busy", "tokens/s", "error", "mean latency, ms", "error",
                  "runs apart", "per 1 % of step time", "calibrations apart",
                  title=f"{num_rounds} rounds: median (range)")
    for name, done in rounds.items():
        real = [one.measured for one in done]
        table.add_row(
            name, f"{WORKLOADS[name][0]:.1f}", f"{statistics.median(one.busy_share for one in real):.0%}",
            _range([one.tokens_per_s for one in real], ".0f"), _range([one.throughput_error for one in done], "+.1%"),
            _range([1e3 * one.mean_latency_s for one in real], ".1f"),
            _range([one.latency_error for one in done], "+.1%"),
            f"{_apart([one.mean_latency_s for one in real]):.0%}",
            f"{done[0].latency_per_step_time():.1f} %",
            _range([one.drift for one in done], ".1%"))
    return table


def _apart(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def _range(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()

"""The simulator beside the machine: three workloads for real and simulated, and how fast it simulates.

    python benchmarks/simulator.py [--model demo | --model-size 80m] [--seconds 15] [--requests 200] [--rounds 5]

Each round calibrates on the model, then runs each workload twice: on an engine whose requests arrive in real time, and
simulated with the same arrivals and lengths. Prints the errors of throughput and of the mean latency, the median of the
rounds and their range, of which the medians are to be within 10 % on a quiet machine; beside them how far the rounds'
measurements lie apart. Then the steps per second of a simulation with 32 rows, to be at least 10,000.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict

from door_measuring import SIZES, model_of
from rich.console import Console
from rich.table import Table

from pagedcore import Engine, EngineConfig, SamplingParams
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import PluginManager
from pagedcore.requests.stats import StepStats
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.simulation.calibration import calibrate
from pagedcore.simulation.costs import LoadTimes, prompt_work_of
from pagedcore.simulation.replica import SimulatedModel
from pagedcore.simulation.results import Targets
from pagedcore.simulation.simulator import SimulatedEngine, simulate
from pagedcore.simulation.workload import RandomLoad, SimulatedRequest

SETTINGS = {"max_num_seqs": 32, "max_num_waiting": 4096, "num_kv_blocks": 1024}

Round = tuple[tuple[float, float], tuple[float, float]]
"""Tokens per second and mean latency in seconds, measured and simulated."""


def workloads(capacity: float, num_requests: int) -> dict[str, list[SimulatedRequest]]:
    """Steady arrivals at 0.7 of what the engine can do, bursts at the same rate, and twice of what it can do."""
    lengths = {"num_requests": num_requests, "input_tokens": 96, "output_tokens": 48}
    return {
        "Poisson, 0.7 of capacity": RandomLoad(rate=0.7 * capacity, **lengths).requests(),
        "bursts, 0.7 of capacity": RandomLoad(rate=0.7 * capacity, burstiness=3.0, seed=1, **lengths).requests(),
        "overload, long prompts": RandomLoad(
            rate=capacity, seed=2, **lengths | {"input_tokens": 256, "output_tokens": 32}).requests(),
    }


class Steps:
    """What the steps of a run computed, and how long those took that computed prompts, and those that did not."""

    def __init__(self, costs: LoadTimes) -> None:
        self.costs, self.count, self.measured_s, self.predicted_s = costs, 0, [0.0, 0.0], [0.0, 0.0]
        self._work: tuple[int, ...] | None = None

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Note the work of a step."""
        self._work = (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_kv_tokens,
                      *prompt_work_of(stats.plan))

    def note(self, seconds: float) -> None:
        """Note that the step took so long."""
        if self._work is not None:
            has_prompt = self._work[0] > 0
            self.count += 1
            self.measured_s[has_prompt] += seconds
            self.predicted_s[has_prompt] += (
                self.costs.seconds(*self._work[:3]) + self.costs.prompt_seconds(*self._work[3:]))
        self._work = None

    def __str__(self) -> str:
        errors = [predicted / max(measured, 1e-9) - 1
                  for predicted, measured in zip(self.predicted_s, self.measured_s, strict=True)]
        return (f"{self.count} steps; costs off by {errors[0]:+.1%} in the {self.measured_s[0]:.1f} s of those that "
                f"only decode, {errors[1]:+.1%} in the {self.measured_s[1]:.1f} s of those with prompts")


def run(engine: Engine, requests: list[SimulatedRequest], steps: Steps) -> tuple[float, float]:
    """Let requests arrive in real time; return generated tokens per second and the mean latency in seconds."""
    rng, waiting, open_, latencies = random.Random(0), list(reversed(requests)), [], []
    prompts = [[rng.randrange(256) for _ in range(one.num_input)] for one in waiting]
    start_s = time.perf_counter()
    while waiting or open_:
        now_s = time.perf_counter() - start_s
        while waiting and waiting[-1].arrival_s <= now_s:
            one = waiting.pop()
            params = SamplingParams(max_tokens=one.num_output, ignore_eos=True, temperature=0.0)
            open_.append((one, engine.add_request(prompts.pop(), params)))
        if open_:
            before_s = time.perf_counter()
            engine.step_pending()
            after_s = time.perf_counter()
            steps.note(after_s - before_s)
            now_s = after_s - start_s
            done = [pair for pair in open_ if pair[1].is_done]
            for one, handle in done:
                latencies.append(now_s - one.arrival_s)
                handle.remove()
            open_ = [pair for pair in open_ if not pair[1].is_done] if done else open_
        elif waiting:
            time.sleep(max(0.0, waiting[-1].arrival_s - now_s))
    return sum(one.num_output for one in requests) / now_s, sum(latencies) / len(latencies)


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
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to calibrate in each round")
    parser.add_argument("--requests", type=int, default=200, help="requests of each workload")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    loads: dict[str, list[SimulatedRequest]] = {}
    rounds = defaultdict[str, list[Round]](list)
    # Why one engine: what a new one tries out to choose its threads is no cost of a load.
    with model_of(given) as directory, Engine.from_pretrained(directory, **SETTINGS) as engine:
        for seed in range(given.rounds):
            found = calibrate(engine, "model", seconds=given.seconds, seed=seed)
            print(f"{found.num_steps} steps measured, mean error {found.mean_error:.0%}: {found.times}")
            simulated = found.engine(EngineConfig(**SETTINGS))
            loads = loads or workloads(_capacity(simulated), given.requests)
            for name, requests in loads.items():
                steps, manager = Steps(found.times), PluginManager()
                manager.add(steps, "steps")
                forget = engine.hooks.add(manager)
                real = run(engine, requests, steps)
                forget()
                summary = simulate(simulated, requests).summary(Targets())
                rounds[name].append((real, (summary.output_tokens_per_s, summary.latency.mean_s)))
                print(f"{name}: {steps}; simulated {summary.num_steps}", flush=True)
    table = Table("workload", "tokens/s", "error", "mean latency, ms", "error")
    for name, done in rounds.items():
        table.add_row(name, *(cell for what, unit in ((0, 1.0), (1, 1e3)) for cell in _cells(done, what, unit)))
    Console().print(table)
    speed, rows = steps_per_second()
    print(f"{speed:,.0f} simulated steps per second of CPU time, {rows:.0f} rows in the mean")


def _cells(rounds: list[Round], what: int, unit: float) -> tuple[str, str]:
    """Return what was measured and how far the simulations were off: medians, and the least and the most."""
    measured = sorted(unit * real[what] for real, _ in rounds)
    errors = sorted(simulated[what] / real[what] - 1 for real, simulated in rounds)
    return (f"{statistics.median(measured):.1f} ({measured[0]:.1f} to {measured[-1]:.1f})",
            f"{statistics.median(errors):+.1%} ({errors[0]:+.1%} to {errors[-1]:+.1%})")


def _capacity(engine: SimulatedEngine) -> float:
    """Requests per second that the simulated engine completes when all come at once."""
    requests = RandomLoad(rate=1e5, num_requests=300, input_tokens=96, output_tokens=48).requests()
    return simulate(engine, requests).summary(Targets()).requests_per_s


if __name__ == "__main__":
    main()

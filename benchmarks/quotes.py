"""Do quotes hold, and are promises kept? On a virtual clock, with the noise of step times that were recorded.

    python benchmarks/quotes.py [--requests 6000] [--promises 15000] [--load 1.5] [--out TABLE.md]
    python benchmarks/quotes.py --record     # measures the demo model's steps again, for benchmarks/step_noise.json
    python benchmarks/quotes.py --cost       # what a quote takes with 256 running, in milliseconds

A real engine runs over a model that computes nothing and lets the time of each step pass: see
``tests/support/paced_loads.py``. Requests come at ``--load`` times what it can serve, with
log-normal lengths. Every request that is accepted is quoted just before; a quote holds if the moment lies in its
interval. With lengths known, completions have ``max_tokens`` tokens; with lengths learnt, they end when they do, and
``max_tokens`` is the same for all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from interleaved import markdown

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.load_simulation.costs import fit_costs
from pagedcore.analysis.quotes.quoting import prepare_quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.paced_loads import NOISE, bounded, known, paced_engine, promises_of, quotes_table


def promises_table(load: float, num: int, seed: int = 1) -> list[list[str]]:
    """Promise until so many requests have come; compare with what the policy completes in time without promises.

    The comparison has the first 1,500 requests, because a step without promises takes longer.
    """
    rows = list[list[str]]()
    for name, params_of in (("known", known), ("learnt", bounded)):
        kept = promises_of(load, num, seed, params_of, promises=True)
        some = promises_of(load, 1500, seed, params_of, promises=True)
        alone = [promises_of(load, 1500, seed, params_of, sheds=sheds).num_on_target for sheds in (False, True)]
        share = kept.num_promises_broken / max(1, kept.num_promises)
        in_time = some.num_promises_kept
        rows.append([f"lengths {name}", str(kept.num_promises), str(kept.num_promises_broken), f"{share:.2%}",
                     f"{in_time} / {alone[0]} / {alone[1]}", f"{in_time / max(alone):.0%}"])
    return rows


def record(seconds: float) -> None:
    """Measure steps of the demo model under a mixed load; write what they took over what was fitted."""
    steps, rng, cpu_s = list[tuple[int, int, int, float, float]](), random.Random(0), [0.0]
    settings = {"scheduling_policy": "deadline", "max_num_seqs": 16, "num_threads": 1}
    with Engine.from_pretrained("demo", **settings) as engine:
        scheduler, end_s = engine.scheduler, time.perf_counter() + seconds
        before, execute = scheduler.observe, engine._runner.execute

        def timed(*given: Any) -> Any:
            start_s = time.thread_time()
            result = execute(*given)
            cpu_s[0] = time.thread_time() - start_s
            return result

        def observe(plan: Any, took_s: float) -> None:
            steps.append((*plan.work, took_s, cpu_s[0]))
            before(plan, took_s)

        scheduler.observe, engine._runner.execute = observe, timed  # type: ignore[method-assign]
        while time.perf_counter() < end_s:
            if engine.stats().num_waiting < 4:
                params = SamplingParams(max_tokens=rng.randint(8, 100), ignore_eos=True)
                engine.add_request([rng.randrange(40, 90) for _ in range(rng.randint(4, 100))], params)
            engine.step()
    ratios = {name: _ratios(steps[200:4200], place) for place, name in ((3, "wall"), (4, "cpu"))}
    NOISE.write_text(json.dumps(ratios) + "\n")


def _ratios(steps: list[tuple[Any, ...]], place: int) -> list[float]:
    times = fit_costs([((*step[:3], 0, 0, False), 0, step[place]) for step in steps])
    ratios = [step[place] / times.seconds(*step[:3]) for step in steps]
    mean = statistics.fmean(ratios)
    spread, largest = statistics.stdev(ratios) / mean, max(ratios) / mean
    print(f"{len(ratios)} steps, standard deviation {spread:.2f}, largest {largest:.1f}")
    return [round(one / mean, 3) for one in ratios]


def cost(num_running: int = 256, num_quotes: int = 50) -> list[float]:
    """Measure what a quote takes beside so many running requests, all but the tokenizer, in seconds."""
    engine, _ = paced_engine(0, max_num_seqs=num_running, max_num_batched_tokens=4 * num_running, num_kv_blocks=20_000)
    for index in range(num_running):
        engine.add_request([1000] * 8, SamplingParams(max_tokens=200 + index, ignore_eos=True))
    while engine.stats().num_running < num_running:
        engine.step()
    prepared = engine.prepare([1000] * 64, SamplingParams(max_tokens=400, ignore_eos=True))
    times_s = list[float]()
    for _ in range(num_quotes):
        start_s = time.perf_counter()
        prepare_quote(engine, prepared)()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--promises", type=int, default=15_000)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.record:
        record(60.0)
        return
    if options.cost:
        times_s = sorted(cost())
        print(f"256 running: median {1000 * statistics.median(times_s):.2f} ms, least {1000 * times_s[0]:.2f} ms")
        return
    rows = quotes_table(options.load, options.requests, options.seed)
    table = markdown(["quotes of", "moment", "hold", "median width / value"], rows)
    header = ["promises of", "made", "broken", "share", "in time of 1,500: promised / deadline / shedding",
              "of the best"]
    table += "\n\n" + markdown(header, promises_table(options.load, options.promises, options.seed))
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

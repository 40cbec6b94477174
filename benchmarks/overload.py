"""What an engine does with more requests than it has room for: who is admitted, how fast the rest is refused.

    python benchmarks/overload.py [--seconds 60] [--burst 10] [--sustained 3] [--max-num-seqs 16] [--out TABLE.md]

Capacity is what may run and wait at once, ``max_num_seqs + max_num_waiting`` requests. The same engine with the demo
model gets, one after the other:

* held: ``--burst`` times as many requests as may wait, while its thread is held back, so that the number of those it
  admits is exact;
* burst: ``--burst`` times its capacity at once;
* 1.0 x: as many callers as its capacity, each asking again as soon as it has its completion, for ``--seconds``; if a
  place is not free yet, they wait for it;
* 3.0 x: ``--sustained`` times as many callers; those that are refused ask again after 50 ms.

A refusal takes from the call to its error, raised or delivered; the latency of an admitted request is from its call to
its completion. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from interleaved import markdown

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.demo_model.questions import demo_questions
from pagedcore.errors import EngineOverloaded
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats

PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
PAUSE_S = 0.05
HEADER = ["load", "asked", "admitted", "refused", "refusal p50 / p99 / max (ms)", "latency p50 / p99 (s)",
          "latency, of 1.0 x", "most waiting", "memory (MiB)"]


@dataclass
class Load:
    """What happened under one load. Times in seconds."""

    name: str
    latencies: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    most_waiting: int = 0
    resident: int = 0

    def row(self, normal: Load | None) -> list[str]:
        """Return the cells of the table; ``normal`` is the load that latencies are compared with."""
        latency, ratio = "–", "–"
        if self.latencies:
            latency = f"{share(self.latencies, 0.5):.2f} / {share(self.latencies, 0.99):.2f}"
        if self.latencies and normal is not None and normal.latencies:
            ratio = f"{statistics.median(self.latencies) / statistics.median(normal.latencies):.2f}"
        parts = (0.5, 0.99, 1.0) if self.refusals else ()
        refusal = " / ".join(f"{1000 * share(self.refusals, part):.3f}" for part in parts) or "–"
        num_admitted, num_refused = len(self.latencies), len(self.refusals)
        counts = [str(num_admitted + num_refused), str(num_admitted), str(num_refused)]
        memory = f"{self.resident / 2**20:.0f}"
        return [self.name, *counts, refusal, latency, ratio, str(self.most_waiting), memory]


def share(values: list[float], part: float) -> float:
    """Return the value that this part of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class QueueWatch:
    """Remembers how long the waiting queue was at most."""

    def __init__(self) -> None:
        self.most = 0

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Look at a step."""
        self.most = max(self.most, stats.num_waiting)


class Overload:
    """Loads on one engine."""

    def __init__(self, engine: AsyncEngine, watch: QueueWatch) -> None:
        self._engine, self._watch = engine, watch
        self._prompts = [question.prompt for question in demo_questions(64, seed=1)]
        self._num_asked = 0

    async def ask(self, load: Load, *, waits: bool = False) -> bool:
        """Ask once and note how long that took; return whether it was admitted."""
        self._num_asked += 1
        prompt, started_s = self._prompts[self._num_asked % 64], time.perf_counter()
        try:
            await asyncio.wrap_future(self._engine.submit(prompt, PARAMS, wait_for_room=waits))
        except EngineOverloaded:
            load.refusals.append(time.perf_counter() - started_s)
            return False
        load.latencies.append(time.perf_counter() - started_s)
        return True

    async def at_once(self, load: Load, num_requests: int, *, is_held: bool = False) -> Load:
        """Ask for so many at once; with ``is_held`` no step is made before the last one was asked for."""
        gate = threading.Event()
        holding = asyncio.create_task(self._engine.call(lambda engine: gate.wait())) if is_held else None
        await asyncio.sleep(0.1 if is_held else 0.0)
        asking = [asyncio.create_task(self.ask(load)) for _ in range(num_requests)]
        await asyncio.sleep(0.2 if is_held else 0.0)
        gate.set()
        await asyncio.gather(*asking)
        if holding is not None:
            await holding
        return self._look(load)

    async def sustained(self, load: Load, num_callers: int, seconds: float, *, waits: bool = False) -> Load:
        """Let callers ask again and again; with ``waits`` they wait for room, so that none is refused."""
        end_s = time.monotonic() + seconds

        async def call() -> None:
            while time.monotonic() < end_s:
                if not await self.ask(load, waits=waits):
                    await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(call() for _ in range(num_callers)))
        return self._look(load)

    def _look(self, load: Load) -> Load:
        load.most_waiting, self._watch.most = self._watch.most, 0
        load.resident = psutil.Process().memory_info().rss
        return load


async def measure(options: argparse.Namespace, say: Callable[[str], object] = print) -> str:
    """Run all loads and return the table."""
    num_seqs, num_waiting = options.max_num_seqs, 4 * options.max_num_seqs
    capacity, watch = num_seqs + num_waiting, QueueWatch()
    async with AsyncEngine.from_pretrained("demo", max_num_seqs=num_seqs, max_num_waiting=num_waiting) as engine:
        engine.observe(watch)
        overload = Overload(engine, watch)
        await overload.at_once(Load("warm-up"), num_waiting)
        held = await overload.at_once(Load("held"), options.burst * num_waiting, is_held=True)
        burst = await overload.at_once(Load(f"burst {options.burst} x"), options.burst * capacity)
        normal = await overload.sustained(Load("1.0 x"), capacity, options.seconds, waits=True)
        much = await overload.sustained(Load(f"{options.sustained:.1f} x"), round(options.sustained * capacity),
                                        options.seconds)
    say(f"capacity {capacity}: {num_seqs} run, {num_waiting} wait; admitted while held: {len(held.latencies)}")
    rows = [held.row(None), burst.row(None), normal.row(normal), much.row(normal)]
    return markdown(HEADER, rows)


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--burst", type=int, default=10)
    parser.add_argument("--sustained", type=float, default=3.0)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = asyncio.run(measure(options))
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

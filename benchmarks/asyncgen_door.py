"""What the async generator costs: 64 requests through it against the bare engine, alternating in one run.

    python benchmarks/asyncgen_door.py [--random-weights tiny] [--repeats 9]

Both sides generate the same tokens of the same prompts, with the same settings; the clock starts before the first
request is handed over and stops with the last token. The bare engine is the step loop; the other side is 64 tasks
on one event loop, each reading its own stream, delta by delta. The figure is the median over the pairs of runs of
the ratio of throughputs. "Loop" is the CPU time that the event loop's thread needed for one delta.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

from pagedcore import Engine, SamplingParams, expose
from pagedcore.bench.models import SHAPES, random_model
from pagedcore.demo_model.questions import demo_questions
from pagedcore_asyncgen import AsyncTextGenerator

NUM_REQUESTS = 64
WANTED = SamplingParams(max_tokens=64, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """One side of one pair. Times in seconds."""

    tokens: list[tuple[int, ...]]
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.tokens)) / self.wall_s


def run_bare(engine: Engine, prompts: list[Any]) -> Run:
    """Step the engine in this thread until every prompt is answered."""
    start, cpu = time.perf_counter(), time.thread_time()
    requests = [engine.add_request(prompt, WANTED) for prompt in prompts]
    while engine.has_pending_requests():
        engine.step()
    wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
    tokens = [request.output().outputs[0].token_ids for request in requests]
    for request in requests:
        request.remove()
    return Run(tokens, wall_s, cpu_s)


async def run_door(generate: AsyncTextGenerator, prompts: list[Any]) -> Run:
    """Read every prompt's stream in a task of its own."""
    async def read(prompt: Any) -> tuple[int, ...]:
        return tuple([token async for delta in generate(prompt, WANTED) for token in delta.token_ids])

    start, cpu = time.perf_counter(), time.thread_time()
    tokens = await asyncio.gather(*(read(prompt) for prompt in prompts))
    return Run(list(tokens), time.perf_counter() - start, time.thread_time() - cpu)


def main() -> None:
    """Run the pairs and print each, then the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", choices=SHAPES, help="this shape instead of the demo model")
    parser.add_argument("--max-num-seqs", type=int, default=NUM_REQUESTS)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    prompts: list[Any] = [question.prompt for question in demo_questions(NUM_REQUESTS)]
    if chosen.random_weights:
        prompts = [[1 + (7 * i + j) % 200 for j in range(16 + i)] for i in range(NUM_REQUESTS)]

    def model() -> Any:
        return random_model(chosen.random_weights, "float32") if chosen.random_weights else "demo"

    settings = {"max_num_seqs": chosen.max_num_seqs, "max_num_waiting": NUM_REQUESTS, "kv_cache_memory": "1GiB"}
    with (Engine.from_pretrained(model(), **settings) as engine,
          expose("async-generator", model=model(), **settings) as generate):
        run_bare(engine, prompts), asyncio.run(run_door(generate, prompts))
        ratios, loops = [], []
        for _ in range(chosen.repeats):
            bare, door = run_bare(engine, prompts), asyncio.run(run_door(generate, prompts))
            if bare.tokens != door.tokens:
                raise SystemExit("the two sides generated different tokens")
            ratios.append(door.tokens_per_s / bare.tokens_per_s)
            loops.append(door.cpu_s / sum(map(len, door.tokens)) * 1e6)
            print(f"bare {bare.tokens_per_s:8.0f} tokens/s   door {door.tokens_per_s:8.0f} tokens/s   "
                  f"ratio {ratios[-1]:.3f}   loop {loops[-1]:.1f} us per delta")
    print(f"median of {chosen.repeats}: ratio {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f}), loop {statistics.median(loops):.1f} us per delta")


if __name__ == "__main__":
    main()

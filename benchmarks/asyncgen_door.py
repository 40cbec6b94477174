"""What the async generator costs: 64 streams on one event loop against the bare engine's step loop.

    python benchmarks/asyncgen_door.py [--rounds 9] [--model DIRECTORY | --model-size 80m]

64 tasks each read their own stream, delta by delta; the clock starts before the first request is handed over and stops
with the last token. Read ``door_measuring.py`` for how the two sides are compared.
"""

from __future__ import annotations

import asyncio
import os
import time

from door_measuring import SETTINGS, WANTED, Run, model_of, parse, prompts, run_bare_behind, show, take_turns

from pagedcore import SamplingParams, expose
from pagedcore_asyncgen import AsyncTextGenerator


async def run_door(generate: AsyncTextGenerator) -> Run:
    """Read every request's stream in a task of its own."""
    params = SamplingParams(**WANTED)

    async def read(prompt: str) -> tuple[int, ...]:
        return tuple([token async for delta in generate(prompt, params) for token in delta.token_ids])

    engine_cpu_s = await generate.engine.call(lambda _: time.thread_time())
    start_s, cpu_s = time.perf_counter(), time.thread_time()
    answers = await asyncio.gather(*map(read, prompts()))
    wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
    engine_cpu_s = await generate.engine.call(lambda _: time.thread_time()) - engine_cpu_s
    return Run(answers, wall_s, {"engine thread": engine_cpu_s, "event loop": cpu_s})


def main() -> None:
    """Compare and print."""
    given, load = parse(__doc__), os.getloadavg()[0]
    with model_of(given) as model, expose("async-generator", model=model, **SETTINGS) as generate:
        ways = {"bare engine": lambda: run_bare_behind(generate.engine, prompts(), lambda answer: answer.token_ids),
                "async generator": lambda: asyncio.run(run_door(generate))}
        show("async generator", given, take_turns(ways, given.rounds), load)


if __name__ == "__main__":
    main()

"""What the BentoML door costs: 64 streams over loopback HTTP against the bare engine, by turns, in one run.

    python benchmarks/bentoml_door.py [--random-weights tiny] [--repeats 9]

The bare engine is the step loop. The other side is ``bentoml serve`` in processes of its own; its client is in this
process, opens 64 connections, and reads every stream to its last event. Both generate the same tokens of the same
prompts, with the same settings. The figure is the median over the pairs of runs of the ratio of throughputs. It says
something on an idle machine only; the CPU times of the bare engine, the server and its client, which are printed too,
say also on a busy one where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from pagedcore import Engine, SamplingParams
from pagedcore.bench.models import SHAPES, random_model
from pagedcore.demo_model.questions import demo_questions
from pagedcore_bentoml import EventParser

NUM_REQUESTS = 64
WANTED = {"max_tokens": 64, "ignore_eos": True}
SETTINGS = {"max_num_seqs": 64, "num_kv_blocks": 1024}
SERVICE = """
import json, os
from pagedcore.bench.models import random_model
from pagedcore_bentoml import create_service

weights = os.environ["DOOR_WEIGHTS"]
model = random_model(weights, "float32") if weights else "demo"
LLM = create_service(model, **json.loads(os.environ["DOOR_SETTINGS"]))
"""


def run_bare(engine: Engine, prompts: list[Any]) -> tuple[list[list[int]], float, float]:
    """Step the engine in this thread until every prompt is answered; return tokens, seconds and CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    requests = [engine.add_request(prompt, SamplingParams(**WANTED)) for prompt in prompts]
    while engine.has_pending_requests():
        engine.step()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = [list(request.output().outputs[0].token_ids) for request in requests]
    for request in requests:
        request.remove()
    return tokens, seconds, cpu


async def run_door(http: httpx.AsyncClient, prompts: list[Any]) -> tuple[list[list[int]], float, float, int]:
    """Read every prompt's stream; return tokens, seconds, the client's CPU seconds and the number of events."""
    num_events = 0

    async def read(prompt: Any) -> list[int]:
        nonlocal num_events
        parser, tokens = EventParser(), []
        async with http.stream("POST", "/stream", json={"prompt": prompt, "sampling": WANTED}) as response:
            async for text in response.aiter_text():
                for event in parser.feed(text):
                    num_events += 1
                    tokens += event.data.get("token_ids", [])
        return tokens

    start, cpu = time.perf_counter(), time.process_time()
    tokens = await asyncio.gather(*map(read, prompts))
    return tokens, time.perf_counter() - start, time.process_time() - cpu, num_events


@contextmanager
def served(weights: str) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the model from a folder of its own; yield the address and the process."""
    with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        Path(folder, "service.py").write_text(SERVICE, encoding="utf-8")
        env = {**os.environ, "DOOR_WEIGHTS": weights, "DOOR_SETTINGS": json.dumps(SETTINGS), "BENTOML_HOME": folder,
               "BENTOML_DO_NOT_TRACK": "True", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "bentoml", "serve", "service:LLM", "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            try:
                yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
            finally:
                process.terminate()


def cpu_seconds(server: psutil.Process) -> float:
    """CPU time that the server's processes have taken."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def compare(url: str, server: psutil.Process, engine: Engine, prompts: list[Any], repeats: int) -> list[float]:
    """Take turns and return the ratio of each pair, the first pair left out as a warm-up."""
    ratios = []
    # Why: no connection is kept, because the server closes idle ones while the bare engine has its turn.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        while not await is_ready(http):
            await asyncio.sleep(0.5)
        for _ in range(repeats + 1):
            expected, bare_s, bare_cpu_s = run_bare(engine, prompts)
            before_s = cpu_seconds(server)
            tokens, door_s, client_cpu_s, num_events = await run_door(http, prompts)
            server_cpu_s = cpu_seconds(server) - before_s
            if tokens != expected:
                raise SystemExit("the door gave other tokens than the engine")
            ratios.append(bare_s / door_s)
            num_tokens = sum(map(len, tokens))
            print(f"bare {num_tokens / bare_s:7.0f} tokens/s   door {num_tokens / door_s:7.0f} tokens/s   "
                  f"ratio {ratios[-1]:.2f}   CPU s: bare {bare_cpu_s:.2f}, server {server_cpu_s:.2f}, "
                  f"client {client_cpu_s:.2f}   {num_events} events")
    return ratios[1:]


async def is_ready(http: httpx.AsyncClient) -> bool:
    """Whether the server answers yet."""
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def main() -> None:
    """Compare and print the median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random-weights", choices=sorted(SHAPES), default="")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    weights = given.random_weights
    model = random_model(weights, "float32") if weights else "demo"
    prompts: list[Any] = [question.prompt for question in demo_questions(NUM_REQUESTS)]
    if weights:
        prompts = [[1 + (7 * row + place) % 100 for place in range(16)] for row in range(NUM_REQUESTS)]
    with Engine.from_pretrained(model, **SETTINGS) as engine, served(weights) as (url, server):
        ratios = asyncio.run(compare(url, server, engine, prompts, given.repeats))
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

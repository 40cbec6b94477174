"""What an engine loses to busy programs beside it, and what it costs when there are none; figures are in guest.md.

    python benchmarks/guest.py [--base CHECKOUT] [--model demo|80m|qwen05b|...] [--pairs 20] [--only SCENARIO ...]

Every engine under test runs in a process of its own that is loaded once and then answers one piece of work at a time.
Two are compared in pairs that alternate: this checkout and ``--base`` (another checkout of the project, run by this
interpreter), or the same engine with neighbours and without. A neighbour is a process that spins in Python.

Scenarios: ``quiet`` compares with the base; ``same-K`` starts K neighbours in the session of the engine, ``own-K`` each
in a session of its own, which Linux schedules as groups where autogroups are on; ``engines`` lets two engines of one
process work at once. ``guest_peers.py`` compares with other engines beside the same neighbours, ``event_loop.py``
measures the event loop of the program around the engine. A ratio is given as the median of its pairs and the interval
that holds the true median in 95 of 100 cases (order statistics).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interleaved import interval

ROOT = Path(__file__).resolve().parents[1]
#: Rows and generated tokens of a piece of work, long enough for several slices of a neighbour's time. Of GPT-2 torch
#: computes all but products and attention.
WORK = {"demo": (32, 96), "80m": (32, 32), "qwen05b": (1, 24), "qwen05b-32": (32, 8), "gpt2": (1, 24),
        "gpt2-16": (16, 16)}
#: 64 requests of mixed lengths; the peers' W1 needs a vocabulary of 4,000 tokens.
MIXED = {"demo-ragged": "ragged", "80m-ragged": "ragged", "qwen05b-w1": "w1"}
PROMPT_TOKENS = 48
#: Ends with the benchmark even if that is killed (``PR_SET_PDEATHSIG`` of Linux), or it would take a core for ever.
#: Ends with the process of that number, also with one that has ended before it could ask for that.
SPIN = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9)\nif os.getppid() == int(sys.argv[1]):\n while True: pass"


class Worker:
    """An engine, or two, in a process of its own."""

    def __init__(self, checkout: Path, model: str, *, own_session: bool, num_engines: int = 1) -> None:
        folders = [checkout, checkout / "kernels", checkout / "adapters"]
        environment = os.environ | {"PYTHONPATH": ":".join(map(str, folders))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", model, str(num_engines)], env=environment, cwd=checkout, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=own_session,
        )  # fmt: skip
        self._read()

    def run(self, num_engines: int = 1) -> dict[str, Any]:
        """Do one piece of work on each of so many engines at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_engines}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate("\n", timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("a worker ended before its answer")


def work(model: str, num_engines: int) -> None:
    """Be a worker: load, then answer a line of JSON for every line read."""
    from pagedcore import Engine, SamplingParams

    engines = [Engine.from_pretrained(*_model(model)[:1], **_model(model)[1]) for _ in range(num_engines)]
    prompts, lengths = _even(*WORK[model]) if model in WORK else _mixed(model)

    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]

    def generate(engine: Any) -> None:
        engine.generate(prompts, params, show_progress=False)

    for engine in engines:
        generate(engine)
    print("{}", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        busy, steps_before = int(line), engines[0].stats().num_steps
        start_s, cpu_s, counters = time.perf_counter(), time.process_time(), _counters()
        threads = [threading.Thread(target=generate, args=(engine,)) for engine in engines[1:busy]]
        for thread in threads:
            thread.start()
        generate(engines[0])
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - start_s
        num_steps = engines[0].stats().num_steps - steps_before
        print(json.dumps({
            "tokens_per_s": busy * sum(lengths) / wall_s, "cpu_share": (time.process_time() - cpu_s) / wall_s,
            "wakes_per_step": (_counters() - counters) / num_steps / busy,
        }), flush=True)  # fmt: skip


def _even(num_rows: int, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    return [[7 + row] * PROMPT_TOKENS for row in range(num_rows)], [num_tokens] * num_rows


def _mixed(model: str) -> tuple[list[list[int]], list[int]]:
    from pagedcore.bench.workloads import make_workload

    workload = make_workload(MIXED[model], 512)
    return [list(prompt) for prompt in workload.prompts], list(workload.num_outputs)


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    if name.startswith("demo"):
        return "demo", {}
    room = {"num_kv_blocks": 1200 if name in MIXED else 256}
    if name.startswith("qwen05b"):
        from pagedcore.bench.workloads import random_model

        return random_model("qwen05b", "bfloat16"), {"max_model_len": 1024, **room}
    import torch
    from door_measuring import SIZES
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name.startswith("gpt2"):
        shape = GPT2Config(vocab_size=2048, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(shape).to(torch.bfloat16).eval(), room
    config = LlamaConfig(vocab_size=2048, max_position_embeddings=2048, tie_word_embeddings=True, **SIZES["80m"])
    return LlamaForCausalLM(config).to(torch.bfloat16).eval(), room


def _counters() -> int:
    try:
        from pagedcore_kernels.cpu.runtime.team import the_team
    except ImportError:  # a base from before there was a team
        return 0
    return the_team().counters().num_wakes


@contextmanager
def neighbours(number: int, *, own_sessions: bool) -> Iterator[None]:
    """Keep so many processes spinning."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())], start_new_session=own_sessions)
               for _ in range(number)]
    time.sleep(0.2)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def spinner_share(num_threads: int, seconds: float) -> float:
    """Cores that a program of ``num_threads`` spinning threads gets in a session of its own."""
    code = f"""
import os, time
children = [os.fork() for _ in range({num_threads - 1})]
if 0 in children or not children: children = []
end = time.monotonic() + {seconds}
while time.monotonic() < end: pass
own = time.process_time()
if children:
    for child in children: os.waitpid(child, 0)
    print(own + sum(os.times()[2:4]))
elif {num_threads} == 1: print(own)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=True)
    return float(done.stdout) / seconds


def summary(values: list[float]) -> str:
    """Say the median and its interval."""
    low, high = interval(values)
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f}; {len(values)} pairs)"


def pairs(number: int, first: Callable[[], float], second: Callable[[], float]) -> list[float]:
    """Return first / second of so many pairs, each half coming first in every other one."""
    ratios = []
    for turn in range(number):
        if turn % 2:
            b = second()
            a = first()
        else:
            a = first()
            b = second()
        ratios.append(a / b)
    return ratios


def main() -> None:
    """Measure what is asked for and print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--model", choices=sorted([*WORK, *MIXED]), default="demo")
    parser.add_argument("--pairs", type=int, default=20)
    scenarios = ["quiet", "same-1", "same-2", "same-4", "own-1", "own-2", "engines"]
    parser.add_argument("--only", nargs="*", default=scenarios)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work[0], int(given.work[1]))
        return
    size = WORK.get(given.model, (64, "mixed"))
    print(f"{given.model}: {size} rows and tokens, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    for scenario in given.only:
        measure(scenario, given)


def measure(scenario: str, given: argparse.Namespace) -> None:
    """Measure one scenario."""
    kind, _, count = scenario.partition("-")
    own = Worker(ROOT, given.model, own_session=kind == "own", num_engines=2 if kind == "engines" else 1)
    try:
        if kind == "quiet":
            against_base(own, given)
        elif kind == "engines":
            ratios = pairs(given.pairs, lambda: own.run(2)["tokens_per_s"], lambda: own.run(1)["tokens_per_s"])
            print(f"engines: two of one process together, of one alone: {summary(ratios)}", flush=True)
        else:
            beside(own, int(count), kind == "own", given)
    finally:
        own.close()


def against_base(own: Worker, given: argparse.Namespace) -> None:
    """Compare with the base, nothing beside."""
    base = Worker(given.base, given.model, own_session=False)
    wakes: list[float] = []

    def run() -> float:
        result = own.run()
        wakes.append(result["wakes_per_step"])
        return float(result["tokens_per_s"])

    try:
        ratios = pairs(given.pairs, run, lambda: base.run()["tokens_per_s"])
    finally:
        base.close()
    print(f"quiet: of the base: {summary(ratios)}; {statistics.median(wakes):.2f} wakes a step", flush=True)


def beside(own: Worker, count: int, own_sessions: bool, given: argparse.Namespace) -> None:
    """Compare throughput beside neighbours with that of another worker, which has never had any."""
    cores = len(os.sched_getaffinity(0))
    cpu, shares, speeds = [], [], []
    calm = Worker(ROOT, given.model, own_session=own_sessions)

    def busy() -> float:
        with neighbours(count, own_sessions=own_sessions):
            result = own.run()
            if own_sessions:
                shares.append(spinner_share(cores, 0.5) / cores)
        cpu.append(result["cpu_share"] / cores)
        return float(result["tokens_per_s"])

    def quiet() -> float:
        speeds.append(calm.run()["tokens_per_s"])
        return speeds[-1]

    try:
        ratios = pairs(given.pairs, busy, quiet)
    finally:
        calm.close()
    fair = statistics.median(shares) if shares else cores / (cores + count)
    print(f"{'own' if own_sessions else 'same'}-{count}: of quiet: {summary(ratios)}; fair share {fair:.3f}, of it "
          f"{statistics.median(ratios) / fair:.2f}; CPU {statistics.median(cpu):.2f}; quiet "
          f"{statistics.median(speeds):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()

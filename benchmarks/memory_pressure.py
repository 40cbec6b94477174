"""Four times as much KV as there is room for: what each way of making room costs, on six workloads and their mix.

    python benchmarks/memory_pressure.py [--rounds 3] [--json FILE]

Every mode answers the same requests with the same model and the same pool, in the same process, in alternating
order; its time on a workload is the fastest of the rounds. "auto" chooses by its cost model; the others are forced.
All modes have to give the same tokens, or the script stops. The model has random weights: its answers mean nothing,
its work is real.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from pagedcore import Engine, SamplingParams

MODES = ("auto", "swap", "shrink", "recompute", "wait")
BLOCK_SIZE = 16
OVERSUBSCRIPTION = 4
Requests = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Workload:
    """Requests as (prompt, answer length), all there from the start."""

    name: str
    requests: Requests

    @property
    def num_blocks(self) -> int:
        """The pool: a quarter of what up to 32 of the requests want at once, and room for the longest alone."""
        sizes = sorted((-(-(len(prompt) + answer) // BLOCK_SIZE) for prompt, answer in self.requests), reverse=True)
        return max(sizes[0], sum(sizes[:32]) // OVERSUBSCRIPTION)


def workloads() -> list[Workload]:
    """Make six workloads that differ in what is cheap, and their mix."""
    rng = random.Random(0)

    def prompt(low: int, high: int) -> list[int]:
        return [rng.randrange(4000) for _ in range(rng.randint(low, high))]

    def many(count: int, make: Callable[[], tuple[list[int], int]]) -> Requests:
        return [make() for _ in range(count)]

    system = prompt(192, 192)
    kinds = {
        "short prompts, long answers": many(32, lambda: (prompt(8, 24), rng.randint(96, 160))),
        "long prompts, short answers": many(32, lambda: (prompt(160, 320), rng.randint(8, 40))),
        "long prompts, long answers": many(20, lambda: (prompt(160, 320), rng.randint(96, 160))),
        "one system prompt": many(32, lambda: (system + prompt(8, 32), rng.randint(32, 96))),
        "few giants among dwarfs": many(4, lambda: (prompt(480, 640), 160)) + many(28, lambda: (prompt(8, 24), 32)),
        "all the same length": many(32, lambda: (prompt(64, 64), 96)),
    }
    mix = [request for requests in kinds.values() for request in requests[:8]]
    rng.shuffle(mix)
    return [Workload(name, requests) for name, requests in kinds.items()] + [Workload("mix", mix)]


def save_model(directory: str) -> None:
    """Write a model of 29 million parameters with the shape of small chat models."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536,
        vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def run(model: str, workload: Workload, mode: str) -> tuple[float, list[tuple[int, ...]], dict[str, int]]:
    """Answer a workload; return seconds, tokens, and what was done about memory."""
    engine = Engine.from_pretrained(
        model, num_kv_blocks=workload.num_blocks, block_size=BLOCK_SIZE, host_kv_memory="512MiB", preemption=mode,
        max_num_waiting=256,
    )
    with engine:
        requests = [
            engine.add_request(prompt, SamplingParams(max_tokens=answer, min_tokens=answer, ignore_eos=True))
            for prompt, answer in workload.requests
        ]
        before = time.perf_counter()
        while engine.has_pending_requests():
            engine.step()
        seconds = time.perf_counter() - before
        tokens = [request.output().outputs[0].token_ids for request in requests]
        stats = engine.stats()
        return seconds, tokens, {**stats.num_preemptions_by_kind, "steps": stats.num_steps}


def measure(rounds: int) -> dict[str, dict[str, tuple[float, dict[str, int]]]]:
    """Run everything; return (fastest seconds, what was done) by workload and mode."""
    results = {}
    with TemporaryDirectory() as directory:
        save_model(directory)
        for workload in workloads():
            results[workload.name] = measure_workload(directory, workload, rounds)
    return results


def measure_workload(model: str, workload: Workload, rounds: int) -> dict[str, tuple[float, dict[str, int]]]:
    """Run one workload in every mode; return (fastest seconds, what was done) by mode."""
    best: dict[str, tuple[float, dict[str, int]]] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            seconds, answers[mode], done = run(model, workload, mode)
            if mode not in best or seconds < best[mode][0]:
                best[mode] = seconds, done
            if answers[mode] != answers[MODES[0] if number % 2 == 0 else MODES[-1]]:
                raise SystemExit(f"{workload.name}: {mode} gives other tokens")
    return best


def show(results: dict[str, dict[str, tuple[float, dict[str, int]]]]) -> None:
    """Print seconds, each relative to the best mode of its workload, and the preemptions of "auto"."""
    table = Table(title=f"seconds (times the best), pool for 1/{OVERSUBSCRIPTION} of the demand")
    for name in ("workload", *MODES, "auto did"):
        table.add_column(name)
    for workload, best in results.items():
        fastest = min(seconds for seconds, _ in best.values())
        cells = [f"{best[mode][0]:.2f} ({best[mode][0] / fastest:.2f})" for mode in MODES]
        table.add_row(workload, *cells, " ".join(f"{kind} {count}" for kind, count in best["auto"][1].items()))
    Console(width=150).print(table)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds)
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

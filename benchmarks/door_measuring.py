"""What the benchmarks of the doors have in common: the requests, the models, taking turns, the table.

Every way answers the same 64 requests, greedily, in one run of the program, and has to give the same answers as the
bare engine's step loop. They are as long as the 64 of ``peers/workloads.py``: ragged prompts of 16 to 256 tokens, and
answers of 136, which is the mean there; all the same here, because LangChain's ``batch`` gives all inputs one limit.

The ways take turns, in an order that is reversed every round, so that a machine that slows down or speeds up favours
none of them. A ratio is that of two throughputs in one round; the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pagedcore.demo_model
from pagedcore import AsyncEngine, CompletionOutput, Engine, SamplingParams
from pagedcore.demo_model.questions import demo_questions

NUM_REQUESTS = 64
NUM_TOKENS = 136
WANTED = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
SETTINGS = {"max_num_seqs": NUM_REQUESTS, "max_num_waiting": NUM_REQUESTS, "num_kv_blocks": 2048}
SIZES = {
    "40m": {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
            "intermediate_size": 1536},
    "80m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
            "intermediate_size": 2048},
    "360m": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864},
}
"""Llama models with random weights and the demo model's tokenizer, by their number of parameters; the largest has the
layers of Qwen2.5-0.5B."""


@dataclass(frozen=True)
class Run:
    """One way, once. Times in seconds."""

    answers: list[Any]
    wall_s: float
    cpu_s: dict[str, float]
    """By the name of a thread or process."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return NUM_REQUESTS * NUM_TOKENS / self.wall_s


@cache
def prompts() -> list[str]:
    """The requests: two to twenty-four questions each, of about ten tokens. Made once, before any clock runs."""
    rng = random.Random(0)
    counts = [rng.randint(2, 24) for _ in range(NUM_REQUESTS)]
    questions = iter(demo_questions(sum(counts)))
    return [" ".join(question.prompt for question in islice(questions, count)) for count in counts]


def parse(description: str) -> argparse.Namespace:
    """Read the command line, the same for all doors."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="demo", help="a directory with a model and its tokenizer")
    model.add_argument("--model-size", choices=sorted(SIZES), help="random weights of this size instead")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


@contextmanager
def model_of(given: argparse.Namespace) -> Iterator[str]:
    """Yield "demo" or a directory, made for as long as it is needed if the model has random weights."""
    if given.model_size is None:
        yield given.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, SIZES[given.model_size])
        yield folder


def write_model(folder: str, shape: dict[str, int]) -> None:
    """Write a model with random weights, and the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2048, max_position_embeddings=2048, bos_token_id=None, eos_token_id=2,
                         pad_token_id=0, tie_word_embeddings=True, dtype="bfloat16", **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(pagedcore.demo_model.__file__).parent / name, folder)


def run_bare(engine: Engine, requests: list[Any], answer_of: Callable[[CompletionOutput], Any]) -> Run:
    """Step the engine in this thread until every request is answered."""
    params = SamplingParams(**WANTED)
    start_s, cpu_s = time.perf_counter(), time.thread_time()
    taken = [engine.add_request(request, params) for request in requests]
    while engine.has_pending_requests():
        engine.step()
    wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
    answers = [answer_of(request.output().outputs[0]) for request in taken]
    for request in taken:
        request.remove()
    return Run(answers, wall_s, {"engine thread": cpu_s})


def run_bare_behind(engine: AsyncEngine, requests: list[Any], answer_of: Callable[[CompletionOutput], Any]) -> Run:
    """Do so with the engine behind a door while it has no other request, on the thread that it has anyway.

    Why: a second engine on a second thread would bring helper threads of its own, which slow down both.
    """
    return asyncio.run(engine.call(lambda bare: run_bare(bare, requests, answer_of)))


def take_turns(ways: dict[str, Callable[[], Run]], rounds: int) -> list[dict[str, Run]]:
    """Run every way once per round, after two rounds that do not count; the first way has the right answers."""
    results = []
    for number in range(-2, rounds):
        if number == 0:
            # Why: whatever the interpreter holds by now stays; a full collection would hit one way by chance.
            gc.collect()
            gc.freeze()
        names = list(ways) if number % 2 == 0 else list(ways)[::-1]
        done = {name: ways[name]() for name in names}
        if any(done[name].answers != done[next(iter(ways))].answers for name in ways):
            raise SystemExit("the ways gave different answers")
        results.append(done)
    return results[2:]


def show(title: str, given: argparse.Namespace, results: list[dict[str, Run]], load: float) -> None:
    """Print the table: throughput, its share of the first way's, and who used the processor."""
    names = list(results[0])
    kinds = list(dict.fromkeys(kind for run in results[0].values() for kind in run.cpu_s))
    table = Table(title=f"{title}, {given.model_size or Path(given.model).name}: {NUM_REQUESTS} requests of "
                        f"{NUM_TOKENS} tokens, median of {len(results)}", caption=_machine(load))
    table.add_column("")
    for label in ("tokens/s", f"of {names[0]}", "lowest to highest", *(f"{kind}, us CPU/token" for kind in kinds)):
        table.add_column(label, justify="right")
    for name in names:
        runs = [one[name] for one in results]
        shares = [one[name].tokens_per_s / one[names[0]].tokens_per_s for one in results]
        cells = [f"{statistics.median(run.tokens_per_s for run in runs):.0f}", f"{statistics.median(shares):.3f}",
                 f"{min(shares):.3f} to {max(shares):.3f}"]
        table.add_row(name, *cells, *(_cpu(runs, kind) for kind in kinds))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def _cpu(runs: list[Run], kind: str) -> str:
    if kind not in runs[0].cpu_s:
        return ""
    return f"{statistics.median(run.cpu_s[kind] for run in runs) / (NUM_REQUESTS * NUM_TOKENS) * 1e6:.1f}"


def _machine(load: float) -> str:
    names = ("pagedcore", "torch", "langchain-core", "bentoml", "starlette", "uvicorn")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    return (f"{os.cpu_count()} cores, load average {load:.1f} before and {os.getloadavg()[0]:.1f} after; "
            f"CPython {platform.python_version()}, {packages}")

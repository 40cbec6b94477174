"""Sixteen conversations of twenty turns, interleaved, on a pool that holds four of them: seconds per turn.

    python benchmarks/conversation.py [--turns 20] [--json FILE]

Three ways to run the same conversations: with a host tier behind the pool, with the prefix cache of the pool alone,
and computing the whole history again in every turn. All three have to give the same tokens, or the script stops. One
turn of every conversation is asked at a time, so that between two turns of one all others want the memory too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memory_pressure import BLOCK_SIZE, save_model
from rich.console import Console
from rich.table import Table

from pagedcore import Engine, SamplingParams

NUM_CONVERSATIONS = 16
NUM_RESIDENT = 4
QUESTION_TOKENS, ANSWER_TOKENS = 24, 16
WAYS: dict[str, dict[str, Any]] = {
    "host tier": {"host_kv_memory": "1GiB"},
    "prefix cache": {},
    "recompute": {"enable_prefix_caching": False},
}


@dataclass(frozen=True)
class Outcome:
    """Seconds of each turn, all conversations together, and everything that was said."""

    seconds: list[float]
    histories: list[list[int]]
    computed_tokens: int


def converse(model: str, num_turns: int, settings: dict[str, Any]) -> Outcome:
    """Hold all conversations."""
    longest = num_turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    num_blocks = NUM_RESIDENT * -(-longest // BLOCK_SIZE)
    rng = random.Random(0)
    histories: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    params = SamplingParams(max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS, ignore_eos=True)
    seconds = []
    with Engine.from_pretrained(model, num_kv_blocks=num_blocks, block_size=BLOCK_SIZE, **settings) as engine:
        for _ in range(num_turns):
            for history in histories:
                history += [rng.randrange(4000) for _ in range(QUESTION_TOKENS)]
            before = time.perf_counter()
            requests = [engine.add_request(history, params) for history in histories]
            while engine.has_pending_requests():
                engine.step()
            seconds.append(time.perf_counter() - before)
            for history, request in zip(histories, requests, strict=True):
                history += request.output().outputs[0].token_ids
                request.remove()
        return Outcome(seconds, histories, engine.stats().num_computed_tokens)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        save_model(directory)
        converse(directory, 2, {})  # Why: kernels are compiled before the clock runs
        outcomes = {way: converse(directory, arguments.turns, settings) for way, settings in WAYS.items()}
    if any(one.histories != outcomes["recompute"].histories for one in outcomes.values()):
        raise SystemExit("the ways give other tokens")
    table = Table(title=f"{NUM_CONVERSATIONS} conversations, pool for {NUM_RESIDENT}: ms per turn of one conversation")
    for name in ("way", "turns 1-5", "last 5 turns", "all", "tokens computed", "speed-up"):
        table.add_column(name)
    slowest = sum(outcomes["recompute"].seconds)
    for way, one in outcomes.items():
        parts = (one.seconds[:5], one.seconds[-5:], one.seconds)
        cells = [f"{sum(part) / len(part) / NUM_CONVERSATIONS * 1e3:.1f}" for part in parts]
        table.add_row(way, *cells, str(one.computed_tokens), f"{slowest / sum(one.seconds):.2f} x")
    Console(width=120).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({way: one.seconds for way, one in outcomes.items()}, indent=1))


if __name__ == "__main__":
    main()

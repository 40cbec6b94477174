"""Sixteen conversations of twenty turns, interleaved, on a pool that holds four of them: seconds per turn.

    python benchmarks/conversation.py [--minutes 7] [--rounds 5] [--turns 20] [--out TABLE.md] [--json FILE]

Three ways to hold the same conversations: with a host tier behind the pool, with the prefix cache of the pool alone,
and computing the whole history again in every turn. They run in turn, as many rounds as there is time for, and are
compared within rounds; all have to give the same tokens, or the script stops. One turn of every conversation is asked
at a time, so that between two turns of one all others want the memory too. Tokens computed and bytes moved do not
depend on the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from interleaved import Budget, markdown, median_and_spread, ratios, turns
from memory_pressure import BLOCK_SIZE, MIB, save_model

from pagedcore import Engine, SamplingParams

NUM_CONVERSATIONS = 16
NUM_RESIDENT = 4
QUESTION_TOKENS, ANSWER_TOKENS = 24, 16
BASELINE = "recompute everything"
WAYS: dict[str, dict[str, Any]] = {
    "host tier": {"host_kv_memory": "1GiB"},
    "prefix cache": {},
    BASELINE: {"enable_prefix_caching": False},
}


@dataclass(frozen=True)
class Outcome:
    """Seconds of each turn, all conversations together, everything that was said, and what was done for it."""

    seconds: list[float]
    histories: list[list[int]]
    num_steps: int
    num_tokens: int
    """Positions computed."""
    moved_bytes: int


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
        stats = engine.stats()
        moved_bytes = stats.swapped_out_bytes + stats.swapped_in_bytes
        return Outcome(seconds, histories, stats.num_steps, stats.num_computed_tokens, moved_bytes)


def measure(num_rounds: int, minutes: float, num_turns: int) -> dict[str, list[Outcome]]:
    """Hold the conversations in every way, round by round."""
    outcomes: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    said: list[list[int]] | None = None
    with TemporaryDirectory() as directory:
        save_model(directory)
        converse(directory, 2, {})  # Why: kernels are compiled before the clock runs
        budget = Budget(minutes)
        for number, ways in enumerate(turns(list(WAYS), num_rounds)):
            if not budget.has_time_for_another(number):
                break
            for way in ways:
                one = converse(directory, num_turns, WAYS[way])
                said = said if said is not None else one.histories
                if one.histories != said:
                    raise SystemExit(f"{way} gives other tokens")
                outcomes[way].append(replace(one, histories=[]))
    return outcomes


def compare(outcomes: dict[str, list[Outcome]]) -> str:
    """Write milliseconds per turn of one conversation, what was done, and the speed-up within rounds."""
    rows = []
    slowest = [sum(one.seconds) for one in outcomes[BASELINE]]
    for way, some in outcomes.items():
        parts = [[one.seconds[:5] for one in some], [one.seconds[-5:] for one in some], [one.seconds for one in some]]
        cells = [
            f"{statistics.median(sum(part) / len(part) for part in of) / NUM_CONVERSATIONS * 1e3:.1f}" for of in parts
        ]
        done = [str(some[0].num_steps), str(some[0].num_tokens), f"{some[0].moved_bytes / MIB:.0f}"]
        speed_up = median_and_spread(ratios(slowest, [sum(one.seconds) for one in some]), "{:.2f}".format)
        rows.append([way, *cells, *done, speed_up])
    header = ["way", "first 5 turns, ms", "last 5, ms", "all, ms", "steps", "tokens computed", "MiB moved", "speed-up"]
    return markdown(header, rows)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcomes = measure(arguments.rounds, arguments.minutes, arguments.turns)
    about = (
        f"{len(outcomes[BASELINE])} rounds; {NUM_CONVERSATIONS} conversations of {arguments.turns} turns, pool for "
        f"{NUM_RESIDENT}; ms per turn of one conversation. Speed-up: median (smallest - largest) within rounds."
    )
    text = f"{about}\n\n{compare(outcomes)}"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.json is not None:
        figures = {way: [asdict(one) for one in some] for way, some in outcomes.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

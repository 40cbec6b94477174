"""What a request's parameters cost: the first 16 requests of W1 with them and without, in turns, in one engine.

    python benchmarks/sampling.py [--shape qwen05b] [--dtype bfloat16] [--rounds 20]

Each round computes the same requests greedily, with five log-probabilities, with temperature and top-p, and with
penalties beside these, one place further than the round before. Printed are medians of tokens per second and, of the
ratio of times within a round, the median and its interval of 95 %. All ways generate as many tokens. Run it with
nothing else on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Final

from interleaved import interval, markdown, ratios, turns

from pagedcore import Engine, SamplingParams
from pagedcore.bench.workloads import make_workload, random_model

_DRAWN: Final[dict[str, Any]] = {"temperature": 0.7, "top_p": 0.8}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "five log-probabilities": {"logprobs": 5},
    "temperature, top-p": _DRAWN,
    "and two penalties": {**_DRAWN, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
BESIDE: Final = {"five log-probabilities": "greedy", "temperature, top-p": "greedy",
                 "and two penalties": "temperature, top-p"}  # fmt: skip
NUM_REQUESTS: Final = 16
_CONTEXT: Final = 1024


def measure(engine: Engine, way: str) -> float:
    """Return the seconds that the requests took."""
    work = make_workload("w1", _CONTEXT)
    for number, (prompt, length) in enumerate(zip(work.prompts, work.num_outputs, strict=True)):
        if number < NUM_REQUESTS:
            engine.add_request(list(prompt), SamplingParams(max_tokens=length, ignore_eos=True, seed=number,
                                                            **WAYS[way]))  # fmt: skip
    begin = time.perf_counter()
    while engine.has_pending_requests():
        engine.step()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen05b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with Engine.from_pretrained(
        random_model(given.shape, given.dtype), dtype=given.dtype, max_num_seqs=NUM_REQUESTS, block_size=16,
        num_kv_blocks=NUM_REQUESTS * 33, enable_prefix_caching=False, num_threads=2,
    ) as engine:  # fmt: skip
        for way in WAYS:
            measure(engine, way)
        for ways in turns(list(WAYS), given.rounds):
            for way in ways:
                seconds[way].append(measure(engine, way))
    num_tokens, table = sum(make_workload("w1", _CONTEXT).num_outputs[:NUM_REQUESTS]), list[list[str]]()
    for way, times in seconds.items():
        row = [way, f"{num_tokens / statistics.median(times):.0f}", "", ""]
        if other := BESIDE.get(way):
            pairs = ratios(times, seconds[other])
            low, high = interval(pairs)
            row[2:] = other, f"{statistics.median(pairs):.3f} ({low:.3f} to {high:.3f})"
        table.append(row)
    print(markdown(["parameters", "tokens/s", "beside", f"time, {given.rounds} pairs"], table))


if __name__ == "__main__":
    main()

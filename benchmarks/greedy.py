"""Greedy steps that write no logits, against the same steps of the same engine with all logits written and read.

    python benchmarks/greedy.py --model MODEL_DIR [--dtype bfloat16] [--quantization w8a8] [--rows 1,8,56] [--pairs 40]

Requests decode side by side; two steps choose tokens in the output layer, the next two by logits, and so on, each pair
in the other order than the one before. Printed are the medians and, of the ratio of a pair, the median and its interval
of 95 % (from the order of the ratios). Takes a model of ``peers/make_model.py``, or "demo". Run it with nothing else on
the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from interleaved import interval, markdown, ratios

from pagedcore import Engine, SamplingParams

PROMPT_TOKENS, STEPS = 32, 2


def measure(engine: Engine, num_rows: int, num_pairs: int) -> tuple[list[float], list[float]]:
    """Return ms a step without logits and with them, by pairs."""
    model: Any = engine._runner.backend
    output = model._decoder._output
    assert model.decodes_greedily, "this model writes logits in any case"
    length = 8 + 2 * STEPS * (num_pairs + 1)
    params = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True)
    rng = np.random.default_rng(num_rows)
    for _ in range(num_rows):
        engine.add_request(rng.integers(3, model.vocab_size // 2, PROMPT_TOKENS).tolist(), params)
    for _ in range(4):
        engine.step()
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_pairs + 1):
        for with_logits in (number % 2 == 0, number % 2 == 1):
            output.can_pick = not with_logits
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            times[with_logits].append((time.perf_counter() - begin) / STEPS * 1e3)
    output.can_pick = True
    while engine.has_pending_requests():
        engine.step()
    # Why: the first steps of each way record their kernel calls.
    return times[False][1:], times[True][1:]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", default="1,8,56")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    numbers, table = [int(number) for number in given.rows.split(",")], list[list[str]]()
    with Engine.from_pretrained(
        given.model, dtype=given.dtype, quantization=given.quantization, max_num_seqs=max(numbers), block_size=16,
        num_kv_blocks=max(numbers) * (4 + (PROMPT_TOKENS + 8 + 2 * STEPS * (given.pairs + 1)) // 16),
        num_threads=given.threads, enable_prefix_caching=False,
    ) as engine:  # fmt: skip
        for num_rows in numbers:
            without, with_logits = measure(engine, num_rows, given.pairs)
            pairs = ratios(without, with_logits)
            low, high = interval(pairs)
            ms = [f"{statistics.median(times):.2f}" for times in (without, with_logits)]
            ratio = f"{statistics.median(pairs):.3f} ({low:.3f} to {high:.3f})"
            table.append([str(num_rows), *ms, ratio, str(len(pairs))])
    print(markdown(["rows", "ms a step", "with logits", "ratio", "pairs"], table))


if __name__ == "__main__":
    main()

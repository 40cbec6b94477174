"""Steps whose rows have LoRA adapters, against the same steps of the same engine without.

    python benchmarks/lora.py --model MODEL_DIR [--dtype bfloat16] [--quantization w4a16] [--rank 16] [--pairs 40]

32 requests decode greedily side by side. A step of one kind is followed by one of 32 rows without adapters, in the
other order the next time: 4 rows with an adapter each and 28 without, all rows with 16 adapters, and no row while 16
adapters are loaded, against an engine that has none. The last line is a step of 16 adapters against 16 steps of 2 rows
each, which is what 16 engines with merged weights take in turns. Adapters are of all linear layers of attention and
MLP, in random numbers of the format --of. Printed are medians and, of the ratio of a pair, the median and its interval
of 95 %. Takes a model of ``peers/make_model.py``, or "demo". Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import interval, markdown, ratios

from pagedcore import Engine, SamplingParams
from support.lora_directories import random_matrices, write_adapter

ROWS, ADAPTERS, PROMPT_TOKENS, STEPS = 32, 16, 32, 2
KINDS = {
    f"{ROWS - 4} rows without, 4 rows of 4 adapters": np.array([0] * (ROWS - 4) + [1, 2, 3, 4], np.int32),
    f"{ROWS} rows of {ADAPTERS} adapters": np.array(np.arange(ROWS) % ADAPTERS + 1, np.int32),
}


class Slots:
    """Says which slots the rows of the next steps of an engine have."""

    def __init__(self, engine: Engine, rank: int, dtype: torch.dtype) -> None:
        """Load the adapters."""
        model: Any = engine._runner.backend
        self.of_rows: np.ndarray[Any, Any] | None = None
        model.use_adapters(ADAPTERS, rank)
        layers = model._adapted._model.layers
        sizes = {name: (one.num_inputs, one.end - one.begin) for name, one in layers.items()}
        with tempfile.TemporaryDirectory() as folder:
            for slot in range(1, ADAPTERS + 1):
                directory = write_adapter(Path(folder), random_matrices(sizes, rank, slot, dtype), rank)
                adapter = model.read_adapter(str(directory))
                model.put_adapter(slot, adapter)
        print(f"{adapter.num_bytes / 2**20:.1f} MiB for each adapter")
        compute = model.forward_greedily

        def with_slots(batch: Any, barred: Any) -> Any:
            return compute(dataclasses.replace(batch, adapter_slots=self.of_rows), barred)

        model.forward_greedily = with_slots


def start(engine: Engine, num_rows: int, length: int) -> None:
    """Let so many requests decode."""
    params = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True)
    rng = np.random.default_rng(num_rows)
    for _ in range(num_rows):
        model: Any = engine._runner.backend
        engine.add_request(rng.integers(3, model.vocab_size // 2, PROMPT_TOKENS).tolist(), params)
    for _ in range(4):
        engine.step()


def pairs_of(some: Callable[[], object], others: Callable[[], object], num_pairs: int) -> tuple[list[float], ...]:
    """Return ms of either, by pairs; the first pair, which records kernel calls, is left out."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_pairs + 1):
        for is_first in (number % 2 == 0, number % 2 == 1):
            begin = time.perf_counter()
            (some if is_first else others)()
            times[is_first].append((time.perf_counter() - begin) * 1e3)
    return times[True][1:], times[False][1:]


def steps(engine: Engine, slots: Slots | None, of_rows: np.ndarray[Any, Any] | None, count: int = STEPS) -> None:
    """Make steps of an engine, with these slots of the rows."""
    if slots is not None:
        slots.of_rows = of_rows
    for _ in range(count):
        engine.step()


def line(name: str, some: list[float], others: list[float]) -> list[str]:
    """Return a line of the table: how fast the first is, the second being 1."""
    of_pairs = ratios(others, some)
    low, high = interval(of_pairs)
    ms = [f"{statistics.median(times) / STEPS:.2f}" for times in (some, others)]
    return [name, *ms, f"{statistics.median(of_pairs):.3f} ({low:.3f} to {high:.3f})"]


def drain(engine: Engine) -> None:
    """End all requests."""
    while engine.has_pending_requests():
        engine.step()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--of", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    length = 16 + 2 * STEPS * (given.pairs + 1)
    settings: dict[str, Any] = {
        "dtype": given.dtype, "quantization": given.quantization, "max_num_seqs": ROWS, "block_size": 16,
        "num_kv_blocks": ROWS * (4 + (PROMPT_TOKENS + length) // 16), "num_threads": given.threads,
        "enable_prefix_caching": False,
    }  # fmt: skip
    table = list[list[str]]()
    with Engine.from_pretrained(given.model, **settings) as engine:
        slots = Slots(engine, given.rank, getattr(torch, given.of))
        for name, of_rows in KINDS.items():
            start(engine, ROWS, length)
            some, others = pairs_of(
                lambda of_rows=of_rows: steps(engine, slots, of_rows), lambda: steps(engine, slots, None), given.pairs)
            table.append(line(name, some, others))
            drain(engine)
        with Engine.from_pretrained(given.model, **settings) as bare:
            for one in (engine, bare):
                start(one, ROWS, length)
            some, others = pairs_of(
                lambda: steps(engine, slots, None), lambda: steps(bare, None, None), given.pairs)
            table.append(line(f"{ROWS} rows without, {ADAPTERS} adapters loaded", some, others))
            for one in (engine, bare):
                drain(one)
        start(engine, ROWS // ADAPTERS, 16 + ADAPTERS * STEPS * given.pairs)
        alone = [time_of(lambda: steps(engine, slots, None, ADAPTERS * STEPS)) for _ in range(given.pairs // 2)]
        whole = statistics.median(alone)
        ms = float(table[1][1])
        table.append([f"{ROWS} rows of {ADAPTERS} adapters, against merged engines in turns", f"{ms:.2f}",
                      f"{whole / STEPS:.2f}", f"{whole / STEPS / ms:.2f}"])  # fmt: skip
        drain(engine)
    print(markdown(["rows", "ms a step", "ms of the others", "speed"], table))


def time_of(work: Callable[[], object]) -> float:
    """Return ms that something takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    main()

"""How long the host takes to cut a step's attention into work for a GPU: python benchmarks/cuda_plan.py

Needs no GPU. Prints the best of many runs, for decode batches and a mixed one.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from pagedcore_kernels.cuda.attention.work_lists import Visibility, make_work_lists
from pagedcore_kernels.step_plan import StepPlan

NUM_CTAS = 264
BLOCK = 16


def step_plan(tokens: list[int], past: list[int]) -> StepPlan:
    """A checked plan of rows of so many tokens after so many positions."""
    lengths = np.array(tokens, np.int64)
    kv_lens = lengths + np.array(past, np.int64)
    return StepPlan(SimpleNamespace(  # type: ignore[arg-type]
        slot_mapping=np.full(int(lengths.sum()), -1, np.int64),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), kv_lens=kv_lens,
        block_tables=np.zeros((len(tokens), -(-int(kv_lens.max()) // BLOCK)), np.int32),
    ), 1, BLOCK)


def best_us(plan: StepPlan, visibility: Visibility, kv_heads: int) -> float:
    """Microseconds of the fastest of 2,000 runs."""
    best = float("inf")
    for _ in range(2000):
        start = time.perf_counter()
        make_work_lists(plan, visibility, kv_heads, NUM_CTAS)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    """Time three batches of 256 sequences and a small one."""
    random = np.random.default_rng(0)
    contexts = random.integers(100, 8000, 256).tolist()
    for name, tokens, past in (
        ("256 decode rows, 100 to 8,000 tokens", [1] * 256, contexts),
        ("8 decode rows, 100 to 8,000 tokens", [1] * 8, contexts[:8]),
        ("240 decode rows and 16 chunks of 512", [1] * 240 + [512] * 16, contexts),
    ):
        for visibility in (Visibility(4), Visibility(4, window=1024)):
            print(f"{name}, window {visibility.window}: {best_us(step_plan(tokens, past), visibility, 8):.0f} us")


if __name__ == "__main__":
    main()

"""How long the host takes to plan a step for a GPU: python benchmarks/cuda_plan.py

Needs no GPU. Prints the best of many runs: of a step's arrays being made of its rows, of all that follows until they
are in the memory that the GPU copies from (checks, work lists, filling), and of the work lists alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from pagedcore.execution.ragged_batch import RaggedBatch, TableStack, build_batch
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.reservation import Demand
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence
from pagedcore_kernels.cuda.attention.work_lists import Visibility, make_work_lists
from pagedcore_kernels.cuda.layer_plans import LayerPlans
from pagedcore_kernels.layout import LayerShape, TokenMajorLayout
from pagedcore_kernels.step_plan import StepPlan

NUM_CTAS = 264
BLOCK = 16
KV_HEADS = 8
RUNS = 2000
STEPS = 150


def step_plan(tokens: list[int], past: list[int]) -> StepPlan:
    """A checked plan of rows of so many tokens after so many positions."""
    lengths = np.array(tokens, np.int64)
    kv_lens = lengths + np.array(past, np.int64)
    return StepPlan(SimpleNamespace(  # type: ignore[arg-type]
        slot_mapping=np.full(int(lengths.sum()), -1, np.int64),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), kv_lens=kv_lens,
        block_tables=np.zeros((len(tokens), -(-int(kv_lens.max()) // BLOCK)), np.int32),
    ), 1, BLOCK)


class Decoding:
    """Sequences that decode, step after step."""

    def __init__(self, contexts: list[int]) -> None:
        num_blocks = sum(-(-one // BLOCK) + STEPS for one in contexts)
        self.manager, self.stack = BlockManager(num_blocks, BLOCK), TableStack()
        self.sequences = [Sequence(number, [7] * (length + 1), SamplingParams(), max_tokens=STEPS, seed=0)
                          for number, length in enumerate(contexts)]
        for sequence in self.sequences:
            sequence.num_computed_tokens = len(sequence.token_ids) - 1

    def next_step(self) -> list[ScheduledRow]:
        """Every sequence has got a token; return the rows of the next step, whose blocks are reserved."""
        rows = []
        for sequence in self.sequences:
            sequence.token_ids.append(7)
            sequence.num_computed_tokens += 1
            reservation = self.manager.reserve([Demand(sequence.sequence_id, len(sequence.token_ids))])
            assert reservation is not None
            reservation.commit()
            rows.append(ScheduledRow(sequence, len(sequence.token_ids) - 1, 1))
        return rows

    def batch(self, rows: list[ScheduledRow]) -> RaggedBatch:
        """The arrays of a step."""
        return build_batch(rows, self.manager, stack=self.stack)


def plans(num_blocks: int) -> LayerPlans:
    """What plans steps over a pool of so many blocks, whose memory is not there, with one kind of layers."""
    layout = TokenMajorLayout(BLOCK, torch.bfloat16, (LayerShape(KV_HEADS, 128, 128),))
    made = LayerPlans(layout, torch.empty(1, dtype=torch.uint8).expand(num_blocks, layout.block_bytes), NUM_CTAS)
    first = SimpleNamespace(
        slot_mapping=np.zeros(1, np.int64), query_start=np.array([0, 1]), kv_lens=np.ones(1, np.int64),
        block_tables=np.zeros((1, 1), np.int32))
    made.work(made.begin(first), Visibility(4), layout.layers[0])  # type: ignore[arg-type]
    return made


def best_us(run: Callable[[], object], runs: int = RUNS) -> float:
    """Microseconds of the fastest of many runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def time_decode(contexts: list[int]) -> tuple[float, float]:
    """Microseconds of making the arrays of a decode step, and of planning it; the best of steps one after the other."""
    decoding = Decoding(contexts)
    layer_plans = plans(decoding.manager.num_blocks)
    made = planned = float("inf")
    for _ in range(STEPS):
        rows = decoding.next_step()
        start = time.perf_counter()
        batch = decoding.batch(rows)
        made = min(made, (time.perf_counter() - start) * 1e6)
        numbers = [batch.token_ids, batch.positions]
        planned = min(planned, best_us(lambda: layer_plans.begin(batch, numbers), 10))  # noqa: B023
    return made, planned


def main() -> None:
    """Time decode steps, and the work lists of three batches of 256 sequences and a small one."""
    random = np.random.default_rng(0)
    contexts = random.integers(100, 8000, 256).tolist()
    for count in (256, 64, 8):
        made, planned = time_decode(contexts[:count])
        print(f"{count} decode rows, 100 to 8,000 tokens: arrays {made:.0f} us, plan {planned:.0f} us")
    for name, tokens, past in (
        ("256 decode rows, 100 to 8,000 tokens", [1] * 256, contexts),
        ("8 decode rows, 100 to 8,000 tokens", [1] * 8, contexts[:8]),
        ("240 decode rows and 16 chunks of 512", [1] * 240 + [512] * 16, contexts),
    ):
        for visibility in (Visibility(4), Visibility(4, window=1024)):
            plan = step_plan(tokens, past)
            lists = best_us(lambda: make_work_lists(plan, visibility, KV_HEADS, NUM_CTAS))  # noqa: B023
            print(f"{name}, window {visibility.window}: work lists {lists:.0f} us")


if __name__ == "__main__":
    main()

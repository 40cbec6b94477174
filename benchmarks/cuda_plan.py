"""How long the host takes to plan a step for a GPU: python benchmarks/cuda_plan.py

Needs no GPU. Prints the best of many steps: of a step's arrays being made of its rows; of all that follows until they
are in the memory that the GPU copies from (checks, work lists, filling), the first time in a step, and at once again,
when caches are warm; and the best of many runs of the work lists alone.
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
        self.sequences, self._number = list[Sequence](), 0
        for length in contexts:
            self.join(length)

    def join(self, length: int) -> None:
        """Let a sequence of so many tokens come."""
        self._number += 1
        self.sequences.append(Sequence(self._number, [7] * (length + 1), SamplingParams(), max_tokens=STEPS, seed=0))
        self.sequences[-1].num_computed_tokens = length

    def exchange(self, place: int) -> None:
        """Let a sequence go, and one that is as long come behind all others."""
        gone = self.sequences.pop(place)
        self.manager.free_blocks(gone)
        self.join(len(gone.token_ids))

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
    pool = torch.empty(1, dtype=torch.uint8, device="meta").expand(num_blocks, layout.block_bytes)
    made = LayerPlans(layout, pool, NUM_CTAS)
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


def time_decode(contexts: list[int], changes: bool) -> tuple[float, float, float]:
    """Microseconds of making the arrays of a decode step, of planning it in a frame, and of planning it again; the best
    of steps one after the other. ``changes``: in each, one sequence goes and one comes.
    """
    decoding = Decoding(contexts)
    layer_plans = plans(decoding.manager.num_blocks)
    frame = layer_plans.new_frame(256, 8192 // BLOCK)
    made = planned = again = float("inf")
    for step in range(STEPS):
        if changes:
            decoding.exchange(step % len(contexts))
        rows = decoding.next_step()
        begin = time.perf_counter()
        batch = decoding.batch(rows)
        middle = time.perf_counter()
        numbers = [batch.token_ids, batch.positions]
        layer_plans.begin(batch, numbers, frame)
        end = time.perf_counter()
        made, planned = min(made, middle - begin), min(planned, end - middle)
        again = min(again, best_us(lambda: layer_plans.begin(batch, numbers, frame), 10))  # noqa: B023
    return made * 1e6, planned * 1e6, again


def main() -> None:
    """Time decode steps, and the work lists of three batches of 256 sequences and a small one."""
    random = np.random.default_rng(0)
    contexts = random.integers(100, 8000, 256).tolist()
    torch.set_num_threads(1)
    for count, changes in ((256, False), (256, True), (64, False), (8, False)):
        made, planned, again = time_decode(contexts[:count], changes)
        print(f"{count} decode rows, 100 to 8,000 tokens{', one of them new' * changes}: arrays {made:.0f} us, plan "
              f"{planned:.0f} us, again {again:.0f} us")
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

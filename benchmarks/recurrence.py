"""Recurrences of hybrid models on the CPU against the same formulas in torch, in the same run.

    python benchmarks/recurrence.py [--threads 1] [--repeats 20]

Each case is one layer of a model: so many rows of so many tokens each. Decode reads a state of every row and writes
another; its bound is memory, so the column "of copy" says how fast the states went by beside ``copy_`` of as many
bytes in the same turns. A prompt keeps its state in the cache; its bound is arithmetic, so there is the time of a head
and position. Torch is given the recurrence as a loop over positions, all rows and heads at once. Figures are minima
over alternating repeats. With one thread the CPU time of that thread counts instead of the wall clock, so that a busy
machine changes little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from pagedcore_kernels.cpu.recurrence.states import RecurrentStates
from pagedcore_kernels.cpu.runtime.threads import Computing
from pagedcore_kernels.state_layout import StateLayout, StatePart

Action = Callable[[], object]
ROWS = ((1, 1), (8, 1), (32, 1), (1, 512))
"""Rows, and tokens of each."""


@dataclass(frozen=True)
class Layer:
    """A recurrence of a model: H heads whose keys have G heads of N elements, values of P."""

    name: str
    operator: str
    heads: int
    groups: int
    key_size: int
    value_size: int

    @property
    def part(self) -> StatePart:
        """What it keeps of a sequence."""
        return StatePart((self.heads, self.key_size, self.value_size), torch.float32)

    def inputs(self, tokens: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Queries and keys [T, G, N] and values [T, H, P] in bfloat16; rates and factors [T, H]."""
        sizes = (self.groups, self.key_size), (self.groups, self.key_size), (self.heads, self.value_size)
        rows = [torch.randn(tokens, *size).bfloat16() for size in sizes]
        return rows, -torch.rand(tokens, self.heads) / 10, torch.rand(tokens, self.heads)


LAYERS = (
    Layer("gated delta rule of Qwen3-Next", "delta_rule", 32, 16, 128, 128),
    Layer("Mamba 2 of Granite 4 H small", "mamba2", 128, 1, 128, 64),
)


def ours(layer: Layer, num_rows: int, length: int) -> Action:
    """Our kernel, from one half of a pool of states to the other."""
    layout = StateLayout(((layer.part,),))
    pool = layout.allocate(2 * num_rows).zero_()
    states = RecurrentStates(layout, pool)
    reads = np.arange(num_rows)
    states.plan(SimpleNamespace(
        token_ids=np.zeros(num_rows * length, np.int64), query_start=np.arange(num_rows + 1) * length,
        state_reads=reads, state_writes=reads + num_rows,
    ))  # fmt: skip
    (query, key, value), rates, factors = layer.inputs(num_rows * length)
    if layer.operator == "delta_rule":
        return lambda: states.delta_rule(0, 0, query, key, value, rates, factors, scale=0.1, normalizes=True)
    of_heads = torch.rand(layer.heads)
    return lambda: states.mamba2(0, 0, value, factors, -of_heads, key, query, of_heads)


def theirs(layer: Layer, num_rows: int, length: int) -> Action:
    """The formula in torch, position by position, over all rows."""
    rows, rates, factors = layer.inputs(num_rows * length)
    given = [x.view(num_rows, length, *x.shape[1:]) for x in (*rows, rates, factors)]
    begin = torch.zeros(num_rows, *layer.part.shape)
    corrects = layer.operator == "delta_rule"

    def action() -> torch.Tensor:
        query, key, value, rate, factor = (x.float() for x in given)
        query, key = (x.repeat_interleave(layer.heads // layer.groups, 2) for x in (query, key))
        if corrects:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        state, outputs = begin, []
        for t in range(length):
            state = state * rate[:, t].exp()[..., None, None]
            update = value[:, t]
            if corrects:
                update = update - (state * key[:, t, :, :, None]).sum(-2)
            state = state + key[:, t, :, :, None] * (factor[:, t, :, None] * update)[:, :, None]
            outputs.append((state * query[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, 1)

    return action


def copying(num_bytes: int) -> Action:
    """Torch's copy of so many bytes."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def fastest(actions: list[Action], repeats: int, *, is_alone: bool) -> list[float]:
    """Microseconds of each action: the minimum over repeats taken in turn, after one that is not counted."""
    clock = time.thread_time if is_alone else time.perf_counter
    best = [float("inf")] * len(actions)
    for turn in range(repeats + 1):
        for i, action in enumerate(actions):
            start = clock()
            action()
            if turn:
                best[i] = min(best[i], clock() - start)
    return [1e6 * seconds for seconds in best]


def main() -> None:
    """Measure all cases and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads; microseconds of a layer, and of a head and position")
    numbers = f"{'rows':>5}{'tokens':>7}{'ours':>9}{'torch':>10}{'ratio':>7}{'head':>8}{'GB/s':>7}{'of copy':>9}"
    print(f"{'layer':<31}{numbers}")
    with torch.inference_mode(), Computing(arguments.threads):
        for layer in LAYERS:
            for num_rows, length in ROWS:
                num_bytes = num_rows * layer.part.num_bytes
                actions = [ours(layer, num_rows, length), theirs(layer, num_rows, length), copying(num_bytes)]
                repeats = arguments.repeats if length == 1 else 3
                mine, best, copied = fastest(actions, repeats, is_alone=arguments.threads == 1)
                line = f"{layer.name:<31}{num_rows:>5}{length:>7}{mine:>9.0f}{best:>10.0f}{best / mine:>6.0f}x"
                line += f"{mine / (num_rows * length * layer.heads):>8.2f}"
                if length == 1:
                    line += f"{2e-3 * num_bytes / mine:>7.1f}{copied / mine:>9.2f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()

"""Paged attention on the CPU against torch's scaled_dot_product_attention, in the same run.

    python benchmarks/attention_cpu.py [--threads 2] [--repeats 20]

Ours reads K and V through block tables in random order. Torch gets them gathered into contiguous tensors before its
clock starts, and the best of three ways to call it counts: ``enable_gqa``, K and V expanded to all query heads
beforehand, and, for decode, the heads of a group packed as queries of one head. The last column adds the gather
that a paged engine without a kernel would have to do first. Figures are minima over alternating repeats. With one
thread the CPU time of that thread counts instead of the wall clock, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.layout import KVLayout, LayerShape, ScaledKVLayout

Action = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``context`` tokens, the last ``new`` of which are queries."""

    batch: int
    new: int
    context: int
    group: int
    kv_heads: int
    head_size: int

    def __str__(self) -> str:
        kind = "decode " if self.new == 1 else "prefill"
        heads = f"{self.group * self.kv_heads}/{self.kv_heads} heads x {self.head_size}"
        return f"{kind} {self.batch:>2} x {self.new:>3} of {self.context:>4}, {heads}"


CASES = (
    Case(32, 1, 256, 7, 2, 64),
    Case(32, 1, 1024, 7, 2, 64),
    Case(8, 1, 1024, 4, 8, 128),
    Case(8, 1, 1024, 1, 16, 64),
    Case(1, 512, 512, 7, 2, 64),
    Case(4, 64, 1024, 7, 2, 64),
    Case(1, 512, 512, 4, 8, 128),
)


def ours(
    case: Case, dtype: torch.dtype, *, is_int8: bool = False
) -> tuple[Action, KVLayout | ScaledKVLayout, torch.Tensor, torch.Tensor]:
    """Our attention of the case, the layout, pool and block ids [batch, blocks] it reads.

    ``dtype`` is the model's, and that of KV unless it is int8.
    """
    size = NumbaCpuAttention.preferred_block_size(dtype)
    shapes = (LayerShape(case.kv_heads, case.head_size, case.head_size),)
    layout = ScaledKVLayout(size, torch.int8, shapes, dtype) if is_int8 else KVLayout(size, dtype, shapes)
    per_row = -(-case.context // size)
    pool = layout.allocate(case.batch * per_row)
    for view in layout.key_view(pool, 0), layout.value_view(pool, 0):
        view.copy_(torch.randint(-127, 128, view.shape) if is_int8 else torch.randn(view.shape))
    if isinstance(layout, ScaledKVLayout):
        layout.key_scales(pool, 0).fill_(1 / 64)
        layout.value_scales(pool, 0).fill_(1 / 64)
    tables = np.random.default_rng(0).permutation(case.batch * per_row).astype(np.int32).reshape(case.batch, per_row)
    backend = NumbaCpuAttention(layout, pool)
    tokens = case.batch * case.new
    backend.plan(
        SimpleNamespace(
            slot_mapping=np.full(tokens, -1),
            query_start=np.arange(case.batch + 1) * case.new,
            kv_lens=np.full(case.batch, case.context),
            block_tables=tables,
        )
    )
    query = torch.randn(tokens, case.group * case.kv_heads, case.head_size).to(dtype)
    action = lambda: backend.attend(0, query, scale=case.head_size**-0.5)  # noqa: E731
    return action, layout, pool, torch.from_numpy(tables).long()


def gather(layout: KVLayout, pool: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous K and V [batch, KVH, context, D] of all rows."""
    key = layout.key_view(pool, 0)[tables].permute(0, 2, 1, 4, 3).flatten(2, 3).contiguous()
    value = layout.value_view(pool, 0)[tables].permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    return key, value


def theirs(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[Action]:
    """Ways to compute the case with torch."""
    heads = case.group * case.kv_heads
    query = torch.randn(case.batch, heads, case.new, case.head_size).to(key.dtype)
    is_causal = case.new == case.context
    mask = None
    if case.new > 1 and not is_causal:
        mask = torch.ones(case.new, case.context, dtype=torch.bool).tril(case.context - case.new)
    wide_key, wide_value = (t.repeat_interleave(case.group, 1) for t in (key, value))
    ways: list[Action] = [
        lambda: sdpa(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True),
        lambda: sdpa(query, wide_key, wide_value, attn_mask=mask, is_causal=is_causal),
    ]
    if case.new == 1:
        packed = query.view(case.batch, case.kv_heads, case.group, case.head_size)
        ways.append(lambda: sdpa(packed, key, value))
    return ways


def fastest(actions: list[Action], repeats: int) -> list[float]:
    """Milliseconds of each action: the minimum over repeats taken in turn, after one that is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(actions)
    for turn in range(repeats + 1):
        for i, action in enumerate(actions):
            start = clock()
            action()
            if turn:
                best[i] = min(best[i], clock() - start)
    return [1e3 * seconds for seconds in best]


def main() -> None:
    """Measure all cases and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads; milliseconds per layer call")
    print(f"{'case':<48}{'dtype':>9}{'ours':>9}{'torch':>9}{'ratio':>7}{'with gather':>13}")
    with torch.inference_mode():
        for case in CASES:
            for dtype in (torch.float32, torch.bfloat16):
                action, *stored = ours(case, dtype)
                ways = theirs(case, *gather(*stored))
                mine, copied, *torchs = fastest([action, partial(gather, *stored), *ways], arguments.repeats)
                best = min(torchs)
                name = str(dtype).removeprefix("torch.")
                ratios = f"{best / mine:>6.1f}x{(best + copied) / mine:>12.1f}x"
                print(f"{case!s:<48}{name:>9}{mine:>9.3f}{best:>9.3f}{ratios}", flush=True)


if __name__ == "__main__":
    main()

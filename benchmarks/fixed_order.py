"""What the fixed order of additions costs: pagedcore's kernels against the fastest order that torch has.

    python benchmarks/fixed_order.py [--pairs 20] [--dtype bfloat16] [--threads 2] [--rows 1 2] [--out FILE]

Products: the linear layers of Qwen2.5-0.5B, over so many layers that no weight is in a cache when it is needed, and its
output layer, against the faster of oneDNN's packed product and ``torch.nn.functional.linear``. Attention: decode
batches over 1,024 tokens and a prompt of 512, against the fastest way to call ``scaled_dot_product_attention`` over
contiguous keys and values. Which of torch's ways is the fastest is found out for each row before its pairs.

A ratio is time in the fixed order / time in the fastest order: the median of alternating pairs, and the interval that
holds the median in 95 of 100 cases. The table belongs into docs/guarantees.md; take it on a machine with nothing else
on it.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from attention_cpu import Case, gather, ours, theirs
from guest import pairs
from interleaved import interval, markdown
from matmul_cpu import HEAD, LAYER, Product, products
from torch.nn.functional import linear

from pagedcore.models.linears.packed_linear import OneDnnMatmul
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul

ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
#: Rows of an output layer: one for each sequence, never a whole prompt.
MOST_ROWS_OF_HEAD = 64
CONTEXT = 1024
#: Shorter work than this is repeated within one measurement.
SHORTEST_S = 0.005

Work = Callable[[], object]


def seconds(work: Work, times: int) -> float:
    """Time of one of so many runs in a row."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def row_of(name: str, fixed: Work, ways: list[Work], num_pairs: int) -> list[str]:
    """Compare one piece of work with the fastest of torch's ways."""
    for work in (fixed, *ways):
        work()
    fastest = min(ways, key=lambda way: min(seconds(way, 1) for _ in range(3)))
    times = max(1, round(SHORTEST_S / seconds(fixed, 1)))
    taken: list[float] = []

    def measured() -> float:
        taken.append(seconds(fixed, times))
        return taken[-1]

    found = pairs(num_pairs, measured, lambda: seconds(fastest, times))
    low, high = interval(found)
    return [name, f"{1e3 * statistics.median(taken):.3f}", f"{statistics.median(found):.3f} ({low:.3f} to {high:.3f})"]


def product_rows(dtype: torch.dtype, num_layers: int, sizes: list[int], num_pairs: int) -> Iterator[list[str]]:
    """Compare the layers' products, then the output layer's."""
    parts = ("layers", LAYER * num_layers, max(sizes)), ("output layer", (HEAD,), MOST_ROWS_OF_HEAD)
    for name, shapes, most in parts:
        weights = [torch.randn(shape).to(dtype) * 0.02 for shape in shapes]
        fixed, packed = products(PackedMatmul, weights), products(OneDnnMatmul, weights)
        plain = [partial(linear, weight=weight) for weight in weights]
        for size in (size for size in sizes if size <= most):
            given = {inputs: torch.randn(size, inputs).to(dtype) for _, inputs in shapes}
            work, *ways = (partial(compute, kind, given, shapes) for kind in (fixed, packed, plain))
            yield row_of(f"products of the {name}, {size} rows", work, ways, num_pairs)


def compute(kind: list[Product], given: dict[int, torch.Tensor], shapes: Sequence[tuple[int, int]]) -> None:
    """Compute every product once."""
    for product, (_, inputs) in zip(kind, shapes, strict=True):
        product(given[inputs])


def attention_rows(dtype: torch.dtype, sizes: list[int], num_pairs: int) -> Iterator[list[str]]:
    """Compare decode batches, then a prompt; the heads are those of Qwen2.5-0.5B."""
    for size in sizes:
        is_prompt = size > MOST_ROWS_OF_HEAD
        case = Case(1, size, size, 7, 2, 64) if is_prompt else Case(size, 1, CONTEXT, 7, 2, 64)
        fixed, *stored = ours(case, dtype)
        name = f"attention, prompt of {size}" if is_prompt else f"attention, decode of {size} x {CONTEXT} tokens"
        yield row_of(name, fixed, theirs(case, *gather(*stored)), num_pairs)


def main() -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, given.dtype)
    rows = []
    with torch.inference_mode():
        for row in chain(product_rows(dtype, given.layers, given.rows, given.pairs),
                         attention_rows(dtype, given.rows, given.pairs)):
            print(*row, sep="; ", flush=True)
            rows.append(row)
    title = (f"{given.dtype}, {given.threads} threads, {platform.processor() or platform.machine()}, torch "
             f"{torch.__version__}, {given.pairs} pairs:")
    table = markdown(["work", "fixed order, ms", "fixed / fastest"], rows)
    print(title, table, sep="\n\n")
    if given.out is not None:
        given.out.write_text(f"{title}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

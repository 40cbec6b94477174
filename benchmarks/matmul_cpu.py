"""Our matrix products against oneDNN's packed ones, and quantised ones against ours, in the same run.

    python benchmarks/matmul_cpu.py [--threads 2] [--layers 8] [--repeats 5] [--dtype bfloat16]

The products of one layer of Qwen2.5-0.5B and of its output layer, over so many layers that no weight is in a cache when
it is needed. Both have their weights in huge pages. Figures are minima over alternating repeats; the outputs of both
are compared, and differ in the last bit of few at most: oneDNN adds long sums up in other pieces. Products of w8a8
quantise their rows, which is part of their time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from pagedcore.models.linears.packed_linear import OneDnnMatmul
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.protocols import Matmul
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.runtime.huge_pages import move_to_huge_pages

#: Outputs and inputs: attention's projections in and out, the two halves of the feed-forward part, the output layer.
LAYER = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
HEAD = (151936, 896)
ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512)

Product = Callable[[torch.Tensor], torch.Tensor]


def products(kind: Callable[[torch.Tensor, None], Matmul], weights: list[torch.Tensor]) -> list[Product]:
    """Pack all weights; the weights stay."""
    packed = [kind(weight, None) for weight in weights]
    for product in packed:
        move_to_huge_pages(*product.memory)
    return list(packed)


def seconds(all_products: list[Product], rows: dict[int, torch.Tensor], weights: list[torch.Tensor]) -> float:
    """Time of every product once."""
    begin = time.perf_counter()
    for product, weight in zip(all_products, weights, strict=True):
        product(rows[weight.shape[1]])
    return time.perf_counter() - begin


def compare(weights: list[torch.Tensor], sizes: tuple[int, ...], repeats: int) -> None:
    """Print a line for each number of rows."""
    ours, theirs, *quantised = (products(kind, weights) for kind in (PackedMatmul, OneDnnMatmul, *QUANTIZERS.values()))
    flops = 2 * sum(weight.numel() for weight in weights)
    for size in sizes:
        rows = {weight.shape[1]: torch.randn(size, weight.shape[1]).to(weight.dtype) for weight in weights}
        times = [[seconds(kind, rows, weights) for kind in (ours, theirs, *quantised)] for _ in range(repeats)]
        mine, other, *others = (min(column) for column in zip(*times, strict=True))
        last = rows[weights[-1].shape[1]]
        torch.testing.assert_close(ours[-1](last), theirs[-1](last), rtol=2**-6, atol=1e-2)
        rate = size * flops / mine / 1e9
        print(f"{size:>6}{1e3 * mine:>12.2f}{1e3 * other:>12.2f}{other / mine:>9.2f}x{rate:>12.0f}"
              + "".join(f"{1e3 * one:>12.2f}{mine / one:>9.2f}x" for one in others), flush=True)


def main() -> None:
    """Compare the layers' products and the output layer's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"{arguments.threads} threads; {'rows':>4}{'ours ms':>12}{'oneDNN ms':>12}{'ratio':>10}{'GFLOP/s':>12}"
          + "".join(f"{name + ' ms':>12}{'ratio':>10}" for name in QUANTIZERS))
    with torch.inference_mode():
        for shapes, sizes in ((LAYER * arguments.layers, ROWS), ((HEAD,), ROWS[:8])):
            print(f"{len(shapes)} products")
            compare([torch.randn(shape).to(dtype) * 0.02 for shape in shapes], sizes, arguments.repeats)


if __name__ == "__main__":
    main()

"""Which share of a workload's time is the limit of the hardware, and where the rest goes.

    python benchmarks/hardware_share.py --model MODEL_DIR [--dtype bfloat16] [--quantization w8a8]
        [--workloads w3,w2,w1,long8192]
    python benchmarks/hardware_share.py --attention [--threads 2]

Takes a model of ``peers/make_model.py``; with the shape of Qwen2.5-0.5B about two minutes on two cores. Peaks are
measured in the same run, before and after the workloads, and the better ones count: products by the fastest of ours and
torch's over 512 rows, memory by the faster of a sum and of a product of two rows, each over more than the caches hold.

The limit of a step is, for the layers and for the output layer, the longer of the time that their products take at the
peak and the time that their weights take at the memory's rate, and for attention the longer of its products at the peak
and of reading the KV of its rows. That of a workload is the sum over its steps. Beside it is where the time goes, each
part with its own limit: the cause of what is missing. Parts are those of a second run, of the same shape with other
tokens, in which Python calls each kernel, with a clock around it; "rest" has this Python in it. Take the table on a
machine with nothing else on it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_cpu import Case, fastest, ours
from interleaved import markdown
from matmul_cpu import HEAD, LAYER
from transformers import AutoConfig

from pagedcore import Engine, SamplingParams
from pagedcore.execution.sampler import Sampler
from pagedcore.models.decoders.output_layer import OutputLayer
from pagedcore.models.linears.packed_linear import OneDnnMatmul
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.stats import StepStats
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from workloads import Workload, workload

PARTS = ("layers", "output layer", "attention", "sampling", "rest")
#: Rows of a product that is bound by arithmetic.
MANY_ROWS = 512
#: Attention alone: size of a head, query heads for each of keys, new tokens, context.
SHAPES = (
    (64, 7, 512, 2048), (64, 7, 512, 8192), (64, 1, 512, 2048), (96, 1, 512, 2048), (128, 4, 512, 2048),
    (128, 8, 512, 2048), (256, 4, 512, 2048), (256, 8, 512, 2048), (64, 7, 1, 1024), (128, 4, 1, 1024),
    (64, 1, 1, 1024),
)  # fmt: skip


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of some times."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


class Peaks:
    """The best that this machine was seen to do."""

    def __init__(self, dtype: torch.dtype, quantization: str) -> None:
        """Make the weights that are multiplied: the widest product of a layer, and an output layer."""
        self.operations = self.bytes = 0.0
        """Per second."""
        weight = torch.randn(LAYER[2]).to(dtype)
        self._rows = torch.randn(MANY_ROWS, weight.shape[1]).to(dtype)
        products: list[Any] = [PackedMatmul(weight, None), lambda rows: torch.nn.functional.linear(rows, weight)]
        products += [OneDnnMatmul(weight, None)] if OneDnnMatmul.supports(dtype, weight.shape[1]) else []
        products += [QUANTIZERS[quantization](weight, None)] if quantization != "none" else []
        self._products, self._num_operations = products, 2 * MANY_ROWS * weight.numel()
        self._wide, self._numbers = PackedMatmul(torch.zeros(HEAD, dtype=dtype), None), torch.ones(2**28)

    @torch.inference_mode()
    def measure(self) -> None:
        """Measure once more."""
        for product in self._products:
            seconds = best_seconds(lambda product=product: product(self._rows))  # type: ignore[misc]
            self.operations = max(self.operations, self._num_operations / seconds)
        two = self._rows[:2].contiguous()
        seconds_of_sum, seconds_of_two = best_seconds(self._numbers.sum), best_seconds(lambda: self._wide(two))
        self.bytes = max(self.bytes, self._numbers.nbytes / seconds_of_sum, self._wide.memory[1] / seconds_of_two)


class Clock:
    """Seconds by part, of everything that runs while it is on."""

    def __init__(self, num_outputs_of_head: int) -> None:
        self.seconds: Counter[str] = Counter()
        for kind in (PackedMatmul, PackedInt8Matmul, PackedGroupedMatmul):
            for method in ("__call__", "pick_to"):
                self._time(kind, method, lambda it: PARTS[it._num_outputs == num_outputs_of_head])
        self._time(NumbaCpuAttention, "attend", lambda it: "attention")
        self._time(Sampler, "sample", lambda it: "sampling")
        self._time(OutputLayer, "token_ids", lambda it: "sampling")

    def _time(self, kind: type, method: str, part: Callable[[Any], str]) -> None:
        plain = getattr(kind, method)

        def timed(it: Any, *arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return plain(it, *arguments, **options)
            finally:
                self.seconds[part(it)] += time.perf_counter() - begin

        setattr(kind, method, timed)


class Steps:
    """Notes of each step how many tokens, rows of logits, positions of KV, and pairs of a query and a key it had."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int, int]] = []

    @hookimpl
    def pagedcore_step(self, stats: StepStats) -> None:
        """Note one step."""
        num_sampled = sum(row.num_sampled for row in stats.plan.rows)
        num_pairs = sum(row.num_tokens * (row.start + row.end + 1) // 2 for row in stats.plan.rows)
        self.sizes.append((stats.num_tokens, num_sampled, stats.num_kv_tokens, num_pairs))


def limits(engine: Engine, config: Any, steps: Steps, peaks: Peaks) -> Counter[str]:
    """Return the least seconds that the parts of the steps take."""
    backend: Any = engine.components.runner.backend
    products = backend._decoder.products
    least: Counter[str] = Counter()
    sizes = dict.fromkeys(PARTS[:2], (0, 0))
    for product in products:
        part = PARTS[product.out_features == backend.vocab_size]
        num_weights, num_bytes = sizes[part]
        sizes[part] = num_weights + product.out_features * product.in_features, num_bytes + product.multiply.memory[1]
    operations_per_pair = 4 * config.num_hidden_layers * config.hidden_size
    for num_tokens, num_sampled, num_kv_tokens, num_pairs in steps.sizes:
        for part, num_rows in zip(PARTS, (num_tokens, num_sampled), strict=False):
            if num_rows:
                num_weights, num_bytes = sizes[part]
                least[part] += max(2 * num_rows * num_weights / peaks.operations, num_bytes / peaks.bytes)
        read = num_kv_tokens * backend.kv_bytes_per_token / peaks.bytes
        least["attention"] += max(read, num_pairs * operations_per_pair / peaks.operations)
    return least


def call_from_python(backend: Any) -> None:
    """Let the decoder of a backend record no calls, so that each can be timed."""
    backend._decoder._steps = None


def answer(engine: Engine, work: Workload) -> float:
    """Answer all prompts greedily; return the seconds."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True) for n in work.outputs]
    begin = time.perf_counter()
    engine.generate(work.prompts, params)
    return time.perf_counter() - begin


def attention_alone(num_threads: int) -> None:
    """Print how fast attention's own products are beside those by weights: chunks of prompts, and a decode step."""
    torch.set_num_threads(num_threads)
    peaks = {dtype: Peaks(dtype, "none") for dtype in (torch.bfloat16, torch.float32)}
    formats = (("bfloat16", torch.bfloat16, False), ("float32", torch.float32, False), ("int8", torch.bfloat16, True))
    rows = []
    for size, group, new, context in SHAPES:
        case = Case(1 if new > 1 else 16, new, context, group, max(1, 8 // group), size)
        for name, dtype, is_int8 in formats:
            (milliseconds,) = fastest([ours(case, dtype, is_int8=is_int8)[0]], 5)
            peaks[dtype].measure()
            num_pairs = case.batch * case.group * case.kv_heads * new * (2 * context - new + 1) // 2
            rate = 4 * size * num_pairs / milliseconds * 1e3
            item = (size + 4) if is_int8 else size * dtype.itemsize
            read = case.batch * case.kv_heads * context * 2 * item / milliseconds * 1e3
            rows.append([
                str(case), name, f"{milliseconds:.2f}", f"{rate / 1e9:.0f}", f"{rate / peaks[dtype].operations:.2f}",
                f"{read / 1e9:.1f}",
            ])  # fmt: skip
    for dtype, peak in peaks.items():
        print(f"Peak, {dtype}: {peak.operations / 1e9:.0f} GFLOP/s, {peak.bytes / 1e9:.1f} GB/s")
    print(markdown(["case", "KV", "ms", "GFLOP/s", "of the products' rate", "GB/s of KV"], rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model")
    what.add_argument("--attention", action="store_true", help="attention alone, over sizes and groups of heads")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--workloads", default="w3,w2,w1")
    given = parser.parse_args()
    if given.attention:
        attention_alone(given.threads)
        return
    names, config = given.workloads.split(","), AutoConfig.from_pretrained(given.model)
    longest = max(1024, *(len(prompt) + 64 for name in names for prompt in workload(name).prompts))
    steps, peaks = Steps(), Peaks(getattr(torch, given.dtype), given.quantization)
    peaks.measure()
    engine = Engine.from_pretrained(
        given.model, dtype=given.dtype, quantization=given.quantization, max_model_len=longest,
        max_num_seqs=32,
        plugins=[steps],
    )
    answer(engine, workload("warm"))
    backend, seconds, sizes = engine.components.runner.backend, {}, {}
    for name in names:
        steps.sizes = []
        seconds[name], sizes[name] = answer(engine, workload(name)), list(steps.sizes)
    clock = Clock(backend.vocab_size)
    call_from_python(backend)
    parts_of: dict[str, Counter[str]] = {}
    for name in names:
        clock.seconds = Counter()
        clocked = answer(engine, workload(f"{name}@1"))
        clock.seconds["rest"] = clocked - sum(clock.seconds.values())
        parts_of[name] = Counter(clock.seconds)
    peaks.measure()
    rows = []
    for name in names:
        parts, steps.sizes = parts_of[name], sizes[name]
        least = limits(engine, config, steps, peaks)
        shown = [f"{parts[part]:.2f} ({least[part]:.2f})" if least[part] else f"{parts[part]:.2f}" for part in PARTS]
        missing = max(PARTS, key=lambda part: parts[part] - least[part])
        share = (parts[missing] - least[missing]) / sum(parts.values())
        of_limit = f"{sum(least.values()) / seconds[name]:.0%}"
        rows.append([name, f"{seconds[name]:.2f}", of_limit, *shown, f"{missing}, {share:.0%}"])
    rates = f"{peaks.operations / 1e9:.0f} GFLOP/s, {peaks.bytes / 1e9:.1f} GB/s"
    print(f"Peaks: {rates}; {torch.get_num_threads()} threads\n")
    print(markdown(["workload", "s", "limit", *(f"{part}, s (limit)" for part in PARTS), "largest part beyond"], rows))
    engine.close()


if __name__ == "__main__":
    main()

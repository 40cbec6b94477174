"""What is measured on a GPU: each stage takes a GPU, sizes and a report, and adds rows to the report as it gets them.

A stage raises nothing for a result that is wrong or slow: it is a row like any other, and ``ok`` says so. Read
``gpu.py`` for how stages are run, ``gpu_problems.py`` for what they launch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cuda_plan import BLOCK
from gpu_device import HardwareDriver, host_us, median
from gpu_problems import CTAS_PER_SM, Layer, Problem

from pagedcore_kernels.cuda.build.variants import attention_name, gated_name, rotate_name
from pagedcore_kernels.cuda.formats import FORMATS
from pagedcore_kernels.cuda.shapes import AttentionShape, Format

GAP_NAME = gated_name(Format.BF16, "silu")
"""The kernel whose smallest launches are timed."""
GOAL_OF_COPY = 0.85
"""Share of the copy's bytes per second that decode is to reach."""
SANITIZER_S = 180
SANITIZERS = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards",
              "synccheck": "ERROR SUMMARY: 0 errors"}
STAGE_DEPTHS = (3, 4)
"""Depths of decode's ring of tiles that the sweep compares with what ships."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: as measured on a GPU, or as small as control flow allows."""

    all_cases: bool
    stress_runs: int
    stress_burst: int
    stress_rows: tuple[tuple[int, int], ...]
    layer: Layer
    decode: tuple[tuple[int, int], ...]
    """Sequences and context of each decode batch."""
    prefill: tuple[int, ...]
    """Prompt lengths."""
    copy_bytes: int
    repeats: int
    launches: int
    """At once, few enough for the GPU's queue."""


FULL = Sizes(
    True, 100_000, 50, tuple((1, 500 + 700 * i) for i in range(16)), Layer(),
    ((64, 4096), (256, 1024), (16, 16384), (1, 8192), (1, 131072)), (1024, 8192, 16384), 2**33, 20, 500,
)
SMALL = Sizes(
    False, 6, 2, ((1, 1500), (2, 60)), Layer(4, 1, 32), ((2, 600),), (70,), 2**12, 2, 3,
)


class Report:
    """Rows and notes of one stage; ``save`` is called after each."""

    def __init__(self, save: Callable[[Report], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._save = save

    def add(self, **row: Any) -> None:
        """Add a row."""
        self.rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
        self._save(self)

    def note(self, text: str) -> None:
        """Add a remark, such as why something was left out."""
        self.notes.append(text)
        self._save(self)


def correctness(gpu: Any, sizes: Sizes, report: Report) -> None:
    """Every case of the execute gate, its launches taken to the GPU: float64, options, the same bits however cut."""
    from kernels.cuda import cuda_cases, test_execute

    errors: list[float] = []

    def noted(output: Any, exact: Any) -> float:
        errors.append(inner(output, exact))
        return errors[-1]

    inner = test_execute.relative_error
    with (
        torch.inference_mode(), patch.object(test_execute, "relative_error", noted),
        patch.object(cuda_cases, "SimulatedDriver", lambda **how: HardwareDriver(gpu, **how)),
    ):
        for label, check in _checks(test_execute, sizes.all_cases):
            errors.clear()
            begin, failure = time.perf_counter(), ""
            try:
                check()
            except Exception as error:
                failure = f"{type(error).__name__}: {str(error)[:300]}"
            report.add(case=label, ok=not failure, largest_relative_error=max(errors, default=0.0),
                       seconds=time.perf_counter() - begin, failure=failure)
    report.note(f"{sum(row['ok'] for row in report.rows)} of {len(report.rows)} cases agree")


def _checks(gate: Any, all_cases: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    for case in [*gate.FAST, *(gate.ALL if all_cases else [])]:
        label = f"{case[0]}, pool {case[1] or case[0].dtype}"
        yield f"float64: {label}", lambda case=case: gate.test_kernels_agree_with_float64(*case)
        yield f"bits: {label}", lambda case=case: gate.test_a_token_has_the_same_bits_however_the_work_is_cut(*case)
    for case in gate.LONG_CHUNKS[: None if all_cases else 1]:
        yield f"a chunk of {case[1]} tokens after {case[2]}", lambda case=case: (
            gate.test_a_chunk_of_a_long_context_is_split_without_changing_bits(*case))
    names = ["written_bytes_are_the_references"]
    if all_cases:
        names += ["the_first_layer_of_a_kind_and_later_steps_agree", "alibi"]
    for name in names:
        yield name.replace("_", " "), getattr(gate, f"test_{name}")


def stress(gpu: Any, sizes: Sizes, report: Report) -> None:
    """The merge of split contexts, again and again: every result has the bits of the first, counters end at zero."""
    with gpu.memory():
        problem = Problem(gpu, sizes.layer, sizes.stress_rows)
        size = problem.output_bytes
        outputs = gpu.alloc(size * sizes.stress_burst)
        problem.cut(1)
        problem.runner(outputs)()
        expected = gpu.download(outputs)[:size]
        done, wrong, begin = 0, 0, time.perf_counter()
        while done < sizes.stress_runs:
            with gpu.memory():
                cut = problem.cut((1, 2, 4, 8)[done // sizes.stress_burst % 4] * gpu.num_sms, shuffle_seed=done)
                gpu.zero(outputs)
                for i in range(sizes.stress_burst):
                    problem.runner(outputs.at(i * size))()
                found = gpu.download(outputs).reshape(sizes.stress_burst, size)
                wrong += int((found != expected).any(axis=1).sum())
                counters_left = int(np.count_nonzero(gpu.download(problem.counters)))
            done += sizes.stress_burst
            if counters_left or done % (200 * sizes.stress_burst) == 0 or done >= sizes.stress_runs:
                report.add(runs=done, wrong_bits=wrong, partials=cut.num_partials, counters_left=counters_left,
                           ok=not wrong and not counters_left, seconds=time.perf_counter() - begin)


def sanitizer(gpu: Any, sizes: Sizes, report: Report, script: list[str]) -> None:
    """compute-sanitizer's memcheck, racecheck and synccheck over the short correctness stage."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        report.note("compute-sanitizer is not installed here: left out")
        return
    for name, clean in SANITIZERS.items():
        command = [tool, "--tool", name, "--target-processes", "all", sys.executable, *script]
        begin = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_S, check=False)
            text = done.stdout + done.stderr
            report.add(tool=name, ok=clean in text, rc=done.returncode, seconds=time.perf_counter() - begin,
                       end="" if clean in text else text[-1500:])
        except subprocess.TimeoutExpired:
            report.add(tool=name, ok=False, rc=None, seconds=time.perf_counter() - begin, end="not done in time")


def copy_gbs(gpu: Any, sizes: Sizes) -> float:
    """Gigabytes per second of a copy on the GPU, read and written bytes together."""
    with gpu.memory():
        source, target = gpu.alloc(sizes.copy_bytes), gpu.alloc(sizes.copy_bytes)
        gpu.zero(source)
        times = gpu.time_ms(lambda: gpu.copy(target, source, sizes.copy_bytes), sizes.repeats)
    return 2 * sizes.copy_bytes / median(times) / 1e6


def decode(gpu: Any, sizes: Sizes, report: Report) -> None:
    """Bytes of K and V per second of decode steps, against a copy on the same GPU in the same run."""
    copied = copy_gbs(gpu, sizes)
    report.add(batch="copy on the GPU", gb_per_s=copied)
    for sequences, context in sizes.decode:
        with gpu.memory():
            problem = Problem(gpu, sizes.layer, [(1, context - 1)] * sequences)
            report.add(batch=f"{sequences} x {context}", **_decode_row(gpu, sizes, problem, copied))


def _decode_row(gpu: Any, sizes: Sizes, problem: Problem, copied: float) -> dict[str, Any]:
    times = gpu.time_ms(problem.runner(gpu.alloc(problem.output_bytes)), sizes.repeats)
    speed = problem.kv_bytes / median(times) / 1e6
    return {"us": median(times) * 1e3, "fastest_us": min(times) * 1e3, "gb_per_s": speed,
            "share_of_copy": speed / copied, "ok": speed >= GOAL_OF_COPY * copied}


def prefill(gpu: Any, sizes: Sizes, report: Report) -> None:
    """Arithmetic per second of causal prompts, against torch's flash attention and matrix product in the same run."""
    peers = TorchPeers.find(report)
    if peers is not None:
        report.add(batch="matrix product 8192 x 8192 x 8192, torch", tflop_per_s=peers.matmul_tflops())
    for length in sizes.prefill:
        with gpu.memory():
            problem = Problem(gpu, sizes.layer, [(length, 0)])
            times = gpu.time_ms(problem.runner(gpu.alloc(problem.output_bytes)), sizes.repeats)
            own = problem.flops / median(times) / 1e9
            row: dict[str, Any] = {"batch": f"prompt of {length}", "us": median(times) * 1e3, "tflop_per_s": own}
        if peers is not None:
            flash = problem.flops / peers.flash_ms(sizes.layer, length, sizes.repeats) / 1e9
            row |= {"torch_flash_tflop_per_s": flash, "share_of_flash": own / flash}
        report.add(**row)


class TorchPeers:
    """What torch's own kernels reach on the same GPU."""

    @classmethod
    def find(cls, report: Report) -> TorchPeers | None:
        """Return them if torch has CUDA, else note why there are none."""
        if torch.version.cuda is not None and torch.cuda.is_available():
            return cls()
        report.note(f"torch {torch.__version__} cannot use the GPU: no comparison with its flash attention and matrix "
                    "product; the other figures do not need it")
        return None

    def matmul_tflops(self) -> float:
        """Of a large matrix product in bfloat16."""
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return 2 * 8192**3 / self._ms(lambda: a @ b, 10) / 1e9

    def flash_ms(self, layer: Layer, length: int, repeats: int) -> float:
        """Milliseconds of flash attention over one causal prompt; K and V are repeated for each query head."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        size = (1, layer.heads, length, layer.head_size)
        q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.inference_mode():
            return self._ms(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), repeats
            )

    def _ms(self, work: Callable[[], Any], repeats: int) -> float:
        for _ in range(3):
            work()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return median(times)


def gaps(gpu: Any, sizes: Sizes, report: Report) -> None:
    """What a launch costs: on the host, on the GPU back to back, and replayed as a graph."""
    with gpu.memory():
        nothing, times = gpu.upload(np.zeros(8, np.int32)), []
        gpu.prepare(GAP_NAME)

        def launch() -> None:
            gpu.launch(GAP_NAME, 1, (nothing, nothing, 1, 1))

        def burst() -> None:
            for _ in range(100):
                launch()

        for _ in range(sizes.repeats):
            times.append(host_us(launch, sizes.launches))
            gpu.synchronize()  # Why: a full queue would make the host wait for the GPU.
        report.add(what="host, one launch", us=median(times), fastest_us=min(times))
        report.add(what="GPU, one of 100 launches back to back", us=median(gpu.time_ms(burst, sizes.repeats)) * 10)
        replay = gpu.graph_of(burst)
        report.add(what="GPU, one of 100 launches of a graph", us=median(gpu.time_ms(replay, sizes.repeats)) * 10)
        report.add(what="host, one graph of 100 launches", us=host_us(replay, min(20, sizes.launches)))
        gpu.synchronize()


def sweeps(gpu: Any, sizes: Sizes, report: Report, deeper: Callable[[int], Any]) -> None:
    """Decode under other splits, other distances between pages and other depths of the ring of tiles.

    ``deeper`` returns the GPU with decode kernels of another depth, or ``None`` where they were not built.
    """
    copied = copy_gbs(gpu, sizes)
    for sequences, context in sizes.decode:
        batch, rows = f"{sequences} x {context}", [(1, context - 1)] * sequences
        with gpu.memory():
            problem = Problem(gpu, sizes.layer, rows)
            for per_sm in (1, 2, CTAS_PER_SM, 4, 8, 16):
                problem.cut(per_sm * gpu.num_sms)
                report.add(what="CTAs per multiprocessor", value=per_sm, batch=batch,
                           **_decode_row(gpu, sizes, problem, copied))
        for layers in (1, 8, 32):
            stride = layers * sizes.layer.block_bytes
            if sequences * -(-context // BLOCK) * stride > sizes.copy_bytes * 8:
                report.note(f"page stride of {layers} layers, {batch}: left out, the pool would be too large")
                continue
            with gpu.memory():
                problem = Problem(gpu, sizes.layer, rows, block_stride=stride)
                report.add(what="layers from page to page", value=layers, batch=batch,
                           **_decode_row(gpu, sizes, problem, copied))
    for stages in STAGE_DEPTHS:
        other = deeper(stages)
        if other is None:
            report.note(f"{stages} tiles in the ring: no kernels were built for it (`gpu.py build`)")
            continue
        for sequences, context in sizes.decode:
            with other.memory():
                problem = Problem(other, sizes.layer, [(1, context - 1)] * sequences)
                report.add(what="tiles in decode's ring", value=stages, batch=f"{sequences} x {context}",
                           **_decode_row(other, sizes, problem, copied))


@contextmanager
def ring_of(stages: int) -> Iterator[None]:
    """Let decode kernels that are made meanwhile keep so many tiles in shared memory."""
    with patch.object(AttentionShape, "stages", property(lambda _: stages)):
        yield


def gate_kernels(sizes: Sizes) -> list[str]:
    """What correctness launches; some head sizes are the execute gate's alone and do not ship."""
    from kernels.cuda import test_execute as gate

    names = []
    for shape, pool, _ in [*gate.FAST, *(gate.ALL if sizes.all_cases else [])]:
        kernel = AttentionShape(shape.key_size, shape.value_size, FORMATS[shape.dtype], FORMATS[pool or shape.dtype])
        names += kernels_of(kernel)
    return sorted(set(names))


def kernels_of(shape: AttentionShape) -> list[str]:
    """What an engine launches for layers of a shape."""
    return [attention_name("decode", shape), attention_name("prefill", shape),
            rotate_name(shape.query, shape.pool, interleaved=False)]

"""The arithmetic of the benchmark that compares in pairs."""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys

import psutil
import pytest

from pagedcore.demo_model import DEMO_MODEL_DIR
from support.scripts import BENCHMARKS, script

guest = script("guest")
interleaved = script("interleaved")


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of many samples of twenty, about 19 in 20 have the true median in their interval, which is never all of it."""
    rng = random.Random(0)
    samples = [[rng.gauss(0, 1) for _ in range(20)] for _ in range(2000)]
    intervals = [interleaved.interval(sample) for sample in samples]
    held = sum(low <= 0 <= high for low, high in intervals) / len(intervals)
    assert 0.94 <= held <= 0.98
    assert all(min(one) < low <= statistics.median(one) <= high < max(one)
               for one, (low, high) in zip(samples, intervals, strict=True))


def test_few_pairs_have_a_wide_interval() -> None:
    """Where no order statistics enclose the median surely enough, the interval is the whole range."""
    assert interleaved.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_pairs_alternate() -> None:
    """Each half comes first in every other pair, and the ratio is always first / second."""
    calls: list[str] = []

    def run(name: str, value: float) -> float:
        calls.append(name)
        return value

    assert guest.pairs(3, lambda: run("a", 6.0), lambda: run("b", 3.0)) == [2.0, 2.0, 2.0]
    assert calls == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_neighbours_end_with_a_benchmark_that_is_killed() -> None:
    """Or they would take everybody's cores for ever, those in sessions of their own too."""
    code = "import guest, time\nwith guest.neighbours(2, own_sessions=True): print(flush=True); time.sleep(60)"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, cwd=BENCHMARKS, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        benchmark.stdout.readline()
        spinning = psutil.Process(benchmark.pid).children()
        assert len(spinning) == 2
        benchmark.kill()
        assert not psutil.wait_procs(spinning, timeout=60)[1]


@pytest.mark.parametrize(("command", "expected"), [
    pytest.param("guest.py --pairs 1 --only same-1", r"same-1: of quiet: [\d.]+ ", marks=pytest.mark.slow),
    pytest.param("guest.py --pairs 1 --only engines", r"engines: .* of one alone: [\d.]+ ", marks=pytest.mark.slow),
    ("greedy.py --model demo --pairs 3 --rows 1,4", r"\| 4 \| [\d.]+ \| [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \| 3 \|"),
    pytest.param(f"start.py --runs 2 --model {DEMO_MODEL_DIR}",
                 r"\| model, imports done \| [\d.]+ \([\d.]+ - [\d.]+\) \| 2 \|", marks=pytest.mark.slow),
    pytest.param("event_loop.py --doors asyncgen --seconds 0.2 --turns 1 --long-prompts",
                 r"engine above that of the stub, ms: -?", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_benchmarks_run(command: str, expected: str) -> None:
    """They measure the engine of this checkout and print what they say."""
    script, *words = command.split()
    line = [sys.executable, str(BENCHMARKS / script), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout

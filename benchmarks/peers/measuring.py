"""Runs one peer over the workloads and writes a line of JSON per result.

A peer brings two functions: one that runs a workload to its end, and one that streams a single request and notes
when each token came. On a shared machine set BENCH_LOCK to a file that every timed part locks, and BENCH_NICE to the
priority of the timed part (-15, as root).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workloads import LONG, Workload, workload

Run = Callable[[Workload], int]
"""Returns the number of tokens generated."""
Stream = Callable[[Workload], tuple[float, list[float]]]
"""Returns when it began and when each token came."""


def arguments(**extra: object) -> argparse.Namespace:
    """Parse the options of every peer script, and more: name=default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--workloads", default="w3,w2,w2p,w1", help="- reads a name from each line of the input")
    parser.add_argument("--results", default="", help="file that results are appended to")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for name, default in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), default=default, type=type(default))
    return parser.parse_args()


def measure(peer: str, options: argparse.Namespace, run: Run, stream: Stream, process: int | str = "self") -> None:
    """Warm up, then run the workloads one after the other; the peak of memory is that of a process."""
    run(workload("warm"))
    names = map(str.strip, sys.stdin) if options.workloads == "-" else options.workloads.split(",")
    for name in names:
        if name == "w3":
            result = _stream_result(stream, [f"w3@{repeat}" for repeat in range(3)])
        else:
            result = _stream_result(stream, [name]) if name.startswith(LONG) else _run_result(workload(name), run)
        line = json.dumps({"peer": peer, "workload": name, **result, "peak_rss_mb": _peak_rss_mb(process)})
        print(line, flush=True)
        if options.results:
            with pathlib.Path(options.results).open("a") as file:
                file.write(line + "\n")


def _run_result(work: Workload, run: Run) -> dict[str, object]:
    if work.prime is not None:
        run(work.prime)
    with _lock(), _Timed() as timed:
        generated = run(work)
    if generated != work.num_output_tokens:
        raise SystemExit(f"{work.name}: {generated} tokens came, {work.num_output_tokens} were asked for")
    total = generated + work.num_prompt_tokens
    return {"out_tok_s": round(generated / timed.wall_s, 1), "total_tok_s": round(total / timed.wall_s, 1),
            **timed.figures()}


def _stream_result(stream: Stream, names: list[str]) -> dict[str, object]:
    """Stream one after the other and take the median by duration."""
    results = []
    with _lock():
        for name in names:
            with _Timed() as timed:
                begin, stamps = stream(work := workload(name))
            # Why not by stamps: an engine may hold back tokens that end in the middle of a character.
            per_token_s = (stamps[-1] - stamps[0]) / (work.num_output_tokens - 1)
            results.append({"ttft_ms": round((stamps[0] - begin) * 1e3, 1), "tpot_ms": round(per_token_s * 1e3, 2),
                            **timed.figures()})
    return sorted(results, key=lambda result: float(str(result["wall_s"])))[len(names) // 2]


@dataclass
class _Timed:
    """Seconds of the clock, and seconds that our threads stood ready without a core."""

    wall_s: float = 0.0
    waited_s: float = 0.0

    def __enter__(self) -> _Timed:
        self.wall_s, self.waited_s = -time.perf_counter(), -_run_delay_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter()
        self.waited_s += _run_delay_s()

    def figures(self) -> dict[str, float]:
        return {"wall_s": round(self.wall_s, 2), "waited_s": round(self.waited_s, 2)}


def _run_delay_s() -> float:
    return sum(int(path.read_text().split()[1]) for path in pathlib.Path("/proc/self/task").glob("*/schedstat")) / 1e9


def _peak_rss_mb(process: int | str) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if path := os.environ.get("BENCH_LOCK"):
            fcntl.flock(stack.enter_context(pathlib.Path(path).open("a")), fcntl.LOCK_EX)
        if priority := os.environ.get("BENCH_NICE"):
            before = os.getpriority(os.PRIO_PROCESS, 0)
            _set_priority(int(priority))
            stack.callback(_set_priority, before)
        yield


def _set_priority(value: int) -> None:
    """Set the priority of every thread, and of the session where the kernel schedules sessions against each other."""
    for task in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(task), value)
    group = pathlib.Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(value))

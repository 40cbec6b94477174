"""Engines asked in turn: the others are stopped meanwhile, and the first is compared with the best of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.scripts import BENCHMARKS

IN_TURNS = BENCHMARKS / "peers" / "in_turns.py"
#: Answers each name with its own figure, and with the states of the other engines' processes on the error output.
ENGINE = """
import json, os, sys, time, psutil
figure, folder = float(sys.argv[1]), sys.argv[2]
open(f"{folder}/{os.getpid()}", "w").close()
for line in sys.stdin:
    ids, deadline, others = [int(name) for name in os.listdir(folder) if name != str(os.getpid())], time.time() + 60, []
    # A process that sleeps stops when it is next given a core.
    while set(others := [psutil.Process(pid).status() for pid in ids]) - {"stopped"} and time.time() < deadline:
        time.sleep(0.01)
    print("a line of a log", flush=True)
    print(json.dumps({"peer": "fake", "workload": line.strip(), "out_tok_s": figure, "tpot_ms": figure,
                      "others": others}), flush=True)
"""


def command_of(tmp_path: Path, figures: dict[str, float | str], workloads: str, rounds: int = 2) -> list[str]:
    """Return the command that asks engines that answer with given figures."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "processes").mkdir()
    line = [sys.executable, str(IN_TURNS), "--rounds", str(rounds), "--workloads", workloads]
    for name, figure in figures.items():
        command = f"exec {sys.executable} {tmp_path / 'engine.py'} '{figure}' {tmp_path / 'processes'}"
        line += ["--engine", f"{name}={command}"]
    return line


def ask(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(command_of(*arguments), capture_output=True, text=True, check=False, timeout=240)


def left(tmp_path: Path) -> list[int]:
    """Return the engines that are still there."""
    ids = [int(path.name) for path in (tmp_path / "processes").iterdir()]
    assert ids
    return [pid for pid in ids if lives(pid)]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_first_is_compared_with_the_best_and_nothing_else_runs(tmp_path: Path) -> None:
    """Of tokens per second the best is the largest, of ms per token the smallest; nothing is left running."""
    done = ask(tmp_path, {"ours": 30.0, "slow": 10.0, "fast": 20.0}, "w1,w3")
    assert done.returncode == 0, done.stderr
    assert "| w1, out_tok_s | 30.0 (30.0 - 30.0) | 10.0 (10.0 - 10.0) | 20.0 (20.0 - 20.0) | 1.50 (" in done.stdout
    assert re.search(r"\| w3, tpot_ms \| 30.00 .* \| 10.00 .* \| 20.00 .* \| 3.00 \(3.00 - 3.00\) \|", done.stdout)
    answers = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(answers) == 12
    assert all('"others": ["stopped", "stopped"]' in line for line in answers)
    assert sum('"workload": "w1@2"' in line for line in answers) == 3
    assert not left(tmp_path)


def test_an_engine_that_ends_is_named(tmp_path: Path) -> None:
    """And those that were loaded before it are ended."""
    done = ask(tmp_path, {"ours": 1.0, "broken": "no number"}, "w1")
    assert done.returncode == 1
    assert re.search(r"EOFError: .*no number.* ended before it answered warm", done.stderr)
    assert not left(tmp_path)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_engine_outlives_it(tmp_path: Path, number: signal.Signals) -> None:
    """Neither one that works nor those that are stopped."""
    command = command_of(tmp_path, {"ours": 1.0, "one": 1.0, "other": 1.0}, "w1", 1_000_000)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "w1@1" in process.stderr.readline()
        assert len(left(tmp_path)) == 3
        process.send_signal(number)
        # Why read: its errors end when it and its engines have ended.
        process.stderr.read()
    deadline = time.monotonic() + 30
    while left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left(tmp_path)

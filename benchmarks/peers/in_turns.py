"""Loads engines side by side, asks them for the same workloads in turn, and compares the first with the best other one.

    python benchmarks/peers/in_turns.py --workloads w1,heavy --rounds 3 \\
        --engine "pagedcore=PYTHON run_pagedcore.py --model MODEL_DIR" --engine "vllm=..." --engine "openvino=..."

A command is one of the shell's; it runs in this directory and is given ``--workloads -``. While one engine works, the
processes of the others are stopped. Every round begins with another engine and has other tokens (``w1@1``, ``w1@2``)
but for ``w3``, whose prompt is cached from the second round on. Printed are the median and the range of each engine,
and of the first one's figure beside the best other of its round: output tokens per second, of ``w3`` ms per token, of
``long8192`` and its like ms to the first token and per token after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from interleaved import markdown, median_and_spread, ratios, turns
from workloads import LONG

HERE = Path(__file__).resolve().parent
#: Ends a process group when its input closes, as it does however this script ends: what is stopped would stay for ever.
GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


class Peer:
    """An engine in a process group of its own, stopped unless it is asked."""

    def __init__(self, command: str) -> None:
        """Load it, and wait until it has warmed up."""
        self._process = subprocess.Popen(
            f"{command} --workloads -", shell=True, cwd=HERE, start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(self._process.pid)], start_new_session=True, stdin=subprocess.PIPE
        )
        try:
            self.ask("warm")
        except BaseException:
            self.end()
            raise

    def ask(self, name: str) -> dict[str, Any]:
        """Run a workload and return its line of results.

        Raises:
            EOFError: the engine ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"peer"'):
                self._signal(signal.SIGSTOP)
                result: dict[str, Any] = json.loads(line)
                return result
        raise EOFError(f"{self._process.args!r} ended before it answered {name}")

    def end(self) -> None:
        """End it and all that it started."""
        # Why first: later another process may have the engine's number.
        self._guard.kill()
        self._guard.wait()
        # Why: of an engine that ended by itself no process may be left.
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def _figures_of(workload: str) -> list[tuple[str, int, Callable[..., float]]]:
    """Return what is compared: the key in a line of results, its digits, and which of two is the better."""
    if workload.startswith(LONG):
        return [("ttft_ms", 0, min), ("tpot_ms", 2, min)]
    return [("tpot_ms", 2, min)] if workload == "w3" else [("out_tok_s", 1, max)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=COMMAND", help="first: compared")
    parser.add_argument("--workloads", default="w1,heavy,w3")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    commands = dict(engine.split("=", 1) for engine in given.engine)
    first, *others = commands
    peers, table = dict[str, Peer](), list[list[str]]()
    try:
        for name, command in commands.items():
            peers[name] = Peer(command)
        for workload in given.workloads.split(","):
            results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
            for number, order in enumerate(turns(list(commands), given.rounds), 1):
                for name in order:
                    result = peers[name].ask(workload if workload == "w3" else f"{workload}@{number}")
                    print(json.dumps({"engine": name, **result}), file=sys.stderr, flush=True)
                    results[name].append(result)
            for key, digits, best in _figures_of(workload):
                figures = {name: [result[key] for result in results[name]] for name in commands}
                best_other = [best(theirs) for theirs in zip(*(figures[name] for name in others), strict=True)]
                shown = [median_and_spread(values, f"{{:.{digits}f}}".format) for values in figures.values()]
                beside = median_and_spread(ratios(figures[first], best_other), "{:.2f}".format) if others else ""
                table.append([f"{workload}, {key}", *shown, beside])
    finally:
        for peer in peers.values():
            peer.end()
    print(markdown(["workload", *commands, "beside the best"], table))


if __name__ == "__main__":
    main()

"""pagedcore, vLLM's CPU build and OpenVINO GenAI beside the same busy programs.

    python benchmarks/guest_peers.py MODEL OPENVINO_MODEL VLLM_PYTHON OPENVINO_PYTHON [--rounds 20] [--only same-1 ...]

Models and environments are those of ``run_peers.sh``. All three engines are loaded once and wait; then each in turn,
in an order that is reversed every round, does one piece of work: one request alone (``brief``) and 16 at once
(``burst``). Neighbours and their sessions are those of ``guest.py``. A line gives the
median of the rounds' ratios of tokens per second, pagedcore's to the peer's, and its interval.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from guest import neighbours, summary

HERE = Path(__file__).resolve().parent
WORKLOADS = ("brief", "burst")


class Peer:
    """An engine that runs a given amount of work."""

    def __init__(self, name: str, python: str, model: str, *, own_session: bool) -> None:
        self.name = name
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
                                    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
                                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                                    "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
        if name == "vllm" and (preload := os.environ.get("VLLM_PRELOAD")):
            environment["LD_PRELOAD"] = preload
        self._process = subprocess.Popen(
            [python, str(HERE / "peers" / f"run_{name}.py"), "--model", model, "--workloads", "-"], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=own_session,
        )  # fmt: skip

    def run(self, workload: str) -> float:
        """Do a piece of work; return tokens per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(workload, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"peer"'):
                return float(json.loads(line)["out_tok_s"])
        raise SystemExit(f"{self.name} ended before its answer")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "openvino_model", "vllm_python", "openvino_python"):
        parser.add_argument(name)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=["quiet-0", "same-1", "own-1"])
    given = parser.parse_args()
    for own_session in (False, True):
        scenarios = [scenario for scenario in given.only if scenario.startswith("own") == own_session]
        if scenarios:
            measure(scenarios, given, own_session=own_session)


def measure(scenarios: list[str], given: argparse.Namespace, *, own_session: bool) -> None:
    """Load the engines and compare them in some scenarios."""
    with contextlib.ExitStack() as stack:
        peers = []
        for name, python, model in (("pagedcore", sys.executable, given.model),
                                    ("vllm", given.vllm_python, given.model),
                                    ("openvino", given.openvino_python, given.openvino_model)):  # fmt: skip
            peers.append(Peer(name, python, model, own_session=own_session))
            stack.callback(peers[-1].close)
            peers[-1].run("warm")
        for scenario, workload in itertools.product(scenarios, WORKLOADS):
            compare(peers, scenario, workload, given.rounds)


def compare(peers: list[Peer], scenario: str, workload: str, rounds: int) -> None:
    """Print one line for each peer."""
    kind, _, count = scenario.partition("-")
    results: list[dict[str, float]] = []
    for number in range(rounds):
        done = {}
        for peer in peers if number % 2 == 0 else peers[::-1]:
            with neighbours(int(count), own_sessions=kind == "own"):
                done[peer.name] = peer.run(f"{workload}@{scenario}-{number}")
        results.append(done)
    own = statistics.median(done["pagedcore"] for done in results)
    for peer in peers[1:]:
        ratios = [done["pagedcore"] / done[peer.name] for done in results]
        theirs = statistics.median(done[peer.name] for done in results)
        print(f"{scenario}, {workload}: {own:.1f} tokens/s, {peer.name} {theirs:.1f}: {summary(ratios)}", flush=True)


if __name__ == "__main__":
    main()

"""Runs every suite of random cases for as many minutes as it is given, with fresh seeds, on all cores.

    python tests/torture/torture.py --minutes 30 [--table benchmarks/reliability.md] [PATH ...]

A suite is a file of tests that takes its number of cases from ``support.torture``; where some of its tests have the
mark ``torture``, those. Each runs once to learn how long its share of ``make test`` takes, then again, scaled to the
time that is left. Failing seeds of the simulations are kept in tests/scheduler_lives/seeds.
Ctrl-C ends it with the summary. The exit status is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
LONGEST_CHUNK_S = 120.0
"""Seconds of one run of a suite, so that all suites get their turns and the end comes in time."""
LATE_S = 120.0
"""Seconds by which a run may miss its estimate threefold before it counts as hanging."""
COLUMNS = "suite | seeds | steps | violations | mutants killed | seconds | command"


@dataclass(eq=False)
class Suite:
    """One file of tests, and what its runs have shown."""

    path: str
    selection: tuple[str, ...] = ()
    """Arguments of pytest that choose its tests."""
    seconds_at_one: float | None = None
    """How long it takes as in ``make test``."""
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0

    def scale(self, left_s: float) -> float | None:
        """Return how much to run in so many seconds, ``None`` if there is too little time."""
        if self.seconds_at_one is None:
            return 1.0
        scale = min(left_s, LONGEST_CHUNK_S) / self.seconds_at_one
        return scale if scale >= 0.5 else None

    def run(self, scale: float, seed: int) -> str:
        """Run once with ``scale`` and the seeds from ``seed`` on; return what failed."""
        started_s, expected_s = time.monotonic(), scale * (self.seconds_at_one or LONGEST_CHUNK_S)
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider",
                       "-o", "timeout=0", f"--junitxml={report.name}", *self.selection, self.path]
            variables = {**os.environ, "TORTURE_SCALE": f"{scale:.3f}", "TORTURE_SEED": str(seed)}
            try:
                done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False,
                                      timeout=3 * expected_s + LATE_S)
                output, is_failed = done.stdout + done.stderr, done.returncode not in (0, -signal.SIGINT, 2)
            except subprocess.TimeoutExpired:
                output, is_failed = "it hangs", True
            self._count(report.name, is_failed)
        seconds = time.monotonic() - started_s
        self.seconds += seconds
        self.num_runs += 1
        if self.seconds_at_one is None:
            self.seconds_at_one = max(seconds, 1.0)
        return f"{self.path} (TORTURE_SCALE={scale:.3f} TORTURE_SEED={seed})\n{output[-4000:]}" if is_failed else ""

    def _count(self, report: str, is_failed: bool) -> None:
        found: Counter[str] = Counter()
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except ElementTree.ParseError:
            cases = []
        for case in cases:
            values = {one.get("name"): int(one.get("value", "0")) for one in case.iter("property")}
            is_bad = bool(list(case.iter("failure")) or list(case.iter("error")))
            found["seeds"] += values.get("seeds", 1)
            found["steps"] += values.get("steps", 0)
            found["mutants killed"] += values.get("mutants killed", 0)
            found["violations"] += max(values.get("violations", 0), is_bad)
        found["violations"] = max(found["violations"], int(is_failed))
        self.counts += found

    def row(self) -> list[str]:
        """Return the cells of the table, the command left out."""
        numbers = [self.counts["seeds"], self.counts["steps"], self.counts["violations"], self.counts["mutants killed"]]
        shown = [f"{numbers[0]:,}", f"{numbers[1]:,}" if numbers[1] else "–", str(numbers[2]), str(numbers[3] or "–")]
        return [self.path, *shown, f"{self.seconds:.0f}"]


def find_suites(paths: Sequence[str]) -> list[Suite]:
    """Return the files of tests whose number of cases can be scaled."""
    found = []
    for path in sorted({file for one in paths for file in [ROOT / one, *(ROOT / one).rglob("test_*.py")]}):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if "from support.torture import" in text and "scaled(" in text:
            selection = ("-m", "torture") if "mark.torture" in text else ()
            found.append(Suite(str(path.relative_to(ROOT)), selection))
    return found


def torture(suites: list[Suite], minutes: float, seed: int, num_jobs: int) -> list[str]:
    """Run all suites until the time is over; return what failed."""
    started_s, failures = time.monotonic(), list[str]()
    end_s, running, chunk = started_s + 60 * minutes, dict[Future[str], Suite](), 0
    with ThreadPoolExecutor(num_jobs) as pool, tqdm(total=round(60 * minutes), unit="s") as bar:
        try:
            while True:
                left_s = end_s - time.monotonic()
                idle = sorted(set(suites) - set(running.values()), key=lambda one: (one.seconds, one.path))
                for suite in idle[: num_jobs - len(running)]:
                    scale = suite.scale(left_s * num_jobs / len(suites) if suite.num_runs < 2 else left_s)
                    if left_s > 0 and scale is not None:
                        running[pool.submit(suite.run, scale, seed + 1_000_000 * chunk)] = suite
                        chunk += 1
                if not running:
                    return failures
                for done in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                    del running[done]
                    if failure := done.result():
                        failures.append(failure)
                        bar.write(failure)
                bar.n = min(bar.total, round(time.monotonic() - started_s))
                steps = sum(one.counts["steps"] for one in suites)
                bar.set_postfix_str(f"{steps:,} steps, {len(failures)} failures")
        except KeyboardInterrupt:
            # The runs have got the signal too, and end.
            return failures


def write_table(path: Path, suites: Sequence[Suite], command: str) -> None:
    """Put the rows behind the table's heading in a page, in the place of those of the same suites."""
    lines = path.read_text(encoding="utf-8").splitlines()
    known = {suite.path for suite in suites}
    head = next(place for place, line in enumerate(lines) if COLUMNS in line) + 2
    end = next((place for place in range(head, len(lines)) if not lines[place].startswith("|")), len(lines))
    kept = [line for line in lines[head:end] if line.split("|")[1].strip(" `") not in known]
    rows = [f"| `{name}` | {' | '.join(cells)} | `{command}` |" for name, *cells in (suite.row() for suite in suites)]
    path.write_text("\n".join([*lines[:head], *sorted(kept + rows), *lines[end:]]) + "\n", encoding="utf-8")


def main() -> int:
    """Run, print one line per suite, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="first seed; printed, to run it again")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, os.cpu_count() or 1)))
    parser.add_argument("--table", type=Path, help="a page whose table gets the figures")
    options = parser.parse_args()
    suites = find_suites(options.paths)
    print(f"{len(suites)} suites, {options.minutes:g} minutes, seeds from {options.seed}", flush=True)
    failures = torture(suites, options.minutes, options.seed, options.jobs)
    print(COLUMNS.removesuffix(" | command"))
    for suite in suites:
        print(" | ".join(suite.row()))
    if options.table is not None:
        write_table(options.table, suites, f"make torture MINUTES={options.minutes:g}")
    print(f"{len(failures)} failed runs" if failures else "no violation")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

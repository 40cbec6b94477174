"""Draws tokens per second beside other engines, from the tables of benchmarks/peers_cpu.md: docs/peers.svg."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import mean

from architecture.sources import ROOT
from architecture.svg import Picture

TABLES = ROOT / "benchmarks" / "peers_cpu.md"
#: One group of bars for each table of rounds, in the page's order.
MACHINES = ("2 cores of an EPYC (Zen 4, AVX-512)", "2 cores of a Xeon (AMX)")
COLOURS = {"pagedcore": "engine", "OpenVINO GenAI": "memory", "vLLM": "ground"}
_WIDTH, _LEFT, _TOP, _BAR, _GAP = 760, 150, 78, 24, 9
_GROUP = 3 * (_BAR + _GAP) + 46


def tokens_per_s() -> list[dict[str, list[float]]]:
    """Return, for each machine, every engine's w1 figure of each round."""
    tables: list[dict[str, list[float]]] = []
    for line in TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("| | w1: output tokens/s"):
            tables.append({})
        elif tables and (row := re.match(r"\| (\w[\w ]*), round \d \| \**([\d.]+)", line)):
            tables[-1].setdefault(row[1], []).append(float(row[2]))
    return tables


def bars() -> Iterator[tuple[int, str, float]]:
    """Yield machine, engine and the mean of its rounds, the fastest engine of a machine first."""
    for machine, engines in enumerate(tokens_per_s()):
        for engine, rounds in sorted(engines.items(), key=lambda item: -mean(item[1])):
            yield machine, engine, mean(rounds)


def draw() -> str:
    """Return the picture."""
    shown = list(bars())
    most = max(figure for _, _, figure in shown)
    height = _TOP + len(MACHINES) * _GROUP + 26
    picture = Picture(_WIDTH, height, "Output tokens per second beside other engines on a CPU")
    picture.words(24, 34, "Output tokens per second on a CPU", "loud", size=18, bold=True, anchor="start")
    picture.words(24, 56, "64 ragged requests, 0.5 B parameters, bfloat16, at most 32 at once; mean of the rounds",
                  "quiet", size=12.5, anchor="start")
    place = dict.fromkeys(range(len(MACHINES)), 0)
    for machine, engine, figure in shown:
        y = _TOP + machine * _GROUP + 26 + place[machine] * (_BAR + _GAP)
        place[machine] += 1
        length = (_WIDTH - _LEFT - 90) * figure / most
        picture.words(_LEFT - 12, y + 17, engine, "loud", size=13.5, bold=engine == "pagedcore", anchor="end")
        picture.bar(_LEFT, y, length, _BAR, COLOURS[engine])
        picture.words(_LEFT + length + 9, y + 17, f"{figure:.1f}", "loud", size=13.5, bold=engine == "pagedcore",
                      anchor="start")
    for machine, name in enumerate(MACHINES):
        picture.words(24, _TOP + machine * _GROUP + 13, name, "quiet", size=13, bold=True, anchor="start")
    picture.words(24, height - 16, "benchmarks/peers_cpu.md, workload w1; less than 5 % is a tie on these machines",
                  "quiet", size=11.5, anchor="start")
    return picture.text

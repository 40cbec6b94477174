"""Draws tokens per second beside other engines, from the marked tables of benchmarks/peers_cpu.md: docs/peers.svg."""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

from architecture.sources import ROOT
from architecture.svg import Picture

TABLES = ROOT / "benchmarks" / "peers_cpu.md"
MARK = re.compile(r"<!-- chart: ([^;]+); ([^;]+); ([^;]+) -->\n((?:\|.*\n)+)")
WORKLOAD = "w1: output tokens/s"
COLOURS = {"pagedcore": "engine", "OpenVINO": "memory", "vLLM": "ground"}
_WIDTH, _LEFT, _TOP, _COLUMN, _NAMES, _BAR, _GAP = 900, 24, 84, 440, 92, 22, 7
_GROUP = 3 * (_BAR + _GAP) + 62


class Group(NamedTuple):
    """One table of the page."""

    number_format: str
    machine: str
    day: str
    figures: dict[str, float]
    """Of each engine the median of its rounds, the fastest first."""


def groups() -> list[Group]:
    """Return the marked tables, in the page's order."""
    found = []
    for number_format, machine, day, table in MARK.findall(TABLES.read_text(encoding="utf-8")):
        rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        figures = _of_rounds(rows) if WORKLOAD in rows[0] else _of_medians(rows)
        found.append(Group(number_format, machine, day, dict(sorted(figures.items(), key=lambda item: -item[1]))))
    return found


def _of_rounds(rows: list[list[str]]) -> dict[str, float]:
    """A table with a row for each engine and round."""
    rounds: dict[str, list[float]] = {}
    for name, *cells in rows[2:]:
        rounds.setdefault(_engine(name), []).append(float(cells[rows[0].index(WORKLOAD) - 1]))
    return {engine: median(figures) for engine, figures in rounds.items()}


def _of_medians(rows: list[list[str]]) -> dict[str, float]:
    """A table with a column for each engine, whose cells begin with the median."""
    (row,) = [row for row in rows if row[0] in (WORKLOAD, f"bfloat16, {WORKLOAD}")]
    cells = zip(rows[0], row, strict=True)
    return {_engine(name): float(re.split(r"[* ]", cell)[0]) for name, cell in cells if _engine(name) in COLOURS}


def _engine(name: str) -> str:
    return re.split(r"[ ,]", name)[0]


def draw() -> str:
    """Return the picture: a column for each number format."""
    shown = groups()
    most = max(figure for group in shown for figure in group.figures.values())
    columns = {number_format: [group for group in shown if group.number_format == number_format]
               for number_format in dict.fromkeys(group.number_format for group in shown)}
    height = _TOP + 22 + max(map(len, columns.values())) * _GROUP + 22
    picture = Picture(_WIDTH, height, "Output tokens per second of pagedcore, OpenVINO GenAI and vLLM on a CPU")
    picture.words(_LEFT, 34, "Output tokens per second on a CPU", "loud", size=18, bold=True, anchor="start")
    picture.words(_LEFT, 56, "64 ragged requests, 0.5 B parameters, at most 32 at once; median of the rounds", "quiet",
                  size=12.5, anchor="start")
    for column, (number_format, members) in enumerate(columns.items()):
        x = _LEFT + column * _COLUMN
        picture.words(x, _TOP + 10, number_format, "loud", size=15, bold=True, anchor="start")
        for place, group in enumerate(members):
            _draw_group(picture, x, _TOP + 22 + place * _GROUP, group, most)
    picture.words(_LEFT, height - 14, "benchmarks/peers_cpu.md, workload w1; less than 5 % is a tie on these machines",
                  "quiet", size=11.5, anchor="start")
    return picture.text


def _draw_group(picture: Picture, x: float, top: float, group: Group, most: float) -> None:
    picture.words(x, top + 18, f"{group.machine}, {group.day}", "quiet", size=12.5, anchor="start")
    for place, (engine, figure) in enumerate(group.figures.items()):
        y = top + 30 + place * (_BAR + _GAP)
        length = (_COLUMN - _NAMES - 90) * figure / most
        is_ours = engine == "pagedcore"
        picture.words(x + _NAMES - 12, y + 16, engine, "loud", size=13, bold=is_ours, anchor="end")
        picture.bar(x + _NAMES, y, length, _BAR, COLOURS[engine])
        picture.words(x + _NAMES + length + 8, y + 16, f"{figure:.1f}", "loud", size=13, bold=is_ours, anchor="start")

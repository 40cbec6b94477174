"""The pictures of the documentation are what the scripts draw today, and the scripts draw what is there."""

from __future__ import annotations

import itertools
import re
from statistics import mean

import pytest

from architecture import draw_request, draw_rooms
from architecture.draw import PICTURES
from architecture.rooms import ORDER
from architecture.sources import PACKAGES, ROOT


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    """The committed file is byte for byte what ``make architecture`` writes."""
    assert (ROOT / name).read_text(encoding="utf-8") == PICTURES[name](), "run `make architecture`"


def test_every_room_and_package_has_a_place() -> None:
    """A new room or adapter has to be given its place in the picture."""
    assert {*ORDER, *PACKAGES[1:]} <= set(draw_rooms.PLACES)


def test_the_arrows_are_imports_and_hide_none() -> None:
    """Each arrow is an import of some file, and along the arrows each importer reaches what it imports."""
    imports = draw_rooms.graph()
    arrows: draw_rooms.Graph = {}
    for start, end in draw_rooms.shown(imports):
        assert end in imports[start]
        arrows.setdefault(start, set()).add(end)
    hidden = [(start, end) for start, ends in imports.items() for end in ends
              if end not in draw_rooms._reach(arrows, start)]
    assert hidden == []


def test_no_arrow_of_the_rooms_crosses_a_box() -> None:
    """Every arrow has found a way between the boxes."""
    edges = draw_rooms.graph()
    boxes = [name for name in draw_rooms.PLACES if name in {*ORDER, *edges}]
    router = draw_rooms._Router(boxes)
    lines = [line for edge in draw_rooms.shown(edges) for line in itertools.pairwise(router.way(*edge))]
    assert lines
    assert not [name for name in boxes for line in lines if draw_rooms._crosses(line, draw_rooms._rectangle(name))]


def test_the_steps_of_a_request_are_those_of_the_page() -> None:
    """The picture's eight files exist, and docs/architecture.md describes them in the same order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = re.findall(r"^\d\. `pagedcore/([\w/]+\.py)`", page, flags=re.MULTILINE)
    files = [file for _, _, file, _ in draw_request.STEPS]
    assert described == files
    assert [file for file in files if not (ROOT / "pagedcore" / file).is_file()] == []


def test_the_chart_shows_the_figures_of_the_tables() -> None:
    """Each figure of the chart is the mean of an engine's rounds of w1; every engine of both machines is there."""
    figures: dict[tuple[int, str], list[float]] = {}
    machine = -1
    for line in (ROOT / "benchmarks" / "peers_cpu.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")]
        machine += "w1: output tokens/s" in cells
        if len(cells) > 2 and ", round " in cells[1]:
            figures.setdefault((machine, cells[1].partition(",")[0]), []).append(float(cells[2]))
    chart = PICTURES["docs/peers.svg"]()
    drawn = re.findall(r">(\d+\.\d)</text>", chart)
    assert sorted(drawn) == sorted(f"{mean(rounds):.1f}" for rounds in figures.values())
    assert len(drawn) == 6
    assert {engine for _, engine in figures} <= set(re.findall(r">([\w ]+)</text>", chart))

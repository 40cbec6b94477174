"""The pictures of the documentation are what the scripts draw today, and the scripts draw what is there."""

from __future__ import annotations

import re
from statistics import median

import pytest

from architecture import draw_request, draw_rooms
from architecture.draw import PAGE, PICTURES, TABLE
from architecture.rooms import ORDER
from architecture.sources import PACKAGES, ROOT


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    """The committed file is byte for byte what ``make architecture`` writes."""
    assert (ROOT / name).read_text(encoding="utf-8") == PICTURES[name](), "run `make architecture`"


def test_the_table_of_rooms_is_what_the_folders_say() -> None:
    """docs/architecture.md has every room in its order, with the first sentence of its folder."""
    assert TABLE.findall((ROOT / PAGE).read_text(encoding="utf-8")) == [draw_rooms.table()], "run `make architecture`"


def test_every_room_and_package_is_in_the_picture() -> None:
    """A new room or adapter has to be told in the picture, and one that is gone is not."""
    assert {*draw_rooms.WORDS, draw_rooms.KERNELS} == {*ORDER, *PACKAGES[1:]}


def test_the_steps_of_a_request_are_those_of_the_page() -> None:
    """The picture's eight files exist, and docs/architecture.md describes them in the same order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = re.findall(r"^\d\. `pagedcore/([\w/]+\.py)`", page, flags=re.MULTILINE)
    files = [file for _, _, file, _ in draw_request.STEPS]
    assert described == files
    assert [file for file in files if not (ROOT / "pagedcore" / file).is_file()] == []


def test_the_chart_shows_the_figures_of_the_tables() -> None:
    """Each marked table has its machine and day in the chart, and every engine its median of w1."""
    page = (ROOT / "benchmarks" / "peers_cpu.md").read_text(encoding="utf-8")
    chart = PICTURES["docs/peers.svg"]()
    wanted: list[str] = []
    for part in page.split("<!-- chart: ")[1:]:
        mark, _, rest = part.partition(" -->")
        number_format, machine, day = mark.split("; ")
        assert f">{number_format}</text>" in chart
        assert f">{machine}, {day}</text>" in chart
        table = rest.partition("\n\n")[0]
        if rounds := re.findall(r"^\| (\w+)[^|]*, round \d \| \W*([\d.]+)", table, flags=re.MULTILINE):
            wanted += [f"{median(float(figure) for name, figure in rounds if name == engine):.1f}"
                       for engine in {engine for engine, _ in rounds}]
        else:
            row = re.findall(r"^\| (?:bfloat16, )?w1: output tokens/s(.*)", table, flags=re.MULTILINE)[0]
            wanted += re.findall(r"\| \W*([\d.]+)", row)[:3]
    assert sorted(re.findall(r">(\d+\.\d)</text>", chart)) == sorted(wanted)
    assert len(wanted) == 3 * 5
    assert {"bfloat16", "int8"} <= set(re.findall(r">([\w ]+)</text>", chart))

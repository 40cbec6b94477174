"""The benchmark of the fixed order measures the product's own kernels, and its table has the form of the page."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.doubles import FakeClock
from support.scripts import script

fixed_order = script("fixed_order")


def test_the_fastest_of_the_other_ways_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio is the fixed order's time over that of the fastest way, whichever place it has."""
    clock = FakeClock()
    monkeypatch.setattr(fixed_order, "time", SimpleNamespace(perf_counter=clock.now))
    slow, quick = partial(clock.advance, 0.25), partial(clock.advance, 0.015625)
    row = fixed_order.row_of("work", slow, [slow, quick], 3)
    assert row == ["work", "250.000", "16.000 (16.000 to 16.000)"]


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One pair of the smallest work prints and writes a row for each product and for attention."""
    words = ["--pairs", "1", "--layers", "1", "--rows", "1", "--threads", "1", "--out", str(tmp_path / "table.md")]
    monkeypatch.setattr(sys, "argv", ["fixed_order.py", *words])
    fixed_order.main()
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    names = ["products of the layers, 1 rows", "products of the output layer, 1 rows",
             "attention, decode of 1 x 1024 tokens"]
    assert re.findall(r"^\| (.+?) \| [\d.]+ \| [\d.]+ \([\d.]+ to [\d.]+\) \|$", table, flags=re.MULTILINE) == names

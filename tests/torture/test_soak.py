"""A fast cut of the soak, and of what runs the suites at length."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pagedcore.requests.request import Request
from support.torture import scaled
from torture.soak import Left, Soak, make_engine, warm_up
from torture.torture import COLUMNS, Suite, find_suites, write_table

NOTHING = Left(0, 0, 0, 0, 0, threads=9, files=0, handles=9, traced=2**20, resident=2**30)


async def use(model: str, num_requests: int, folder: Path) -> list[str]:
    """Use an engine, and return what is left behind, memory aside."""
    (exports := folder / "exports").mkdir()
    await warm_up()
    async with make_engine(model, folder) as engine:
        soak = Soak(engine, random.Random(4), exports, is_toy=model == "toy")
        await soak.run(lambda: soak.counts["requests"] >= num_requests // 2)
        before = await soak.look()
        await soak.run(lambda: soak.counts["requests"] >= num_requests)
        assert min(soak.counts[what] for what in ("cancelled", "vanished", "slow", "sessions")) > 0
        return replace(await soak.look(), traced=0, resident=0).leaks(before)


@pytest.mark.torture
@pytest.mark.parametrize("model", ["toy", pytest.param("demo", marks=pytest.mark.slow)])
async def test_nothing_is_left_behind(model: str, tmp_path: Path, record_property: object) -> None:
    """Aborted requests, lost and slow readers, parked, forked and exported sessions leave no block, request, session,
    task, thread, file or handle."""
    num_requests = scaled(200 if model == "toy" else 70)
    record_property("seeds", num_requests)  # type: ignore[operator]
    assert await use(model, num_requests, tmp_path) == []


async def test_a_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that stay in the engine's table are counted; memory that grows is too."""
    monkeypatch.setattr(Request, "remove", lambda self: None)
    assert "requests" in await use("toy", 60, tmp_path)
    assert NOTHING.leaks(NOTHING) == []
    assert replace(NOTHING, traced=2**22).leaks(NOTHING) == [f"traced memory by {2**22 - 2**20} bytes"]
    assert len(replace(NOTHING, resident=2**31, threads=10, handles=10).leaks(NOTHING)) == 3


def test_the_table_keeps_one_row_for_each_suite(tmp_path: Path) -> None:
    """Figures of a suite that has run again replace the earlier ones; those of others stay."""
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n| {COLUMNS} |\n|---|---|---|---|---|---|---|\n\nThe end.\n")
    one, other = Suite("tests/one.py"), Suite("tests/other.py")
    one.counts["seeds"] = 1200
    write_table(page, [one, other], "make torture MINUTES=1")
    one.counts["violations"] = 1
    write_table(page, [one], "make torture MINUTES=2")
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert rows == [
        "| `tests/one.py` | 1,200 | – | 1 | – | 0 | `make torture MINUTES=2` |",
        "| `tests/other.py` | 0 | – | 0 | – | 0 | `make torture MINUTES=1` |",
    ]
    assert page.read_text().endswith("|\n\nThe end.\n")


def test_time_is_shared_in_chunks() -> None:
    """A suite runs once as in ``make test``, then as much as fits, and not at all when too little time is left."""
    suite = Suite("tests/one.py")
    assert suite.scale(1.0) == 1.0
    suite.seconds_at_one = 4.0
    assert [suite.scale(seconds) for seconds in (1000.0, 20.0, 1.0)] == [30.0, 5.0, None]


def test_suites_are_found_and_failures_counted(tmp_path: Path) -> None:
    """Files that scale their cases are suites; a run that fails is a violation, with the seeds that show it again."""
    assert "tests/scheduler_lives/test_engine_simulation.py" in {suite.path for suite in find_suites(["tests"])}
    path = tmp_path / "test_one.py"
    path.write_text(
        "import os\n\ndef test_one(record_property):\n    record_property('seeds', 7)\n"
        "    assert os.environ['TORTURE_SEED'] != '5'\n"
    )
    suite = Suite(str(path))
    assert "TORTURE_SCALE=2.000 TORTURE_SEED=5" in suite.run(2.0, 5)
    assert (suite.counts["seeds"], suite.counts["violations"], suite.num_runs) == (7, 1, 1)

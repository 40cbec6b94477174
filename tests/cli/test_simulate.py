"""``pagedcore simulate``, from step times in a file to tables, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore.analysis.load_simulation import simulator
from pagedcore.analysis.load_simulation.calibration import Calibration
from pagedcore.scheduler.step_time import StepTimes
from support.runner import invoke, try_invoke


@pytest.fixture
def times(tmp_path: Path) -> str:
    path = tmp_path / "step_times.json"
    Calibration(model="demo", times=StepTimes(0.002, 1e-4, 2e-4, 1e-7), num_steps=100, mean_error=0.1,
                max_model_len=2048, block_size=32, num_kv_blocks=256, is_schedule_invariant=True).save(path)
    return str(path)


def test_a_load_is_simulated(times: str, tmp_path: Path) -> None:
    """A table and JSON say what came of it; the same command writes the same bytes."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        out = invoke("simulate", "--step-times", times, "--rate", "20", "--requests", "60", "--ttft-ms", "100",
                     "--burstiness", "2", "--json", str(file))
    assert "60 of 60" in out
    assert "goodput" in out
    assert files[0].read_bytes() == files[1].read_bytes()
    data = json.loads(files[0].read_text())
    assert data["summary"]["num_completed"] == len(data["requests"]) == 60


def test_a_trace_is_simulated_on_replicas(times: str, tmp_path: Path) -> None:
    """Arrivals come from a file, faster than they were recorded, and go to several engines."""
    trace = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:{number:02}.5+00:00,{50 + number},{5 + number}" for number in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    file = tmp_path / "out.json"
    invoke("simulate", "--step-times", times, "--trace", str(trace), "--speed", "10", "--replicas", "2",
           "--route", "round-robin", "--requests", "20", "--json", str(file))
    data = json.loads(file.read_text())
    assert [one["replica"] for one in data["requests"]] == [0, 1] * 10
    assert data["requests"][-1]["arrival_s"] == pytest.approx(1.9)


def test_replicas_are_found(times: str) -> None:
    """The answer comes with what was tried."""
    out = invoke("simulate", "--step-times", times, "--rate", "80", "--requests", "80", "--ttft-ms", "60",
                 "--find-replicas", "--share", "0.9")
    assert "how many replicas" in out
    assert "of the requests in time." in out


@pytest.mark.parametrize(("words", "error"), [
    (["--rate", "1"], "--calibrate"), (["--step-times", "TIMES"], "either --trace"),
    (["--step-times", "TIMES", "--rate", "1", "--trace", "x.csv"], "either --trace"),
    (["--step-times", "none.json", "--rate", "1"], "cannot be read"),
    (["--step-times", "TIMES", "--rate", "-1"], "rate: got -1.0"),
    (["--step-times", "TIMES", "--rate", "1", "--ttft-ms", "0"], "ttft_ms: got 0.0"),
    (["--step-times", "TIMES", "--rate", "1", "--max-model-len", "9999"], "max_model_len: got 9999"),
])
def test_what_cannot_be_simulated_is_one_line(times: str, words: list[str], error: str) -> None:
    """A missing or wrong option ends with an error of ours that names it."""
    from pagedcore.errors import PagedcoreError

    with pytest.raises(PagedcoreError, match=error):
        try_invoke("simulate", *[times if word == "TIMES" else word for word in words])


def test_ctrl_c_ends_a_simulation(times: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends the command with an exit code, without a traceback and without a half-written file."""
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator.Replica, "run_until", interrupt)
    result = try_invoke("simulate", "--step-times", times, "--rate", "1", "--json", str(tmp_path / "out.json"))
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert not (tmp_path / "out.json").exists()

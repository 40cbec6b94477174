"""Costs measured on an engine: fitted to its steps, kept in a file, refused when the file is another's."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.load_simulation import calibration
from pagedcore.analysis.load_simulation.calibration import Calibration, calibrate, fit
from pagedcore.analysis.load_simulation.costs import LoadTimes, Step
from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig
from support.engine_builders import assert_all_free, make_engine

TIMES = LoadTimes(0.004, 3e-4, 5e-4, 2e-7, 1e-3, 2e-7, 5e-4, 2e-3)
KNOWN = Calibration(model="demo", times=TIMES, num_steps=100, mean_error=0.1, max_model_len=2048, block_size=32,
                    num_kv_blocks=64, is_schedule_invariant=True)


def measured(num_steps: int) -> list[Step]:
    rng, steps, is_after = random.Random(3), list[Step](), False
    for _ in range(num_steps):
        rows, new, chunks = rng.randrange(1, 33), rng.choice([0, 0, rng.randrange(1, 512)]), rng.randrange(1, 4)
        work = (new, rows, rows * rng.randrange(20, 800), chunks if new else 0, new * rng.randrange(1, 600), is_after)
        is_after, ended = new > 0, rng.choice([0, 0, 1, 4])
        steps.append((work, ended, (TIMES.load_seconds(work) + TIMES.request_s * ended) * rng.uniform(0.9, 1.1)))
    return steps


def test_costs_are_fitted_to_the_steps() -> None:
    """Costs that made the steps are found to a tenth, those of prompts' squares, chunks and ends among them."""
    times, error = fit(measured(4000))
    for work in ((0, 1, 100, 0, 0, False), (0, 32, 9000, 0, 0, False), (0, 1, 100, 0, 0, True),
                 (512, 16, 4000, 1, 130_000, True), (50, 4, 400, 3, 500, False)):
        assert times.load_seconds(work) == pytest.approx(TIMES.load_seconds(work), rel=0.1)
    assert times.pair_s == pytest.approx(TIMES.pair_s, rel=0.3)
    assert times.chunk_s == pytest.approx(TIMES.chunk_s, rel=0.5)
    assert times.request_s == pytest.approx(TIMES.request_s, rel=0.3)
    assert times.after_prompts_s == pytest.approx(TIMES.after_prompts_s, rel=0.3)
    assert 0.03 < error < 0.07


def test_all_steps_together_take_as_long_as_they_did() -> None:
    """With a few steps that are a hundred times slower, no single step is predicted well, but all together are."""
    steps = [(work, ended, 100 * time_s if work[1] == 7 else time_s) for work, ended, time_s in measured(500)]
    times, _ = fit(steps)
    predicted_s = sum(times.load_seconds(work) + times.request_s * ended for work, ended, _ in steps)
    assert predicted_s == pytest.approx(sum(one[2] for one in steps))


def test_too_few_steps_are_refused() -> None:
    """Four costs cannot be told from a handful of steps."""
    with pytest.raises(InvalidConfig, match="steps: got 49, allowed is 50 or more"):
        fit(measured(49))


def test_an_engine_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all sizes run until the time is over; then nothing is left in the engine, and its facts are noted."""
    ticks = count()
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: 0.005 * next(ticks))
    engine, progress = make_engine(num_kv_blocks=64, max_num_waiting=8), list[float]()
    found = calibrate(engine, "toy", seconds=12.0, on_progress=progress.append)
    assert found.num_steps >= 50
    assert found.times.seconds(0, 4, 100) == pytest.approx(0.005, rel=0.2)
    assert (found.block_size, found.num_kv_blocks, found.max_model_len) == (4, 64, 4096)
    assert found.times.request_s == pytest.approx(0.01, rel=0.2)
    assert len(progress) > found.num_steps
    assert_all_free(engine)


def test_a_file_written_by_hand_may_leave_out_what_prompts_cost(tmp_path: Path) -> None:
    """Four numbers are enough; chunks, pairs, requests and steps after prompts then cost nothing on top."""
    KNOWN.save(tmp_path / "times.json")
    data = json.loads((tmp_path / "times.json").read_text())
    for name in ("chunk_s", "pair_s", "request_s", "after_prompts_s"):
        del data["times"][name]
    (tmp_path / "times.json").write_text(json.dumps(data))
    assert Calibration.load(tmp_path / "times.json").times == LoadTimes(0.004, 3e-4, 5e-4, 2e-7)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    """What was saved is what is loaded."""
    KNOWN.save(tmp_path / "times.json")
    assert Calibration.load(tmp_path / "times.json") == KNOWN


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 2}, "another kind of file"), ({"times": 3}, "another kind of file"), ({"more": 1}, "got 14 fields"),
    ({"block_size": 0}, "block_size: got 0"), ({"model": ""}, "model: got"), ({"mean_error": "x"}, "mean_error"),
    ({"times": {"fixed_s": 1}}, "got 5 fields"),
    ({"times": {"fixed_s": -1, "prefill_token_s": 0, "decode_row_s": 0, "kv_token_s": 0}}, "fixed_s: got -1"),
])
def test_another_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A field that is missing, unknown or out of range is named."""
    KNOWN.save(tmp_path / "times.json")
    data = json.loads((tmp_path / "times.json").read_text())
    (tmp_path / "times.json").write_text(json.dumps(data | change))
    with pytest.raises(InvalidConfig, match=words):
        Calibration.load(tmp_path / "times.json")


def test_the_pool_is_the_calibrated_one_unless_another_is_asked_for() -> None:
    """Without a setting the simulated pool has the positions that were calibrated, also in blocks of another size."""
    def num_blocks(**settings: Any) -> int:
        return KNOWN.engine(EngineConfig(**settings)).replicas(1)[0].num_positions

    assert num_blocks() == num_blocks(block_size=16) == 64 * 32
    assert num_blocks(num_kv_blocks=10) == 320

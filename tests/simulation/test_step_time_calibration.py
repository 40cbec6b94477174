"""Costs measured on an engine: fitted to its steps, kept in a file, refused when the file is another's."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.simulation import calibration
from pagedcore.simulation.calibration import Calibration, calibrate, fit
from support.engine_builders import assert_all_free, make_engine

TIMES = StepTimes(0.004, 3e-4, 5e-4, 2e-7)
KNOWN = Calibration(model="demo", times=TIMES, num_steps=100, mean_error=0.1, max_model_len=2048, block_size=32,
                    num_kv_blocks=64, is_schedule_invariant=True)


def measured(num_steps: int) -> list[tuple[int, int, int, float]]:
    rng, steps = random.Random(3), []
    for _ in range(num_steps):
        rows = rng.randrange(1, 33)
        work = (rng.choice([0, 0, rng.randrange(512)]), rows, rows * rng.randrange(20, 800))
        steps.append((*work, TIMES.seconds(*work) * rng.uniform(0.9, 1.1)))
    return steps


def test_costs_are_fitted_to_the_steps() -> None:
    """Costs that made the steps are found to a tenth, and the error is that of the noise."""
    times, error = fit(measured(2000), random.Random(1))
    for work in ((0, 1, 100), (0, 32, 9000), (512, 16, 4000)):
        assert times.seconds(*work) == pytest.approx(TIMES.seconds(*work), rel=0.1)
    assert 0.03 < error < 0.07


def test_all_steps_together_take_as_long_as_they_did() -> None:
    """With a few steps that are a hundred times slower, no single step is predicted well, but all together are."""
    steps = [(new, rows, kv, 100 * time_s if rows == 7 else time_s) for new, rows, kv, time_s in measured(500)]
    times, _ = fit(steps, random.Random(1))
    assert sum(times.seconds(*work) for *work, _ in steps) == pytest.approx(sum(seconds for *_, seconds in steps))


def test_too_few_steps_are_refused() -> None:
    """Four costs cannot be told from a handful of steps."""
    with pytest.raises(InvalidConfig, match="steps: got 49, allowed is 50 or more"):
        fit(measured(49), random.Random(1))


def test_an_engine_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all sizes run until the time is over; then nothing is left in the engine, and its facts are noted."""
    ticks = count()
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: 0.005 * next(ticks))
    engine, progress = make_engine(num_kv_blocks=64, max_num_waiting=8), list[float]()
    found = calibrate(engine, "toy", seconds=3.0, on_progress=progress.append)
    assert found.num_steps >= 50
    assert found.times.seconds(0, 4, 100) == pytest.approx(0.005, rel=0.2)
    assert (found.block_size, found.num_kv_blocks, found.max_model_len) == (4, 64, 4096)
    assert len(progress) > found.num_steps
    assert_all_free(engine)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    """What was saved is what is loaded."""
    KNOWN.save(tmp_path / "times.json")
    assert Calibration.load(tmp_path / "times.json") == KNOWN


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 2}, "another kind of file"), ({"times": 3}, "another kind of file"), ({"more": 1}, "got 9 fields"),
    ({"block_size": 0}, "block_size: got 0"), ({"model": ""}, "model: got"), ({"mean_error": "x"}, "mean_error"),
    ({"times": {"fixed_s": 1}}, "got 1 fields"),
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

"""What a step costs, learned from steps: exact where it can be, never negative, not misled by a single odd step."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InvalidConfig
from pagedcore.scheduler.step_time import FIRST_GUESS, StepTimeModel, StepTimes, non_negative

COUNT = st.integers(0, 100_000)
TRUTH = StepTimes(0.004, 3e-4, 5e-4, 2e-7)


def a_step(rng: random.Random) -> tuple[int, int, int]:
    """A step of up to 32 rows, with a prompt chunk in every third one."""
    rows = rng.randrange(1, 33)
    prefill = rng.choice([0, 0, rng.randrange(1, 513)])
    return prefill, rows, rows * rng.randrange(20, 2000) + prefill


def taught(truth: StepTimes, num_steps: int, noise: float = 0.0, start: StepTimes = FIRST_GUESS) -> StepTimeModel:
    rng, model = random.Random(7), StepTimeModel(start)
    for _ in range(num_steps):
        step = a_step(rng)
        model.observe(*step, truth.seconds(*step) * (1 + rng.uniform(-noise, noise)))
    return model


def worst_error(model: StepTimeModel, truth: StepTimes) -> float:
    rng = random.Random(8)
    steps = [a_step(rng) for _ in range(200)]
    return max(abs(model.predict(*step) / truth.seconds(*step) - 1) for step in steps)


@pytest.mark.parametrize("truth", [
    TRUTH, StepTimes(1e-4, 1e-3, 0.0, 0.0), StepTimes(0.02, 0.0, 0.0, 1e-6), StepTimes(1e-5, 1e-6, 1e-6, 1e-10),
])
def test_it_learns_what_it_is_shown(truth: StepTimes) -> None:
    """After some hundred exact steps no prediction is off by more than a fiftieth, whatever the first guess was."""
    for start in (FIRST_GUESS, StepTimes(1.0, 1.0, 1.0, 1.0), StepTimes(0, 0, 0, 0)):
        assert worst_error(taught(truth, 600, start=start), truth) < 0.02


def test_it_learns_through_noise() -> None:
    """With steps that are 20 % longer or shorter at random, predictions are within 5 %."""
    assert worst_error(taught(TRUTH, 2000, noise=0.2), TRUTH) < 0.05


def test_one_odd_step_changes_little() -> None:
    """A step that takes a hundred times as long as predicted moves other predictions by less than a hundredth."""
    model = taught(TRUTH, 600, noise=0.02)
    before = model.predict(0, 16, 8000)
    model.observe(0, 16, 8000, 100 * before)
    for _ in range(8):
        model.observe(0, 16, 8000, TRUTH.seconds(0, 16, 8000))
    assert model.predict(0, 16, 8000) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("factor", [0.25, 1.5, 4.0])
def test_it_follows_a_machine_that_has_changed(factor: float, noise: float) -> None:
    """What stays is no outlier: after hours at one speed, another one is known within 200 steps to a fifth, and what
    steps cost usually within 1,000 to a tenth.
    """
    model, rng, step = taught(TRUTH, 5000, noise=noise), random.Random(9), (0, 16, 8000)
    for num_steps in range(1000):
        if num_steps == 200:
            assert model.times_now().seconds(*step) == pytest.approx(factor * TRUTH.seconds(*step), rel=0.2)
        work = a_step(rng)
        model.observe(*work, factor * TRUTH.seconds(*work) * (1 + rng.uniform(-noise, noise)))
    assert model.predict(*step) == pytest.approx(factor * TRUTH.seconds(*step), rel=0.1)


def test_slow_steps_are_slow_now_and_not_usually() -> None:
    """Thirty steps of half as long again are what the next one is thought to cost, and hardly change what one costs."""
    model, rng, step = taught(TRUTH, 2000, noise=0.2), random.Random(9), (0, 16, 8000)
    for _ in range(30):
        work = a_step(rng)
        model.observe(*work, 1.5 * TRUTH.seconds(*work))
    assert model.predict(*step) < 1.15 * TRUTH.seconds(*step)
    assert 1.25 * TRUTH.seconds(*step) < model.times_now().seconds(*step) < 1.6 * TRUTH.seconds(*step)


def test_a_step_that_stood_still_is_no_level() -> None:
    """An hour counts as a step of four times its length, and the first steps say nothing of a level."""
    model = taught(TRUTH, 600)
    assert model.level == pytest.approx(1.0, abs=1e-6)
    model.observe(0, 16, 8000, 3600.0)
    assert model.level == pytest.approx(1.1)


@pytest.mark.parametrize("first", [1.0, 50.0])
def test_a_slow_first_step_does_not_decide_what_steps_cost(first: float) -> None:
    """However long the step takes in which kernels are loaded, after three more it is hardly seen."""
    model = StepTimeModel()
    for factor in (first, 1.0, 1.0, 1.0):
        model.observe(64, 0, 64, factor * TRUTH.seconds(64, 0, 64))
    assert model.predict(64, 0, 64) == pytest.approx(TRUTH.seconds(64, 0, 64), rel=0.05)


def test_long_decoding_does_not_wipe_out_what_prompts_cost() -> None:
    """After 2,000 steps that only decode, a prompt's step is still predicted to a twentieth."""
    model = taught(TRUTH, 600)
    for step in range(2000):
        model.observe(0, 32, 32 * (100 + step), TRUTH.seconds(0, 32, 32 * (100 + step)))
    assert model.predict(512, 8, 4000) == pytest.approx(TRUTH.seconds(512, 8, 4000), rel=0.05)


def test_what_was_never_seen_stays_as_guessed() -> None:
    """Where no step had a prompt, the cost of its tokens is still the first guess."""
    model = StepTimeModel()
    for step in range(500):
        model.observe(0, 8, 8 * (100 + step), TRUTH.seconds(0, 8, 8 * (100 + step)))
    assert model.times.prefill_token_s == pytest.approx(FIRST_GUESS.prefill_token_s)
    assert model.predict(0, 8, 4000) == pytest.approx(TRUTH.seconds(0, 8, 4000), rel=0.02)


@settings(max_examples=60)
@given(st.lists(st.tuples(COUNT, COUNT, COUNT, st.floats(allow_nan=True)), max_size=40), COUNT, COUNT, COUNT)
def test_no_prediction_is_negative(
    steps: list[tuple[int, int, int, float]], prefill: int, rows: int, kv: int
) -> None:
    """Whatever was measured, even by a broken clock: costs are finite and not negative."""
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    assert min(asdict(model.times).values()) >= 0
    assert 0 <= model.times_now().seconds(prefill, rows, kv) < math.inf


@given(st.lists(st.lists(st.floats(-9, 9), min_size=5, max_size=5), min_size=4, max_size=9))
def test_a_solution_without_negative_numbers_is_the_best_one(steps: list[list[float]]) -> None:
    """The costs that are not zero fit best, as if there were no others."""
    rows, right = np.array(steps)[:, :4], np.array(steps)[:, 4]
    products, aims = rows.T @ rows + np.eye(4), rows.T @ right
    solved = np.array(non_negative(products.tolist(), aims.tolist()))
    gradient = products @ solved - aims
    assert solved.min() >= 0.0
    np.testing.assert_allclose(gradient[solved > 0.0], 0.0, atol=1e-8)


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan, "1", None, True])
def test_costs_that_are_none_are_refused(value: object) -> None:
    """A cost that is negative, not finite or not a number names its field."""
    with pytest.raises(InvalidConfig, match="decode_row_s"):
        StepTimes(0.0, 0.0, value, 0.0)  # type: ignore[arg-type]

"""What a step costs, learned from steps: exact where it can be, never negative, not misled by a single odd step."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.errors import InvalidConfig
from pagedcore.scheduler.step_time import FIRST_GUESS, StepTimeModel, StepTimes

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


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_it_follows_a_machine_that_has_changed(factor: float) -> None:
    """What stays is no outlier: a machine of another speed is known within 300 steps, to a twentieth."""
    model, rng = taught(TRUTH, 600), random.Random(9)
    for _ in range(300):
        step = a_step(rng)
        model.observe(*step, factor * TRUTH.seconds(*step))
    step = (0, 16, 8000)
    assert model.predict(*step) == pytest.approx(factor * TRUTH.seconds(*step), rel=0.05)


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(COUNT, COUNT, COUNT, st.floats(allow_nan=True)), max_size=40), COUNT, COUNT, COUNT)
def test_no_prediction_is_negative(
    steps: list[tuple[int, int, int, float]], prefill: int, rows: int, kv: int
) -> None:
    """Whatever was measured, even by a broken clock: costs are finite and not negative, and intervals are in order."""
    model = StepTimeModel()
    for step in steps:
        model.observe(*step)
    assert min(asdict(model.times).values()) >= 0
    low, high = model.interval(prefill, rows, kv)
    assert 0 <= low <= high < math.inf


def test_the_interval_holds_for_its_share_of_the_steps() -> None:
    """Of steps with 20 % of noise, 90 % intervals hold for 85 to 95 in 100, and are about as wide as the noise."""
    model, rng, num_held = taught(TRUTH, 2000, noise=0.2), random.Random(10), 0
    for _ in range(1000):
        step = a_step(rng)
        low, high = model.interval(*step, share=0.9)
        num_held += low <= TRUTH.seconds(*step) * (1 + rng.uniform(-0.2, 0.2)) <= high
        assert high - low < 0.5 * TRUTH.seconds(*step)
    assert 850 <= num_held <= 950


def test_before_it_knows_anything_the_interval_is_wide() -> None:
    """With few steps observed the interval begins at 0 and has the worst step so far in it."""
    model = StepTimeModel()
    assert model.interval(0, 1, 10) == (0.0, 2 * model.predict(0, 1, 10))
    model.observe(0, 1, 10, 1.0)
    low, high = model.interval(0, 1, 10)
    assert low == 0.0
    assert high > model.predict(0, 1, 10) * (1 + model.errors[0])


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan, "1", None, True])
def test_costs_that_are_none_are_refused(value: object) -> None:
    """A cost that is negative, not finite or not a number names its field."""
    with pytest.raises(InvalidConfig, match="decode_row_s"):
        StepTimes(0.0, 0.0, value, 0.0)  # type: ignore[arg-type]

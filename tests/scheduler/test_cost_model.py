"""Estimates of what it costs to take blocks away: learned from measurements, never below nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.kv_cache.host_cache import Direction
from pagedcore.scheduler.cost_model import CostModel, Line
from pagedcore.scheduler.step_time import StepTimeModel, StepTimes

SECONDS = st.floats(0, 100, allow_nan=False)


@pytest.mark.parametrize(("fixed_s", "per_unit_s"), [(0.01, 0.002), (0.5, 0.0), (0.0, 0.03)])
def test_a_line_learns_what_it_is_shown(fixed_s: float, per_unit_s: float) -> None:
    """After some hundred exact observations the prediction is within a hundredth, for any first guess."""
    line = Line(1e-3, 1e-4)
    for step in range(400):
        count = 1 + step * 37 % 64
        line.observe(count, fixed_s + count * per_unit_s)
    for count in (1, 20, 64):
        assert line.seconds(count) == pytest.approx(fixed_s + count * per_unit_s, rel=0.01, abs=1e-3)


def test_a_line_follows_a_machine_that_has_changed() -> None:
    """Old observations fade: twice as slow a machine is known after a few hundred steps."""
    line = Line(0.0, 0.001)
    for factor in (1, 2):
        for step in range(400):
            count = 1 + step % 50
            line.observe(count, factor * count * 0.001)
    assert line.seconds(40) == pytest.approx(0.08, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 512), SECONDS), max_size=60))
def test_a_line_is_never_negative(observations: list[tuple[int, float]]) -> None:
    """Whatever was measured, no prediction is below zero."""
    line = Line(1e-3, 1e-4)
    for count, seconds in observations:
        line.observe(count, seconds)
        assert line.fixed_s >= 0
        assert line.per_unit_s >= 0
    assert line.seconds(0) >= 0


def test_equal_counts_teach_the_mean() -> None:
    """A decode-only engine always computes the same number of tokens: that step's time is learned all the same."""
    line = Line(1e-3, 1e-4)
    for _ in range(500):
        line.observe(8, 0.05)
    assert line.seconds(8) == pytest.approx(0.05, rel=0.05)


def test_one_odd_measurement_does_not_replace_the_first_guess() -> None:
    """A single hiccup right after the start moves the estimate by less than the hiccup."""
    line = Line(1e-3, 1e-4)
    line.observe(32, 1.0)
    assert line.seconds(32) < 0.7


def test_swapping_costs_both_ways_and_computing_only_its_tokens() -> None:
    """Out and back by the lines; tokens and the positions they are read at, in steps that take place anyway."""
    steps = StepTimeModel(StepTimes(0.1, 0.01, 0.02, 0.001))
    costs = CostModel(steps, {Direction.OUT: Line(0.0, 1.0), Direction.IN: Line(0.0, 2.0)})
    assert costs.swap_s(3, 4) == pytest.approx(3 + 8)
    assert costs.compute_s(5) == pytest.approx(0.055)
    assert costs.compute_s(0) == 0


def test_waiting_costs_more_the_longer_and_less_the_more_others_run() -> None:
    """Standing still costs a row's part of the fixed time of each step, and more the more steps it takes."""
    costs = CostModel()
    assert costs.wait_s(0, 4, 16) == 0
    assert costs.wait_s(4, 4, 16) < costs.wait_s(8, 4, 16)
    assert costs.wait_s(4, 16, 16) < costs.wait_s(4, 2, 16)


def test_what_shrinking_loses_is_learned() -> None:
    """A tail costs its tokens; the rest costs the share of it that was gone the last times."""
    costs = CostModel(StepTimeModel(StepTimes(0.0, 0.01, 0.0, 0.0)))
    for share in (1.0, 0.0):
        for _ in range(40):
            costs.observe_loss(share)
        assert costs.loss_share == pytest.approx(share, abs=0.01)
        assert costs.shrink_s(10, 100) == pytest.approx(0.1 + share, abs=0.02)


def test_scores_are_relative_errors() -> None:
    """A hit scores 0, a miss by half 0.5, and nothing scored is no error."""
    costs = CostModel()
    assert costs.mean_relative_error == 0
    costs.score(1.0, 1.0)
    costs.score(1.0, 2.0)
    assert costs.mean_relative_error == pytest.approx(0.25)
    costs.score(0.0, 0.0)
    assert costs.num_estimates == 3

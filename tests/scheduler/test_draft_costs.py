"""What a draft costs is learned from steps in which all rows decode, for each size of a batch."""

from __future__ import annotations

import random

import pytest

from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.step_time import StepTimeModel


def test_what_a_draft_costs_is_known_after_loads_of_other_kinds() -> None:
    """After prompts and full batches, for which one row is thought to take half of its time, a step of one row and its
    drafts are known as well as before.
    """
    steps, rng = StepTimeModel(), random.Random(3)
    costs = DraftCosts(steps)

    def step(prefill: int, rows: int, drafts: int) -> None:
        seconds = max(0.036, 0.002 * (prefill + rows + drafts)) + 0.0005 * drafts
        steps.observe(prefill + drafts, rows, 300 * rows + prefill, seconds)
        if not prefill:
            costs.observe(rows, drafts, seconds)

    for _ in range(60):
        step(0, 1, rng.randrange(9))
    for _ in range(600):
        step(rng.choice([0, 20, 480]), rng.randrange(24, 33), 0)
    assert steps.predict(0, 1, 300) < 0.02
    assert costs.predict(1, 300) == (pytest.approx(0.036, rel=0.05), pytest.approx(0.0005, rel=0.3))


def test_before_a_step_was_measured_all_steps_say_what_it_costs() -> None:
    """A draft is thought to cost what a prompt's token does, and no more than its share of the step."""
    steps = StepTimeModel()
    assert DraftCosts(steps).predict(3, 300) == (pytest.approx(steps.predict(0, 3, 300)), pytest.approx(2e-4))
    costs = DraftCosts(steps)
    costs.observe(1, 0, 1e-5)
    step_s, row_s = costs.predict(1, 300)
    assert 0 < row_s <= step_s


def test_a_step_that_stood_still_costs_no_drafts() -> None:
    """A second's pause in a step counts as twice what was expected."""
    costs = DraftCosts(StepTimeModel())
    for _ in range(60):
        for drafts in (0, 4, 8):
            costs.observe(1, drafts, 0.03 + 0.001 * drafts)
    costs.observe(1, 8, 1.0)
    step_s, row_s = costs.predict(1, 300)
    assert step_s == pytest.approx(0.031, rel=0.05)
    assert row_s < 0.0015

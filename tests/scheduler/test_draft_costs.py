"""What drafts cost is learned from steps in which all rows decode, for each size of a batch."""

from __future__ import annotations

import random

import pytest

from pagedcore.drafting.offers import Chances, share_out
from pagedcore.scheduler.draft_costs import DraftCosts
from pagedcore.scheduler.step_time import FIRST_GUESS, StepTimeModel, StepTimes


def tiles(tokens: int) -> float:
    """Seconds of a step whose products take sixteen rows at a time."""
    return 0.036 + 0.018 * ((tokens - 1) // 16) + 0.0002 * tokens


def test_what_drafts_cost_is_known_after_loads_of_other_kinds() -> None:
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
    assert costs.predict(1, 300, 8) == pytest.approx([0.036 + 0.0005 * drafts for drafts in range(9)], rel=0.01)


def test_before_a_step_was_measured_all_steps_say_what_it_costs() -> None:
    """A draft is thought to cost what a prompt's token does, and a step never less than half of one that was seen."""
    steps = StepTimeModel()
    first = steps.predict(0, 3, 300)
    assert DraftCosts(steps).predict(3, 300, 2) == pytest.approx([first, first + 2e-4, first + 4e-4])
    costs = DraftCosts(steps)
    costs.observe(1, 16, 1e-4)
    assert costs.predict(1, 300, 20) == pytest.approx([5e-5, *[1e-4] * 19, 3e-4])


def test_a_row_that_needs_another_tile_is_not_worth_it_and_those_behind_it_are_free() -> None:
    """With 32 rows drafts that are right half of the time are hardly ever tried; with 30 they are had."""
    chances, rng = Chances(0.5, 0.7), random.Random(4)
    for rows, least, most in ((32, 1, 50), (30, 950, 1000)):
        costs, num_tried, spent, kept = DraftCosts(StepTimeModel()), 0, 0.0, 0
        for _ in range(1000):
            seconds = costs.predict(rows, 300 * rows, 64)
            counts = share_out([chances] * rows, [4] * rows, 64, num_sampled=rows, seconds=seconds)
            took = tiles(rows + sum(counts)) * rng.uniform(0.95, 1.05)
            costs.observe(rows, sum(counts), took)
            num_tried, spent, kept = num_tried + (sum(counts) > 0), spent + took, kept + sum(counts) // 2
        assert least <= num_tried <= most
        assert (1000 * rows + kept) / spent > 0.99 * rows / tiles(rows)


def test_a_step_that_stood_still_costs_no_drafts() -> None:
    """A second's pause in a step counts as twice what was expected, of which a tenth is believed."""
    costs = DraftCosts(StepTimeModel())
    for _ in range(60):
        for drafts in (0, 4, 8):
            costs.observe(1, drafts, 0.03 + 0.001 * drafts)
    costs.observe(1, 8, 1.0)
    assert costs.predict(1, 300, 8)[8] == pytest.approx(0.038, rel=0.11)


def test_a_clock_that_stands_still_gives_costs_that_can_be_divided_by() -> None:
    """Steps that took no time, and costs of nothing, are no failure of the source of drafts."""
    for times in (FIRST_GUESS, StepTimes(0.0, 0.0, 0.0, 0.0)):
        costs = DraftCosts(StepTimeModel(times))
        assert min(costs.predict(1, 300, 8)) > 0
        costs.observe(1, 0, 0.0)
        assert min(costs.predict(1, 300, 8)) > 0


def test_what_has_not_come_for_long_is_tried_again() -> None:
    """Where a machine was slow when drafts were tried, that is forgotten after a thousand steps."""
    costs = DraftCosts(StepTimeModel())
    costs.observe(1, 4, 9.0)
    for _ in range(1100):
        costs.observe(1, 0, 0.03)
    assert costs.predict(1, 300, 4)[4] == pytest.approx(0.03 + 4 * 2e-4)

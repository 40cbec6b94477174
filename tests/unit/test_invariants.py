"""The checker itself: every law, broken alone in a hand-made snapshot, is reported alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from doubles import make_scheduler, make_sequence, run_step
from pagedcore.cache.block_manager import BlockSnapshot
from pagedcore.request import SequenceStatus
from pagedcore.scheduling.invariants import SequenceState, Snapshot, check, snapshot

WAITING = SequenceState(1, SequenceStatus.WAITING, (7, 7), 0, 8)
RUNNING = SequenceState(2, SequenceStatus.RUNNING, (1, 2, 3, 4), 3, 8)
KEPT = SequenceState(3, SequenceStatus.FINISHED, (1, 2, 9), 2, 3)
BLOCKS = BlockSnapshot(2, (3, 4, 5), (1, 1, 1, 0, 0, 0), {2: (0, 1), 3: (2,)})
LAWFUL = Snapshot(BLOCKS, (WAITING,), (RUNNING,), (KEPT,), {}, num_newcomers=1, max_num_waiting=1, max_num_seqs=1)


def with_blocks(**changes: Any) -> Snapshot:
    return replace(LAWFUL, blocks=replace(BLOCKS, **changes))


def test_a_lawful_snapshot_has_no_violation() -> None:
    """The snapshot that all cases below start from keeps every law, compared with itself as well."""
    assert check(LAWFUL) == check(LAWFUL, LAWFUL) == []


BROKEN = {
    "a block that is neither free nor referenced": ("S1", with_blocks(free_blocks=(3, 4))),
    "a reference without a table": ("S2", with_blocks(free_blocks=(3, 4), reference_counts=(1, 1, 1, 0, 0, 1))),
    "a table without a reference": ("S2", with_blocks(reference_counts=(1, 1, 2, 0, 0, 0))),
    "a block twice in the free list": ("S3", with_blocks(free_blocks=(3, 4, 5, 5))),
    "a block of two different pasts": (
        "S4", with_blocks(free_blocks=(2, 3, 4, 5), reference_counts=(1, 2, 0, 0, 0, 0), tables={2: (0, 1), 3: (1,)})
    ),
    "a block that a sequence holds too many": (
        "S5", with_blocks(free_blocks=(4, 5), reference_counts=(1, 1, 1, 1, 0, 0), tables={2: (0, 1, 3), 3: (2,)})
    ),
    "a block that a sequence lacks": (
        "S5", with_blocks(free_blocks=(1, 3, 4, 5), reference_counts=(1, 0, 1, 0, 0, 0), tables={2: (0,), 3: (2,)})
    ),
    "blocks missing for the step in flight": ("S5", replace(LAWFUL, reserved={1: 2})),
    "a sequence in two places": ("S6", replace(LAWFUL, waiting=(WAITING, WAITING))),
    "a table of nobody": (
        "S6", with_blocks(free_blocks=(4, 5), reference_counts=(1, 1, 1, 1, 0, 0), tables={**BLOCKS.tables, 9: (3,)})
    ),
    "a place that does not fit the status": (
        "S6", replace(LAWFUL, waiting=(replace(WAITING, status=SequenceStatus.FINISHED),))
    ),
    "nothing left to compute while waiting": (
        "S9", replace(LAWFUL, running=(replace(RUNNING, num_computed_tokens=4),))
    ),
    "more tokens than allowed": ("S9", replace(LAWFUL, running=(replace(RUNNING, max_total_tokens=3),))),
    "more newcomers than the bound": ("S10", replace(LAWFUL, num_newcomers=2)),
    "more running than the bound": ("S10", replace(LAWFUL, max_num_seqs=0)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_law_is_reported_when_it_alone_is_broken(case: str) -> None:
    """One break, one law, whatever else could be said about the snapshot."""
    law, broken = BROKEN[case]
    assert {violation.law for violation in check(broken)} == {law}


def test_a_free_block_that_is_held_is_reported() -> None:
    """A held block in the free list breaks S3, and the conservation law with it."""
    laws = {violation.law for violation in check(with_blocks(free_blocks=(0, 3, 4, 5)))}
    assert laws == {"S1", "S3"}


def test_known_tokens_never_change() -> None:
    """A token that was known before and is another one now is a violation; growing is none."""
    changed = replace(LAWFUL, running=(replace(RUNNING, token_ids=(1, 2, 8, 4)),))
    grown = replace(LAWFUL, running=(replace(RUNNING, token_ids=(1, 2, 3, 4, 5)),))
    assert [violation.law for violation in check(changed, LAWFUL)] == ["S9"]
    assert check(grown, LAWFUL) == []


def test_a_block_may_be_shared_by_sequences_with_the_same_past() -> None:
    """Sharing is lawful as far as both sequences are equal."""
    shared = with_blocks(
        free_blocks=(2, 3, 4, 5), reference_counts=(2, 1, 0, 0, 0, 0), tables={2: (0, 1), 3: (0,)}
    )
    assert check(shared) == []


def test_a_snapshot_is_a_value() -> None:
    """Later steps do not change a snapshot, and a step in flight is part of it."""
    scheduler = make_scheduler()
    sequence = make_sequence(3, 2)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    scheduler.reserve(plan)
    taken = snapshot(scheduler)
    copy = snapshot(scheduler)
    assert taken.reserved == {sequence.sequence_id: 3}
    scheduler.rollback(plan)
    run_step(scheduler)
    assert taken == copy
    assert snapshot(scheduler) != taken

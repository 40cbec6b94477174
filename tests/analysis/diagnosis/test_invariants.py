"""The checker itself: every law, broken alone in a hand-made snapshot, is reported alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from architecture.sources import ROOT
from pagedcore.analysis.diagnosis.invariants import SequenceState, Snapshot, check, snapshot
from pagedcore.errors import InternalError
from pagedcore.kv_cache.memory_snapshot import BlockSnapshot, Known, MemorySnapshot
from pagedcore.sequence import SequenceStatus
from support.doubles import make_scheduler, make_sequence, run_step
from support.engine_builders import make_engine

WAITING = SequenceState(1, SequenceStatus.WAITING, (7, 7), 0, 8)
RUNNING = SequenceState(2, SequenceStatus.RUNNING, (1, 2, 3, 4), 3, 8)
CACHED = {b"first": Known(0, b"root", (1, 2), True), b"next": Known(2, b"first", (5, 6), False)}
#: Blocks 0 and 1 are in a table, 2 is idle, 3 to 5 are free; on the host 0 is pinned, 1 idle, 2 free.
DEVICE = MemorySnapshot((3, 4, 5), frozenset({2}), (1, 1, 0, 0, 0, 0), {0: 1, 1: 1}, CACHED)
HOST = MemorySnapshot((2,), frozenset({1}), (1, 0, 0), {0: 1}, {b"host": Known(1, b"root", (9,), True)})
BLOCKS = BlockSnapshot(2, DEVICE, HOST, {2: (0, 1)}, {1: (0,)})
LAWFUL = Snapshot(
    BLOCKS, (WAITING,), (RUNNING,), frozenset(), {}, num_never_started=1, max_num_waiting=1, max_num_seqs=1
)


def with_blocks(**changes: Any) -> Snapshot:
    return replace(LAWFUL, blocks=replace(BLOCKS, **changes))


def on_device(tables: dict[int, tuple[int, ...]] | None = None, **changes: Any) -> Snapshot:
    return with_blocks(device=replace(DEVICE, **changes), tables=tables if tables is not None else BLOCKS.tables)


def on_host(**changes: Any) -> Snapshot:
    return with_blocks(host=replace(HOST, **changes))


def test_a_lawful_snapshot_has_no_violation() -> None:
    """The snapshot that all cases below start from keeps every law, compared with itself as well."""
    assert check(LAWFUL) == check(LAWFUL, LAWFUL) == []


BROKEN = {
    "a block that is nowhere": ("S1", on_device(free_blocks=(3, 4))),
    "a host block that is nowhere": ("S1", on_host(free_blocks=())),
    "a reference without a holder": ("S2", on_device(free_blocks=(3, 4), reference_counts=(1, 1, 0, 0, 0, 1))),
    "a holder without a reference": ("S2", on_device(reference_counts=(1, 2, 0, 0, 0, 0))),
    "a host block pinned without a reference": ("S2", on_host(holders={0: 2})),
    "a block twice in the free list": ("S3", on_device(free_blocks=(3, 4, 5, 5))),
    "a host block twice in the free list": ("S3", on_host(free_blocks=(2, 2))),
    "a block that a sequence holds too many": (
        "S5", on_device({2: (0, 1, 3)}, free_blocks=(4, 5), reference_counts=(1, 1, 0, 1, 0, 0),
                        holders={0: 1, 1: 1, 3: 1})
    ),
    "a block that a sequence lacks": (
        "S5", on_device({2: (0,)}, free_blocks=(1, 3, 4, 5), reference_counts=(1, 0, 0, 0, 0, 0), holders={0: 1})
    ),
    "blocks missing for the step in flight": ("S5", replace(LAWFUL, reserved={1: 2})),
    "a sequence in two places": ("S6", replace(LAWFUL, waiting=(WAITING, WAITING))),
    "a table without a sequence": (
        "S6", on_device({2: (0, 1), 9: (3,)}, free_blocks=(4, 5), reference_counts=(1, 1, 0, 1, 0, 0),
                        holders={0: 1, 1: 1, 3: 1})
    ),
    "pins without a sequence": ("S6", with_blocks(pins={9: (0,)})),
    "a place that does not fit the status": (
        "S6", replace(LAWFUL, waiting=(replace(WAITING, status=SequenceStatus.FINISHED),))
    ),
    "a table and pins": ("S7", with_blocks(pins={2: (0,)})),
    "a table and a transfer": ("S7", replace(LAWFUL, moving=frozenset({2}))),
    "pins of a running sequence, its step in flight": ("S7", replace(with_blocks(pins={2: (0,)}), reserved={2: 4})),
    "one block under two keys": (
        "S8", on_device(registered={**CACHED, b"again": Known(2, b"first", (5, 7), False)})
    ),
    "an idle block that cannot be found": ("S8", on_device(registered={b"first": CACHED[b"first"]})),
    "a block whose past cannot be found": ("S8", on_device(registered={b"next": CACHED[b"next"]})),
    "a free block that can be found": (
        "S8", on_device(registered={**CACHED, b"ghost": Known(3, b"root", (8, 8), True)})
    ),
    "an idle host block that cannot be found": ("S8", on_host(registered={})),
    "nothing left to compute": ("S9", replace(LAWFUL, running=(replace(RUNNING, num_computed_tokens=4),))),
    "more tokens than allowed": ("S9", replace(LAWFUL, running=(replace(RUNNING, max_total_tokens=3),))),
    "more new sequences than the bound": ("S10", replace(LAWFUL, num_never_started=2)),
    "more running than the bound": ("S10", replace(LAWFUL, max_num_seqs=0)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_law_is_reported_when_it_alone_is_broken(case: str) -> None:
    """One break is reported under one law."""
    law, broken = BROKEN[case]
    assert {violation.law for violation in check(broken)} == {law}


def sharing(other: SequenceState) -> Snapshot:
    """Two running sequences that share block 0."""
    shared = on_device({2: (0, 1), 3: (0,)}, reference_counts=(2, 1, 0, 0, 0, 0), holders={0: 2, 1: 1})
    return replace(shared, running=(RUNNING, other), max_num_seqs=2)


SAME_PAST = SequenceState(3, SequenceStatus.RUNNING, (1, 2, 9), 2, 8)


def test_a_block_may_be_shared_by_sequences_with_the_same_past() -> None:
    """Sharing is lawful as far as both sequences are equal."""
    assert check(sharing(SAME_PAST)) == []


@pytest.mark.parametrize("change", [{"token_ids": (1, 8, 9)}, {"cache_root": b"another tenant"}])
def test_a_block_of_two_pasts_or_two_tenants_is_reported(change: dict[str, Any]) -> None:
    """S4: other tokens up to the block's end, or the same tokens under another cache root."""
    assert {violation.law for violation in check(sharing(replace(SAME_PAST, **change)))} == {"S4"}


def test_a_free_block_that_is_held_or_idle_is_reported() -> None:
    """Such a block breaks S3, and conservation with it."""
    assert {violation.law for violation in check(on_device(free_blocks=(1, 3, 4, 5)))} == {"S1", "S3"}
    assert {"S1", "S3"} <= {violation.law for violation in check(on_device(free_blocks=(2, 3, 4, 5)))}


def test_pins_may_stay_until_the_first_step_is_committed() -> None:
    """A waiting sequence whose first step is in flight can still be rolled back to what the host keeps for it."""
    starting = on_device(
        {2: (0, 1), 1: (3,)}, free_blocks=(4, 5), reference_counts=(1, 1, 0, 1, 0, 0), holders={0: 1, 1: 1, 3: 1}
    )
    assert check(replace(starting, reserved={1: 2})) == []


def test_known_tokens_never_change() -> None:
    """A token that was known before and is another one now is a violation; growing is none."""
    changed = replace(LAWFUL, running=(replace(RUNNING, token_ids=(1, 2, 8, 4)),))
    grown = replace(LAWFUL, running=(replace(RUNNING, token_ids=(1, 2, 3, 4, 5)),))
    assert [violation.law for violation in check(changed, LAWFUL)] == ["S9"]
    assert check(grown, LAWFUL) == []


def test_a_snapshot_is_a_value() -> None:
    """Later steps do not change a snapshot, and a step in flight is part of it."""
    scheduler = make_scheduler(num_host_blocks=4)
    sequence = make_sequence(3, 2)
    scheduler.add_sequences(sequence)
    plan = scheduler.schedule()
    scheduler.reserve(plan)
    taken, copy = snapshot(scheduler), snapshot(scheduler)
    assert taken.reserved == {sequence.sequence_id: 3}
    scheduler.rollback(plan)
    run_step(scheduler)
    assert taken == copy
    assert snapshot(scheduler) != taken


def test_a_broken_law_ends_the_step_of_an_engine_that_checks() -> None:
    """With ``check_invariants=True`` a step after which a law is broken raises the law's number and place."""
    engine = make_engine(check_invariants=True)
    engine.add_request([1, 2, 3])
    engine.step()
    engine.scheduler.kv_cache.device._pool.free_blocks.append(0)
    with pytest.raises(InternalError, match=r"broken laws.*S3: block 0 is"):
        engine.step()


def test_known_tokens_are_compared_from_step_to_step() -> None:
    """The checker keeps the last snapshot, so a token that changes between two steps breaks a law."""
    engine = make_engine(check_invariants=True)
    request = engine.add_request([1, 2, 3])
    engine.step()
    request.sequences[0].token_ids[0] = 5
    with pytest.raises(InternalError, match=r"S9: .* known tokens have changed"):
        engine.step()


def test_laws_are_imported_only_where_they_are_checked() -> None:
    """An engine without the switch neither checks nor imports the laws; the next one, which has it, does."""
    code = (
        "import sys; from pagedcore import Engine; from support.doubles import ToyBackend\n"
        "for is_on in (False, True):\n"
        "    engine = Engine.from_pretrained(ToyBackend(), num_kv_blocks=4, check_invariants=is_on)\n"
        "    engine.add_request([1, 2]); engine.step(); print('pagedcore.analysis.diagnosis.invariants' in sys.modules)"
    )
    folders = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "tests"))]
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(folders), "PATH": ""},
                          check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]

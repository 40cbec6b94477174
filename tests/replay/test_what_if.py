"""Other settings on the recorded requests: the same lengths, other waits, preemptions and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.errors import RecordingError
from pagedcore.recorder.recording import Recording, read_recording
from pagedcore.replay.lives import Outcome, lives_of, recorded_outcome
from pagedcore.replay.what_if import WhatIf, changed_order
from support.doubles import FakeClock, ToyBackend
from support.recordings import dumped, recorded_life, run_all, toy_engine
from support.torture import first_seed, scaled


class Paced(ToyBackend):
    """A toy whose steps take time: a tenth of a second, and a hundredth for each token."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch):  # type: ignore[no-untyped-def]
        """Let time pass and compute."""
        self.clock.advance(0.1 + 0.01 * int(batch.query_start[-1]))
        return super().forward(batch)


def recorded(folder: Path, **settings: Any) -> Recording:
    clock = FakeClock()
    with toy_engine(backend=Paced(clock), clock=clock, num_kv_blocks=32, **settings) as engine:
        wanted = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (3, 9, 5, 12, 4, 7)]
        for place, params in enumerate(wanted):
            priority = place if settings.get("scheduling_policy") == "priority" else 0
            engine.add_request([place, 1, 2, 3, 4], params, priority=priority)
            engine.step()
        while engine.has_pending_requests():
            engine.step()
        return dumped(engine, folder)


def outcome(recording: Recording, **changes: Any) -> Outcome:
    return WhatIf(recording, changes, leave_at=(0, 0)).run()


def test_the_recorded_settings_give_about_what_was_recorded(tmp_path: Path) -> None:
    """On the virtual clock the recorded settings end the same requests in the same order, in as many steps give or take
    one for an arrival just before or after a step, and, where steps take what their tokens say, in the recorded time.
    """
    recording = recorded(tmp_path)
    was, modelled = recorded_outcome(recording), outcome(recording)
    assert modelled.finished == was.finished
    assert abs(modelled.num_steps - was.num_steps) <= 1
    assert modelled.seconds == pytest.approx(was.seconds, rel=0.1)
    assert changed_order(was, modelled) == 0


def test_fewer_rows_and_blocks(tmp_path: Path) -> None:
    """With one row at a time everything waits longer and takes more steps; a smaller pool preempts; a pool that some
    request never fits refuses it, and the others end.
    """
    recording = recorded(tmp_path)
    free, alone = outcome(recording), outcome(recording, max_num_seqs=1)
    assert alone.num_steps > free.num_steps
    assert alone.mean_wait_s > free.mean_wait_s
    assert alone.longest_wait_s > free.longest_wait_s
    assert sorted(alone.finished) == sorted(free.finished)
    tight = outcome(recording, num_blocks=5, preemption="shrink")
    assert tight.num_preemptions > 0
    assert sorted(tight.finished) == sorted(free.finished)
    tiny = outcome(recording, num_blocks=3)
    assert (tiny.num_refused, len(tiny.finished)) == (2, 4)


def test_another_policy(tmp_path: Path) -> None:
    """Under another policy other requests end first."""
    recording = recorded(tmp_path, scheduling_policy="priority", max_num_seqs=1, max_num_waiting=10)
    first, other = outcome(recording), outcome(recording, policy="fcfs")
    assert other.finished == sorted(other.finished)
    assert changed_order(first, other) > 0
    with pytest.raises(RecordingError, match="policy"):
        outcome(recording, policy="no such policy")


def test_any_recorded_life_ends_under_any_settings(tmp_path: Path) -> None:
    """Whatever happened in a recording, with swaps, aborts and further turns, all that was accepted ends or is refused
    under other settings.
    """
    for seed in range(first_seed(), first_seed() + scaled(3)):
        path = recorded_life(seed, tmp_path, max_steps=8192, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0)
        recording = read_recording(path)
        lives = lives_of(recording)
        for changes in ({}, {"num_blocks": 40, "num_host_blocks": 0}, {"policy": "priority", "preemption": "shrink"}):
            found = WhatIf(recording, changes).run()
            assert len(found.finished) + found.num_refused == len(lives), (seed, changes)


def test_beams_are_refused(tmp_path: Path) -> None:
    """Beams depend on each other's logits, so nothing is said of other schedules."""
    with toy_engine(num_kv_blocks=24) as engine:
        run_all(engine, [[1, 2, 3]], beam_width=2)
        recording = dumped(engine, tmp_path)
    with pytest.raises(RecordingError, match="branch"):
        lives_of(recording)

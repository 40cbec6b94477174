"""Other settings on the recorded requests: the same lengths, other waits, preemptions and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.quotes.test_promises import exactly, steady
from pagedcore import SamplingParams
from pagedcore.analysis.recorder.recording import Recording, read_recording, write_recording
from pagedcore.analysis.recorder.ring import FlightRecorder
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.lives import Outcome, lives_of, recorded_outcome
from pagedcore.analysis.replay.starting_state import starting_state
from pagedcore.analysis.replay.what_if import WhatIf, changed_order, compare
from pagedcore.errors import PromiseRefused, RecordingError
from pagedcore.scheduler import chunk_ends
from scheduler_lives.simulator import Simulation
from support.doubles import FakeClock, ToyBackend, ToyHybrid, ToyWindowed
from support.engine_builders import run
from support.recordings import dumped, recorded_life, ring_of, run_all, toy_engine
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
    under other settings, and what was refused stays so.
    """
    for seed in range(first_seed(), first_seed() + scaled(3)):
        path = recorded_life(seed, tmp_path, max_steps=8192, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0)
        recording = read_recording(path)
        num_lives = len(lives_of(recording)) + recorded_outcome(recording).num_refused
        for changes in ({"num_blocks": 40, "num_host_blocks": 0}, {"policy": "priority", "preemption": "shrink"}):
            found = WhatIf(recording, changes).run()
            assert len(found.finished) + found.num_refused == num_lives, (seed, changes)


@pytest.mark.parametrize("has_faults", [False, True])
def test_without_a_change_every_decision_is_the_recorded_one(has_faults: bool, tmp_path: Path) -> None:
    """From a snapshot in the middle of any life the way of the what-if takes the recorded
    decisions byte for byte, and so it does in a pool with more blocks until the recorded one was full.
    """
    num_live = 0
    for seed in range(first_seed(), first_seed() + scaled(4)):
        life = Simulation(seed, has_faults, seed % 3 == 0)
        for _ in range(life.world.num_busy_steps // 2):
            life._happenings()
            life._step()
        recorder = FlightRecorder(life.scheduler, life.clock)
        life.run()
        write_recording(tmp_path / "one.gz", {}, recorder.segments, life.scheduler.kv_cache.device.hasher,
                        keeps_tokens=False)
        recording = read_recording(tmp_path / "one.gz")
        num_live += len(recording.segments[0]["state"]["sequences"])
        same, was = WhatIf(recording, {}), recorded_outcome(recording)
        assert same.run() == was, seed
        assert same.left_at is None, seed
        larger = WhatIf(recording, {"num_blocks": recording.segments[0]["settings"]["num_blocks"] + 8})
        larger.run()
        was_full = "blocks" in str(recording.segments[0]["events"][0])
        assert was_full or larger.left_at is None or larger.left_at > (0, 0), seed
    assert num_live


def late_burst(folder: Path, **settings: Any) -> tuple[Recording, list[list[tuple[int, ...]]]]:
    """Record an engine from the moment on at which many requests come beside the running ones; return its steps too.

    Without guesses: those of other settings are taken from the recording.
    """
    clock, steps = FakeClock(), list[list[tuple[int, ...]]]()
    chosen: dict[str, Any] = {"max_num_seqs": 3, "num_kv_blocks": 24, "max_num_waiting": 20, "speculation": "off",
                              **settings}
    with toy_engine(backend=Paced(clock), clock=clock, **chosen) as engine:
        for place in range(3):
            engine.add_request([place, 1, 2, 3, 4], SamplingParams(max_tokens=6 + 2 * place, ignore_eos=True))
        for _ in range(4):
            engine.step()
        for place in range(7):
            wanted = SamplingParams(max_tokens=3 + 5 * place % 7, ignore_eos=True)
            priority = place % 4 if settings.get("scheduling_policy") == "priority" else 0
            engine.add_request([place % 3, 1, 2, 3, 4, place, 7], wanted, priority=priority)
        ring_of(engine).begin_anew()
        note_steps(engine.scheduler, steps)
        while engine.has_pending_requests():
            engine.step()
        recording = dumped(engine, folder)
    del recording.segments[0]
    return recording, steps


def note_steps(scheduler: Any, steps: list[list[tuple[int, ...]]]) -> None:
    """Append the rows of every step that a scheduler commits: sequence, start, tokens, new blocks."""
    commit = scheduler.commit

    def noting(plan: Any, sampled: Any) -> Any:
        steps.append([(row.sequence.sequence_id, row.start, row.num_tokens, row.num_new_blocks) for row in plan.rows])
        return commit(plan, sampled)

    scheduler.commit = noting


@pytest.mark.parametrize(("recorded_policy", "changes", "settings"), [
    ("priority", {"policy": "fcfs"}, {}),
    ("fcfs", {"policy": "shortest-first"}, {"scheduling_policy": "shortest-first"}),
    ("fcfs", {"max_num_seqs": 5}, {"max_num_seqs": 5}),
    ("fcfs", {"num_blocks": 60, "max_num_seqs": 8}, {"num_kv_blocks": 60, "max_num_seqs": 8}),
])
def test_other_settings_decide_as_an_engine_that_has_them(
    recorded_policy: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two engines do the same until many requests come. The recording of one of them, under the other's settings, has
    step for step the rows of the other one, which ran live: it begins with its tables, cache, queue and positions.
    """
    recording, was = late_burst(tmp_path, scheduling_policy=recorded_policy)
    _, live = late_burst(tmp_path, **settings)
    run, steps = WhatIf(recording, changes), list[list[tuple[int, ...]]]()
    note_steps(run.scheduler, steps)
    run.run()
    assert steps == live
    assert live != was
    assert run.left_at is not None


def test_a_smaller_pool_evicts_in_order_and_then_preempts(tmp_path: Path) -> None:
    """Blocks that a smaller pool lacks are free ones first, then the cached ones that were used least recently, then
    those of the running sequence that came last; what is too long for the pool is refused. The laws hold, all ends.
    """
    with toy_engine(num_kv_blocks=24, max_num_seqs=4) as engine:
        for token in range(5):
            run_all(engine, [[token, 1, 2, 3]], max_tokens=1)
        for place in range(3):
            engine.add_request([7, place, 6, 6, 6], SamplingParams(max_tokens=6 + 4 * place, ignore_eos=True))
        for _ in range(3):
            engine.step()
        ring_of(engine).begin_anew()
        while engine.has_pending_requests():
            engine.step()
        recording = dumped(engine, tmp_path)
    del recording.segments[0]
    segment = recording.segments[0]
    held = {block for _, blocks, _ in segment["state"]["device"]["tables"] for block in blocks}
    cached = [entry[0] for entry in segment["state"]["device"]["entries"] if entry[0] not in held]
    assert (len(held), len(cached)) == (6, 5)

    def begun(num_blocks: int) -> tuple[int, int, int, list[int]]:
        made = starting_state(segment, {"num_blocks": num_blocks}, 0.0)
        memory = made.scheduler.kv_cache.device
        idle = sorted(one.content.token_ids[0] for one in memory.cache.registered if not memory.is_held(one.block_id))
        assert memory.num_blocks == num_blocks
        assert outcome_of(num_blocks).num_refused == len(made.refused)
        return made.num_evicted, made.num_preempted, len(made.refused), idle

    def outcome_of(num_blocks: int) -> Outcome:
        found = WhatIf(recording, {"num_blocks": num_blocks}).run()
        assert len(found.finished) + found.num_refused == 3
        return found

    assert begun(11)[:3] == (0, 0, 0)
    assert begun(9)[:3] == (2, 0, 0)
    assert len(begun(9)[3]) == 3
    evicted = set(begun(11)[3]) - set(begun(9)[3])
    assert max(evicted) < min(begun(9)[3])
    assert begun(5)[1:3] == (1, 0)
    assert begun(4)[1:3] == (0, 1)


def test_fewer_rows_preempt_in_the_order_of_victims(tmp_path: Path) -> None:
    """With fewer rows than run, those that came last wait again at the beginning."""
    recording, _ = late_burst(tmp_path)
    running = recording.segments[0]["state"]["running"]
    made = starting_state(recording.segments[0], {"max_num_seqs": 1}, 0.0)
    assert [one.sequence_id for one in made.scheduler.running] == running[:1]
    assert made.num_preempted == len(running) - 1


@pytest.mark.parametrize("params", [{"n": 3, "temperature": 1.0}, {"best_of": 3, "temperature": 1.0}])
def test_several_completions_run_under_other_settings(params: dict[str, Any], tmp_path: Path) -> None:
    """Completions and candidates are sequences that end where they ended; each is decided on by itself."""
    with toy_engine(num_kv_blocks=24) as engine:
        run_all(engine, [[1, 2, 3], [4, 5, 6]], **params)
        recording = dumped(engine, tmp_path)
    found = outcome(recording, max_num_seqs=1)
    assert len(found.finished) == len(lives_of(recording)) == 6


def test_a_recording_with_beams_is_refused(tmp_path: Path) -> None:
    """Which beams there are depends on the schedule: no other setting can be tried, whether a search began before the
    recording or in it."""
    for num_steps in (0, 3):
        with toy_engine(num_kv_blocks=24) as engine:
            engine.add_request([0, 1, 2, 3, 4], SamplingParams(beam_width=2, max_tokens=9, ignore_eos=True))
            for _ in range(num_steps):
                engine.step()
            ring_of(engine).begin_anew()
            while engine.has_pending_requests():
                engine.step()
            recording = dumped(engine, tmp_path)
        del recording.segments[:-1]
        with pytest.raises(RecordingError, match="it has a beam search, which is not run under other settings"):
            compare(recording, {"max_num_seqs": 1})


def test_refused_promises_are_in_the_table(tmp_path: Path) -> None:
    """A table of what an engine did says how many it turned away; a replay passes over them, and under other settings,
    from whatever step on, they stay turned away and all others end.
    """
    engine, _ = steady(flight_recorder="on")
    num_refused = 0
    for _ in range(12):
        try:
            engine.add_request([1000], exactly(20), deadline_s=3.0)
        except PromiseRefused:
            num_refused += 1
    run(engine)
    assert num_refused > 0
    recording = dumped(engine, tmp_path)
    was = recorded_outcome(recording)
    assert was.num_refused == num_refused
    assert replay_decisions(recording).difference is None
    found = compare(recording, {"max_num_seqs": 1})
    assert found.left_at is not None
    assert [one.num_refused for one in (found.recorded, found.modelled, found.changed)] == [num_refused] * 3
    assert sorted(found.changed.finished) == sorted(was.finished)


def test_other_settings_of_a_model_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of other sizes are run; a host tier that was not there, and more rows than have two states each, are
    refused."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    with toy_engine(backend=ToyHybrid(), num_kv_blocks=40) as engine:
        for _ in range(2):
            run_all(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9, number] for number in range(10)])
        recording = dumped(engine, tmp_path)
    for changes in ({"num_blocks": 16}, {"num_blocks": 80}, {"max_num_seqs": 2}):
        assert len(WhatIf(recording, changes).run().finished) == 20
    for changes in ({"max_num_seqs": 9}, {"num_host_blocks": 10}):
        with pytest.raises(RecordingError, match="keeps 16 states"):
            WhatIf(recording, changes)


def test_any_recorded_life_with_states_ends_under_any_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with states, swaps and faults: without its host tier, with a larger one, and with other pools all that
    was accepted ends or is refused.
    """
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    num_with_host = 0
    for seed in range(first_seed(), first_seed() + scaled(6)):
        path = recorded_life(seed, tmp_path, max_steps=8192, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0,
                             keeps_states=True)
        recording = read_recording(path)
        num_lives = len(lives_of(recording)) + recorded_outcome(recording).num_refused
        size = recording.segments[0]["settings"]["num_host_blocks"]
        num_with_host += size > 0
        for changes in ({"num_blocks": 40, "num_host_blocks": 0}, {"num_blocks": 10}, {"num_host_blocks": 3 * size}):
            found = WhatIf(recording, changes).run()
            assert len(found.finished) + found.num_refused == num_lives, (seed, changes)
    assert num_with_host


def test_other_settings_of_a_model_with_windows(tmp_path: Path) -> None:
    """Pools of other sizes are run with the same window blocks; a host tier is refused."""
    with toy_engine(backend=ToyWindowed(), num_kv_blocks=40) as engine:
        for _ in range(2):
            run_all(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9, number] for number in range(10)])
        assert engine.stats().num_windows > 0
        recording = dumped(engine, tmp_path)
    for changes in ({"num_blocks": 16}, {"num_blocks": 80}, {"max_num_seqs": 2}):
        assert len(WhatIf(recording, changes).run().finished) == 20
    with pytest.raises(RecordingError, match="window blocks"):
        WhatIf(recording, {"num_host_blocks": 10})

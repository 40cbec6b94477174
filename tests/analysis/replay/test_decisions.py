"""A replay takes the decisions of a recording, byte for byte, whatever happened in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.recorder.ring import FlightRecorder
from pagedcore.analysis.replay.decisions import Replayed, replay_decisions
from pagedcore.errors import InternalError
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import chunk_ends, policies, preemption
from pagedcore.scheduler.policy_guard import make_policy
from scheduler_lives import simulator
from scheduler_lives.engine_simulator import EngineSimulation
from support.doubles import ToyBackend
from support.recordings import dumped, lines_of, recorded_life, run_all, toy_engine, write_lines
from support.torture import first_seed, scaled

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]
OF_RING: dict[str, Any] = FlightRecorder.__init__.__kwdefaults__


def replayed(path: Path) -> Replayed:
    return replay_decisions(read_recording(path))


@pytest.mark.torture
@pytest.mark.parametrize("max_steps", [8192, 10, 2])
def test_random_lives_are_replayed(max_steps: int, tmp_path: Path) -> None:
    """Every decision of a random life of a scheduler is taken again, with any size of the ring: swaps that are late or
    fail, preemptions, aborts, shared prefixes, further turns, batch formation; and where one segment ends, the whole
    state of queues, blocks, caches and costs is the one that the next segment was recorded with.
    """
    num_steps = 0
    for seed in range(first_seed(), first_seed() + scaled(6)):
        path = recorded_life(seed, tmp_path, max_steps=max_steps, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0)
        found = replayed(path)
        assert found.difference is None, seed
        num_steps += found.num_steps
    assert num_steps


@pytest.mark.parametrize("max_steps", [8192, 3])
@pytest.mark.parametrize(("kind", "version"), [("keeps_states", 7), ("has_windows", 9)])
def test_lives_with_further_memory_are_replayed(
    kind: str, version: int, max_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a model that keeps states, or has windows: who has which block, what is kept, and in which order it
    is evicted, is part of the state."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    for seed in range(8):
        path = recorded_life(seed, tmp_path, max_steps=max_steps, has_faults=seed % 2 == 1, has_formation=seed % 3 == 0,
                             **{kind: True})
        found = replayed(path)
        assert found.difference is None, (seed, found.difference)
        assert lines_of(path)[0]["version"] == version


def test_an_engine_whose_model_keeps_states_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for engines whose callers park sessions, fork and come back."""
    monkeypatch.setattr(chunk_ends, "LEAST_SAVED", 2)
    monkeypatch.setattr("pagedcore.analysis.recorder.dumps.MAX_DUMPS", 0)
    for seed in range(3):
        simulation = EngineSimulation(seed, has_faults=seed % 2 == 1, keeps_states=True)
        simulation.settings |= {"flight_recorder": "on", "check_invariants": False}
        simulation.run()
        simulation.engine.dump_recording(tmp_path / "one.gz")
        assert replayed(tmp_path / "one.gz").difference is None, seed


POLICIES = [
    (policies.fair, {"max_rows": 2}), (policies.deadline, {"default_s": 2.0}), (policies.shortest_first, {}),
    (policies.priority, {"ageing_s": 1.0, "preemption_gap": 1}),
]


@pytest.mark.parametrize(("make", "options"), POLICIES)
def test_decisions_of_every_policy_are_replayed(
    make: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same under policies with options, whose views, service and costs of steps begin anew from any segment."""
    monkeypatch.setattr(simulator, "draw_policy", lambda _: make_policy(make, options))
    for seed, max_steps in ((2, 8192), (3, 4), (5, 4), (8, 2)):
        found = replayed(recorded_life(
            seed, tmp_path, max_steps=max_steps, has_faults=seed % 2 == 1, has_policies=True))
        assert found.difference is None, (seed, found.difference)
        assert found.num_steps


@pytest.mark.torture
def test_engines_with_callers_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording of an engine whose callers abort, park sessions, fork and come back is replayed too, also with a
    ring of a few steps.
    """
    monkeypatch.setattr("pagedcore.analysis.recorder.dumps.MAX_DUMPS", 0)
    for seed in range(first_seed(), first_seed() + scaled(2)):
        monkeypatch.setitem(OF_RING, "max_steps", 8192 if seed % 2 else 10)
        simulation = EngineSimulation(seed, has_faults=seed % 2 == 1)
        simulation.settings |= {"flight_recorder": "on", "check_invariants": False}
        simulation.run()
        engine = simulation.engine
        engine.dump_recording(tmp_path / "one.gz")
        assert replayed(tmp_path / "one.gz").difference is None, seed


@pytest.mark.parametrize("params", [
    {"n": 3, "temperature": 1.0}, {"best_of": 3, "temperature": 1.0}, {"beam_width": 3}, {"prompt_logprobs": 0},
])
def test_completions_that_branch_are_replayed(params: dict[str, object], tmp_path: Path) -> None:
    """So are beams, candidates, several completions of one prompt, and prompts that are scored."""
    with toy_engine(num_kv_blocks=24) as engine:
        run_all(engine, [PREFIX, [*PREFIX, 9], [3, 1]], **params)
        recording = dumped(engine, tmp_path)
    found = replay_decisions(recording)
    assert found.difference is None
    assert found.num_steps > 5


def test_a_session_that_swaps_and_loads_is_replayed(tmp_path: Path) -> None:
    """A host tier, and KV that comes from a file between two steps, which begins another segment."""
    backend = ToyBackend()
    with toy_engine(backend=backend, host_kv_memory=24 * 4 * backend.kv_bytes_per_token, preemption="swap") as engine:
        session = engine.session()
        session.ask(PREFIX)
        session.park("disk")
        run_all(engine, [[place, *PREFIX] for place in range(6)], max_tokens=14)
        session.ask([7, 7])
        recording = dumped(engine, tmp_path)
    found = replay_decisions(recording)
    assert found.difference is None
    assert [segment["is_continuous"] for segment in recording.segments] == [False, False]


def test_sessions_that_begin_with_a_segment_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session marks its sequence behind the last event of a full segment, and before the next one begins."""
    monkeypatch.setitem(OF_RING, "max_steps", 6)
    for max_tokens in range(1, 5):
        with toy_engine(num_kv_blocks=24) as engine:
            for place in range(3):
                engine.session().ask([place, *PREFIX], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            recording = dumped(engine, tmp_path)
        assert replay_decisions(recording).difference is None, max_tokens
        assert recording.segments[-1]["is_continuous"]


def test_a_step_that_fails_is_replayed(tmp_path: Path) -> None:
    """What was rolled back, and a failure of the model in the middle, changes nothing of what can be replayed."""
    class Failing(ToyBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            """Fail once."""
            logits = super().forward(batch)
            if self.num_steps == 3:
                raise RuntimeError("no device")
            return logits

    with toy_engine(backend=Failing()) as engine:
        run_all(engine, [PREFIX, [5, 5]])
        run_all(engine, [PREFIX])
        assert replay_decisions(dumped(engine, tmp_path)).difference is None


def test_the_first_other_decision_is_named(tmp_path: Path) -> None:
    """A recording whose decision was changed by one token differs there, and both values are shown."""
    with toy_engine() as engine:
        run_all(engine, [PREFIX, [5, 5]])
        engine.dump_recording(tmp_path / "one.gz")
    lines = lines_of(tmp_path / "one.gz")
    place = next(n for n, line in enumerate(lines) if isinstance(line, list) and line[1:2] == ["schedule"])
    lines[place][3][0][2] -= 1
    write_lines(tmp_path / "one.gz", lines)
    found = replayed(tmp_path / "one.gz").difference
    assert found is not None
    assert (found.verb, found.event) == ("schedule", place - 3)
    assert found.recorded != found.replayed


def test_another_scheduler_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that chooses other victims than the recorded one decides otherwise, and the replay says so."""
    with toy_engine(num_kv_blocks=8, preemption="shrink") as engine:
        run_all(engine, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], max_tokens=14)
        assert engine.stats().num_preemptions
        recording = dumped(engine, tmp_path)
    assert replay_decisions(recording).difference is None
    with monkeypatch.context() as patch:
        patch.setattr(preemption.PreemptionRules, "choose", lambda *_, **__: [])
        assert replay_decisions(recording).difference is not None


def test_a_plan_that_cannot_be_made_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which no plan could be made is in the recording, and so is why."""
    with toy_engine() as engine:
        engine.add_request(PREFIX)
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr("pagedcore.scheduler.scheduler.StepPlanner.plan", _broken)
            with pytest.raises(InternalError, match="law"):
                engine.step()
        recording = dumped(engine, tmp_path)
    events = [event[1:] for event in recording.segments[-1]["events"]]
    assert ("schedule", [None], {"raised": "InternalError"}) in events


def _broken(_: object) -> None:
    raise InternalError("a law is broken")

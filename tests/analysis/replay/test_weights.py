"""Recordings of an engine that got other weights: every step knows which ones it was computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.recorder.recording import Recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.point import compute_point, find_point, require_equal, settings_for
from pagedcore.analysis.replay.what_if import WhatIf
from pagedcore.engine import engine as engine_module
from pagedcore.errors import RecordingError, RecordingMismatch
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.requests.request import Request
from pagedcore.scheduler.scheduler import Scheduler
from support.changed_demo import changed_weights, write_demo
from support.doubles import FakeClock
from support.recordings import dumped
from support.runner import invoke, try_invoke

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
PROMPTS = [[20 + number] * 30 for number in range(6)]


def recorded(folder: Path, running: Any = "keep") -> tuple[Recording, list[Request]]:
    """Requests before and behind a change of weights, with the same beginnings."""
    settings: dict[str, Any] = {"flight_recorder": "tokens", "max_num_seqs": 4, "num_kv_blocks": 24,
                                "host_kv_memory": "1MiB"}
    with Engine.from_pretrained("demo", **settings) as engine:
        requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        with engine.new_weights("7", running=running) as weights:
            weights.load(changed_weights())
            for _ in range(12):
                engine.step()
        requests += [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        while engine.has_pending_requests():
            engine.step()
        return dumped(engine, folder), requests


@pytest.mark.parametrize("running", ["wait", "abort", "keep"])
def test_decisions_are_taken_again_across_other_weights(running: Any, tmp_path: Path) -> None:
    """Byte by byte, whatever became of requests, and each step has the number and the label of its weights."""
    recording, _ = recorded(tmp_path, running)
    assert replay_decisions(recording).difference is None
    (segment,) = recording.segments
    assert segment["state"]["weights"][:2] == [0, ""]
    (taken,) = [given for _, verb, given, _ in segment["events"] if verb == "weights"]
    assert (taken[0] > 0, taken[1]) == (True, "7")
    assert recording.header["identity"] == taken[2] != segment["state"]["weights"][2]


def test_decisions_are_taken_again_across_a_sleep(tmp_path: Path) -> None:
    """Nothing that was cached before it is found behind it."""
    with Engine.from_pretrained("demo", flight_recorder="on", num_kv_blocks=24) as engine:
        for level in (1, 2):
            engine.generate(PROMPTS[:2], PARAMS)
            engine.sleep(level)  # type: ignore[arg-type]
            engine.wake()
        engine.generate(PROMPTS[:2], PARAMS)
        assert replay_decisions(dumped(engine, tmp_path)).difference is None


def test_a_point_needs_the_weights_that_drew_it(tmp_path: Path) -> None:
    """Tokens of one request that was kept: the first ones with the old weights, the others with the new ones, each
    computed again alone by an engine of these, and refused by an engine of the others.
    """
    recording, requests = recorded(tmp_path)
    directory = write_demo(tmp_path, changed_weights())
    drawn = requests[0].output().outputs[0]
    assert {one.number > 0 for one in drawn.weights} == {False, True}
    settings = settings_for(recording, 64)
    with Engine.from_pretrained("demo", **settings) as old, Engine.from_pretrained(directory, **settings) as new:
        for index, (token_id, version) in enumerate(zip(drawn.token_ids, drawn.weights, strict=True)):
            point = find_point(recording, requests[0].request_id, index)
            right, wrong = (new, old) if version.number else (old, new)
            assert point.weights[:2] == (version.number, version.label)
            require_equal(recording, right, point)
            assert compute_point(right, point).token_id == token_id
            with pytest.raises(RecordingMismatch, match="weights '7', number" if version.number else "model"):
                require_equal(recording, wrong, point)
        with old.new_weights() as weights:
            weights.load(changed_weights())
        require_equal(recording, old, find_point(recording, requests[-1].request_id, 3))
    for segment in recording.segments:
        segment["events"] = [one for one in segment["events"] if one[1] != "weights"]
    with pytest.raises(RecordingError, match="no longer in it"):
        find_point(recording, requests[0].request_id, 20)


def test_the_command_says_which_weights_it_needs(tmp_path: Path) -> None:
    """``pagedcore replay`` with the directory of the right ones, and with that of others."""
    _, requests = recorded(tmp_path)
    (path,) = tmp_path.glob("*.gz")
    directory = write_demo(tmp_path, changed_weights())
    words = ("replay", str(path), "--request", requests[0].request_id, "--token", "20", "--model")
    assert "recorded, chosen" in invoke(*words, str(directory))
    with pytest.raises(RecordingMismatch, match="weights '7'"):
        try_invoke(*words, "demo")


@pytest.mark.parametrize("running", ["wait", "keep"])
def test_under_other_settings_the_old_blocks_are_gone_too(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the weights come, on the virtual clock too, what runs is computed again, and nothing before it is found."""
    # Why: on a busy machine all requests would have ended when the weights come.
    clock, execute = FakeClock(), ModelRunner.execute
    monkeypatch.setattr(engine_module, "MonotonicClock", lambda: clock)
    monkeypatch.setattr(ModelRunner, "execute", lambda *given: (clock.advance(0.01), execute(*given))[1])
    recording, requests = recorded(tmp_path, running)
    restarts, restart = list[list[int]](), Scheduler.restart

    def noting(scheduler: Scheduler, live: Any) -> None:
        restart(scheduler, live)
        restarts.append([one.sequence_id for one in live])
        assert all(one.num_computed_tokens == 0 == len(one.block_keys) for one in live)
        assert scheduler.stats().num_blocks_cached == 0

    monkeypatch.setattr(Scheduler, "restart", noting)
    run = WhatIf(recording, {"max_num_seqs": 1})
    outcome = run.run()
    assert run.left_at is not None
    assert (len(outcome.finished), len(restarts)) == (len(requests), 1)
    roots = {number: one.cache_root for number, one in run._replay.sequences.items()}
    kept, later = {roots[number] for number in restarts[0]}, {roots[number] for number in [*roots][-len(PROMPTS):]}
    assert kept
    assert not (kept | later) & {roots[number] for number in [*roots][:2] if number not in restarts[0]}
    # Why: where they are of the same salt and weights, they share what is computed.
    assert (kept == later) == (running == "keep")

"""One point of a recording, computed alone: the same bits as in the batch it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.analysis.replay.point import compute_point, continue_point, find_point, require_equal, settings_for
from pagedcore.errors import InvalidRequest, RecordingError, RecordingMismatch
from support.doubles import ToyBackend
from support.recordings import dumped, run_all, toy_engine
from support.runner import invoke, try_invoke
from support.session_builders import Recorder, tiny_model

PROMPTS = [[5, 9, 11, 14, 3, 8, 40, 41, 42], [7, 9], [60, 61, 62, 63, 64]]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2,
                        seed=7, ignore_eos=True, suppress_tokens=[5, 9], no_repeat_ngram_size=1, forced_eos_token_id=3)


def watched(engine: Engine) -> Recorder:
    recorder = Recorder(engine._runner.backend)
    engine._runner.backend = recorder  # type: ignore[assignment]
    return recorder


def test_a_point_alone_has_the_bits_of_its_batch(tmp_path: Path) -> None:
    """Every token of three requests that ran together, one of them preempted, is computed again alone, in an engine of
    its own: its logits are those of the original run, byte for byte, and it is chosen again, whatever was drawn.
    """
    with Engine.from_pretrained(
        tiny_model(), dtype="float32", flight_recorder="tokens", num_kv_blocks=7, block_size=4, max_num_seqs=3,
    ) as engine:
        seen = watched(engine)
        requests = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
        while engine.has_pending_requests():
            engine.step()
        assert engine.stats().num_preemptions
        engine.dump_recording(tmp_path / "one.gz")
    recording = read_recording(tmp_path / "one.gz")
    with Engine.from_pretrained(tiny_model(), **settings_for(recording, 64)) as other:
        require_equal(recording, other)
        again = watched(other)
        for request in requests:
            number, output = request.sequences[0].sequence_id, request.sequences[0].output_token_ids
            for index in range(len(output)):
                point = find_point(recording, request.request_id, index)
                again.logits.clear()
                found = compute_point(other, point)
                place = len(point.token_ids) - 1
                bits = [value for (_, position), value in again.logits.items() if position == place]
                assert bits == [seen.logits[number, place]]
                assert found.token_id == point.token_id == output[index]
                assert len(found.top) == 10


def recorded(folder: Path, **settings: Any) -> tuple[Any, str, list[int]]:
    with toy_engine("tokens", **settings) as engine:
        request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        while engine.has_pending_requests():
            engine.step()
        return dumped(engine, folder), request.request_id, request.sequences[0].output_token_ids


def test_another_token_leads_elsewhere(tmp_path: Path) -> None:
    """With another token forced, what follows is what the model says after it, and the recorded one leads back."""
    recording, request, output = recorded(tmp_path)
    with toy_engine("off") as engine:
        point = find_point(recording, request, 2)
        assert continue_point(engine, point, output[2], 2)[0] == output[2:]
        token_ids, _ = continue_point(engine, point, 17, 4)
        wanted = engine.generate([[1, 2, 3, *output[:2], 17]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert token_ids == [17, *wanted[0].outputs[0].token_ids]
        with pytest.raises(InvalidRequest):
            continue_point(engine, point, 10**6, 1)
        assert not list(engine.requests)


def test_the_point_behind_the_end(tmp_path: Path) -> None:
    """The point behind the last token shows what would have come next; one further on is refused."""
    recording, request, output = recorded(tmp_path)
    point = find_point(recording, request[:6], len(output))
    assert point.token_id is None
    for index in (-1, len(output) + 1):
        with pytest.raises(RecordingError, match="not in it"):
            find_point(recording, request, index)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    """Without token ids, of another request or completion, of beams, or with an engine whose bits may be others."""
    with toy_engine("on") as engine:
        run_all(engine, [[1, 2]])
        with pytest.raises(RecordingError, match="tokens"):
            find_point(dumped(engine, tmp_path), "", 0)
    recording, request, _ = recorded(tmp_path)
    with pytest.raises(RecordingError, match="0 requests"):
        find_point(recording, "no such id", 0)
    with pytest.raises(RecordingError, match="completions"):
        find_point(recording, request, 0, completion=1)
    recording.header["identity"] = "another"
    with toy_engine("off", max_model_len=64) as other, pytest.raises(RecordingMismatch, match="setting"):
        require_equal(recording, other)
    recording.header["is_schedule_invariant"] = False
    with toy_engine("off") as other, pytest.raises(RecordingError, match="schedule"):
        require_equal(recording, other)


def test_a_grammar_and_biases_are_those_of_the_request(tmp_path: Path) -> None:
    """With a grammar, biases and stop tokens the point is chosen as it was; a forced token leaves the grammar."""
    wanted = (
        SamplingParams(max_tokens=6, logit_bias={5: 3.0, 9: -100.0}, stop=("zzz",), stop_token_ids=(7,)),
        SamplingParams(max_tokens=6, structured={"regex": "[0-9]{3,8}"}),
    )
    with Engine.from_pretrained("demo", flight_recorder="tokens", num_kv_blocks=8) as engine:
        requests = [engine.add_request("What is 2 + 3?", params) for params in wanted]
        while engine.has_pending_requests():
            engine.step()
        recording = dumped(engine, tmp_path)
    assert replay_decisions(recording).difference is None
    with Engine.from_pretrained("demo", **settings_for(recording, 64)) as other:
        for request in requests:
            for index, token_id in enumerate(request.sequences[0].output_token_ids):
                point = find_point(recording, request.request_id, index)
                assert compute_point(other, point).token_id == token_id
        assert continue_point(other, find_point(recording, requests[1].request_id, 1), 300, 3)[0][0] == 300


def test_forged_tokens_are_refused(tmp_path: Path) -> None:
    """A token that the model does not have never reaches the model, and a block size that is none no pool."""
    recording, request, _ = recorded(tmp_path)
    recording.rows[0][1][0] = 10**6
    with toy_engine("off") as other, pytest.raises(InvalidRequest, match="token"):
        compute_point(other, find_point(recording, request, 1))
    recording.header["engine"]["block_size"] = 10**9
    with pytest.raises(RecordingError, match="engine"):
        settings_for(recording, 10)


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A model with the same shapes and other weights is noticed by its fingerprint."""
    with Engine.from_pretrained(tiny_model(), dtype="float32", flight_recorder="tokens", num_kv_blocks=8) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=1))
        recording = dumped(engine, tmp_path)
    with (Engine.from_pretrained(tiny_model(1), **settings_for(recording, 16)) as other,
          pytest.raises(RecordingMismatch, match="model")):
        require_equal(recording, other)


def test_the_command(tmp_path: Path) -> None:
    """``pagedcore replay`` compares decisions, shows other settings side by side, and a point of the demo model; what
    it cannot read is one line and exit code 1.
    """
    path = str(tmp_path / "recording.gz")
    with Engine.from_pretrained("demo", flight_recorder="tokens", num_kv_blocks=16) as engine:
        requests = [engine.add_request(f"What is {one} + 3?", SamplingParams(max_tokens=8)) for one in range(4)]
        while engine.has_pending_requests():
            engine.step()
        engine.dump_recording(path)
    assert "equal to the recorded ones" in invoke("replay", path)
    table = invoke("replay", path, "--max-num-seqs", "1", "--num-kv-blocks", "9")
    assert "max_num_seqs 1" in table
    assert "longest wait" in table
    words = ("--request", requests[1].request_id, "--token", "3", "--force", "5", "--continue", "2")
    shown = invoke("replay", path, *words)
    assert "recorded, chosen" in shown
    assert "with token 5: [5, " in shown
    with pytest.raises(RecordingError, match="cannot be read"):
        try_invoke("replay", str(tmp_path / "nowhere"))


def test_a_backend_of_ones_own_is_compared_too(tmp_path: Path) -> None:
    """A backend that does not describe itself is taken for equal by its type and limits, as sessions do."""
    recording, request, output = recorded(tmp_path)
    with toy_engine("off", backend=ToyBackend()) as other:
        require_equal(recording, other)
        assert compute_point(other, find_point(recording, request, 0)).token_id == output[0]

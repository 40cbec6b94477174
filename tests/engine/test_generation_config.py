"""What a model's ``generation_config.json`` says holds for requests that do not say otherwise."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.point import find_point
from pagedcore.errors import InvalidMinTokens
from pagedcore.models.checkpoints import quick_start
from support.families import VOCAB, tiny_model

PROMPTS = [[5, 17, 88, 5, 17], [9, 40, 40, 9], [3, 120, 60, 61, 62, 63, 120]]
NUM_TOKENS = 12
TURN = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself, so that penalties and masks show."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(path)
    return path


def say(directory: Path, **settings: Any) -> None:
    """Write generation_config.json."""
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))


def oracle(directory: Path, **more: Any) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return [model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, **more)[0]
            .tolist()[len(prompt):] for prompt in PROMPTS]


@contextmanager
def opened(directory: Path, **settings: Any) -> Iterator[Engine]:
    with Engine.from_pretrained(str(directory), dtype="float32", num_kv_blocks=64, **settings) as engine:
        yield engine


def tokens_of(engine: Engine, params: SamplingParams) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in engine.generate(PROMPTS, params, show_progress=False)]


def tokens(engine: Engine, **params: Any) -> list[list[int]]:
    return tokens_of(engine, SamplingParams(max_tokens=NUM_TOKENS, **params))


FIELDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "suppressed": {"suppress_tokens": [15, 180, 192, VOCAB + 3]},
    "not first": {"begin_suppress_tokens": list(range(90, VOCAB))},
    "forced end": {"forced_eos_token_id": 2},
    "forced ends": {"forced_eos_token_id": [7, 2]},
    "runs of one": {"no_repeat_ngram_size": 1},
    "runs of two": {"no_repeat_ngram_size": 2},
    "bad words": {"eos_token_id": [2, 11], "bad_words_ids": [[11], [180, 191], [192, 192]]},
    "late end": {"eos_token_id": [2, 173, 86], "min_new_tokens": 5},
}
FIELDS["all"] = {name: value for fields in FIELDS.values() for name, value in fields.items()}


@pytest.mark.parametrize("case", FIELDS)
def test_greedy_completions_are_those_of_transformers(case: str, directory: Path) -> None:
    """With the same file, whose field changes something."""
    say(directory)
    plain = oracle(directory)
    say(directory, **FIELDS[case])
    expected = oracle(directory)
    assert expected != plain
    with opened(directory) as engine:
        assert tokens(engine) == expected


def test_the_files_fields_come_with_every_way_of_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' modules and a loaded object have them, as the quick start does."""
    say(directory, temperature=0.7, top_k=5000, suppress_tokens=[15])
    expected = {"temperature": 0.7, "top_k": VOCAB, "suppress_tokens": (15,)}
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with opened(directory) as quick, Engine.from_pretrained(loaded, num_kv_blocks=8) as taken:
        assert quick.generation_defaults == taken.generation_defaults == expected
    monkeypatch.setattr(quick_start, "FAMILIES", {})
    with opened(directory) as general:
        assert general.generation_defaults == expected


def test_what_a_request_gives_wins(directory: Path) -> None:
    """Also a value that is the parameter's own default, and through ``replace``; only suppressed tokens always hold."""
    say(directory)
    plain = oracle(directory)
    say(directory, repetition_penalty=1.5, temperature=2.0, suppress_tokens=[111], do_sample=False, max_new_tokens=1)
    own = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, repetition_penalty=1.0)
    with opened(directory) as engine:
        for params in (own, replace(own, seed=3), SamplingParams.from_mapping(
            {"max_tokens": NUM_TOKENS, "temperature": 0, "repetition_penalty": 1.0})):
            assert tokens_of(engine, params) == plain
        assert tokens_of(engine, replace(own, seed=1, temperature=2.0)) != plain
        (sampled,) = {engine.prepare([5], params).params for params in (None, SamplingParams())}
        assert (sampled.temperature, sampled.repetition_penalty, sampled.max_tokens) == (2.0, 1.5, None)
        assert engine.prepare([5], replace(own, suppress_tokens=[7])).params.suppress_tokens == (7, 111)


def test_none_takes_end_tokens_and_suppressed_ones_only(directory: Path) -> None:
    """``generation_config="none"``."""
    say(directory, repetition_penalty=1.5, temperature=2.0, suppress_tokens=[180, 15], num_beams=4)
    with opened(directory, generation_config="none") as engine:
        assert engine.generation_defaults == {"suppress_tokens": (15, 180)}
        got = tokens(engine)
    say(directory, suppress_tokens=[180, 15])
    assert got == oracle(directory)


def test_beams_take_no_field_of_sampling(directory: Path) -> None:
    """Suppressed tokens hold, and a minimum length does."""
    always = {"eos_token_id": [2, 173, 86], "min_new_tokens": 5, "suppress_tokens": list(range(10, 170))}
    say(directory, **always)
    expected = oracle(directory, num_beams=3)
    say(directory, **always, temperature=0.7, top_p=0.5, repetition_penalty=1.3, no_repeat_ngram_size=1,
        begin_suppress_tokens=[5], forced_eos_token_id=9)
    with opened(directory) as engine:
        assert tokens(engine, beam_width=3) == expected


def test_defaults_refuse_no_request(directory: Path) -> None:
    """What cannot be combined with what a request gives is left out; given by the request itself it is refused."""
    say(directory, min_new_tokens=9, bad_words_ids=[[4]], no_repeat_ngram_size=2, forced_eos_token_id=2)
    with opened(directory, max_model_len=12) as engine:
        assert engine.prepare([5], SamplingParams(max_tokens=3)).params.min_tokens == 3
        assert engine.prepare([5] * 8, None).params.min_tokens == 4
        params = SamplingParams(structured={"regex": "a"}).with_defaults(engine.generation_defaults)
        assert (params.min_tokens, params.bad_words_ids, params.forced_eos_token_id) == (0, (), None)
        with pytest.raises(InvalidMinTokens):
            engine.prepare([5] * 8, SamplingParams(min_tokens=9))


def test_a_forged_file_refuses_no_request(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of wrong types, of absurd depth or outside of the vocabulary are named, and requests are as without."""
    say(directory)
    plain, deep = oracle(directory), list[Any]()
    for _ in range(400):
        deep = [deep]
    say(directory, bad_words_ids=deep, forced_eos_token_id=[VOCAB + 9], suppress_tokens=[None, 1.5, "a"],
        begin_suppress_tokens=[[3]], no_repeat_ngram_size=10**9, repetition_penalty="high")
    with caplog.at_level(logging.WARNING, "pagedcore"), opened(directory) as engine:
        assert engine.generation_defaults == {}
        assert tokens(engine) == plain
    (said,) = (one.getMessage() for one in caplog.records if "generation_config" in one.getMessage())
    for name in ("bad_words_ids", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
                 "no_repeat_ngram_size", "repetition_penalty"):
        assert f"{name} (" in said


def test_what_is_not_applied_is_said_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A field that is not supported, one that is out of range, and not what means nothing."""
    say(directory, typical_p=0.9, stop_strings=["x"], temperature=99.0, top_p="high", num_beams=1, max_length=20,
        do_sample=True, bad_words_ids=[[2], [VOCAB]], begin_suppress_tokens=[True])
    with caplog.at_level(logging.INFO, "pagedcore"), opened(directory) as engine:
        tokens(engine)
    (said,) = (one.getMessage() for one in caplog.records if "generation_config" in one.getMessage())
    for name in ("typical_p", "stop_strings", "temperature", "top_p", "begin_suppress_tokens"):
        assert f"{name} (" in said
    for name in ("num_beams", "max_length", "do_sample", "bad_words_ids"):
        assert name not in said


def test_they_are_part_of_identity_recordings_and_sessions(directory: Path, tmp_path: Path) -> None:
    """An engine without them continues a session as it was begun, and a recording has what a request had in the end."""
    say(directory, repetition_penalty=1.5, suppress_tokens=[15])
    with opened(directory, flight_recorder="tokens") as engine, engine.session(TURN) as session:
        identity, request = engine.identity, engine.add_request(PROMPTS[0], TURN)
        while not request.is_done:
            engine.step()
        engine.dump_recording(tmp_path / "one.gz")
        point = find_point(read_recording(tmp_path / "one.gz"), request.request_id, 0)
        assert (point.params.repetition_penalty, point.params.suppress_tokens) == (1.5, (15,))
        session.ask(PROMPTS[0])
        session.export(tmp_path / "session")
        expected = session.ask(PROMPTS[1])
    say(directory, forced_eos_token_id=9, suppress_tokens=[15])
    with opened(directory) as engine:
        assert engine.identity != identity
        with engine.import_session(tmp_path / "session") as session:
            assert session.ask(PROMPTS[1]).outputs[0].token_ids == expected.outputs[0].token_ids

"""KV from forged files: no request but those of the importing session ever computes with it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcore import Engine, EngineConfig, SamplingParams
from pagedcore.errors import InvalidConfig
from pagedcore.sessions.kv_file import KVCopy, KVSpec, read_kv, write_kv
from support.families import tiny_model

KEY = b"the operator's own key"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
QUESTION = "What is 17 + 25? Give the sum."


def engine_of(**settings: Any) -> Engine:
    return Engine.from_pretrained("demo", num_kv_blocks=64, block_size=4, **settings)


def answer(engine: Engine) -> tuple[tuple[int, ...], int]:
    """Tokens of another caller's completion of the question, and how much of its prompt was found."""
    (output,) = engine.generate([QUESTION], GREEDY, show_progress=False)
    output.raise_for_error()
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with engine_of() as engine:
        return answer(engine)[0]


def exported(path: Path, **settings: Any) -> tuple[Path, KVSpec, KVCopy]:
    """A session that was asked the question, as files; what its KV file holds."""
    with engine_of(**settings) as engine, engine.session(GREEDY) as session:
        session.ask(QUESTION)
        session.export(path)
        kv_path = path.with_name(path.name + ".kv.safetensors")
        spec = engine.sessions.describe_kv(session.token_ids[:-1])
        kv = read_kv(kv_path, spec)
    assert kv is not None
    assert kv.num_tokens == len(spec.token_ids)
    return kv_path, spec, kv


def forge(path: Path, spec: KVSpec, kv: KVCopy, kind: str) -> None:
    """Replace a KV file by one whose blocks are wrong and whose checks are right, as far as the forger knows."""
    blocks = kv.blocks.copy()
    if kind == "nan":
        blocks[:] = 0xFF
    else:
        np.random.default_rng(0).shuffle(blocks.view(np.uint16), axis=1)
    write_kv(path, KVCopy(kv.num_tokens, blocks), replace(spec, key=b""))


@pytest.mark.parametrize("kind", ["nan", "shuffled"])
def test_forged_kv_reaches_no_other_caller(kind: str, tmp_path: Path, expected: tuple[int, ...]) -> None:
    """Without a key imported KV, forged here, serves its own session only: others find nothing of it and compute."""
    path = tmp_path / "chat.json"
    forge(*exported(path), kind)
    with engine_of() as engine, engine.import_session(path) as session, session.fork() as fork:
        assert answer(engine) == (expected, 0)
        for one in (session, fork):
            one.ask("Thanks.")
        assert answer(engine)[0] == expected
        with engine_of() as other, other.session(GREEDY) as honest:
            honest.ask(QUESTION)
            # Why: the forger harms the session that was imported, and that one alone.
            assert honest.ask("Thanks.").outputs[0].token_ids != session.output().outputs[0].token_ids


def test_honest_kv_without_a_key_serves_its_session_alone(tmp_path: Path, expected: tuple[int, ...]) -> None:
    """The imported session continues without computing anything again; another caller of its prompt finds nothing."""
    path = tmp_path / "chat.json"
    _, _, kv = exported(path)
    with engine_of() as engine, engine.import_session(path) as session:
        assert session.ask("Thanks.").num_cached_tokens == kv.num_tokens
        assert answer(engine) == (expected, 0)


def test_signed_kv_is_shared(tmp_path: Path, expected: tuple[int, ...]) -> None:
    """An engine with the operator's key lets every caller find what another one with this key exported."""
    path = tmp_path / "chat.json"
    exported(path, session_key=KEY)
    with engine_of(session_key=KEY.decode()) as engine, engine.import_session(path):
        tokens, num_cached = answer(engine)
        assert tokens == expected
        assert num_cached >= 8


@pytest.mark.parametrize("other", [
    {"seed": 1}, {"quantization": "w8a8"}, {"quantization": "w4a16"}, {"kv_cache_dtype": "int8"},
], ids=["weights", "w8a8", "w4a16", "int8 KV"])
def test_kv_that_another_model_signed_is_not_used(other: dict[str, Any], tmp_path: Path) -> None:
    """One key may serve engines of several models of one shape: KV that one of them signed, put in the place of
    another's, is not used, and the completions stay those of the own model."""
    prompt, params = list(range(3, 60)), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def engine_with(seed: int = 0, **settings: Any) -> Engine:
        model = tiny_model("llama", seed=seed)
        return Engine.from_pretrained(model, dtype="float32", num_kv_blocks=64, session_key=KEY, **settings)

    own, foreign, completions = tmp_path / "own.json", tmp_path / "foreign.json", []
    for path, settings in ((own, {}), (foreign, other)):
        with engine_with(**settings) as engine, engine.session(params) as session:
            completions.append(session.ask(prompt).outputs[0].token_ids)
            session.export(path)
    for is_forged in (False, True):
        if is_forged:
            kv_name = f"{own.name}.kv.safetensors"
            foreign.with_name(f"{foreign.name}.kv.safetensors").replace(own.with_name(kv_name))
        with engine_with() as engine, engine.import_session(own):
            (output,) = engine.generate([prompt], params, show_progress=False)
        assert output.outputs[0].token_ids == completions[0]
        assert (output.num_cached_tokens == 0) == is_forged


@pytest.mark.parametrize("signed_with", [None, b"the key of another operator", KEY])
def test_an_engine_with_a_key_uses_nothing_else(
    signed_with: bytes | None, tmp_path: Path, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Files without a signature, with another one, or forged after they were signed: tokens are imported, KV is not."""
    path = tmp_path / "chat.json"
    made = exported(path, session_key=signed_with)
    if signed_with == KEY:
        forge(*made, "shuffled")
    with engine_of(session_key=KEY) as engine, caplog.at_level(logging.WARNING), engine.import_session(path) as session:
        assert "0 of" in caplog.text
        assert answer(engine) == (expected, 0)
        assert session.ask("Thanks.").outputs[0].finish_reason != "error"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_parked_file_that_another_program_wrote_is_not_used(
    key: bytes | None, tmp_path: Path, expected: tuple[int, ...]
) -> None:
    """Who can write to the directory of parked KV, and knows the format, loses the session its KV and nothing else."""
    with engine_of(disk_kv_dir=str(tmp_path), session_key=key) as engine, engine.session(GREEDY) as session:
        first = session.ask(QUESTION).outputs[0].token_ids
        spec = engine.sessions.describe_kv(session.token_ids[:-1])
        assert session.park("disk").tier == "disk"
        (file,) = tmp_path.glob("*/*")
        kv = KVCopy(len(spec.token_ids), np.full((len(spec.block_keys()), spec.block_bytes), 0xFF, np.uint8))
        # Why: another engine's requests, so that the session has to look into its file.
        engine.generate([[number] * 60 for number in range(40, 60)], GREEDY, show_progress=False)
        write_kv(file, kv, spec)
        with engine_of() as other, other.session(GREEDY) as undisturbed:
            assert undisturbed.ask(QUESTION).outputs[0].token_ids == first
            turn = undisturbed.ask("Thanks.").outputs[0].token_ids
        output = session.ask("Thanks.")
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (turn, 0)
        assert answer(engine)[0] == expected


@pytest.mark.parametrize("key", ["short", b"x" * 15, b"x" * 1025, 16 * "\ud800", 1234567890123456, bytearray(16)])
def test_keys_have_a_length_and_are_shown_nowhere(key: Any) -> None:
    """Too short, too long, no text and no bytes: refused without the key in the message; accepted ones have no repr."""
    with pytest.raises(InvalidConfig, match=r"session_key: got .* allowed is a secret of 16 to 1024") as refused:
        EngineConfig(session_key=key)
    assert "short" not in str(refused.value).split("allowed")[0]
    assert "operator" not in repr(EngineConfig(session_key=KEY))

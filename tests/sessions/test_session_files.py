"""Session files: what they hold, and everything that can be wrong with one."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidSalt, InvalidSessionFile, ModelMismatch
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions import session_file
from support.doubles import ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine
from support.session_builders import make_lab, tiny_model

PARAMS = SamplingParams(
    max_tokens=6, temperature=0.7, logit_bias={3: 1.5, 5: -2.0}, stop=("x",), stop_token_ids=[9], seed=4, logprobs=2,
    ignore_eos=True,
)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An exported session, with its KV beside it."""
    engine = make_engine(scheduling_policy="priority")
    session = engine.session(PARAMS, priority=3)
    session.ask(PROMPT)
    session.export(tmp_path / "chat.json")
    return tmp_path / "chat.json"


def kv_of(path: Path) -> Path:
    """The KV file of a session file."""
    return path.with_name(path.name + ".kv.safetensors")


def change(path: Path, edit: Callable[[dict[str, Any]], None], *, is_signed: bool = True) -> None:
    """Edit a session file, and by default correct its checksum."""
    document = json.loads(path.read_text())
    edit(document)
    if is_signed:
        document["checksum"] = session_file._checksum(document["body"])
    path.write_text(json.dumps(document))


def test_everything_comes_back(files: Path) -> None:
    """Parameters, seed, log-probabilities, priority and text of an imported session are those of the exported one."""
    engine = make_engine()
    session = engine.import_session(files)
    sequence = session._request.sequences[0]  # type: ignore[union-attr]
    assert sequence.token_ids[: len(PROMPT)] == PROMPT
    assert (sequence.params, session._params, session._options.priority, sequence.priority) == (PARAMS, PARAMS, 3, 3)
    assert sequence.seed == 4
    [completion] = session.output().outputs
    assert completion.finish_reason in ("length", "stop")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    session.close()
    assert_all_free(engine)


def test_files_are_private_and_replaced_as_a_whole(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner may read them; a second export replaces them, one without KV removes the old KV, and one that
    fails leaves everything as it was."""
    assert {stat.S_IMODE(path.stat().st_mode) for path in (files, kv_of(files))} == {0o600}
    engine = make_engine()
    session = engine.import_session(files)
    session.ask([13])
    before = {path: path.read_bytes() for path in files.parent.iterdir()}

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            session.export(files)
    assert {path: path.read_bytes() for path in files.parent.iterdir()} == before
    session.export(files, include_kv=False)
    assert list(files.parent.iterdir()) == [files]
    assert make_engine().import_session(files).token_ids == session.token_ids


def test_what_could_not_be_imported_is_not_exported(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than one that is read is not written, and what was there stays."""
    session = make_engine().import_session(files)
    before = {path: path.read_bytes() for path in files.parent.iterdir()}
    for num_bytes, is_too_large in ((files.stat().st_size, False), (files.stat().st_size - 1, True)):
        monkeypatch.setattr(session_file, "MAX_SESSION_FILE_BYTES", num_bytes)
        if is_too_large:
            with pytest.raises(InvalidSessionFile, match=f"bytes: got {num_bytes + 1}, allowed is at most {num_bytes}"):
                session.export(files)
        else:
            session.export(files)
    assert {path: path.read_bytes() for path in files.parent.iterdir()} == before


def test_an_empty_session_can_be_exported(tmp_path: Path) -> None:
    """Before its first turn a session is only its parameters."""
    make_engine().session(PARAMS).export(tmp_path / "chat.json")
    session = make_engine().import_session(tmp_path / "chat.json")
    assert (session.token_ids, session._params) == ((), PARAMS)
    session.ask(PROMPT)


def test_the_salt_is_not_in_the_file(tmp_path: Path) -> None:
    """A salted session's file does not have the salt, and is imported only with one."""
    session = make_engine().session(PARAMS, cache_salt="another tenant's secret")
    session.ask(PROMPT)
    session.export(tmp_path / "chat.json")
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())
    with pytest.raises(InvalidSalt):
        make_engine().import_session(tmp_path / "chat.json")
    engine = make_engine()
    engine.import_session(tmp_path / "chat.json", cache_salt="another")
    assert engine.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_another_model_is_refused(files: Path, tmp_path: Path) -> None:
    """A file of another model, other weights or another number format is refused with the names of both."""
    with pytest.raises(ModelMismatch, match=r"made with ToyBackend \(config \w{8}, .* runs qwen2 \(config"):
        make_lab("float32").engine.import_session(files)
    session = make_lab("float32").engine.session(PARAMS)
    session.ask(PROMPT)
    session.export(tmp_path / "tiny.json")
    for model, dtype in ((tiny_model(seed=1), "float32"), (tiny_model(), "bfloat16")):
        with pytest.raises(ModelMismatch) as refusal:
            Engine.from_pretrained(model, dtype=dtype, num_kv_blocks=8).import_session(tmp_path / "tiny.json")
        assert refusal.value.made_with.partition(",")[0] == refusal.value.running.partition(",")[0]
        assert refusal.value.made_with != refusal.value.running


def test_a_model_saved_and_loaded_is_the_same_model(tmp_path: Path) -> None:
    """Where a model lies, and whether it was loaded or made here, is not part of what it is."""
    from pagedcore.models.fingerprint import model_fingerprint

    tiny_model().save_pretrained(tmp_path / "model")
    with Engine.from_pretrained(tmp_path / "model", dtype="float32", num_kv_blocks=8) as engine:
        assert engine.components.fingerprint == model_fingerprint(tiny_model())


def test_another_block_size_needs_only_the_tokens(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KV in another form is ignored, with a line in the log; the tokens are enough."""
    engine = make_engine(block_size=8)
    with caplog.at_level(logging.INFO, logger="pagedcore"):
        session = engine.import_session(files)
    assert "made in another form" in caplog.text
    known = [*session.token_ids, 13]
    output = session.ask([13], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == toy_answer(known, 4)


def test_a_pool_with_little_room_takes_what_fits(files: Path) -> None:
    """Imported KV never takes a block from anybody; what does not fit is computed again."""
    engine = make_engine(num_kv_blocks=7)
    request = engine.add_request([7] * 14, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    engine.step()
    session = engine.import_session(files)
    while not request.is_done:
        engine.step()
    assert request.sequences[0].output_token_ids == toy_answer([7] * 14, 2)
    known = [*session.token_ids, 13]
    output = session.ask([13], SamplingParams(max_tokens=4, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == toy_answer(known, 4)
    assert 0 < output.num_cached_tokens < len(known) - 2


BAD_FIELDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another format": lambda file: file.update(format="pagedcore prompt"),
    "another version": lambda file: file.update(version=3),
    "a later version": lambda file: file.update(version=2),
    "no body": lambda file: file.update(body=[]),
    "no model": lambda file: file["body"].update(model=None),
    "a path as architecture": lambda file: file["body"]["model"].update(architecture="../../etc/passwd"),
    "a short digest": lambda file: file["body"]["model"].update(weights="00"),
    "no history": lambda file: file["body"].update(history=7),
    "no tokens": lambda file: file["body"]["history"].update(token_ids=[]),
    "a token outside the vocabulary": lambda file: file["body"]["history"]["token_ids"].__setitem__(0, 32),
    "a negative token": lambda file: file["body"]["history"]["token_ids"].__setitem__(0, -1),
    "a token that is true": lambda file: file["body"]["history"]["token_ids"].__setitem__(0, True),
    "too many tokens": lambda file: file["body"]["history"].update(token_ids=[1] * 5000),
    "more prompt than tokens": lambda file: file["body"]["history"].update(num_prompt_tokens=99),
    "a seed that is true": lambda file: file["body"]["history"].update(seed=True),
    "a huge seed": lambda file: file["body"]["history"].update(seed=2**63),
    "no room for its own answer": lambda file: file["body"]["history"].update(max_tokens=1),
    "an unknown parameter": lambda file: file["body"]["params"].update(temprature=1),
    "two answers": lambda file: file["body"]["params"].update(n=2),
    "a biased token outside the vocabulary": lambda file: file["body"]["params"].update(logit_bias={"77": 1.0}),
    "a made-up reason": lambda file: file["body"]["history"].update(finish_reason="boredom"),
    "logprobs of nothing": lambda file: file["body"]["history"].update(logprobs=[[1, "0x1p-1"]]),
    "too many logprobs": lambda file: file["body"]["history"].update(logprobs=[[1, "0x1p-1", []]] * 99),
    "a certainty above 1": lambda file: file["body"]["history"]["logprobs"][0].__setitem__(1, (0.5).hex()),
    "a logprob that is no number": lambda file: file["body"]["history"]["logprobs"][0].__setitem__(1, "nan"),
    "a logprob above 1 of another token": lambda file: file["body"]["history"]["logprobs"][0][2][0].__setitem__(
        1, (0.5).hex()),
    "a logprob of another token": lambda file: file["body"]["history"]["logprobs"][0].__setitem__(
        0, (file["body"]["history"]["logprobs"][0][0] + 1) % 32),
    "a logprob outside the vocabulary": lambda file: file["body"]["history"]["logprobs"][0][2][0].__setitem__(0, 32),
    "no logprobs": lambda file: file["body"]["history"].update(logprobs=[]),
    "KV of no tokens": lambda file: file["body"].update(history=None),
    "an unknown field": lambda file: file["body"]["history"].update(note=""),
    "a priority of text": lambda file: file["body"].update(priority="high"),
    "a salt of 1": lambda file: file["body"].update(is_salted=1),
    "KV of more tokens than there are": lambda file: file["body"]["kv"].update(num_tokens=4000),
    "digests of other tokens": lambda file: file["body"]["kv"]["block_digests"].__setitem__(0, "00" * 32),
    "a digest less": lambda file: file["body"]["kv"]["block_digests"].pop(),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_wrong_field_is_refused(files: Path, name: str) -> None:
    """Every field is checked, also in a file whose checksum is right; nothing is taken from a refused file."""
    change(files, BAD_FIELDS[name])
    engine = make_engine()
    with pytest.raises(InvalidSessionFile) as refusal:
        engine.import_session(files)
    assert "passwd" not in str(refusal.value)
    assert len(engine.sessions) == 0
    assert_all_free(engine)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}', b'{"a": ' * 50_000,
    b'{"format": "pagedcore session", "version": 1, "body": {}, "checksum": null}', b"1" * 100_000,
], ids=range(11))
def test_what_is_no_session_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty files, other JSON, deep nesting, endless numbers and bytes that are no text are refused alike."""
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(InvalidSessionFile):
        make_engine().import_session(tmp_path / "chat.json")


def test_size_and_kind_are_checked_before_reading(tmp_path: Path, files: Path) -> None:
    """A file of many gigabytes, a pipe and a directory are refused before a byte of them is read."""
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(2**40)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("pipe.json", "", "missing.json"):
        with pytest.raises(OSError, match=r"plain file|Is a directory|No such file"):
            make_engine().import_session(tmp_path / name)
    with pytest.raises(InvalidSessionFile, match=f"bytes: got {2**40}, allowed is at most [0-9]+"):
        make_engine().import_session(tmp_path / "huge.json")
    with kv_of(files).open("r+b") as file:
        file.truncate(2**40)
    assert make_engine().import_session(files).token_ids


def test_no_damage_goes_unnoticed(files: Path) -> None:
    """Any byte of the session file changed, and any end cut off: refused, or it says the very same."""
    content = files.read_bytes()
    rng = random.Random(1)
    good = make_engine().import_session(files)._snapshot(include_kv=False)
    engine = make_engine()
    for trial in range(300):
        damaged = bytearray(content)
        if trial % 3 == 0:
            del damaged[rng.randrange(len(content)) :]
        else:
            damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        files.write_bytes(damaged)
        try:
            session = engine.import_session(files)
        except InvalidSessionFile:
            continue
        assert session._snapshot(include_kv=False) == good
        session.close()
    assert_all_free(engine)


def test_damaged_kv_is_computed_again(files: Path) -> None:
    """Any damage to the KV file costs time at most: the answer is right, and no wrong block is ever used."""
    content = kv_of(files).read_bytes()
    rng = random.Random(2)
    found = set()
    for trial in range(60):
        damaged = bytearray(content)
        if trial % 3 == 0:
            del damaged[rng.randrange(len(content)) :]
        else:
            damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        kv_of(files).write_bytes(damaged)
        engine = make_engine()
        session = engine.import_session(files)
        known = [*session.token_ids, 13]
        output = session.ask([13], SamplingParams(max_tokens=4, ignore_eos=True))
        assert list(output.outputs[0].token_ids) == toy_answer(known, 4)
        found.add(output.num_cached_tokens)
        session.close()
        assert_all_free(engine)
    assert len(found) >= 3


OTHER_TENSORS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "of other types": lambda kv: {name: tensor.astype(np.float32) for name, tensor in kv.items()},
    "of another shape": lambda kv: {**kv, "blocks": kv["blocks"].reshape(-1)},
    "with a block too many": lambda kv: {name: np.concatenate([t, t[:1]]) for name, t in kv.items()},
    "with fewer checks": lambda kv: {**kv, "checks": kv["checks"][:1]},
    "without checks": lambda kv: {"blocks": kv["blocks"]},
    "of no block": lambda kv: {name: tensor[:0] for name, tensor in kv.items()},
    "without dimensions": lambda kv: {**kv, "blocks": np.zeros((), np.uint8)},
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_kv_of_another_form_is_ignored(files: Path, name: str) -> None:
    """A well-made safetensors file that holds something else is not used."""
    save_file(OTHER_TENSORS[name](load_file(kv_of(files))), kv_of(files))
    session = make_engine().import_session(files)
    assert session.ask([13], SamplingParams(max_tokens=1)).num_cached_tokens == 0


def test_a_crash_between_the_two_files_costs_only_time(files: Path) -> None:
    """An older session file beside the newer KV, and the other way round, gives the right answer."""
    engine = make_engine()
    session = engine.import_session(files)
    session.ask([13], SamplingParams(max_tokens=6, ignore_eos=True))
    later = files.parent / "later.json"
    session.export(later)
    older_kv = kv_of(files).read_bytes()
    shutil.copy(kv_of(later), kv_of(files))
    kv_of(later).write_bytes(older_kv)
    for path in (files, later):
        output = make_engine().import_session(path).ask([14], SamplingParams(max_tokens=4, ignore_eos=True))
        assert list(output.outputs[0].token_ids) == toy_answer(output.prompt_token_ids, 4)


def test_a_longer_answer_than_the_context_is_not_completed(tmp_path: Path) -> None:
    """An answer that was begun with a longer context is not completed here; the session stays usable."""
    engine = make_engine(max_model_len=60)
    session = engine.session(SamplingParams(max_tokens=40, ignore_eos=True))
    request = session.extend(PROMPT)
    while request.sequences[0].num_output_tokens < 5:
        engine.step()
    session.export(tmp_path / "chat.json")
    imported = make_engine(max_model_len=30).import_session(tmp_path / "chat.json")
    with pytest.raises(ValueError, match="begun with a longer context"):
        imported.ask(None)
    assert len(imported.ask([13], SamplingParams(max_tokens=4, ignore_eos=True)).outputs[0].token_ids) == 4


def test_a_backend_of_ones_own_can_say_what_it_is(files: Path) -> None:
    """A ``ModelBackend`` whose ``fingerprint`` differs refuses the files of another."""
    from pagedcore.models.fingerprint import ModelFingerprint

    backend = ToyBackend()
    backend.fingerprint = ModelFingerprint("toy", "0" * 64, "1" * 64)  # type: ignore[attr-defined]
    with pytest.raises(ModelMismatch, match=r"this engine runs toy \(config 00000000, weights 11111111\)"):
        make_engine(backend).import_session(files)


#: The parameters that every file of an earlier version has.
FIRST_PARAMS = {
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "seed", "n", "best_of", "beam_width",
    "length_penalty", "early_stopping", "logprobs", "prompt_logprobs", "structured",
}


def test_files_without_later_parameters_are_read_and_written(files: Path, tmp_path: Path) -> None:
    """A file that asks for nothing new has the names of earlier versions and no other, which they can read; one with a
    later parameter has that one too. A later one at its default is not how export writes it."""
    body = json.loads(files.read_text())["body"]
    assert body["params"].keys() == body["history"]["params"].keys() == FIRST_PARAMS
    later = SamplingParams(max_tokens=6, bad_words_ids=[[1, 2], [3]], allowed_token_ids=[4, 5], ignore_eos=True,
                           include_stop_str_in_output=True, truncate_prompt_tokens=9)
    with make_engine() as engine, engine.session(later) as session:
        session.ask(PROMPT)
        session.export(tmp_path / "later.json")
        wanted = list(session.ask([1, 2]).outputs[0].token_ids)
    names = json.loads((tmp_path / "later.json").read_text())["body"]["params"].keys() - FIRST_PARAMS
    assert names == {"bad_words_ids", "allowed_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens"}
    with make_engine() as engine, engine.import_session(tmp_path / "later.json") as session:
        assert list(session.ask([1, 2]).outputs[0].token_ids) == wanted
    change(files, lambda document: document["body"]["params"].update(skip_special_tokens=True))
    with make_engine() as engine, pytest.raises(InvalidSessionFile, match="params: got"):
        engine.import_session(files)

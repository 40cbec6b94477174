"""Session files are read strictly: what is accepted is, field by field, what ``export`` writes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidSessionFile
from pagedcore.outputs import TokenLogprobs
from pagedcore.requests.request_table import SequenceSnapshot
from pagedcore.sampling_params import SamplingParams
from pagedcore.sessions import session_file
from pagedcore.sessions.kv_file import KVCopy, KVSpec
from pagedcore.sessions.session_file import SessionSnapshot, write_session
from support.engine_builders import assert_all_free, make_engine

PARAMS = SamplingParams(
    max_tokens=3, temperature=0.7, logit_bias={3: 1.5, 15: -2.0}, stop=("x",), stop_token_ids=[9], seed=4, logprobs=2,
    ignore_eos=True,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 31, 32, 1.0, 0.5, -0.0, 1e308, 2**31, 2**63, -(10**30), 10**400, "", "x", "1", "nan",
    "inf", "-inf", "0x1.8p+1", "-0x1.8000000000000p+1", "-0x1.8p+1", "-0x1p+99999", "\ud800", "0" * 64, [], [[]], [1],
    [[1, "-inf"]], {}, {"3": 1.0, "03": 1.0},
)
"""What takes the place of every field and entry: other types, and numbers at and beyond the limits."""
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A session file with every kind of field."""
    path = tmp_path_factory.mktemp("session") / "chat.json"
    session = make_engine().session(PARAMS)
    session.ask([1, 2, 3, 4, 5])
    session.export(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every field, and to the first and last entry of every list."""
    inner = value.items() if isinstance(value, dict) else [(i, value[i]) for i in {0, len(value) - 1} if value] if (
        isinstance(value, list)) else []
    for key, below in inner:
        yield (key,)
        yield from ((key, *rest) for rest in places(below))


def changes(value: Any) -> Iterator[Change]:
    """What is done to one field or entry of a container."""

    def setting(other: Any) -> Change:
        return lambda old: other

    yield from map(setting, VALUES)
    if type(value) is int:
        yield from (lambda old: old + 1, lambda old: old - 1, float, bool, str)
    if type(value) is float:
        yield from (lambda old: -old, str, lambda old: old.hex())
    if isinstance(value, str):
        yield from (str.upper, lambda old: old + " ", lambda old: [old], lambda old: old[:-1])
    if isinstance(value, list):
        yield from (lambda old: old + old, lambda old: old[:-1], lambda old: [*old, None], lambda old: {"0": old},
                    lambda old: [*reversed(old)])
    if isinstance(value, dict):
        yield from (lambda old: {**old, "unknown": None}, lambda old: [old], lambda old: list(old.items()),
                    lambda old: dict(list(old.items())[:-1]))


def mutants(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Files with one field removed or changed."""
    for way in places(document):
        *above, last = way
        if above[:3] == ["body", "history", "params"]:
            # Why: read like the parameters of the session, which are changed one by one.
            continue
        found = document
        for key in above:
            found = found[key]
        for change in (None, *changes(found[last])):
            mutant = copy.deepcopy(document)
            container = mutant
            for key in above:
                container = container[key]
            if change is None:
                del container[last]
            else:
                container[last] = change(container[last])
            yield mutant


def body_of(engine: Engine, path: Path) -> dict[str, Any]:
    """Import a file, close the session, and return what its export would say, without KV."""
    snapshot = engine.sessions.read(path)
    with engine.sessions.take_in(snapshot, {"cache_salt": "salt"} if snapshot.is_salted else {}) as session:
        return {**session_file._body_of(session._snapshot(include_kv=False)), "kv": None}


def canonical(body: Any) -> str:
    """Text that tells 1, 1.0 and true apart."""
    return json.dumps(body, sort_keys=True)


def test_what_is_accepted_is_what_was_written(document: dict[str, Any], tmp_path: Path) -> None:
    """Every field removed, and replaced by every kind of value, with its checksum corrected: refused with the
    name, the value and the limit, or imported as a session whose export says the very same. Nothing is left behind."""
    engine, path = make_engine(), tmp_path / "chat.json"
    num_refused, num_accepted, unnamed = 0, 0, list[InvalidSessionFile]()
    for mutant in mutants(document):
        body = mutant.get("body")
        if isinstance(body, dict) and mutant.get("checksum") == document["checksum"]:
            mutant["checksum"] = session_file._checksum(body)
        # Why: truncating a file takes the disk longer than writing a new one.
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(mutant))
        try:
            found = body_of(engine, path)
        except InvalidSessionFile as refusal:
            num_refused += 1
            unnamed += [refusal] if not (refusal.what and refusal.given and refusal.limit) else []
            continue
        num_accepted += 1
        assert canonical({**mutant, "body": found}) == canonical({
            "format": "pagedcore session", "version": 1, "checksum": session_file._checksum(mutant["body"]),
            "body": {**mutant["body"], "kv": None},
        })
    assert not unnamed
    assert num_refused > 2000
    assert 20 < num_accepted < num_refused / 10
    assert len(engine.sessions) == 0
    assert list(engine.requests) == []
    assert_all_free(engine)


def test_a_field_given_twice_is_refused(document: dict[str, Any], tmp_path: Path) -> None:
    """A second field of the same name, equal or not, before or after, in any object: the file is refused."""
    engine, text, path = make_engine(), json.dumps(document), tmp_path / "chat.json"
    names = list(re.finditer(r'"\w+": ', text))
    assert len(names) > 40
    for name in names:
        value = text[name.end() :]
        same = value[: json.JSONDecoder().raw_decode(value)[1]]
        for other in (same, "null"):
            path.write_text(f"{text[: name.start()]}{name[0]}{other}, {text[name.start() :]}")
            with pytest.raises(InvalidSessionFile):
                engine.import_session(path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7"])
def test_other_encodings_are_refused(document: dict[str, Any], tmp_path: Path, encoding: str) -> None:
    """A session file is JSON in UTF-8 without a byte order mark."""
    text = json.dumps(document)
    (tmp_path / "chat.json").write_bytes(b"+" + text.encode() if encoding == "utf-7" else text.encode(encoding))
    with pytest.raises(InvalidSessionFile, match=r"format: .* UTF-8"):
        make_engine().import_session(tmp_path / "chat.json")


@pytest.mark.parametrize(
    "text", ["[" * 50_000, '{"a":' * 50_000, "1" * 50_000, "1e999", '"\\ud800"', "[" * 900 + "]" * 900]
)
@pytest.mark.parametrize("way", [("body", "history", "logprobs"), ("body", "params"), ("version",), ("checksum",)])
def test_deep_and_endless_values_are_refused(
    document: dict[str, Any], tmp_path: Path, text: str, way: tuple[str, ...]
) -> None:
    """Nesting, digits, overflowing numbers and lone surrogates in any place raise the file's error and no other."""
    changed = copy.deepcopy(document)
    container = changed
    for key in way[:-1]:
        container = container[key]
    container[way[-1]] = "here"
    (tmp_path / "chat.json").write_text(json.dumps(changed).replace('"here"', text))
    with pytest.raises(InvalidSessionFile):
        make_engine().import_session(tmp_path / "chat.json")


def test_a_file_beyond_the_context_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is refused by its size, which follows from the longest context, and its contents are not parsed."""
    engine, path = make_engine(max_model_len=64), tmp_path / "chat.json"
    path.write_bytes(b"[" + b"[]," * 9_000_000 + b"[]]")
    monkeypatch.setattr(session_file.json, "loads", None)
    with pytest.raises(InvalidSessionFile, match=r"bytes: got 27000004, allowed is at most 6\d{6}\. .*longest"):
        engine.import_session(path)


def longest(num_tokens: int) -> SessionSnapshot:
    """A session whose every value takes as many bytes as it can."""
    params = SamplingParams(
        max_tokens=2**31 - 1, temperature=1.2345678901234567e-300, top_p=1.2345678901234567e-300, seed=2**63 - 1,
        min_p=1.2345678901234567e-300, presence_penalty=-1.2345678901234567e-300, logprobs=20, prompt_logprobs=20,
        logit_bias={2**31 - 301 + i: -1.2345678901234567e-300 for i in range(300)}, stop=("\U0001f600" * 64,) * 8,
        stop_token_ids=(2**31 - 1,) * 64,
    )
    least = -float.fromhex("0x1.123456789abcdp-1022")
    entry = TokenLogprobs(2**31 - 1, least, ((2**31 - 1, least),) * 20)
    token_ids = (2**31 - 1,) * num_tokens
    return SessionSnapshot(
        model=make_engine().sessions.fingerprint, params=params, priority=-(10**6), is_salted=False,
        history=SequenceSnapshot(
            token_ids=token_ids, num_prompt_tokens=1, params=params, max_tokens=2**31 - 1, seed=2**63 - 1,
            finish_reason="length", logprobs=(entry,) * num_tokens,
        ),
        kv_spec=KVSpec(token_ids, 1, 1, "f" * 64), kv=KVCopy(num_tokens, np.zeros((num_tokens, 1), np.uint8)),
    )


@pytest.mark.parametrize("num_tokens", [1, 64, 2000])
def test_no_file_of_a_full_context_is_too_large(num_tokens: int, tmp_path: Path) -> None:
    """A session that fills the context, with the most log-probabilities and the longest numbers, is not refused."""
    write_session(tmp_path / "chat.json", longest(num_tokens))
    limit = session_file._NUM_BASE_BYTES + num_tokens * session_file._NUM_BYTES_PER_TOKEN
    size = (tmp_path / "chat.json").stat().st_size
    assert size <= limit
    assert size > 0.9 * (limit - session_file._NUM_BASE_BYTES)

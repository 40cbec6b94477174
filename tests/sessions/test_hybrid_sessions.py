"""Conversations with a model that keeps states: what moves KV moves the state too, and a wrong one is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedcore.engine.engine import Engine
from support.doubles import ToyHybrid
from support.engine_builders import assert_all_free
from support.toy_sessions import PARAMS, ask, flood, make


def make_hybrid(*, has_attention: bool = True, num_host_blocks: int = 0, **settings: Any) -> Engine:
    backend = ToyHybrid()
    backend.has_attention = has_attention
    return make(num_host_blocks, backend=backend, **settings)


def kv_of(path: Path) -> Path:
    return path.with_name(path.name + ".kv.safetensors")


@pytest.mark.parametrize("has_attention", [True, False])
def test_turns_go_on_from_the_last_state(has_attention: bool) -> None:
    """Each turn finds every position of the turns before, the very last token excepted."""
    engine = make_hybrid(has_attention=has_attention)
    with engine.session(PARAMS) as session:
        assert [ask(session, 1, 2, 3), ask(session, 4), ask(session, 5, 6)] == [0, 7, 13]
    assert_all_free(engine)
    assert engine.scheduler.kv_cache.bookkeeping().states.current == {}  # type: ignore[union-attr]


def test_forks_go_on_from_the_state_they_share() -> None:
    """Sessions that part behind one turn, also while both are asked at once, begin at its end."""
    engine = make_hybrid()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    forks = [session.fork() for _ in range(3)]
    assert [ask(one, number) for number, one in enumerate(forks)] == [7, 7, 7]
    assert ask(session, 9) == 7


@pytest.mark.parametrize("has_attention", [True, False])
def test_a_session_comes_back_from_a_file(has_attention: bool) -> None:
    """What is parked on the disk is found again when everything else was used by others, its state with it."""
    engine = make_hybrid(has_attention=has_attention)
    parked, idle = engine.session(PARAMS), engine.session(PARAMS)
    ask(parked, 1, 2, 3)
    ask(idle, 3, 2, 1)
    state = parked.park("disk")
    assert (state.tier, state.num_tokens_kept) == ("disk", 7)
    flood(engine)
    assert (ask(parked, 4), ask(idle, 4)) == (7, 0)


def test_without_a_host_tier_a_session_is_parked_on_the_disk() -> None:
    """No state is on the host, so what is to be parked there goes where its state can go too."""
    engine = make_hybrid()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    assert session.park("host").tier == "disk"
    flood(engine)
    assert ask(session, 4) == 7


@pytest.mark.parametrize("has_attention", [True, False])
def test_a_session_comes_back_from_the_host(has_attention: bool) -> None:
    """What is parked on the host is loaded with its state when everything else was used by others; its export says so
    too, and when the session is closed the host has nothing of it any more."""
    engine = make_hybrid(has_attention=has_attention, num_host_blocks=64)
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    state = session.park("host")
    assert (state.tier, state.num_tokens_kept) == ("host", 7)
    flood(engine)
    assert engine.stats().num_host_states_used == 1
    assert ask(session, 4) == 7
    session.park("host")
    assert session.park("disk").tier == "disk"
    flood(engine)
    assert ask(session, 5) == 13
    session.close()
    assert_all_free(engine)
    assert engine.stats().num_host_states_used == 0


def test_parked_sessions_leave_states_for_swaps() -> None:
    """When parked sessions have their share of the host's states, the next one goes to the disk."""
    engine = make_hybrid(num_host_blocks=64)
    engine.scheduler.kv_cache.host.states.num_states = 2
    sessions = [engine.session(PARAMS) for _ in range(2)]
    for number, one in enumerate(sessions):
        ask(one, number)
    assert [one.park("host").tier for one in sessions] == ["host", "disk"]


def test_an_imported_session_goes_on_from_its_state(tmp_path: Path) -> None:
    """Another engine finds KV and state in the files, and its turn computes its own tokens alone."""
    session = make_hybrid().session(PARAMS)
    ask(session, 1, 2, 3, 4, 5)
    session.export(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text())["version"] == 2
    imported = make_hybrid().import_session(tmp_path / "chat.json")
    assert ask(imported, 6) == 9


def test_files_without_a_state_are_what_they_were(tmp_path: Path) -> None:
    """A model without states writes files of version 1, which say nothing of states; both kinds are read."""
    session = make(0).session(PARAMS)
    ask(session, 1, 2, 3)
    session.export(tmp_path / "chat.json")
    document = json.loads((tmp_path / "chat.json").read_text())
    assert (document["version"], "state_bytes" in document["body"]["kv"]) == (1, False)
    assert set(load_file(kv_of(tmp_path / "chat.json"))) == {"blocks", "checks"}
    assert ask(make(0).import_session(tmp_path / "chat.json"), 4) == 7


@pytest.mark.parametrize("part", ["state", "blocks", "checks", "none"])
def test_a_damaged_state_is_not_used(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a byte of state, blocks or digests is another one, or there is no state, all is computed again."""
    session = make_hybrid().session(PARAMS)
    ask(session, 1, 2, 3, 4, 5)
    session.export(tmp_path / "chat.json")
    tensors = {name: np.array(one) for name, one in load_file(kv_of(tmp_path / "chat.json")).items()}
    if part == "none":
        del tensors["state"]
    else:
        tensors[part].reshape(-1)[-1] ^= 1
    save_file(tensors, kv_of(tmp_path / "chat.json"))
    with caplog.at_level("WARNING"):
        imported = make_hybrid().import_session(tmp_path / "chat.json")
    assert "computed again" in caplog.text
    assert ask(imported, 6) == 0


def test_a_state_of_another_size_is_not_used(tmp_path: Path) -> None:
    """What a model with states of other bytes has written is computed again."""
    session = make(0, backend=type("ToyHybrid", (ToyHybrid,), {"state_bytes": 24})()).session(PARAMS)
    ask(session, 1, 2, 3)
    session.export(tmp_path / "chat.json", include_kv=True)
    assert ask(make_hybrid().import_session(tmp_path / "chat.json"), 4) == 0

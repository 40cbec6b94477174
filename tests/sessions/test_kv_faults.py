"""Errors of any kind while KV is copied, written, read or loaded: the session continues without what was lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.engine import Engine
from pagedcore.requests.input_processor import InputProcessor
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.sessions.kv_file import KVDirectory
from pagedcore.sessions.session import Session
from support.doubles import ToyBackend, ToyHybrid, ToyWindowed, toy_answer
from support.engine_builders import assert_all_free
from support.toy_sessions import PARAMS, ask, flood, make

ERRORS: tuple[type[Exception], ...] = (MemoryError, ValueError, RuntimeError)
STORE = ("read_blocks", "read_host_blocks", "write_blocks", "start_swap_out", "start_swap_in")
STATES = ("read_states", "read_host_states", "write_states", "swap_out", "swap_in")
WINDOWS = ("read_blocks", "write_blocks")
FUNCTIONS = ("safetensors.numpy.save_file", "safetensors.numpy.load", "os.fsync", "os.replace", "os.open")
"""What fails, beside the methods of the store."""


class Faults:
    """Lets the ``at``-th call fail of anything that can fail and whose name begins so."""

    def __init__(
        self, engine: Engine, patch: pytest.MonkeyPatch, at: int, error: type[Exception], beginning: str = ""
    ) -> None:
        self._at, self._error, self.num_calls, self.failed, self._beginning = at, error, 0, "", beginning
        store = engine.sessions.parking.store
        for name in STORE:
            patch.setattr(store, name, self._around(name, getattr(store, name)))
        parking = engine.sessions.parking
        for of, kind, names in ((parking.state_store, "states", STATES), (parking.window_store, "windows", WINDOWS)):
            for name in names if of is not None else ():
                patch.setattr(of, name, self._around(f"{kind}.{name}", getattr(of, name)))
        patch.setattr(KVDirectory, "name_file", self._around("name_file", KVDirectory.name_file))
        for name in FUNCTIONS:
            module, _, function = name.rpartition(".")
            patch.setattr(name, self._around(name, getattr(__import__(module, fromlist=[""]), function)))

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if not name.startswith(self._beginning):
            return function

        def call(*arguments: Any, **named: Any) -> Any:
            # Why: what tidies up after a failure does not fail too; ``shutil.rmtree`` opens with ``dir_fd``.
            self.num_calls += "dir_fd" not in named
            if "dir_fd" not in named and self.num_calls == self._at + 1:
                self.failed = name
                raise self._error("what no caller may be shown")
            return function(*arguments, **named)

        return call


def tokens_of(file: Path) -> list[int]:
    """The tokens in a session file."""
    found: list[int] = json.loads(file.read_text())["body"]["history"]["token_ids"]
    return found


def export(session: Session, path: Path) -> None:
    """Export, which may be refused; a whole file is there in any case."""
    known = [list(session.token_ids), tokens_of(path / "chat.json")]
    try:
        session.export(path / "chat.json")
        known.pop()
    except ERRORS:
        pass
    assert tokens_of(path / "chat.json") in known


def take_in(session: Session, path: Path) -> None:
    """Import a session, which may be refused."""
    before = set(session._store)
    try:
        imported = session._store.take_in(session._store.read(path / "chat.json"), {})
    except ERRORS:
        assert set(session._store) == before
    else:
        ask(imported, 4)


CALLS: dict[str, Callable[[Session, Path], Any]] = {
    "park on disk": lambda session, path: session.park("disk"),
    "park on the host": lambda session, path: session.park("host"),
    "ask": lambda session, path: ask(session, 4),
    "resume": lambda session, path: session.resume(),
    "fork": lambda session, path: ask(session.fork(), 4),
    "export": export,
    "import": take_in,
}
EXPECTED = {
    ("park on disk", "nowhere"): {"read_blocks", "name_file", "safetensors.numpy.save_file", "os.fsync", "os.replace"},
    ("park on disk", "host"): {"read_host_blocks"}, ("park on the host", "disk"): {"os.open", "write_blocks"},
    ("ask", "disk"): {"os.open", "safetensors.numpy.load", "write_blocks"}, ("ask", "host"): {"start_swap_in"},
    ("resume", "disk"): {"os.open", "safetensors.numpy.load", "write_blocks"},
    ("export", "nowhere"): {"read_blocks", "safetensors.numpy.save_file", "os.replace"},
    ("export", "disk"): {"safetensors.numpy.load"}, ("import", "nowhere"): {"safetensors.numpy.load"},
    ("import", "disk"): {"write_blocks"},
}
OF_KIND: dict[str, dict[tuple[str, str], set[str]]] = {
    "": {},
    "states": {
        ("park on disk", "nowhere"): {"states.read_states"}, ("park on disk", "host"): {"states.read_host_states"},
        ("ask", "disk"): {"states.write_states"}, ("ask", "host"): {"states.swap_in"},
        ("export", "nowhere"): {"states.read_states"}, ("import", "disk"): {"states.write_states"},
    },
    "windows": {
        ("park on disk", "nowhere"): {"windows.read_blocks"}, ("ask", "disk"): {"windows.write_blocks"},
        ("resume", "disk"): {"windows.write_blocks"}, ("export", "nowhere"): {"windows.read_blocks"},
        ("import", "disk"): {"windows.write_blocks"},
    },
}
"""What certainly fails once in some of the calls."""
BACKENDS = {"": ToyBackend, "states": ToyHybrid, "windows": ToyWindowed}
NUM_HOST_BLOCKS = {"": 24, "states": 48, "windows": 0}
"""A model with window blocks has none on the host."""


# Why only their own calls each time: beside states and windows, what copies blocks fails as it does without them.
@pytest.mark.parametrize(("name", "tier", "kind", "fails"), [
    pytest.param(name, tier, kind, fails, marks=[pytest.mark.slow] if kind and not fails else [])
    for name in CALLS for kind in BACKENDS for tier in ("nowhere", "host", "disk")
    for fails in ("", *([f"{kind}."] if (name, tier) in OF_KIND[kind] else []))
    if (kind, tier) != ("windows", "host")
])
def test_any_error_costs_the_kv_alone(
    name: str, tier: Any, kind: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The k-th call into the store, the format or the disk fails, for every k, with the session parked in any tier: a
    call that writes or reads no session file ends without an error, its KV is computed again, and no block, file or law
    is lost."""
    caplog.set_level(logging.WARNING, "pagedcore")
    at, failed, has_failed = 0, True, set[str]()
    while failed:
        path = tmp_path / str(at)
        engine = make(NUM_HOST_BLOCKS[kind], backend=BACKENDS[kind](), disk_kv_dir=str(path / "kv"))
        assert (kind == "windows") == (engine.sessions.parking.window_store is not None)
        session = engine.session(PARAMS)
        ask(session, 1, 2, 3)
        path.mkdir()
        session.export(path / "chat.json")
        ask(session, 5)
        if tier != "nowhere":
            assert session.park(tier).tier == tier
            flood(engine)
        with monkeypatch.context() as patch:
            faults = Faults(engine, patch, at, ERRORS[at % len(ERRORS)], fails)
            CALLS[name](session, path)
        failed, at = bool(faults.failed), at + 1
        has_failed.add(faults.failed)
        assert check(snapshot(engine.scheduler)) == []
        state = session.parked
        num_files = len(list((path / "kv").rglob("*.safetensors")))
        assert num_files == len(engine.sessions.parking.directory.files)
        assert num_files == int(state is not None and state.tier == "disk")
        assert not list(path.rglob("*.part"))
        ask(session, 9)
        for one in engine.sessions:
            one.close()
        assert_all_free(engine)
        stats = engine.stats()
        held = stats.num_host_blocks_used + stats.num_host_states_used
        assert held == 0 or not engine.sessions.parking._parked
        engine.close()
    is_free = fails or (name, kind) == ("park on the host", "windows")
    always = set() if is_free else EXPECTED.get((name, tier), set())
    assert has_failed >= always | OF_KIND[kind].get((name, tier), set())
    assert "what no caller may be shown" not in caplog.text


@pytest.mark.parametrize("error", ERRORS)
async def test_the_engine_continues(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that raises whenever it is read or written ends neither the engine thread nor the request of another."""

    def fail(*_: Any) -> Any:
        raise error("broken")

    engine = make()
    async with AsyncEngine(engine) as serving, serving.session(PARAMS) as session:
        await session.ask([1, 2, 3])
        await session.park("disk")
        nine = SamplingParams(max_tokens=9, ignore_eos=True)
        flooding = [serving.submit([i * j % 30 for j in range(50)], nine) for i in range(2, 9)]
        for name in ("read_blocks", "read_host_blocks", "write_blocks"):
            monkeypatch.setattr(engine.sessions.parking.store, name, fail)
        known = [*session.token_ids, 4]
        output = await session.ask([4])
        assert list(output.outputs[0].token_ids) == toy_answer(known, 5)
        assert (await session.park("disk")).tier == "tokens"
        for future in flooding:
            assert len(future.result(30).outputs[0].token_ids) == 9
        assert serving.is_alive


def test_the_tokenizer_fails_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that raises refuses the turn; the session stays as it was, parked where it was."""
    engine = make()
    session = engine.session(PARAMS)
    ask(session, 1, 2, 3)
    state = session.park("disk")

    def fail(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(InputProcessor, "process", fail)
        with pytest.raises(MemoryError):
            session.ask([4])
    assert session.parked == state
    assert os.path.exists(next(iter(engine.sessions.parking.directory.files)))
    assert ask(session, 4) == 7

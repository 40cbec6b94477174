"""Names of models on the hub: it is asked once, for a limited time, and the error says what is known and what to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine
from pagedcore.cli.doctor import diagnosis
from pagedcore.cli.size import size_model
from pagedcore.errors import InvalidConfig
from pagedcore.models.checkpoints import hub
from pagedcore.models.checkpoints.hub import ModelName
from pagedcore.models.loading import model_source
from support.async_helpers import wait_until

DOORS: dict[str, Callable[[str], object]] = {
    "engine": Engine.from_pretrained, "async engine": AsyncEngine.from_pretrained, "size": size_model,
    "doctor": diagnosis, "tokenizer": lambda name: Engine.from_pretrained("demo", tokenizer=name),
}


class Hub(ThreadingHTTPServer):
    """A hub that answers as it is told, once ``answers`` is set, and notes what it was asked."""

    status, code = 404, "RepoNotFound"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []
        self.answers = threading.Event()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        # Why: its library asks for other things too, once in a process.
        if "/resolve/" in self.path:
            self.server.asked.append(self.path)
        self.server.answers.wait(10)
        self.send_response(self.server.status)
        self.send_header("X-Error-Code", self.server.code)
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that takes connections and does not answer."""
    monkeypatch.setattr(hub, "TIME_LIMIT_S", 0.5)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                            address + "/{repo_id}/resolve/{revision}/{filename}")
        yield server
        server.answers.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def answering(silent: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that answers."""
    monkeypatch.setattr(hub, "TIME_LIMIT_S", 10.0)
    silent.answers.set()
    return silent


@pytest.mark.parametrize("door", DOORS)
def test_a_name_that_the_hub_does_not_have(door: str, answering: Hub) -> None:
    """Every door asks once, names no path, and says what is known without a network."""
    with pytest.raises(InvalidConfig, match="no such directory here, and the hub shows no model of this name") as found:
        DOORS[door]("demo2")
    assert "Did you mean demo? Known without a network: demo." in str(found.value)
    assert answering.asked == ["/demo2/resolve/main/config.json"]


@pytest.mark.parametrize("door", DOORS)
def test_a_hub_that_does_not_answer(door: str, silent: Hub) -> None:
    """It is asked once, however many files there are to ask for, and the limit is said."""
    with pytest.raises(InvalidConfig, match=r"not be reached within 0\.5 seconds .* Known without a network: demo\."):
        DOORS[door]("nope")
    wait_until(lambda: bool(silent.asked))
    assert silent.asked == ["/nope/resolve/main/config.json"]


def test_a_model_that_is_not_open_to_everybody(answering: Hub) -> None:
    """The way to it is said."""
    answering.status, answering.code = 403, "GatedRepo"
    with pytest.raises(InvalidConfig, match="accepted its terms"):
        Engine.from_pretrained("owner/name")
    assert len(answering.asked) == 1


def test_the_cache_answers_for_a_hub_that_does_not(silent: Hub, cache: Path) -> None:
    """A name with a snapshot stands for its directory; of others the nearest in the cache is named."""
    repository = cache / "models--owner--name"
    (snapshot := repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert hub.find_on_hub("owner/name", "model") == str(snapshot)
    advice = re.escape("Did you mean owner/name? Known without a network: demo, owner/name.")
    with pytest.raises(InvalidConfig, match=advice):
        hub.find_on_hub("owner/nane", "model")


def test_a_name_is_looked_up_once(answering: Hub) -> None:
    """One that the hub has, whatever files it has, is not asked for again by the next reader of the same load."""
    answering.code, name = "EntryNotFound", ModelName("owner/name")
    assert [model_source(name) for _ in range(3)] == ["owner/name"] * 3
    assert len(answering.asked) == 1

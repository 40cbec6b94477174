"""``pagedcore serve`` as a user runs it: in a process of its own, started, called, told to end, refused."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
import uvicorn
from openai import OpenAI

from architecture.sources import PACKAGE_PARENTS
from pagedcore.errors import InvalidConfig, MissingDependency
from pagedcore.scheduler.waiting_queue import WaitingQueue
from pagedcore_openai.server import keys_of_environment, serve
from support.async_helpers import wait_until
from support.doubles import ToyBackend
from support.runner import try_invoke

KEYS = ("key-of-tenant-one", "key-of-tenant-two")
QUESTION: Any = [{"role": "user", "content": "What is 2 + 3?"}]


class Server:
    """A server's process and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: "python: OpenAI" in self.text or process.poll() is not None, 120.0)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """The address in the snippet for Python."""
        return re.findall(r'OpenAI\(base_url="([^"]+)"', self.text)[0]


@contextmanager
def serve_process(*words: str, program: tuple[str, ...] = ("-m", "pagedcore"), **environment: str) -> Iterator[Server]:
    """Run the command until the block is left; ``program`` is what Python runs."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGE_PARENTS)), "COLUMNS": "200", **environment}
    command = [sys.executable, *program, "serve", *words, "--port", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def stream_of(client: OpenAI, **fields: Any) -> Iterator[Any]:
    stream = client.completions.create(model="demo", prompt="What is 2 + 3?", stream=True, temperature=0,
                                       extra_body={"ignore_eos": True}, **fields)
    return iter(stream)


def ask_until_refused(client: OpenAI) -> None:
    for _ in range(1000):
        client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=1)


def test_a_server_answers_and_ends_its_streams_when_told_to_end() -> None:
    """Two models by name and two keys; SIGTERM mid-stream: the stream gets all its tokens, new calls are refused, and
    the process ends with 0 and no error in its log."""
    with serve_process("demo", "--model", "second=demo", "--kv-memory", "32MiB",
                       PAGEDCORE_API_KEYS=",".join(KEYS)) as server:
        assert "serving demo, second at http://127.0.0.1:" in server.text
        with OpenAI(base_url=server.url, api_key=KEYS[0], max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == ["demo", "second"]
            given = client.chat.completions.create(model="second", messages=QUESTION, temperature=0)
            assert given.choices[0].message.content == "2 + 3 = 5."
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="key-of-nobody-at-all").models.list()
            chunks = stream_of(client, max_tokens=400, stream_options={"include_usage": True})
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
                ask_until_refused(client)
            *_, last = chunks
            assert last.usage.completion_tokens == 400
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.text


@pytest.mark.slow
def test_what_outlasts_the_drain_is_ended_and_so_is_the_process() -> None:
    """Ctrl-C with a stream that takes longer than the drain: the client's stream raises, and the process ends with 0
    within the time that is stated."""
    with serve_process("demo", "--drain-s", "0.1", "--blocks", "512", "--max-num-seqs", "4") as server:
        with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            streams = [stream_of(client, max_tokens=2000) for _ in range(4)]
            for chunks in streams:
                next(chunks)
            server.process.send_signal(signal.SIGINT)
            for chunks in streams:
                with pytest.raises(openai.APIError, match="closed"):
                    list(chunks)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.text


def test_a_taken_port_is_said_with_advice() -> None:
    """Before a model is loaded, with the way to another port; an address of another machine and no port likewise."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=rf"{port} cannot be listened on: another program .*--port 0"):
            serve({"demo": "no-such-model"}, port=port)
    for address in ({"port": 70_000}, {"host": "203.0.113.7"}, {"host": "no such host"}):
        with pytest.raises(InvalidConfig, match="cannot be listened on"):
            serve({"demo": "no-such-model"}, **address)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", ["", " ", ",", "short", f"{KEYS[0]},short"])
def test_keys_of_the_environment_are_checked(keys: str) -> None:
    """A variable without a key does not open the server to everybody, and a weak key is refused by its place."""
    with pytest.raises(InvalidConfig, match=r"PAGEDCORE_API_KEYS|key [12] has 5 characters"):
        keys_of_environment({"PAGEDCORE_API_KEYS": keys})
    assert keys_of_environment({}) is None
    assert keys_of_environment({"PAGEDCORE_ADMIN_KEY": KEYS[0]}) is not None


@pytest.mark.parametrize(("words", "said"), [
    ((), "model: got none"), (("--model", "demo"), "needed is NAME=MODEL"),
    (("demo", "--model", "demo=demo"), "the same name"),
])
def test_models_are_named(words: tuple[str, ...], said: str) -> None:
    """No model, a model without a name, one name for two: refused, with what is needed."""
    with pytest.raises(InvalidConfig, match=said):
        try_invoke("serve", *words)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without uvicorn the command says what to install."""
    monkeypatch.delitem(sys.modules, "pagedcore_openai.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert uvicorn
    with pytest.raises(MissingDependency, match=r"needs uvicorn. Install pagedcore\[openai\]"):
        try_invoke("serve", "demo")


def test_everybody_is_warned_of_only_where_everybody_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening on all networks without keys is said at the start; on loopback, or with keys, nothing is."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: server._announce())
    for host, keys, is_warned in (("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", KEYS[0], False)):
        if keys is not None:
            monkeypatch.setenv("PAGEDCORE_API_KEYS", keys)
        said: list[str] = []
        serve({"demo": ToyBackend()}, host=host, port=0, announce=said.append, num_kv_blocks=16)
        assert ("everybody who reaches this address" in said[0]) == is_warned
        assert (keys is not None) == ("$KEY" in said[0])


def test_the_demo_has_a_page_and_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``demo --web`` serves the demo model with the settings of the demo and a pause after every step, says where the
    page is and that it ends with Ctrl-C, and opens it unless it is told not to."""
    served: list[Any] = []
    opened: list[str] = []

    def run(server: uvicorn.Server, _: object) -> None:
        served.append(server.config.app)
        server._announce()  # type: ignore[attr-defined]

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("pagedcore.cli.demo_web.sleep", pauses := Pauses())
    for words, opens in (((), True), (("--no-open", "--max-num-seqs", "5"), False)):
        result = try_invoke("demo", "--web", "--requests", "7", *words)
        address = re.findall(r"http://127\.0\.0\.1:\d+/#demo=7", result.output)[0]
        assert "Ctrl-C" in result.output
        wait_until(lambda opens=opens: bool(opened) == opens)  # type: ignore[misc]
        assert opened == [address] * opens
        opened.clear()
        app = served.pop()
        (model,) = app.service.models.values()
        assert (model.engine.stats().max_num_seqs, model.engine.stats().num_blocks) == (5 if words else 12, 24)
        assert app.service.page_files
        assert pauses.seconds == {0.05}
        model.engine.close()


class Pauses:
    """Notes how long it was told to wait, and does not."""

    def __init__(self) -> None:
        self.seconds: set[float] = set()

    def __call__(self, seconds: float) -> None:
        self.seconds.add(seconds)


@pytest.mark.parametrize(("words", "said"), [
    (("--allow-host", "https://a.example"), "host: got"), (("--allow-origin", "a.example"), "origin: got"),
])
def test_names_of_hosts_and_origins_are_refused_before_a_model_is_loaded(words: tuple[str, ...], said: str) -> None:
    """What could never match is an error with the form that is allowed."""
    with pytest.raises(InvalidConfig, match=said):
        try_invoke("serve", "no-such-model", "--port", "0", *words)


def test_hosts_and_origins_are_those_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """On loopback the server has its loopback names, and others that are allowed; elsewhere any name without
    ``--allow-host``. Origins are always asked for. The page is there unless it is left out."""
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: served.append(server.config.app.service))
    loopback = {"127.0.0.1", "localhost", "::1"}
    for host, settings, hosts in (
        ("127.0.0.1", {}, loopback), ("127.0.0.1", {"allow_hosts": ["a.example"]}, {*loopback, "a.example"}),
        ("0.0.0.0", {}, None), ("0.0.0.0", {"allow_hosts": ["a.example"], "page": False}, {*loopback, "a.example"}),
    ):
        serve({"demo": ToyBackend()}, host=host, port=0, num_kv_blocks=16, announce=lambda _: None,
              **settings)  # type: ignore[arg-type]
        service = served.pop()
        assert (service.browsers.hosts, list(service.browsers.origins)) == (hosts, [])
        assert bool(service.page_files) == settings.get("page", True)


def test_idle_connections_outlive_those_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client keeps an idle connection for 5 to 60 seconds; a server that closed it first would lose its next call."""
    seen: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: seen.append(server.config))
    serve({"demo": ToyBackend()}, port=0, num_kv_blocks=16)
    assert seen[0].timeout_keep_alive > 60


def test_there_are_no_websockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections would leave the bounds of the server, and nothing is served on them."""
    seen: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: seen.append(server.config))
    serve({"demo": ToyBackend()}, port=0, num_kv_blocks=16)
    seen[0].load()
    assert seen[0].ws_protocol_class is None


def test_settings_come_from_options_before_those_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--config`` gives the settings that no option gives; a server's queue is long unless the file says otherwise."""
    seen: list[Any] = []

    def run(server: uvicorn.Server, _: object) -> None:
        seen.append([one.engine.stats() for one in server.config.app.service.models.values()])  # type: ignore[union-attr]

    monkeypatch.setattr(uvicorn.Server, "run", run)
    file = tmp_path / "engine.toml"
    for content, most in (("max_num_seqs = 8\n", 1024), ("max_num_seqs = 8\nmax_num_waiting = 24\n", 24)):
        file.write_text(content + "num_kv_blocks = 32\n")
        options = SimpleNamespace(waiting=None)
        monkeypatch.setattr("pagedcore.scheduler.waiting_queue.WaitingQueue.__init__", _noting(options))
        assert try_invoke("serve", "demo", "--port", "0", "--config", str(file), "--blocks", "48").exit_code == 0
        assert [(one.max_num_seqs, one.num_blocks) for one in seen.pop()] == [(8, 48)]
        assert options.waiting == most


def _noting(options: SimpleNamespace) -> Any:
    own = WaitingQueue.__init__

    def init(queue: WaitingQueue, key: Any, limit: int, **more: Any) -> None:
        options.waiting = limit
        own(queue, key, limit, **more)

    return init

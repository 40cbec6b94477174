"""What a service refuses before it starts, how many clients it takes by default, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bentoml
import pytest
from _bentoml_impl.server.serving import server_on_deployment

from adapters.bentoml.asgi_caller import App
from adapters.bentoml.processes import environment
from pagedcore import AsyncEngine
from pagedcore.errors import InvalidConfig
from pagedcore_bentoml import EventParser, PagedCoreRunner, checks, create_service
from pagedcore_bentoml.checks import keep_idle_connections
from pagedcore_http.drain import CUT_AFTER_S, KEEP_IDLE_S, DrainSignal
from support.async_helpers import SlowBackend
from support.engine_builders import make_engine

MISSPELT = 'from pagedcore_bentoml import create_service\n\nLLM = create_service("demo", num_kv_blokcs=64)\n'
WORKERS = ('import bentoml\n\nfrom pagedcore_bentoml import PagedCoreRunner\n\n\n@bentoml.service(workers=2)\n'
           'class LLM(PagedCoreRunner):\n    model = "demo"\n')


def test_bentoml_serve_ends_at_once_with_the_name(tmp_path: Path) -> None:
    """The process that would start the workers ends with an error that names the setting; no worker is started. A
    misspelt one fails already where the service's file is read."""
    (tmp_path / "service.py").write_text(WORKERS, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "bentoml", "serve", "service:LLM", "--port", "0"], cwd=tmp_path,
                          env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "workers: got 2" in done.stderr.splitlines()[-1]
    assert "Starting production" not in done.stdout + done.stderr
    with pytest.raises(InvalidConfig, match="unknown setting 'num_kv_blokcs'"):
        exec(MISSPELT)


@pytest.mark.parametrize(("settings", "words"), [
    ({"num_kv_blokcs": 1}, "unknown setting 'num_kv_blokcs'"), ({"num_kv_blocks": 0}, "num_kv_blocks: got 0"),
    ({"dtype": 5}, "dtype"), ({"max_num_seqs": 4, "max_num_batched_tokens": 2}, "max_num_batched_tokens"),
])
def test_settings_are_validated_where_they_are_written(settings: dict[str, Any], words: str) -> None:
    """The class form and the factory refuse a wrong setting when the class is made."""
    with pytest.raises(InvalidConfig, match=words):
        type("LLM", (PagedCoreRunner,), {"model": "demo", "settings": settings})
    with pytest.raises(InvalidConfig, match=words):
        create_service("demo", **settings)


def test_all_that_an_engine_takes_is_a_valid_setting() -> None:
    """Keywords beyond ``EngineConfig`` pass, with objects as their values."""
    settings = {"tokenizer": object(), "plugins": (), "stream_interval_s": 0.0, "dead_after_s": 5.0, "seed": 3}
    assert create_service("demo", **settings).inner.settings == settings


@pytest.mark.parametrize("workers", [2, "cpu_count", [{"gpus": 1}]])
def test_more_than_one_worker_is_refused_in_the_class_form(workers: Any) -> None:
    """BentoML's hook of the first process refuses them; one worker, said or not, passes."""
    def made(**how: Any) -> Any:
        return bentoml.service(**how)(type("LLM", (PagedCoreRunner,), {"model": "demo"}))

    with pytest.raises(InvalidConfig, match=r"^workers: got .*, allowed is 1\."):
        server_on_deployment(made(workers=workers))
    for service in (made(), made(workers=1), create_service("demo")):
        server_on_deployment(service)


async def test_two_hundred_clients_at_defaults_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of default settings queues them; each gets its tokens, and none a 429."""
    built: list[dict[str, Any]] = []
    sizes = {"num_kv_blocks": 1200, "max_num_seqs": 32, "max_num_batched_tokens": 64, "check_invariants": False}

    def build(_: object, **settings: Any) -> AsyncEngine:
        built.append(settings)
        return AsyncEngine(make_engine(SlowBackend(), **sizes, **settings))

    monkeypatch.setattr(AsyncEngine, "from_pretrained", build)
    asgi: Any = create_service("demo", service={"metrics": {"enabled": False}}).to_asgi()
    async with asgi.router.lifespan_context(asgi):
        app = App(asgi, bentoml.get_current_service(), bentoml.get_current_service().engine)
        body = {"prompt": [1], "sampling": {"max_tokens": 1, "ignore_eos": True}}
        calls = await asyncio.gather(*(app.call("/generate", body) for _ in range(200)))
    assert [call.status for call in calls] == [200] * 200
    assert built == [{"max_num_waiting": 1024}]
    monkeypatch.undo()
    assert PagedCoreRunner.settings == {}


def test_a_queue_of_the_operators_own_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default gives way to a setting."""
    monkeypatch.setattr(AsyncEngine, "from_pretrained", lambda _, **settings: settings)
    runner = type("LLM", (PagedCoreRunner,), {"model": "demo", "settings": {"max_num_waiting": 7}})
    assert runner().engine == {"max_num_waiting": 7}


async def test_what_outlasts_the_drain_is_told_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit a stream gets ``EngineClosed`` as its last event, a whole call 503, and the server ends."""
    engine = AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=1200), stream_interval_s=0.0)
    monkeypatch.setattr(AsyncEngine, "from_pretrained", lambda *_, **__: engine)
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        runner = type("LLM", (PagedCoreRunner,), {"drain_s": 0.2})
        asgi: Any = create_service("demo", runner=runner, service={"metrics": {"enabled": False}}).to_asgi()
        async with asgi.router.lifespan_context(asgi):
            app = App(asgi, bentoml.get_current_service(), engine)
            body = {"prompt": [1], "sampling": {"max_tokens": 4000, "ignore_eos": True}}
            stream, whole = app.begin("/stream", body), app.begin("/generate", body)
            await stream.until_text("token_ids")
            signal.raise_signal(signal.SIGTERM)
            await asyncio.gather(stream.task, whole.task)
            while not ended:
                await asyncio.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    last = EventParser().feed(stream.text)[-1]
    assert (last.name, last.data["error"]["type"]) == ("error", "EngineClosed")
    assert (whole.status, json.loads(whole.text)["error"]["type"]) == (503, "EngineClosed")
    assert not engine.is_alive


class Server:
    """What uvicorn's handler is a method of."""

    def __init__(self, limit: int | None) -> None:
        self.config: Any = type("Config", (), {"timeout_graceful_shutdown": limit})()
        self.limits: list[Any] = []

    def handle_exit(self, number: int, frame: object) -> None:
        """Note the limit under which it ends."""
        self.limits.append(self.config.timeout_graceful_shutdown)


@pytest.mark.parametrize(("own", "then"), [(None, CUT_AFTER_S), (90, 90)])
async def test_a_client_that_does_not_read_keeps_no_server(own: int | None, then: int) -> None:
    """uvicorn waits for connections without a limit; it gets one before it is told to end, unless it has its own."""
    server, ended = Server(own), asyncio.Event()
    before = signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        async def drain() -> None:
            ended.set()

        DrainSignal(drain).install()
        signal.raise_signal(signal.SIGTERM)
        await ended.wait()
        while not server.limits:
            await asyncio.sleep(0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.limits == [then]


@pytest.mark.parametrize(("words", "then"), [((), KEEP_IDLE_S), (("--timeout-keep-alive", "5"), 5)])
def test_idle_connections_outlast_those_of_clients(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], then: int
) -> None:
    """A worker's server keeps them longer than BentoML's five seconds, unless its operator gave a limit; outside of a
    worker the server is someone else's."""
    server = Server(None)
    server.config.timeout_keep_alive = 5
    before = signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        keep_idle_connections()
        assert server.config.timeout_keep_alive == 5
        monkeypatch.setattr(checks, "_is_worker", lambda: True)
        monkeypatch.setattr(sys, "argv", ["service.py", *words])
        keep_idle_connections()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.config.timeout_keep_alive == then


NO_MODEL = 'from pagedcore_bentoml import create_service\n\nLLM = create_service({model!r}, num_kv_blocks=64)\n'


@pytest.mark.parametrize("model", ["./no-such-model", "/no/such/model", Path("no-such-model"), None])
def test_a_path_to_nothing_is_refused_before_any_worker(model: Any) -> None:
    """BentoML's hook of the first process names it; a name, an object and a directory pass."""
    with pytest.raises(InvalidConfig, match=r"^model: (there is no directory|got None)"):
        server_on_deployment(create_service(model))
    for other in ("demo", "owner/name", object(), Path(__file__).parent):
        server_on_deployment(create_service(other))


@pytest.mark.slow
def test_a_start_that_fails_in_the_worker_ends_bentoml_serve(tmp_path: Path) -> None:
    """A directory without a model is seen by the worker only: it says so once, no further worker is started, and the
    exit status tells the program that started the service."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "service.py").write_text(NO_MODEL.format(model=str(tmp_path / "empty")), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "bentoml", "serve", "service:LLM", "--port", "0"], cwd=tmp_path,
                          env=environment(), capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr
    assert said.count("the service cannot start and ends: InvalidConfig: ") == 1, said
    assert "Application startup failed" in said
    assert done.returncode == 1, said

"""What the flight recorder of a running server has, over HTTP: for the operator alone, whole, and for ``replay``."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("uvicorn")

import uvicorn

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from adapters.doors import EndlessBackend, LetterTokenizer
from pagedcore import AsyncEngine
from pagedcore.analysis.recorder.recording import read_recording
from pagedcore.analysis.replay.decisions import replay_decisions
from pagedcore.errors import InvalidConfig
from pagedcore_openai import ApiKeys, openai_app
from pagedcore_openai import endpoints as openai_endpoints
from pagedcore_openai.server import ADMIN_VARIABLE, KEYS_VARIABLE, serve
from support.doubles import ToyBackend
from support.engine_builders import make_engine

ONE, ADMIN = "key-of-tenant-one", "key-of-the-operator"
PATH = "/recording"
BODY = {"prompt": "abcdefg", "max_tokens": 4, "temperature": 0}


@asynccontextmanager
async def opened(mode: str = "on", **options: Any) -> AsyncIterator[App]:
    engine = make_engine(EndlessBackend(), tokenizer=LetterTokenizer(), flight_recorder=mode)
    with AsyncEngine(engine, stream_interval_s=0.0) as served:
        asgi: Any = openai_app(served, **options)
        yield App(asgi, asgi, served)  # type: ignore[arg-type]


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


async def test_it_is_the_admin_s_where_it_is_asked_for() -> None:
    """Without the option there is no such path; with keys a tenant's is 403, none 401, and the admin's has the file."""
    async with opened(api_keys=ApiKeys([ONE], ADMIN)) as app:
        assert (await app.call(PATH, headers=with_key(ADMIN))).status == 404
    async with opened(api_keys=ApiKeys([ONE], ADMIN), recordings=True) as app:
        for path in (PATH, "/v1" + PATH):
            statuses = [(await app.call(path, headers=headers)).status
                        for headers in (JSON_TYPE, with_key(ONE), with_key(ADMIN[:-1]), with_key(ADMIN))]
            assert statuses == [401, 403, 401, 200]
    async with opened(recordings=True, hosts={"127.0.0.1"}) as app:
        assert (await app.call(PATH, headers=[*JSON_TYPE, (b"host", b"evil.example")])).status == 403
    async with opened("off", recordings=True) as app:
        exchange = await app.call(PATH)
        assert (exchange.status, "recorder is off" in exchange.text) == (404, True)


@pytest.mark.parametrize("mode", ["on", "tokens"])
async def test_it_is_a_recording_that_replays(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken between two steps of a busy engine; the decisions are taken again; tokens are in it only if kept. No file
    is left, and no prompt is in the response."""
    async with opened(mode, recordings=True) as app:
        (folder := tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        for _ in range(2):
            assert (await app.call("/v1/completions", BODY)).status == 200
        exchange = await app.call(PATH)
        assert exchange.headers["content-type"] == "application/gzip"
        assert exchange.headers["cache-control"] == "no-store"
        assert not list(folder.iterdir())
    (tmp_path / "recording.gz").write_bytes(b"".join(one.get("body", b"") for one in exchange.messages[1:]))
    recording = read_recording(tmp_path / "recording.gz")
    assert recording.has_tokens == (mode == "tokens")
    assert replay_decisions(recording).difference is None
    prompt = [ord(letter) % 26 for letter in BODY["prompt"]]  # type: ignore[attr-defined]
    assert any(row.tolist()[:7] == prompt for _, row in recording.rows) == (mode == "tokens")


async def test_one_is_written_at_a_time_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is compressed, which no step waits for, a second is 429 and completions are served; then it is free."""
    may_end, has_begun, own = threading.Event(), threading.Event(), openai_endpoints._written

    def written(write: Any) -> bytes:
        has_begun.set()
        may_end.wait(60.0)
        return own(write)

    monkeypatch.setattr(openai_endpoints, "_written", written)
    async with opened(recordings=True) as app:
        assert (await app.call("/v1/completions", BODY)).status == 200
        first = asyncio.ensure_future(app.call(PATH))
        await asyncio.to_thread(has_begun.wait, 60.0)
        assert (await app.call(PATH)).status == 429
        assert (await app.call("/v1/completions", BODY)).status == 200
        may_end.set()
        assert (await first).status == 200
        assert (await app.call(PATH)).status == 200


@pytest.mark.parametrize(("options", "environment", "is_open"), [
    ({"recordings": "on"}, {}, True), ({"recordings": "on", "host": "0.0.0.0"}, {}, False),
    ({"recordings": "on", "allow_hosts": ["llm.example"]}, {}, False), ({"recordings": "tokens"}, {}, False),
    ({"recordings": "on"}, {KEYS_VARIABLE: ONE}, False), ({"recordings": "tokens"}, {ADMIN_VARIABLE: ADMIN}, True),
    ({"recordings": "on", "host": "0.0.0.0"}, {KEYS_VARIABLE: ONE, ADMIN_VARIABLE: ADMIN}, True),
    ({"recordings": "yes"}, {}, False), ({}, {ADMIN_VARIABLE: ADMIN}, None),
])
def test_a_server_has_it_for_its_operator_only(
    options: dict[str, Any], environment: dict[str, str], is_open: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the admin key, or a loopback address without keys and tokens; anything else is refused at the start."""
    for name in (KEYS_VARIABLE, ADMIN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: seen.append(server.config))
    if is_open is False:
        with pytest.raises(InvalidConfig, match="record"):
            serve({"demo": ToyBackend()}, port=0, num_kv_blocks=16, **options)
        assert not seen
        return
    serve({"demo": ToyBackend()}, port=0, num_kv_blocks=16, **options)
    app: Any = seen[0].app
    assert any(getattr(route, "path", "") == PATH for route in app.routes) == bool(is_open)

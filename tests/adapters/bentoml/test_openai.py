"""OpenAI's interface mounted on the BentoML service: the official client, the service's tenants, drain and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import bentoml
import httpx
import pytest

pytest.importorskip("openai")

from openai import AsyncOpenAI, BadRequestError, InternalServerError, PermissionDeniedError
from starlette.exceptions import HTTPException

from adapters.bentoml.asgi_caller import App, serving
from pagedcore import AsyncEngine
from pagedcore_bentoml import create_service
from pagedcore_http.salts import combine_salts
from support.async_helpers import SlowBackend
from support.doubles import toy_answer
from support.engine_builders import make_engine
from support.letters import WritesLetters

BODY: dict[str, Any] = {"model": "toy", "prompt": [1, 2], "temperature": 0}
ENDLESS = {"ignore_eos": True}


def of_header(runner: Any, ctx: bentoml.Context | None) -> str:
    """Derive the salt from a header; without one the call is refused."""
    key: str | None = None if ctx is None else ctx.request.headers.get("x-tenant")
    if key is None:
        raise HTTPException(403, "who are you?")
    return key


@asynccontextmanager
async def mounted(**limits: Any) -> AsyncIterator[App]:
    """The service over a slow toy engine, with OpenAI's interface, started and ended as BentoML does it."""
    inner = make_engine(SlowBackend(), num_kv_blocks=1200, tokenizer=WritesLetters())
    with AsyncEngine(inner, stream_interval_s=0.0) as engine:
        async with serving(engine, openai="toy", **limits) as app:
            yield app


def client_of(app: App, **headers: str) -> AsyncOpenAI:
    transport = httpx.ASGITransport(app.asgi)
    return AsyncOpenAI(base_url="http://bento/v1", api_key="none", max_retries=0, default_headers=headers,
                       http_client=httpx.AsyncClient(transport=transport))


async def test_the_official_client_and_the_services_own_endpoints_share_one_engine() -> None:
    """Models, whole and streamed completions and refusals in OpenAI's form, beside ``/generate``."""
    async with mounted() as app, client_of(app) as client:
        assert [model.id async for model in client.models.list()] == ["toy"]
        whole = await client.completions.create(max_tokens=3, extra_body={"return_token_ids": True}, **BODY)
        assert whole.choices[0].model_extra["token_ids"] == toy_answer([1, 2], 3)  # type: ignore[index]
        chunks = [chunk async for chunk in await client.completions.create(max_tokens=3, stream=True, **BODY)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        with pytest.raises(BadRequestError, match="temperature"):
            await client.completions.create(**{**BODY, "temperature": 99})
        own = await app.call("/generate", {"prompt": [1, 2], "sampling": {"max_tokens": 3}})
        assert (own.status, app.engine.stats().num_finished) == (200, 4)
        assert (await app.call("/v1/metrics")).status == 404


async def test_tenants_are_those_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """``salt_of`` sees the call's headers and is combined with the body's salt; its refusal is the call's."""
    async with mounted(salt_of=of_header) as app, client_of(app, **{"x-tenant": "one"}) as client:
        seen: list[Any] = []
        submit = app.engine.submit
        monkeypatch.setattr(app.engine, "submit", lambda *args, **more: seen.append(more) or submit(*args, **more))
        await client.completions.create(max_tokens=1, extra_body={"cache_salt": "mine"}, **BODY)
        assert [one["cache_salt"] for one in seen] == [combine_salts("one", "mine")]
        async with client_of(app) as other:
            with pytest.raises(PermissionDeniedError, match="who are you"):
                await other.completions.create(max_tokens=1, **BODY)


async def test_a_client_that_leaves_and_a_service_that_drains() -> None:
    """A stream whose client leaves frees its blocks; while the service drains calls are refused in OpenAI's form, and
    it waits for the ones in flight."""
    async with mounted() as app, client_of(app) as client:
        left = app.begin("/v1/completions", {**BODY, "stream": True, "max_tokens": 3000, **ENDLESS})
        await left.until_text("data:")
        assert app.runner.open_calls.num_open == 1
        await left.leave()
        while not app.is_idle():
            await asyncio.sleep(0.001)
        stream = app.begin("/v1/completions", {**BODY, "stream": True, "max_tokens": 60, **ENDLESS})
        await stream.until_text("data:")
        draining = asyncio.create_task(app.runner.open_calls.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(InternalServerError, match="drains"):
            await client.completions.create(**BODY)
        assert not draining.done()
        await stream.task
        assert await draining == 0
        assert stream.text.endswith("data: [DONE]\n\n")


def test_the_mount_has_the_models_name(tmp_path: Any) -> None:
    """True names the model, a directory by its last part; text names it otherwise; without it nothing is mounted."""
    (tmp_path / "my-model").mkdir()
    names = []
    for model, openai in (("demo", True), (tmp_path / "my-model", True), (object(), True), ("demo", "other")):
        ((mount, path, _),) = create_service(model, openai=openai).mount_apps
        names.append((mount._name, path))  # type: ignore[union-attr]
    assert names == [("demo", "/v1"), ("my-model", "/v1"), ("pagedcore", "/v1"), ("other", "/v1")]
    assert create_service("demo").mount_apps == []

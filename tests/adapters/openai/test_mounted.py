"""The app as a part of a FastAPI application, as a user's own program has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from openai import AsyncOpenAI, AuthenticationError, NotFoundError

from pagedcore import AsyncEngine
from pagedcore_openai import ApiKeys, openai_app
from support.doubles import toy_answer
from support.engine_builders import make_engine

KEY = "a-key-of-thirty-two-characters!!"


@asynccontextmanager
async def program(path: str, **options: Any) -> AsyncIterator[tuple[Any, AsyncEngine]]:
    """A FastAPI application with a route of its own, whose lifespan closes the engine."""
    engine = AsyncEngine(make_engine())
    door = openai_app(engine, name="toy", **options)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await door.drain()
        await engine.aclose()

    app = FastAPI(lifespan=lifespan)
    app.get("/hello")(lambda: {"said": "hello"})
    app.mount(path, door)
    async with app.router.lifespan_context(app):
        yield app, engine
    assert not engine.is_alive


@pytest.mark.parametrize(("path", "base"), [("/v1", "/v1"), ("/llm", "/llm/v1"), ("/", "/v1")])
async def test_it_is_mounted_anywhere_in_fastapi(path: str, base: str) -> None:
    """Models, whole and streamed completions at the mount's address, with keys; FastAPI's own routes and its schema
    stay; the host's lifespan drains the app and closes the engine."""
    async with program(path, api_keys=ApiKeys([KEY])) as (app, _):
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app")
        client = AsyncOpenAI(base_url=f"http://app{base}", api_key=KEY, http_client=http, max_retries=0)
        async with http, client:
            assert [one.id async for one in client.models.list()] == ["toy"]
            asked: Any = {"model": "toy", "prompt": [1, 2], "temperature": 0, "max_tokens": 3,
                          "extra_body": {"return_token_ids": True}}
            whole = await client.completions.create(**asked)
            assert whole.choices[0].model_extra["token_ids"] == toy_answer([1, 2], 3)  # type: ignore[index]
            chunks = [one async for one in await client.completions.create(stream=True, **asked)]
            tokens = [token for one in chunks for token in one.choices[0].model_extra["token_ids"]]  # type: ignore[index]
            assert tokens == toy_answer([1, 2], 3)
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="wrong").completions.create(**asked)
            with pytest.raises(NotFoundError):
                await client.completions.create(**{**asked, "model": "other"})
            assert (await http.get("/hello")).json() == {"said": "hello"}
            assert list((await http.get("/openapi.json")).json()["paths"]) == ["/hello"]

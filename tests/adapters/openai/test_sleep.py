"""A served model that sleeps: for admins alone, and calls of others are held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from pagedcore import AsyncEngine
from pagedcore_openai import ApiKeys, openai_app

ONE, ADMIN = "key-of-tenant-one", "key-of-the-operator"
ASKED = {"prompt": "What is 2 + 3?", "max_tokens": 4, "temperature": 0}


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


@asynccontextmanager
async def opened(keys: ApiKeys | None) -> AsyncIterator[App]:
    with AsyncEngine.from_pretrained("demo") as engine:
        asgi: Any = openai_app(engine, api_keys=keys)
        yield App(asgi, asgi, engine)  # type: ignore[arg-type]


async def test_admins_let_a_model_sleep_and_callers_wait_for_it() -> None:
    """Nobody else may; what is no level, no mode or no model is refused."""
    async with opened(ApiKeys([ONE], ADMIN)) as app:
        async def ask(path: str, method: str = "POST", key: str = ADMIN) -> tuple[int, Any]:
            exchange = await app.call(path, b"GET" if method == "GET" else b"", headers=with_key(key))
            return exchange.status, json.loads(exchange.text)

        before = json.loads((await app.call("/v1/completions", ASKED, headers=with_key(ONE))).text)
        for path, method in (("/sleep", "POST"), ("/wake_up", "POST"), ("/is_sleeping", "GET")):
            assert (await ask(path, method, ONE))[0] == 403
        for wrong in ("level=3", "mode=keep", "model=other", "levels=1"):
            assert (await ask(f"/sleep?{wrong}"))[0] in (400, 404)
        assert (await ask("/is_sleeping", "GET"))[1]["is_sleeping"] is False
        assert (await ask("/v1/sleep?level=2&mode=abort"))[1]["level"] == 2
        held = asyncio.create_task(app.call("/v1/completions", ASKED, headers=with_key(ONE)))
        assert (await ask("/is_sleeping", "GET"))[1]["is_sleeping"] is True
        assert not held.done()
        assert (await ask("/wake_up"))[1]["is_sleeping"] is False
        assert json.loads((await held).text)["choices"] == before["choices"]
    for keys in (None, ApiKeys([ONE])):
        async with opened(keys) as app:
            assert (await app.call("/sleep", b"", headers=with_key(ONE))).status == 404

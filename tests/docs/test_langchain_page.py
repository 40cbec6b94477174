"""The endpoint of the page on LangChain: tenants share nothing, clients may leave, refusals have statuses."""

from __future__ import annotations

import asyncio
import json
import runpy
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bentoml")
pytest.importorskip("fastapi")
pytest.importorskip("langchain_core")

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from docs.pages import ROOT, blocks
from pagedcore import AsyncEngine
from support.async_helpers import SlowBackend
from support.engine_builders import make_engine
from support.letters import WritesLetters

PATHS = ("/ask", "/agent", "/tell")
BLUE, GREEN = ([*JSON_TYPE, (b"x-api-key", key)] for key in (b"key-of-blue", b"key-of-green"))
QUESTION = {"text": "What is 12 + 7?"}


class Letters(WritesLetters):
    """A token for every letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return them."""
        return [ord(letter) % 26 for letter in text]

    def encode_chat(self, messages: Any) -> list[int]:
        """Return those of all messages."""
        return self.encode("".join(message["content"] for message in messages))


class Endless(SlowBackend):
    """A model that never ends by itself, and takes seconds to the limit of the page."""

    eos_token_ids = frozenset()

    def forward(self, batch):  # type: ignore[no-untyped-def]
        """Take a while."""
        time.sleep(0.03)
        return super().forward(batch)


@pytest.fixture
async def program(tmp_path: Path) -> AsyncIterator[tuple[App, Any]]:
    """The page's program, started, and its count of calls."""
    (text,) = [block for block in blocks(ROOT / "docs" / "langchain.md", "python") if "FastAPI" in block]
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    found = runpy.run_path(str(tmp_path / "program.py"))
    app = found["app"]
    async with app.router.lifespan_context(app):
        yield App(app, None, app.state.engine), found["calls"]  # type: ignore[arg-type]  # its runner is not used


async def cached(app: App, path: str, headers: Any) -> int:
    """Return how many tokens a call found in the cache, as the engine has counted them."""
    before = app.engine.stats().num_cached_tokens
    answer = await app.call(path, {"text": f"What is {1 + PATHS.index(path)} + 7?"}, headers=headers)
    assert answer.status == 200
    assert "stop" in answer.text
    return app.engine.stats().num_cached_tokens - before


async def test_a_tenant_finds_nothing_of_anothers(program: tuple[App, Any]) -> None:
    """What blue has asked twice is cached for blue, and computed for green, as if nobody had asked it."""
    app, _ = program
    for path in PATHS:
        alone = await cached(app, path, BLUE)
        assert await cached(app, path, BLUE) > alone
        assert await cached(app, path, GREEN) == alone


async def test_only_the_key_says_who_calls(program: tuple[App, Any]) -> None:
    """Without a known key nobody is answered, and a salt in the body is refused."""
    app, calls = program
    for path in PATHS:
        assert (await app.call(path, QUESTION)).status == 401
        assert (await app.call(path, {**QUESTION, "cache_salt": "blue"}, headers=GREEN)).status == 422
    assert calls.num_open == 0


async def test_it_refuses_and_drains(program: tuple[App, Any]) -> None:
    """A prompt that is too long is a 400 that says how long it may be; in a drain a call is a 503 with a hint."""
    app, calls = program
    for path in PATHS:
        refused = await app.call(path, {"text": "x" * 6000}, headers=BLUE)
        assert (refused.status, refused.error["type"], refused.error["limit"]) == (
            400, "PromptTooLong", "at most 2047 tokens")
    await calls.drain(0.0)
    for path in PATHS:
        refused = await app.call(path, QUESTION, headers=BLUE)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")


async def test_a_client_that_leaves_ends_its_request(program: tuple[App, Any]) -> None:
    """The request is gone when its client is, and is no longer counted, on a model that would answer for long."""
    app, calls = program
    with AsyncEngine(make_engine(Endless(), num_kv_blocks=400, tokenizer=Letters()), stream_interval_s=0.0) as slow:
        app.asgi.state.engine = app.engine = slow
        for path in ("/ask", "/tell"):
            exchange = app.begin(path, QUESTION, headers=BLUE)
            while not (await asyncio.to_thread(slow.stats)).num_running:
                assert not exchange.task.done(), exchange.text
                await asyncio.sleep(0.001)
            await exchange.leave()
            assert "finish_reason" not in exchange.text
            assert (app.is_idle(), calls.num_open) == (True, 0)


async def test_a_stream_says_how_it_ended(program: tuple[App, Any]) -> None:
    """Its events are the pieces of the answer, and a last one that has all of it with its reason."""
    app, _ = program
    *pieces, (name, done) = [read(block) for block in
                             (await app.call("/tell", QUESTION, headers=BLUE)).text.strip().split("\n\n")]
    assert (name, done["finish_reason"]) == ("done", "stop")
    assert "".join(piece["text"] for _, piece in pieces) == done["text"] == "12 + 7 = 19."


def read(event: str) -> tuple[str, Any]:
    """Return the name and the data of a server-sent event."""
    fields = dict(line.split(": ", 1) for line in event.splitlines())
    return fields.get("event", ""), json.loads(fields["data"])

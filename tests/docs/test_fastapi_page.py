"""The program of the page on FastAPI: its clients may leave, its refusals have statuses, and it drains."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bentoml")
pytest.importorskip("fastapi")

from adapters.bentoml.asgi_caller import App
from docs.pages import ROOT, blocks
from pagedcore import AsyncEngine
from support.async_helpers import SlowBackend
from support.engine_builders import make_engine
from support.letters import WritesLetters


class Letters(WritesLetters):
    """A token for every letter."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return them."""
        return [ord(letter) % 26 for letter in text]


class Endless(SlowBackend):
    """A slow model that never ends by itself."""

    eos_token_ids = frozenset()


@pytest.fixture
async def program(tmp_path: Path) -> AsyncIterator[tuple[App, Any]]:
    """The page's program, started, and its count of calls; its model answers at length."""
    (tmp_path / "program.py").write_text(blocks(ROOT / "docs" / "fastapi.md", "python")[0], encoding="utf-8")
    found = runpy.run_path(str(tmp_path / "program.py"))
    app = found["app"]
    async with app.router.lifespan_context(app):
        yield App(app, None, app.state.engine), found["calls"]  # type: ignore[arg-type]  # its runner is not used


async def test_it_answers_and_refuses(program: tuple[App, Any]) -> None:
    """Whole and streamed; what the engine refuses is a 400 that names the field, and a drain a 503 with a hint."""
    app, calls = program
    question = {"text": "What is 2 + 3?"}
    assert json.loads((await app.call("/ask", question)).text)["text"].strip() == "2 + 3 = 5."
    assert (await app.call("/tell", question)).text.strip() == "2 + 3 = 5."
    for path in ("/ask", "/tell"):
        refused = await app.call(path, {**question, "max_tokens": 10**6})
        assert (refused.status, refused.error["what"]) == (400, "max_tokens")
    await calls.drain(0.0)
    for path in ("/ask", "/tell"):
        refused = await app.call(path, question)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")


async def test_a_client_that_leaves_ends_the_work(program: tuple[App, Any]) -> None:
    """The request is gone when its client is, and is no longer counted, on a model that would answer for long."""
    app, calls = program
    with AsyncEngine(make_engine(Endless(), num_kv_blocks=400, tokenizer=Letters()), stream_interval_s=0.0) as slow:
        app.asgi.state.engine = app.engine = slow
        await leave_all(app, calls)


async def leave_all(app: App, calls: Any) -> None:
    for path in ("/ask", "/tell"):
        exchange = app.begin(path, {"text": "aa", "max_tokens": 1000})
        while not (await asyncio.to_thread(app.engine.stats)).num_running:
            assert not exchange.task.done()
            await asyncio.sleep(0.001)
        await exchange.leave()
        assert len(exchange.text) < 1000
        assert (app.is_idle(), calls.num_open) == (True, 0)

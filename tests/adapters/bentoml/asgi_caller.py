"""Calls a BentoML application in this process, message by message, so that a test decides when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bentoml import get_current_service

from pagedcore.serving.async_engine import AsyncEngine
from pagedcore_bentoml import PagedCoreRunner, create_service

JSON_TYPE = [(b"content-type", b"application/json")]


@dataclass
class Exchange:
    """One call: what came back so far, and a way to leave."""

    task: asyncio.Task[None]
    leaving: asyncio.Event
    arrived: asyncio.Event
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def leave(self) -> None:
        """Close the client's end and wait until the application has noticed."""
        self.leaving.set()
        await self.task

    async def until_text(self, text: str) -> None:
        """Wait until the response holds ``text``."""
        async with asyncio.timeout(60.0):
            while text not in self.text:
                self.arrived.clear()
                await self.arrived.wait()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages[1:]).decode()

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.text)["error"]
        return error


@dataclass
class App:
    """A started application, its runner and its engine."""

    asgi: Any
    runner: PagedCoreRunner
    engine: AsyncEngine

    def begin(self, path: str, body: Any, headers: Any = JSON_TYPE, client: Any = ("127.0.0.1", 1),
              is_whole: bool = True, reads: asyncio.Event | None = None) -> Exchange:
        """Start a call; ``body`` is bytes, or what becomes JSON; more of it never comes unless it ``is_whole``. The
        client reads nothing before ``reads`` is set.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = iter([{"type": "http.request", "body": content, "more_body": not is_whole}])
        leaving, arrived = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            message = next(sent, None)
            if message is None:
                await leaving.wait()
                message = {"type": "http.disconnect"}
            return message

        async def send(message: dict[str, Any]) -> None:
            if reads is not None:
                await reads.wait()
            exchange.messages.append(message)
            arrived.set()

        path, _, query = path.partition("?")
        scope = {"type": "http", "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"},
                 "method": content.decode() if content in (b"GET", b"OPTIONS") else "POST", "scheme": "http",
                 "path": path,
                 "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": list(headers),
                 "client": client, "server": ("127.0.0.1", 80), "state": {}}
        exchange = Exchange(asyncio.ensure_future(self.asgi(scope, receive, send)), leaving, arrived)
        return exchange

    async def call(self, path: str, body: Any = b"GET", **how: Any) -> Exchange:
        """Do a whole call."""
        exchange = self.begin(path, body, **how)
        await exchange.task
        return exchange

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block, by the first look after the step in flight."""
        stats = self.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


@asynccontextmanager
async def serving(engine: AsyncEngine, is_main: bool = True, openai: bool | str = False,
                  base: type[PagedCoreRunner] = PagedCoreRunner, **limits: Any) -> AsyncIterator[App]:
    """Start the application around an engine that the caller owns."""
    runner = type("LLM", (base,), limits)
    # Why: BentoML registers its metrics once per process, and the tests start many applications in one.
    service = create_service(engine, runner=runner, openai=openai,
                             service={"metrics": {"enabled": False}})
    asgi: Any = service.to_asgi(is_main=is_main)
    async with asgi.router.lifespan_context(asgi):
        yield App(asgi, get_current_service(), engine)

"""OpenAI's interface beside the service's own endpoints: one engine, one drain, the salts of one ``salt_of``.

``create_service(..., openai=True)`` mounts it at ``/v1``; a service class does so by itself:

    @bentoml.asgi_app(OpenAIMount("demo"), path="/v1")
    @bentoml.service(workers=1)
    class LLM(PagedCoreRunner): ...
"""

from __future__ import annotations

import asyncio
from typing import Any

import bentoml
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedcore_http.salts import Salt
from pagedcore_openai import openai_app


class OpenAIMount:
    """An ASGI app that speaks OpenAI's interface for the service that this process serves.

    Invariant: the app is made at the first call, around the engine of the service, and drains with the service.
    """

    def __init__(self, name: str) -> None:
        """Take the name that calls give as their ``model``."""
        self._name = name
        self._app: tuple[Any, ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call."""
        runner: Any = bentoml.get_current_service()
        if self._app is None or self._app[0] is not runner:
            # Why: on a thread, because looking at the engine may take a step.
            self._app = runner, await asyncio.to_thread(_app_of, runner, self._name)
        await self._app[1](scope, receive, send)


def _app_of(runner: Any, name: str) -> ASGIApp:
    async def salt_of(request: Request) -> Salt:
        context: Any = bentoml.Context()
        with context.in_request(request):
            salt: Salt = (await runner.caller(context)).derived
            return salt

    def weight_of(request: Request) -> float:
        context: Any = bentoml.Context()
        with context.in_request(request):
            weight: float = runner.weight_of(context)
            return weight

    app = openai_app(
        runner.shared_engine, name=name, salt_of=salt_of, weight_of=weight_of, max_priority=runner.max_priority,
        max_body_bytes=runner.max_body_bytes,
    )
    app.service.open_calls = runner.open_calls
    return app

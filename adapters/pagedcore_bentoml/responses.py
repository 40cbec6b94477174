"""Answers on their way to a client that may leave: the stream of events, and work that ends when its client does.

BentoML looks for a disconnected client only while it writes. Here the connection is watched from the first moment, so
that a request that still waits, computes its prompt or streams nothing is aborted too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from bentoml import IODescriptor
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedcore_bentoml.events import WAITING, ends_stream, frame
from pagedcore_bentoml.refusals import CLIENT_CLOSED_REQUEST, refusal_of

T = TypeVar("T")

PATIENCE_S: Final = 1.0
"""How long a stream's status is held back for an early refusal to have one of its own, in seconds."""
KEEP_ALIVE_S: Final = 15.0
"""How often a stream without a first delta shows that it lives: below the idle limit of common proxies."""


class ClientGone(Exception):
    """The client left before the work was done; the work was cancelled."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, or cancel it as soon as the client is gone.

    Args:
        receive: the request's ASGI channel, its body read.
        work: cancelled and waited for if it is not done when the client leaves.

    Raises:
        ClientGone: the client left first.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Events as they come; an error before the first has a status of its own, a later one is an event.

    Invariant: the response ends with the event "done" or "error", or the client has left.
    """

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._has_begun = False
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        try:
            await run_until_disconnect(receive, self._deliver(scope, receive, send))
        except ClientGone:
            if not self._has_begun:
                # Why: BentoML's time limit waits for a first message, and would keep this call until it comes.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        if self.background is not None:
            await self.background()

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await self._send_all(events, send)
        except Exception as error:  # whatever went wrong, the client is told
            if self._has_ended:
                raise
            refusal = refusal_of(error)
            if not self._has_begun:
                refused = refusal.response()
                refused.headers.update({k: v for k, v in self.headers.items() if k.startswith(("server", "x-bento"))})
                await refused(scope, receive, send)
                return
            await self._send(frame(refusal.body, "error"), send)
        if not self._has_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, events: AsyncGenerator[str, None], send: Send) -> None:
        first = asyncio.ensure_future(_next(events))
        try:
            patience_s = PATIENCE_S
            while not (await asyncio.wait({first}, timeout=patience_s))[0]:
                await self._send(WAITING, send)
                patience_s = KEEP_ALIVE_S
        finally:
            # Why: a generator can only be closed when nobody is inside it any more.
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
        await self._send(first.result(), send)
        async for event in events:
            await self._send(event, send)

    async def _send(self, event: str, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._has_ended = ends_stream(event)
        await send({"type": "http.response.body", "body": event.encode("ascii"), "more_body": not self._has_ended})


async def _next(events: AsyncGenerator[str, None]) -> str:
    async for event in events:
        return event
    return ""


class EventText(IODescriptor):
    """The output of a streaming endpoint: text in the form of server-sent events."""

    media_type = "text/event-stream"

    @classmethod
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        """Say that a client gets text."""
        return {"type": "string"}

    @classmethod
    async def to_http_response(cls, obj: Any, serde: Any) -> EventStream:
        """Send what an endpoint's generator yields, watching the client."""
        return EventStream(obj)

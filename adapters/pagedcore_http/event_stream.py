"""Event streams, and work that is cancelled when its client disconnects.

The connection is watched from the beginning of a call and not only while the response is written, so that a request
that waits or computes its prompt is aborted too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, ClassVar, Final, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedcore_http.events import WAITING, ends_stream, frame
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, Refusal, refusal_of

T = TypeVar("T")

PATIENCE_S: Final = 1.0
"""How long a stream's status is held back for an early refusal to have one of its own, in seconds."""
KEEP_ALIVE_S: Final = 15.0
"""How often a stream without a first delta sends a comment, in seconds: below the idle limit of common proxies."""


class ClientGone(Exception):
    """The client disconnected before the work was done; the work was cancelled."""


class StreamBroken(Exception):
    """A stream failed after its beginning; the connection is cut, so that nobody takes it for a complete one."""


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it when the client disconnects.

    Args:
        receive: the request's ASGI channel, its body read: ``request.receive`` of Starlette.
        work: cancelled and awaited if the client disconnects first.

    Raises:
        ClientGone: the client disconnected first.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
    except BaseException:
        await _stop(working)
        raise
    finally:
        leaving.cancel()
    return working.result()


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel a task that has no reader any more; an error of it is logged if it is unforeseen."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        refusal_of(error)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events; an error before the first becomes a response with a status, a later one an event.

    Invariant: the response ends with the event "done" or "error", or the client has disconnected.
    """

    waiting: ClassVar[str | None] = WAITING
    """What keeps the connection open before the first event; ``None``: nothing."""

    def __init__(self, events: AsyncGenerator[str, None], media_type: str = "text/event-stream") -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type=media_type)
        # Why: the others are the framework's, added later, and belong to a refusal as well.
        self._own_headers = frozenset(self.headers)
        self._events = events
        self._has_begun = False
        self._has_ended = False

    def ends(self, text: str) -> bool:
        """Whether ``text`` has the last event; without one the body ends with the generator."""
        return ends_stream(text)

    def encode(self, event: str) -> bytes:
        """Return the bytes of an event."""
        return event.encode("ascii")

    def refusal_of(self, error: Exception) -> Refusal:
        """Return what is sent for an error."""
        return refusal_of(error)

    def error_event(self, refusal: Refusal) -> str:
        """Return the event that ends a stream which has begun."""
        return frame(refusal.body, "error")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects."""
        try:
            await run_until_disconnect(receive, self._deliver(scope, receive, send))
        except ClientGone:
            if not self._has_begun:
                # Why: time limits of servers (e.g. BentoML's) wait for a first message and keep the call until then.
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        if self.background is not None:
            await self.background()

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await self._send_all(events, send)
        except Exception as error:  # every error becomes a response or an event
            if self._has_ended:
                raise
            refusal = self.refusal_of(error)
            if not self._has_begun:
                refused = refusal.response()
                refused.headers.update({k: v for k, v in self.headers.items() if k not in self._own_headers})
                await refused(scope, receive, send)
                return
            await self._send(self.error_event(refusal), send)
        if not self._has_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, events: AsyncGenerator[str, None], send: Send) -> None:
        first = asyncio.ensure_future(_next(events))
        try:
            patience_s = PATIENCE_S
            while self.waiting and not (await asyncio.wait({first}, timeout=patience_s))[0]:
                await self._send(self.waiting, send)
                patience_s = KEEP_ALIVE_S
            await asyncio.wait({first})
        except BaseException:
            # Why: a generator cannot be closed while it runs.
            await _stop(first)
            raise
        await self._send(first.result(), send)
        async for event in events:
            await self._send(event, send)

    async def _send(self, event: str, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._has_ended = self.ends(event)
        await send({"type": "http.response.body", "body": self.encode(event), "more_body": not self._has_ended})


class TextStream(EventStream):
    """Sends text or bytes as they are made; an error before the first piece becomes a response with a status, a later
    one cuts the connection.

    Invariant: a response that ends was complete, or the client has disconnected.
    """

    waiting = None

    def __init__(self, pieces: AsyncGenerator[Any, None], media_type: str = "text/plain") -> None:
        super().__init__(pieces, media_type)

    def ends(self, text: Any) -> bool:
        """Whether ``text`` is the last piece; nothing tells before the generator ends."""
        return False

    def encode(self, event: Any) -> bytes:
        """Return the bytes of a piece."""
        return bytes(event) if not isinstance(event, str) else event.encode("utf-8", "replace")

    def error_event(self, refusal: Refusal) -> str:
        """Cut the connection."""
        raise StreamBroken(f"a stream failed after its beginning: {refusal.body['error']['type']}")


async def _next(events: AsyncGenerator[str, None]) -> str:
    async for event in events:
        return event
    return ""

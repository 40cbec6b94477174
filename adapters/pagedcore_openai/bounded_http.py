"""One connection of ``pagedcore serve``: bounds of bytes and time before a request's body, which uvicorn has not.

Everything of uvicorn that is overridden or used here is named in ``USED_OF_UVICORN`` or public; a test compares it with
the uvicorn that is installed. Which connections there are is kept in ``connections.py``.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import sys
import termios
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from pagedcore_http.refusals import RETRY_AFTER_S, RefusedAtTheDoor
from pagedcore_openai.connections import Connections, network_of
from pagedcore_openai.errors import openai_refusal

MAX_HEADER_BYTES: Final = 2**16
"""Bytes of a request line and its headers; as many of a body's other bytes, such as trailers."""
MAX_HEADERS: Final = 128
"""Headers of a request. Each takes a hundred bytes of memory besides its own."""
MAX_PIPELINED: Final = 8
"""Requests that a client may send on a connection before it has the answer to an earlier one."""
_CHUNK_BYTES: Final = 16
"""Bytes besides its content that a chunk of a body may have at no charge: its length and the ends of lines."""
_PROGRESS_BYTES: Final = 2**15
"""What a client has to take in ``Times.reading_s`` of a response of which more than 64 KiB wait for it."""
USED_OF_UVICORN: Final = (
    "cycle", "flow", "headers", "loop", "parser", "pipeline", "server_state", "timeout_keep_alive",
)
"""What has no documentation there."""

Refused = tuple[HTTPStatus, str, object, str]
"""What ``RefusedAtTheDoor`` is made of."""
NOT_HTTP: Final[Refused] = HTTPStatus.BAD_REQUEST, "request", None, "HTTP/1.1"
TOO_LONG: Final[Refused] = (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers", MAX_HEADER_BYTES + 1,
                            f"at most {MAX_HEADER_BYTES} bytes")
TOO_MANY: Final[Refused] = (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers", MAX_HEADERS + 1,
                            f"at most {MAX_HEADERS}")


@dataclass(frozen=True)
class Times:
    """How long a connection may take, in seconds."""

    headers_s: float = 10.0
    """From accept, or from a later request's first byte, to the end of the headers."""
    reading_s: float = 60.0
    """For the client to take some of a response that waits for it."""
    refused_s: float = 2.0
    """For the client to read a refusal while what it sends is thrown away."""


class ParserStopped(Exception):
    """Raised within the parser, which then reads no further."""


class BoundedHttp(HttpToolsProtocol):
    """A connection that is refused before its parser has gathered more than the bounds.

    Invariant: it waits, in ``connections``, exactly while it is open and no call of it is in flight.
    Invariant: the time that it waits for headers is not prolonged by what it sends.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any],
                 connections: Connections, times: Times) -> None:
        super().__init__(config, server_state, app_state)
        self.network = b""
        self._connections = connections
        self._times = times
        self._num_bytes = 0
        """Bytes that the parser was given since the last ones with a meaning of their own."""
        self._is_in_headers = False
        self._is_idle = False
        self._is_refused = False
        self._refusal = NOT_HTTP
        """Why the parser stops, if it does."""
        self._num_unread = 0
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or refuse because there is no room."""
        super().connection_made(transport)
        self.network = network_of(self.client[0]) if self.client else b""
        if self._connections.admit(self):
            self._wait(self._times.headers_s)
        else:
            limit = self._connections.limit
            self._refuse((HTTPStatus.SERVICE_UNAVAILABLE, "connections", limit + 1, f"at most {limit}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.leave(self)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, as far as it is within the bounds."""
        if self._is_idle:
            self._is_idle = False
            self._wait(self._times.headers_s)
        start = 0
        while start < len(data) and not (self._is_refused or self.transport.is_closing()):
            # Safety: counted before the parser has it, because the time that it takes grows with the square.
            room = MAX_HEADER_BYTES - self._num_bytes
            if room <= 0:
                self._refuse(TOO_LONG)
                return
            piece = data[start : start + room]
            start += len(piece)
            self._num_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                # Why nothing: a client that offers another protocol has its answer in this one.
                pass
            except httptools.HttpParserError:
                # Why not uvicorn's way: a stranger must not be able to fill the log.
                self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_in_headers = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self._is_in_headers:
            # Safety: a trailer comes after the headers were looked at, and must not become one of them.
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = TOO_MANY
            raise ParserStopped
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a call."""
        if len(self.pipeline) >= MAX_PIPELINED:
            # Why no refusal of this: there is no place for one before the answers to the others.
            raise ParserStopped
        super().on_headers_complete()
        self._is_in_headers = False
        self._num_bytes = 0
        self._connections.stop_waiting(self)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._num_bytes = max(0, self._num_bytes - len(body) - _CHUNK_BYTES)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take the end of a request, which may come after its response."""
        super().on_message_complete()
        self._num_bytes = 0
        self._settle()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        self._stop_timer()
        self._settle()

    def timeout_keep_alive_handler(self) -> None:
        """Leave the end of an idle connection to ``expire``: uvicorn's timer does not see what arrives."""

    def has_unsent(self) -> bool:
        """Whether a part of a response has not been sent."""
        return self.transport.get_write_buffer_size() > 0

    def drop(self) -> None:
        """Close at once, without what has not been sent."""
        self._connections.leave(self)
        self.transport.abort()

    def expire(self) -> None:
        """Close, because the time is over; say why to a client that has begun a request."""
        if self._num_bytes and not self._is_refused and not self.transport.is_closing():
            limit = f"all of them within {self._times.headers_s:g} seconds"
            self._refuse((HTTPStatus.REQUEST_TIMEOUT, "headers", None, limit))
        else:
            self.drop()

    @property
    def _is_in_call(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._connections.wait(self, self.loop.time() + seconds)

    def _settle(self) -> None:
        """Wait for the next request if there is nothing to do for an earlier one."""
        if self._is_refused or self.flow.write_paused:
            return
        if self.transport.is_closing():
            # Why before calls: those that were to come after a response which closes are never begun.
            self._wait(self._times.reading_s)
        elif self._num_bytes and not self._is_in_call:
            self._wait(self._times.headers_s)
        elif not self._is_in_call:
            self._is_idle = True
            self._wait(self.timeout_keep_alive)

    def _refuse(self, refusal: Refused) -> None:
        """Send a refusal and close; between the parts of a response there is no place for one."""
        if self._is_in_call:
            self.drop()
            return
        start, rest = _response(*refusal)
        usual = [b"%s: %s\r\n" % header for header in self.server_state.default_headers]
        self.transport.write(b"".join([start, *usual, rest]))
        self._is_refused, self._is_idle = True, False
        self._wait(self._times.refused_s)
        try:
            # Why not closed: the system would reset the connection because of unread bytes, and the refusal with it.
            self.transport.write_eof()
        except OSError:
            self.drop()

    def _watch_reader(self) -> None:
        self._num_unread = self._count_unread()
        self._reading = self.loop.call_later(self._times.reading_s, self._require_progress)

    def _require_progress(self) -> None:
        # Why bytes, and not any progress: a client could take a few of them for hours.
        if self._num_unread - self._count_unread() < _PROGRESS_BYTES:
            self.drop()
        else:
            self._watch_reader()

    def _count_unread(self) -> int:
        # Why the system's too: megabytes may lie there, and it takes no more before the client has read a third of it.
        try:
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            # Why: it has been closed, and this has not been told yet.
            return 0
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _stop_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


@cache
def _response(*refusal: Any) -> tuple[bytes, bytes]:
    """Return the first line of a refusal, and what comes after the headers that every response has."""
    # Why kept: a stranger causes as many as he likes, and there are few different ones.
    told = openai_refusal(RefusedAtTheDoor(*refusal))
    body = json.dumps(told.body).encode()
    headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
    if told.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers += b"retry-after: %d\r\n" % RETRY_AFTER_S
    return STATUS_LINE[told.status], headers + b"\r\n" + body

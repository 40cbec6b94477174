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
from http import HTTPStatus
from typing import Any, Final

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from pagedcore_http.refusals import RETRY_AFTER_S, RefusedAtTheDoor
from pagedcore_openai.connections import Connections, network_of
from pagedcore_openai.errors import openai_refusal

MAX_HEADER_BYTES: Final = 2**16
"""Bytes of a request line and its headers; as many of a body's other bytes, such as trailers."""
MAX_HEADERS: Final = 256
"""Headers of a request. Each takes a hundred bytes of memory besides its own."""
MAX_PIPELINED: Final = 16
"""Requests that a client may send on a connection before it has the answer to an earlier one."""
_CHUNK_BYTES: Final = 16
"""Bytes besides its content that a chunk of a body may have at no charge: its length and the ends of lines."""
_PROGRESS_BYTES: Final = 2**15
"""What a client has to take in ``Times.reading_s`` of a response of which more than 64 KiB wait for it."""
USED_OF_UVICORN: Final = ("_unsupported_upgrade_warning", "cycle", "flow", "headers", "pipeline", "server_state")
"""What has no documentation there."""


@dataclass(frozen=True)
class Times:
    """How long a connection may take, in seconds."""

    headers_s: float = 10.0
    """From accept, or from a later request's first byte, to the end of the headers."""
    reading_s: float = 60.0
    """For the client to take some of a response that waits for it."""
    refused_s: float = 2.0
    """For the client to read a refusal while what it sends is thrown away."""


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
        self._refusal: RefusedAtTheDoor | None = None
        """Why the parser was stopped, if it was by this class."""
        self._num_unread = 0
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or refuse because there is no room."""
        super().connection_made(transport)
        self.network = network_of(self.client[0]) if self.client else b""
        if self._connections.admit(self):
            self._wait(self._times.headers_s)
        else:
            self._refuse(RefusedAtTheDoor(HTTPStatus.SERVICE_UNAVAILABLE, "connections", self._connections.limit + 1,
                                          f"at most {self._connections.limit}"))

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
        while data and not (self._is_refused or self.transport.is_closing()):
            # Safety: counted before the parser has it, because the time that it takes grows with the square.
            room = MAX_HEADER_BYTES - self._num_bytes
            if room <= 0:
                self._refuse(_too_large("headers", MAX_HEADER_BYTES + 1, f"at most {MAX_HEADER_BYTES} bytes"))
                return
            piece, data = data[:room], data[room:]
            self._num_bytes += len(piece)
            super().data_received(piece)

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
            self._stop_parser(_too_large("headers", MAX_HEADERS + 1, f"at most {MAX_HEADERS}"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a call."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "requests without an answer", MAX_PIPELINED + 1,
                                               f"at most {MAX_PIPELINED}"))
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

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser has not taken."""
        self._refuse(self._refusal or RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "request", None, "HTTP/1.1"))

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
            self._refuse(RefusedAtTheDoor(HTTPStatus.REQUEST_TIMEOUT, "headers", None,
                                          f"all of them within {self._times.headers_s:g} seconds"))
        else:
            self.drop()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of a client that offers another protocol: it has its answer in this one."""

    @property
    def _is_in_call(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._connections.wait(self, self.loop.time() + seconds)

    def _settle(self) -> None:
        """Wait for the next request if there is nothing to do for an earlier one."""
        if self._is_refused or self._is_in_call or self.flow.write_paused:
            return
        if self.transport.is_closing():
            self._wait(self._times.reading_s)
        elif self._num_bytes:
            self._wait(self._times.headers_s)
        else:
            self._is_idle = True
            self._wait(self.timeout_keep_alive)

    def _stop_parser(self, refusal: RefusedAtTheDoor) -> None:
        self._refusal = refusal
        raise refusal

    def _refuse(self, error: RefusedAtTheDoor) -> None:
        """Send a refusal and close; between the parts of a response there is no place for one."""
        if self._is_in_call:
            self.drop()
            return
        refusal = openai_refusal(error)
        body = json.dumps(refusal.body).encode()
        headers = [*self.server_state.default_headers, (b"content-type", b"application/json"),
                   (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[refusal.status], *lines, b"\r\n", body]))
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
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _stop_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _too_large(what: str, given: int, limit: str) -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what, given, limit)

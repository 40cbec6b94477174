"""A ``BoundedServer`` on a loopback port, and raw connections to it."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from pagedcore_openai.bounded_http import Times
from pagedcore_openai.bounded_server import BoundedServer
from support.async_helpers import wait_until

WHOLE_BYTES = 2**24
PROGRESS_BYTES = 2**15
"""As documented, of a response that waits for its reader."""
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def small_app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body at "/body" and the headers at "/headers", else without reading a body; "/big"
    sends until the client goes, "/whole" 16 MiB in one piece, and "/last" closes."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    size = 0
    if scope["path"] in ("/body", "/headers"):
        while (message := await receive()).get("more_body", False):
            size += len(message["body"])
        size += len(message.get("body", b""))
    headers = [(b"connection", b"close")] if scope["path"] == "/last" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/big":
        leaving = asyncio.ensure_future(_gone(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
            await asyncio.sleep(0)
        return
    if scope["path"] == "/whole":
        await send({"type": "http.response.body", "body": b"x" * WHOLE_BYTES, "more_body": False})
        return
    text = str(scope["headers"] if scope["path"] == "/headers" else size).encode()
    await send({"type": "http.response.body", "body": text, "more_body": False})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Bounded:
    """The server, and how to reach it."""

    def __init__(self, server: BoundedServer, address: tuple[str, int]) -> None:
        self.server = server
        self.address = address
        self.num_admitted = 0
        self._admit = server.connections.admit
        server.connections.admit = self._count  # type: ignore[method-assign]

    def _count(self, connection: Any) -> bool:
        self.num_admitted += 1
        return self._admit(connection)

    @property
    def num_open(self) -> int:
        """How many connections it has."""
        return self.server.connections.num_open

    def end_times(self) -> int:
        """End the time of idle connections, and that to read of those which wait for a client that has read since it
        began; return how many those are.
        """
        connections: list[Any] = list(self.server.connections._open)
        read = [one for one in connections
                if one.flow.write_paused and one._num_unread - one._count_unread() >= PROGRESS_BYTES]
        for one in read:
            has_ended = threading.Event()
            for act in (lambda: self.server.connections.expire(math.inf), one._require_progress, has_ended.set):
                one.loop.call_soon_threadsafe(act)
            assert has_ended.wait(60)
        return len(read)

    def connect(self, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """Open a connection and send something."""
        connection = socket.create_connection(self.address, timeout=10, source_address=(source, 0))
        connection.sendall(data)
        return connection

    def ask(self, data: bytes) -> bytes:
        """Send something and return everything that comes until the server closes."""
        with self.connect() as connection:
            with suppress(OSError):
                connection.sendall(data)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Return everything that comes until the server closes."""
    found = bytearray()
    with suppress(ConnectionResetError):
        while piece := connection.recv(2**16):
            found += piece
    return bytes(found)


def read_one(connection: socket.socket) -> bytes:
    """Return one response, in however many pieces it comes, or what came of it before the server closed."""
    found = b""
    while not _is_whole(found) and (piece := connection.recv(2**16)):
        found += piece
    return found


def _is_whole(response: bytes) -> bool:
    head, end, body = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return bool(end) and len(body) >= int(length[1] if length else 0)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection that it sent nothing on."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def bounded(max_connections: int = 64, times: Times = Times(), app: Any = small_app,  # noqa: B008  # frozen
            **settings: Any) -> Iterator[Bounded]:
    """Serve until the block is left."""
    config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, ws="none", lifespan="on",
                            **{"timeout_graceful_shutdown": 1, "timeout_keep_alive": 65, **settings})
    is_up = threading.Event()
    server = BoundedServer(config, is_up.set, max_connections, times)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            assert is_up.wait(30)
            yield Bounded(server, listener.getsockname())
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def wait_until_open(served: Bounded, num_open: int) -> None:
    """Wait until the server has so many connections."""
    wait_until(lambda: served.num_open == num_open)

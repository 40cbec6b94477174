"""Attacks on what a server does before a body, each in a process of its own.

    python tests/adapters/openai/attackers.py NAME PORT SECONDS

They are as fast as one process can be; a lower priority leaves the processors to the server, as another machine would.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

NUM_IDLE = 320
GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
PIECE = b"y" * 2**18


def endless_header() -> Iterator[bytes]:
    """100 MB of one header."""
    yield GET + b"X: "
    yield from [PIECE] * 400


def endless_address() -> Iterator[bytes]:
    """100 MB of an address."""
    yield b"GET /"
    yield from [PIECE] * 400


def many_headers() -> Iterator[bytes]:
    """More headers than any program sends, and an end."""
    yield GET + b"a:b\r\n" * 12_000 + b"\r\n"


def largest_headers() -> Iterator[bytes]:
    """As many bytes in as many headers as are allowed, again and again on one connection."""
    while True:
        yield GET + (b"n" * 250 + b":" + b"v" * 250 + b"\r\n") * 127 + b"\r\n"


def pipelined() -> Iterator[bytes]:
    """Thousands of requests in one piece."""
    yield (GET + b"\r\n") * 20_000


def extensions() -> Iterator[bytes]:
    """A body that is mostly not content."""
    yield POST + b"Transfer-Encoding: chunked\r\n\r\n1;"
    yield from [PIECE] * 400


def trailers() -> Iterator[bytes]:
    """A body that is followed by headers."""
    yield POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    yield from [b"a: b\r\n" * 10_000] * 400


def nothing() -> Iterator[bytes]:
    """A connection that is closed at once."""
    yield b""


SENT = {one.__name__: one for one in (endless_header, endless_address, many_headers, largest_headers, pipelined,
                                      extensions, trailers, nothing)}
HELD = {"idle": (b"", 10**9), "half_headers": (GET + b"X: ", 10**9), "kept_alive": (GET + b"\r\n", 100)}
"""What connections send that are then kept open, a byte a second, as many as ``NUM_IDLE``; closed ones are replaced, so
many in a second: of those that send a whole request few, because answers cost what they cost."""


def send(port: int, pieces: Callable[[], Iterator[bytes]], until_s: float) -> None:
    """Open one connection after another, each until the server closes it."""
    while time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            for piece in pieces():
                connection.sendall(piece)
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    while connection.recv(2**16):
                        pass
                connection.settimeout(5)
                if time.monotonic() > until_s:
                    return
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):
                pass


def hold(port: int, start: bytes, most_per_s: int, until_s: float) -> None:
    """Keep connections open."""
    held: list[socket.socket] = []
    beat_s, num_new = time.monotonic(), 0
    while time.monotonic() < until_s:
        while len(held) < NUM_IDLE and num_new < most_per_s:
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                held[-1].sendall(start)
                held[-1].setblocking(False)
                num_new += 1
            except OSError:
                break
        if is_beat := time.monotonic() - beat_s > 1:
            beat_s, num_new = time.monotonic(), 0
        held = [one for one in held if is_alive(one, b"y" if is_beat and start else b"")]
        time.sleep(0.001)


def is_alive(connection: socket.socket, more: bytes) -> bool:
    """Send something, read what has come, and return whether the server keeps the connection."""
    try:
        connection.sendall(more)
        if connection.recv(2**16):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


if __name__ == "__main__":
    os.nice(10)
    name, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    end_s = time.monotonic() + seconds
    if name in HELD:
        hold(port, *HELD[name], end_s)
    else:
        send(port, SENT[name], end_s)

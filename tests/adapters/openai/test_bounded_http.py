"""What a connection of ``pagedcore serve`` may send before a body, and for how long, over real sockets."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from adapters.openai.bounded import (
    GET,
    WHOLE_BYTES,
    Bounded,
    bounded,
    is_closed,
    read_all,
    read_one,
    small_app,
    wait_until_open,
)
from pagedcore_openai.bounded_http import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    USED_OF_UVICORN,
    BoundedHttp,
    Times,
)
from pagedcore_openai.connections import Connections
from support.async_helpers import wait_until

QUICK = Times(headers_s=0.4, reading_s=0.5, refused_s=0.5)
POST = b"POST /body HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Bounded]:
    """A server with the limits of ``pagedcore serve``."""
    with bounded() as server:
        yield server


@pytest.fixture(scope="module")
def quick() -> Iterator[Bounded]:
    """A server that waits for half a second only, but between requests."""
    with bounded(times=QUICK) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A stranger cannot fill the log."""
    yield
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


def padded(start: bytes, num_bytes: int) -> bytes:
    """The start of a request, with a header that fills it up to a length."""
    return start + b"X: " + b"y" * (num_bytes - len(start) - 7) + b"\r\n\r\n"


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1]) if response else 0


def error_of(response: bytes) -> str:
    message: str = json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]
    return message


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/v1/chat/completions", "/nothing"])
def test_headers_are_bounded_for_every_method_and_path(served: Bounded, method: str, path: str) -> None:
    """64 KiB are taken, and one byte more is 431 with a body that says so, after which the connection is closed."""
    start = f"{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n".encode()
    assert status_of(served.ask(padded(start, MAX_HEADER_BYTES))) == 200
    refused = served.ask(padded(start, MAX_HEADER_BYTES + 1))
    assert status_of(refused) == 431
    assert b"connection: close\r\n" in refused
    assert error_of(refused) == "headers: got 65537, allowed is at most 65536 bytes."


@pytest.mark.parametrize("start", [
    b"GET /" + b"a" * MAX_HEADER_BYTES, b"GET / HTTP/1.1\r\n" + b"n" * MAX_HEADER_BYTES, b"\r\n" * MAX_HEADER_BYTES,
    b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000_000, b"GET / HTTP/1.1\r\nX: " + b"y\r\n " * MAX_HEADER_BYTES,
])
def test_bytes_are_counted_whatever_they_are_for(served: Bounded, start: bytes) -> None:
    """A long address, a long name, empty lines before a request, and 10 MB of a header that has no end."""
    assert status_of(served.ask(start + b"z")) in (400, 431)


def test_bytes_are_counted_over_pieces_and_again_for_every_request(served: Bounded) -> None:
    """Cut anywhere, and for the second request of a connection as for the first."""
    whole = padded(GET, MAX_HEADER_BYTES)
    with served.connect() as connection:
        for request in (whole, whole, padded(GET, MAX_HEADER_BYTES + 1)):
            for at in range(0, len(request), 10_000):
                connection.sendall(request[at : at + 10_000])
            response = read_one(connection)
            assert status_of(response) == (200 if request is whole else 431)
        assert connection.recv(1) == b""


def test_the_parser_is_given_no_more_than_the_bound(served: Bounded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a header of 20 MB it sees 64 KiB: the time that it takes for one grows with the square of its length."""
    seen: list[int] = []

    class Parser(httptools.HttpRequestParser):
        def feed_data(self, data: bytes) -> None:
            seen.append(len(data))
            super().feed_data(data)

    monkeypatch.setattr(httptools, "HttpRequestParser", Parser)
    served.ask(GET + b"X: " + b"y" * 20_000_000)
    assert sum(seen) == MAX_HEADER_BYTES


def test_headers_are_counted(served: Bounded) -> None:
    """128 are taken; one more is 431, and the parser reads none of the others."""
    for num, status in ((MAX_HEADERS, 200), (MAX_HEADERS + 1, 431), (10_000, 431)):
        request = b"GET / HTTP/1.1\r\nConnection: close\r\n" + b"a:b\r\n" * (num - 1) + b"\r\n"
        response = served.ask(request)
        assert status_of(response) == status
    assert error_of(response) == "headers: got 129, allowed is at most 128."


def test_the_time_for_headers_runs_from_accept_on(quick: Bounded) -> None:
    """A client that has begun is told 408, one that has said nothing is left without a word, and sending a byte now and
    then prolongs nothing.
    """
    began_s = time.monotonic()
    silent, half, slow = quick.connect(), quick.connect(GET + b"X: y"), quick.connect(GET + b"X: y")
    require_closed_while_sending(slow, b"y")
    assert time.monotonic() - began_s > QUICK.headers_s * 0.9
    assert read_all(silent) == b""
    told = read_all(half)
    assert status_of(told) == 408
    assert error_of(told) == "headers: got None, allowed is all of them within 0.4 seconds."
    for one in (silent, half, slow):
        one.close()
    wait_until_open(quick, 0)


def require_closed_while_sending(connection: socket.socket, more: bytes) -> None:
    """Send something now and then until the server closes a connection."""
    end_s = time.monotonic() + 30
    while not is_closed(connection):
        assert time.monotonic() < end_s, "what was sent has prolonged the time"
        connection.settimeout(60)
        try:
            connection.sendall(more)
        except OSError:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("more", [b"\r", b"G", b"GET / HTTP/1.1\r\nX: y"])
def test_later_requests_have_the_same_time(quick: Bounded, more: bytes) -> None:
    """From the first byte after a response, whatever it is."""
    with quick.connect(GET + b"\r\n") as connection:
        assert status_of(read_one(connection)) == 200
        time.sleep(QUICK.headers_s * 1.5)
        began_s = time.monotonic()
        connection.sendall(more)
        assert status_of(read_all(connection)) == 408
        assert time.monotonic() - began_s > QUICK.headers_s * 0.9


def test_idle_connections_are_closed() -> None:
    """A connection between two requests is closed after the time that uvicorn is given for it, without a word."""
    with bounded(times=QUICK, timeout_keep_alive=1) as served:
        began_s = time.monotonic()
        with served.connect(GET + b"\r\n") as connection:
            assert status_of(read_one(connection)) == 200
            assert read_all(connection) == b""
            assert time.monotonic() - began_s > 0.9
            wait_until_open(served, 0)


def test_a_body_that_nobody_reads_has_no_more_time(quick: Bounded) -> None:
    """A call that is answered before its body: what is left of the body has the time of headers to arrive; then the
    connection is of use again.
    """
    start = b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
    with quick.connect(start) as late, quick.connect(start) as whole:
        for one in (late, whole):
            assert status_of(read_one(one)) == 200
        whole.sendall(b"x" * 1000)
        time.sleep(QUICK.headers_s * 2)
        whole.sendall(GET + b"\r\n")
        assert status_of(read_one(whole)) == 200
        began_s = time.monotonic()
        require_closed_while_sending(late, b"x")
        assert time.monotonic() - began_s > QUICK.headers_s * 0.9


def chunks(num: int, extension: bytes = b"") -> bytes:
    return (b"1" + extension + b"\r\nx\r\n") * num


@pytest.mark.parametrize("rest", [
    b"1;" + b"e" * 2 * MAX_HEADER_BYTES, chunks(100, b";" + b"e" * 2000), b"0\r\nX: " + b"y" * 2 * MAX_HEADER_BYTES,
    b"0\r\n" + b"a: b\r\n" * 2 * MAX_HEADER_BYTES, b"0" * 2 * MAX_HEADER_BYTES,
])
def test_what_a_body_has_besides_its_content_is_bounded(served: Bounded, rest: bytes) -> None:
    """Extensions of chunks, one or many, trailers, and digits of a length: the connection is closed."""
    assert status_of(served.ask(CHUNKED + rest)) in (0, 400)


def test_chunks_of_one_byte_are_no_burden(served: Bounded) -> None:
    """60,000 of them are a body like any other."""
    with served.connect(CHUNKED + chunks(60_000) + b"0\r\n\r\n") as connection:
        assert read_one(connection).endswith(b"5\r\n60000\r\n0\r\n\r\n")


def test_the_bytes_of_a_body_are_not_those_of_the_next_headers(served: Bounded) -> None:
    """After long trailers the next request has the whole bound, and so has the one after it."""
    with served.connect() as connection:
        for _ in range(2):
            connection.sendall(CHUNKED)
            time.sleep(0.05)
            connection.sendall(b"1\r\nx\r\n0\r\nX: " + b"y" * 40_000 + b"\r\n\r\n")
            assert status_of(read_one(connection)) == 200
            connection.sendall(padded(GET, MAX_HEADER_BYTES))
            assert status_of(read_one(connection)) == 200


def test_trailers_are_no_headers(served: Bounded) -> None:
    """What comes after a body was not looked at before it."""
    request = CHUNKED.replace(b"/body", b"/headers") + b"1\r\nx\r\n0\r\nAuthorization: late\r\n\r\n"
    with served.connect(request) as connection:
        response = read_one(connection)
    assert b"host" in response
    assert b"late" not in response


def test_requests_that_do_not_wait_for_answers_are_bounded(served: Bounded) -> None:
    """Nine in one piece are answered, in order; with ten the connection is closed, however many there are."""
    with served.connect((GET + b"\r\n") * (MAX_PIPELINED + 1)) as connection:
        found = b""
        while found.count(b"HTTP/1.1 200") < MAX_PIPELINED + 1 or not found.endswith(b"0\r\n\r\n"):
            found += connection.recv(2**16)
    for num in (MAX_PIPELINED + 2, 20_000):
        assert served.ask((GET + b"\r\n") * num) == b""


def test_a_refusal_never_ends_up_within_a_response(served: Bounded) -> None:
    """What cannot be parsed, or is too long, after a request whose response has begun: the connection is closed."""
    for rest in (b"\x00nonsense\r\n\r\n", padded(GET, 3 * MAX_HEADER_BYTES)):
        with served.connect(b"GET /big HTTP/1.1\r\n\r\n") as connection:
            connection.recv(100)
            connection.sendall(rest)
            assert b"HTTP/1.1" not in read_all(connection)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"nonsense"])
def test_offers_of_other_protocols_are_not_taken(served: Bounded, protocol: bytes) -> None:
    """The call is answered in this one, so is the next, and the connection keeps its bounds."""
    offer = GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\nSec-WebSocket-Version: 13\r\n"
    with served.connect() as connection:
        for request in (offer + b"\r\n", POST + b"Upgrade: h2c\r\nContent-Length: 3\r\n\r\nabc", GET + b"\r\n"):
            connection.sendall(request)
            assert status_of(read_one(connection)) == 200
        connection.sendall(padded(GET, MAX_HEADER_BYTES + 1))
        assert status_of(read_one(connection)) == 431


def test_a_client_may_ask_before_it_sends_its_body(served: Bounded) -> None:
    """``Expect: 100-continue`` is answered as soon as the body is wanted."""
    with served.connect(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n") as connection:
        assert status_of(read_one(connection)) == 100
        connection.sendall(b"abc")
        assert status_of(read_one(connection)) == 200


@pytest.mark.parametrize(("path", "num_taken"), [("/big", 0), ("/big", 500), ("/whole", 0), ("/whole", 2**20)])
def test_a_client_that_stops_reading_loses_its_connection(quick: Bounded, path: str, num_taken: int) -> None:
    """After the time to read, whether it has taken nothing, takes too little every time, or has read before; its call
    ends.
    """
    num_before = quick.num_admitted
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.settimeout(10)
        connection.connect(quick.address)
        began_s = time.monotonic()
        connection.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        while num_taken > 1000 and num_taken > (took := len(connection.recv(2**16))):
            num_taken -= took
        wait_until(lambda: quick.num_admitted > num_before)
        while quick.num_open:
            assert time.monotonic() - began_s < 60, "the connection is kept"
            if num_taken == 500:
                with suppress(OSError):
                    connection.recv(num_taken)
            time.sleep(0.02)
        assert time.monotonic() - began_s > QUICK.reading_s * 0.9
        wait_until(lambda: not quick.server.server_state.tasks)


def test_a_client_that_reads_slowly_gets_everything() -> None:
    """16 MiB in one piece, over several of the times to read, however long ago it was called: the test ends each time
    when something was taken in it.
    """
    with bounded(times=Times(reading_s=1000.0)) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.connect(served.address)
        connection.sendall(b"GET /whole HTTP/1.1\r\n\r\n")
        num_times = 0
        for _ in range(WHOLE_BYTES // 2**18):
            assert len(connection.recv(2**18, socket.MSG_WAITALL)) == 2**18
            num_times += served.end_times()
        assert num_times > 1


class StandIn(asyncio.Transport):
    """A transport whose client takes nothing any more."""

    is_closed = is_aborted = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 100

    pause_reading = resume_reading = lambda self: None


@pytest.mark.parametrize("more", [b"", GET + b"\r\n"])
async def test_the_end_of_a_response_that_closes_does_not_wait_for_ever(more: bytes) -> None:
    """A connection that is to be closed when its last bytes are sent, which never happens, whatever was to come next:
    it is closed after the time to read.
    """
    config = uvicorn.Config(small_app, log_config=None, ws="none", lifespan="off")
    connections, transport = Connections(4), StandIn()
    own = BoundedHttp(config, ServerState(), {}, connections, QUICK)
    own.connection_made(transport)
    own.data_received(GET.replace(b"/ ", b"/last ") + b"\r\n" + more)
    while not transport.is_closed:
        await asyncio.sleep(0)
    for after_s, is_over in ((QUICK.reading_s * 0.5, False), (QUICK.reading_s * 1.1, True)):
        connections.expire(asyncio.get_running_loop().time() + after_s)
        assert transport.is_aborted == is_over


def test_uvicorn_has_the_shape_that_is_overridden() -> None:
    """Every method that replaces one of uvicorn's takes what that takes, and every name that is used is there."""
    own = {name: value for name, value in vars(BoundedHttp).items() if inspect.isfunction(value)}
    replaced = {name for name in own if hasattr(HttpToolsProtocol, name)}
    assert replaced == {
        "__init__", "connection_made", "connection_lost", "data_received", "on_message_begin", "on_header",
        "on_headers_complete", "on_body", "on_message_complete", "on_response_complete", "pause_writing",
        "resume_writing", "timeout_keep_alive_handler",
    }
    for name in replaced - {"__init__"}:
        theirs, ours = (list(inspect.signature(vars(one)[name]).parameters) for one in (HttpToolsProtocol, BoundedHttp))
        assert theirs == ours, name
    made = inspect.getsource(HttpToolsProtocol)
    assert [name for name in USED_OF_UVICORN if f"self.{name}" not in made] == []


def test_connections_end_with_the_server() -> None:
    """Half a header, an idle connection and a stream: the server is gone a second after it was told to go."""
    with bounded() as served:
        connections = [served.connect(data) for data in (b"GET", GET + b"\r\n", b"GET /big HTTP/1.1\r\n\r\n")]
        wait_until_open(served, 3)
    for one in connections:
        assert isinstance(one, socket.socket)
        one.close()

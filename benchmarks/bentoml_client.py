"""The client of ``bentoml_door.py`` and ``openai_door.py``: a process that does as little as an HTTP client can.

    python benchmarks/bentoml_client.py PORT

For every line on its input, a JSON list of request bodies, it opens a connection for each and asks over it whether the
server lives, so that the server has them open too, as it has those of a client with a pool. Then it starts the clock,
posts each body to ``/stream``, or to what ``DOOR_PATH`` says, and collects bytes until the last stream has ended; what
they say is read after the clock has stopped. In the end it writes one line: wall and CPU seconds, and of every stream
its tokens and its number of events. Imports the standard library only.

    python benchmarks/bentoml_client.py PORT SECONDS

reads one line instead, lists of bodies for each of some connections; until so many seconds are over, every connection
posts its bodies one after the other, again and again.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from http.client import HTTPConnection
from itertools import cycle

LAST_CHUNK = b"0\r\n\r\n"
"""How a chunked response ends (RFC 9112, section 7.1)."""
PATH = os.environ.get("DOOR_PATH", "/stream")


def request_of(body: object) -> bytes:
    """Write a request."""
    content = json.dumps(body).encode()
    head = (f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n")
    return head.encode() + content


def connected(port: int) -> socket.socket:
    """Open a connection and use it once."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/livez")
    connection.getresponse().read()
    assert isinstance(connection.sock, socket.socket)
    return connection.sock


def download(port: int, bodies: list[object]) -> tuple[list[bytes], float, float]:
    """Send all requests at once; return the responses, wall and CPU seconds."""
    requests = [request_of(body) for body in bodies]
    connections = [connected(port) for _ in bodies]
    parts: dict[socket.socket, list[bytes]] = {connection: [] for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        for connection, request in zip(connections, requests, strict=True):
            connection.sendall(request)
        num_open = len(connections)
        while num_open:
            for key, _ in selector.select():
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                parts[key.fileobj].append(data)  # type: ignore[index]
                num_open -= data.endswith(LAST_CHUNK) or not data
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    for connection in connections:
        connection.close()
    return [b"".join(received) for received in parts.values()], wall_s, cpu_s


def keep_busy(port: int, seconds: float, bodies: list[list[object]]) -> None:
    """Post the bodies of every list over a connection of its own, each when the stream before it has ended."""
    asked = {connected(port): cycle([request_of(body) for body in some]) for some in bodies}
    heard = dict.fromkeys(asked, b"")
    end_s = time.perf_counter() + seconds
    with selectors.DefaultSelector() as selector:
        for connection, requests in asked.items():
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(next(requests))
        while time.perf_counter() < end_s:
            for key, _ in selector.select(1.0):
                connection = key.fileobj  # type: ignore[assignment]
                heard[connection] += connection.recv(65536)
                if heard[connection].endswith(LAST_CHUNK):
                    read(heard[connection])
                    heard[connection] = b""
                    connection.sendall(next(asked[connection]))


def read(response: bytes) -> tuple[list[int], int]:
    """Return the tokens of a response and its number of events; refuse one that was cut off."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or not {b"event: done", b"data: [DONE]"} & set(rest.split(b"\n")):
        raise SystemExit(f"not a whole stream: {response[:200]!r}")
    tokens, num_events = [], 0
    for event in _without_chunks(rest).split(b"\n\n"):
        if b"data: {" in event:
            num_events += 1
            data = json.loads(event.partition(b"data: ")[2])
            tokens += data.get("choices", [data])[0].get("token_ids", [])
    return tokens, num_events


def _without_chunks(rest: bytes) -> bytes:
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(parts)


def main() -> None:
    """Serve the lines of the input."""
    if len(sys.argv) > 2:
        keep_busy(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.stdin.readline()))
        return
    for line in sys.stdin:
        responses, wall_s, cpu_s = download(int(sys.argv[1]), json.loads(line))
        print(json.dumps([wall_s, cpu_s, [read(response) for response in responses]]), flush=True)


if __name__ == "__main__":
    main()

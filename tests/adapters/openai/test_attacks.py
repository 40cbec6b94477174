"""Beside each attack on what comes before a body, for a minute, a stream goes on and new calls are answered.

With ``-s`` the figures are printed. The server has 300 handles; attackers are processes, two for each attack.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from adapters.openai.attackers import HELD, SENT
from adapters.openai.bounded import read_all
from adapters.openai.test_serve import Server, serve_process

SECONDS, NUM_ATTACKERS, NUM_HANDLES = 60.0, 2, 300
LATEST_ANSWER_S, MORE_GAP_S = 1.0, 0.5


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """``pagedcore serve`` with few handles."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_HANDLES, before[1]))
        try:
            server = stack.enter_context(serve_process("demo"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        yield server


@pytest.fixture(scope="module")
def at_rest(served: Server) -> float:
    """The longest gap of a stream without an attack, in seconds, once everything has been compiled that it needs."""
    Watch(served).run("the first time", SECONDS / 4)
    return Watch(served).run("at rest")


class Watch:
    """One client's stream, and calls on new connections beside it."""

    def __init__(self, served: Server) -> None:
        self.port = urlsplit(served.url).port or 0
        self.longest_gap_s = 0.0
        self.own_gap_s = 0.0
        self.num_chunks = 0
        self.answers_s: list[float] = []
        self._until_s = 0.0

    def run(self, name: str, seconds: float = SECONDS) -> float:
        """Watch as long as an attack takes, print what was seen and return the longest gap."""
        self._until_s = time.monotonic() + seconds
        with ThreadPoolExecutor() as threads:
            for ended in [threads.submit(one) for one in (self._stream, self._call, self._sleep)]:
                ended.result()
        ordered = sorted(1e3 * one for one in self.answers_s)
        print(f"\n{name}: {self.num_chunks} chunks, longest gap {1e3 * self.longest_gap_s:.0f} ms; "
              f"{len(ordered)} new calls, median {ordered[len(ordered) // 2]:.0f}, longest {ordered[-1]:.0f} ms; "
              f"this process itself was late by up to {1e3 * self.own_gap_s:.0f} ms")
        return self.longest_gap_s

    def _sleep(self) -> None:
        """See how long this machine lets anybody wait."""
        while (before_s := time.monotonic()) < self._until_s:
            time.sleep(0.005)
            self.own_gap_s = max(self.own_gap_s, time.monotonic() - before_s - 0.005)

    def _stream(self) -> None:
        while time.monotonic() < self._until_s:
            with self._asked(max_tokens=1900, stream=True) as connection:
                end = connection.recv(2**16)[-5:]
                last_s = time.monotonic()
                while chunk := connection.recv(2**16):
                    now_s, end = time.monotonic(), (end + chunk)[-5:]
                    self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                    self.num_chunks += 1
                assert end == b"0\r\n\r\n", "the stream was cut off"

    def _call(self) -> None:
        while time.monotonic() < self._until_s:
            began_s = time.monotonic()
            with self._asked(max_tokens=1) as connection:
                response = read_all(connection)
            self.answers_s.append(time.monotonic() - began_s if response.startswith(b"HTTP/1.1 200") else float("inf"))
            time.sleep(0.2)

    def _asked(self, **fields: object) -> socket.socket:
        body = json.dumps({"prompt": "What is 2 + 3?", "ignore_eos": True, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return connection


@pytest.mark.slow
@pytest.mark.parametrize("attack", [*SENT, *HELD])
def test_others_notice_nothing_of_an_attack(served: Server, at_rest: float, attack: str) -> None:
    """The longest gap of a stream is what it is at rest, every new call is answered within a second, and the log has no
    traceback.
    """
    watch = Watch(served)
    script = Path(__file__).with_name("attackers.py")
    command = [sys.executable, str(script), attack, str(watch.port), str(SECONDS)]
    attackers = [subprocess.Popen(command) for _ in range(NUM_ATTACKERS)]
    try:
        longest_gap_s = watch.run(attack)
    finally:
        for one in attackers:
            one.kill()
            one.wait()
    assert served.process.poll() is None
    assert "Traceback" not in served.text
    assert max(watch.answers_s) < LATEST_ANSWER_S
    assert longest_gap_s < at_rest + MORE_GAP_S

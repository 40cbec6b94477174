"""How many connections ``pagedcore serve`` has, which goes for another one, and what happens without a free handle."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")

from adapters.openai.bounded import GET, bounded, is_closed, read_all, read_one, wait_until_open
from pagedcore.errors import InvalidConfig
from pagedcore_openai.bounded_http import Times
from pagedcore_openai.bounded_server import ACCEPTED_AT_ONCE
from pagedcore_openai.connections import (
    MAX_CONNECTIONS,
    RESERVED_HANDLES,
    Connections,
    connections_within_handles,
    network_of,
)
from support.async_helpers import wait_until

HERE, THERE = b"here", b"there"


class Fake:
    """A connection without a socket."""

    def __init__(self, connections: Connections, network: bytes, waits: bool = True) -> None:
        self.network = network
        self.is_open = True
        self.is_unsent = False
        self._connections = connections
        self.is_admitted = connections.admit(self)
        if waits:
            connections.wait(self, 10.0)

    def has_unsent(self) -> bool:
        return self.is_unsent

    def drop(self) -> None:
        self.is_open = False
        self._connections.leave(self)

    expire = drop


def test_the_one_that_has_waited_longest_goes() -> None:
    """Not the oldest: one whose call has ended waits from then on, and what it sends meanwhile changes nothing."""
    connections = Connections(16)
    first, *others = [Fake(connections, bytes([i])) for i in range(16)]
    connections.stop_waiting(first)
    connections.wait(first, 10.0)
    connections.wait(others[0], 20.0)
    Fake(connections, HERE)
    assert [one for one in others if not one.is_open] == [others[0]]
    assert first.is_open
    assert connections.num_open == 16


def test_calls_are_never_closed_for_others() -> None:
    """With as many in calls as there may be another one is told so, and is the next to go; one call less, and there is
    room.
    """
    connections = Connections(4)
    calls = [Fake(connections, HERE, waits=False) for _ in range(4)]
    refused = [Fake(connections, THERE) for _ in range(3)]
    assert [one.is_admitted for one in calls + refused] == [True] * 4 + [False] * 3
    assert [one.is_open for one in calls + refused] == [True] * 4 + [False] * 2 + [True]
    calls[0].drop()
    assert Fake(connections, THERE).is_admitted


def test_a_crowd_loses_its_own_first() -> None:
    """A network with more than an eighth of the places, however new they are; of two such the larger one, and below
    that nobody is singled out.
    """
    connections = Connections(16)
    old = [Fake(connections, bytes([i])) for i in range(9)]
    crowds = [[Fake(connections, network) for _ in range(num)] for network, num in ((HERE, 4), (THERE, 3))]
    for _ in range(4):
        Fake(connections, bytes([99]))
    assert all(one.is_open for one in old)
    assert [[one.is_open for one in crowd] for crowd in crowds] == [[False, False, True, True], [False, True, True]]
    assert [one.is_open for one in old] == [True] * 9


def test_the_end_of_a_response_is_not_cut_off() -> None:
    """A connection with unsent bytes is passed over; if all have some, nobody goes."""
    connections = Connections(4)
    waiting = [Fake(connections, HERE) for _ in range(4)]
    for one in waiting[:2]:
        one.is_unsent = True
    Fake(connections, HERE)
    assert [one.is_open for one in waiting] == [True, True, False, True]
    for one in waiting:
        one.is_unsent = True
    alone = Connections(1)
    Fake(alone, HERE).is_unsent = True
    assert not alone.make_room()


def test_nothing_is_kept_of_connections_that_have_gone() -> None:
    """Neither of networks nor of crowds, however they went."""
    connections = Connections(8)
    some = [Fake(connections, bytes([i % 3])) for i in range(8)]
    for i, one in enumerate(some):
        if i % 2:
            connections.stop_waiting(one)
        one.drop()
        connections.leave(one)
    assert connections.num_open == 0
    assert [value for value in vars(connections).values() if value == {} or value == set()] == [set(), {}, {}, {}]


@pytest.mark.parametrize(("address", "network"), [
    ("192.0.2.7", bytes([192, 0, 2, 7])), ("::ffff:192.0.2.7", bytes([192, 0, 2, 7])), ("::1", bytes(8)),
    ("2001:db8:1:2:3:4:5:6", bytes.fromhex("20010db800010002")), ("fe80::1%eth0", bytes.fromhex("fe80000000000000")),
    ("a socket's file", b""),
])
def test_an_ipv6_network_counts_as_one_address(address: str, network: bytes) -> None:
    """Its first 64 bits do, which one client has for itself; an IPv4 address is the same in both notations."""
    assert network_of(address) == network


def test_connections_leave_handles_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the soft limit what is open and what is reserved is taken off; with too few left the server does not start."""
    monkeypatch.setattr(psutil.Process, "num_fds", lambda _: 20)
    for limit, num in ((300, 300 - 20 - RESERVED_HANDLES), (100_000, MAX_CONNECTIONS),
                       (resource.RLIM_INFINITY, MAX_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert connections_within_handles() == num
    monkeypatch.setattr(resource, "getrlimit", lambda _: (150, 4096))
    with pytest.raises(InvalidConfig, match=r"may have 150 \(ulimit -n\), needed are at least 164"):
        connections_within_handles()


def test_idle_connections_do_not_keep_others_out() -> None:
    """Five times as many as there may be, from a few addresses: beside each a new call is answered at once and a stream
    goes on, there are never more than the limit, and a slower client of another address is not closed for them.
    """
    with bounded(max_connections=16) as served, ExitStack() as stack:
        stream = stack.enter_context(served.connect(b"GET /big HTTP/1.1\r\n\r\n"))
        slow = stack.enter_context(served.connect(GET, "127.0.0.9"))
        for i in range(80):
            stack.enter_context(served.connect(GET + b"X: y", f"127.0.0.{2 + i % 5}"))
            with served.connect(GET + b"Connection: close\r\n\r\n") as honest:
                assert read_all(honest).startswith(b"HTTP/1.1 200")
            assert served.num_open <= 16
            assert stream.recv(2**16)
        slow.sendall(b"\r\n")
        assert read_one(slow).startswith(b"HTTP/1.1 200")


def test_with_all_in_calls_the_next_is_refused() -> None:
    """503 with ``Retry-After``, before it has said anything; a call less, and the next is answered."""
    with bounded(max_connections=2, times=Times(refused_s=0.3)) as served, ExitStack() as stack:
        calls = [stack.enter_context(served.connect(b"GET /big HTTP/1.1\r\n\r\n")) for _ in range(2)]
        for one in calls:
            one.recv(10)
        refused = read_all(stack.enter_context(served.connect()))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in refused
        assert b"connections: got 3, allowed is at most 2." in refused
        wait_until_open(served, 2)
        calls.pop().close()
        wait_until_open(served, 1)
        assert read_all(served.connect(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


def test_without_a_handle_a_waiting_connection_goes(monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    """The system accepts nothing: that is said once, without a traceback, connections that wait are closed, and as soon
    as it accepts again calls are answered.
    """
    fails, own = False, asyncio.SelectorEventLoop.sock_accept

    async def accept(loop: Any, listener: socket.socket) -> Any:
        if fails:
            raise OSError(errno.EMFILE, "Too many open files")
        return await own(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", accept)
    with bounded(loop="asyncio") as served, served.connect(b"GET /big HTTP/1.1\r\n\r\n") as stream:
        with served.connect(), served.connect(GET):
            wait_until_open(served, 3)
            fails = True
            # Why one more: the server awaits it already.
            with served.connect(GET):
                wait_until_open(served, 1)
        with served.connect(GET + b"Connection: close\r\n\r\n") as late:
            fails = False
            assert read_all(late).startswith(b"HTTP/1.1 200")
        assert stream.recv(10)
    assert [one.levelno for one in caplog.records if "cannot be accepted" in one.message] == [logging.WARNING]
    assert not [one for one in caplog.records if one.exc_info]


def test_a_burst_is_accepted_in_parts() -> None:
    """So that connections which are accepted and not yet counted fit into the handles that are kept back."""
    assert ACCEPTED_AT_ONCE <= RESERVED_HANDLES // 4
    with bounded(max_connections=32) as served, ExitStack() as stack:
        some = [stack.enter_context(served.connect()) for _ in range(200)]
        wait_until(lambda: sum(map(is_closed, some)) == 200 - 32)
        assert served.num_open == 32

"""Which connections a server has, how many it may have, and which of them goes when another one comes.

The connections are those of ``bounded_http.py``, and ``bounded_server.py`` accepts them.
"""

from __future__ import annotations

import resource
from ipaddress import IPv4Address, ip_address
from itertools import chain
from typing import Final, Protocol

import psutil

from pagedcore.errors import InvalidConfig

MAX_CONNECTIONS: Final = 2048
"""Connections of a server, however many handles it may have: twice the calls that may be in flight."""
RESERVED_HANDLES: Final = 128
"""Handles that connections never take: for files, and for connections that are being accepted or closed."""
_FEWEST: Final = 16
"""Connections without which there is no server."""
_NUM_SHARES: Final = 8
"""A network with more than the limit divided by this number of waiting connections loses one first."""


class Connection(Protocol):
    """What is counted here."""

    network: bytes
    """Who is at the other end, as ``network_of`` tells."""

    def has_unsent(self) -> bool:
        """Whether a part of a response has not been sent."""

    def drop(self) -> None:
        """Close at once."""

    def expire(self) -> None:
        """Close, because the time is over that the connection was given."""


class Connections:
    """The open connections of a server. Some of them wait: for all headers of a request, or for their end.

    Invariant: only a connection that waits is closed for another one; among these the one that has waited longest goes,
        of the network that has most of them if that has more than its share, else of all.
    Invariant: of ``limit`` connections or more, all that are in a call, no other one is admitted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._share = max(1, limit // _NUM_SHARES)
        self._open: set[Connection] = set()
        self._deadlines: dict[Connection, float] = {}
        """Of those that wait, in the order in which they began to."""
        self._waiting_of: dict[bytes, dict[Connection, None]] = {}
        """Those that wait by network, in the same order."""
        self._crowds: dict[bytes, dict[Connection, None]] = {}
        """The same, of networks that have more than their share."""

    @property
    def num_open(self) -> int:
        """How many there are."""
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, for which another one goes if need be; return whether there is room for its call."""
        self._open.add(connection)
        if len(self._open) > self.limit:
            self.make_room()
        return len(self._open) - len(self._deadlines) <= self.limit

    def make_room(self) -> bool:
        """Close a connection that waits; return whether there was one."""
        crowd = max(self._crowds.values(), key=len, default=None)
        victims = chain(crowd or (), self._deadlines)
        victim = next((one for one in victims if not one.has_unsent()), None)
        if victim is not None:
            victim.drop()
        return victim is not None

    def wait(self, connection: Connection, until_s: float) -> None:
        """Note that a connection waits, or waits until another time than before; it keeps its place in the order."""
        self._deadlines[connection] = until_s
        same = self._waiting_of.setdefault(connection.network, {})
        same[connection] = None
        if len(same) > self._share:
            self._crowds[connection.network] = same

    def stop_waiting(self, connection: Connection) -> None:
        """Note that a connection is in a call."""
        if self._deadlines.pop(connection, None) is None:
            return
        same = self._waiting_of[connection.network]
        del same[connection]
        if len(same) <= self._share:
            self._crowds.pop(connection.network, None)
        if not same:
            del self._waiting_of[connection.network]

    def leave(self, connection: Connection) -> None:
        """Forget a connection; nothing happens the second time."""
        self._open.discard(connection)
        self.stop_waiting(connection)

    def expire(self, now_s: float) -> None:
        """Close those that have waited too long."""
        for connection in [one for one, until_s in self._deadlines.items() if until_s <= now_s]:
            connection.expire()


def network_of(address: str) -> bytes:
    """Return what counts as one address: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        found = ip_address(address)
    except ValueError:
        return b""
    # Why: a socket for both families names IPv4 addresses as IPv6 addresses that all have the same 64 bits.
    known = found if isinstance(found, IPv4Address) else found.ipv4_mapped or found
    return known.packed[:8]


def connections_within_handles() -> int:
    """Return how many connections this process has handles for, besides those that are open and reserved.

    Raises:
        InvalidConfig: too few are left for a server.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    num_taken: int = psutil.Process().num_fds() + RESERVED_HANDLES
    if limit - num_taken < _FEWEST:
        raise InvalidConfig(f"open files: this process may have {limit} (ulimit -n), needed are at least "
                            f"{num_taken + _FEWEST}. Raise the limit, for example with ulimit -n 4096.")
    return min(limit - num_taken, MAX_CONNECTIONS)

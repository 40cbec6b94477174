"""uvicorn's server, with connections that are accepted one by one and have bounds before the body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from pagedcore_openai.bounded_http import BoundedHttp, Times
from pagedcore_openai.connections import RESERVED_HANDLES, Connections

_log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE: Final = RESERVED_HANDLES // 4
"""Connections that may be accepted and not yet counted."""
_PAUSE_S: Final = 0.1
"""How long to wait for a handle, in seconds."""


class BoundedServer(uvicorn.Server):
    """Says when it answers, and ends in order however often it is told to.

    Args:
        config: without WebSockets, whose connections would leave the bounds.
        announce: called once it answers.
        max_connections: how many it may have open.
        times: how long they may take.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None], max_connections: int,
                 times: Times = Times()) -> None:  # noqa: B008  # frozen
        super().__init__(config)
        self.connections = Connections(max_connections)
        self._announce = announce
        self._times = times
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: Any = None) -> None:
        """Start to listen."""
        # Why no sockets: event loops accept all connections that wait before any of them is counted, and without a free
        # handle uvloop resets them all, while asyncio logs a traceback for each and listens to nobody for a second.
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(one)) for one in sockets or []]
        self._announce()

    async def shutdown(self, sockets: Any = None) -> None:
        """Accept no more, and end."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Close what has waited too long; uvicorn calls this ten times in a second."""
        self.connections.expire(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to end."""
        # Why not uvicorn's: it would leave out the lifespan's end after a second Ctrl-C, and raise the signal again
        # when everything has been closed.
        self.should_exit = True

    async def _accept(self, listener: Any) -> None:
        listener.setblocking(False)
        listener.listen(self.config.backlog)
        is_told = False
        while True:
            try:
                accepted = await _accept_some(listener)
            except OSError:
                if not is_told:
                    _log.warning("a connection cannot be accepted; if the process has no handle left (ulimit -n), one "
                                 "that waits for headers is closed for it")
                    is_told = True
                await asyncio.sleep(0 if self.connections.make_room() else _PAUSE_S)
                continue
            if len(accepted) == 1:
                # Why: the usual case, in a quarter less time.
                await self._open(accepted[0])
            else:
                await asyncio.gather(*map(self._open, accepted))

    async def _open(self, accepted: Any) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, accepted)
        except OSError:
            # Why nothing is said: the client has left already.
            accepted.close()
        except Exception:
            _log.exception("a connection cannot be served")
            accepted.close()

    def _protocol(self) -> BoundedHttp:
        return BoundedHttp(self.config, self.server_state, self.lifespan.state, self.connections, self._times)


async def _accept_some(listener: Any) -> list[Any]:
    """Wait for a connection, and return it with others that wait too. Raises ``OSError`` if there is no handle."""
    first, _ = await asyncio.get_running_loop().sock_accept(listener)
    accepted = [first]
    while len(accepted) < ACCEPTED_AT_ONCE:
        try:
            one, _ = listener.accept()
        except OSError:
            # Why any: what is wrong beyond that none waits is found by the next call.
            break
        one.setblocking(False)
        accepted.append(one)
    return accepted

"""OpenAI's interface over the engine of the tests, on a port of this machine, on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pagedcore import AsyncEngine
from pagedcore.errors import EngineClosed, MissingDependency
from pagedcore_openai import openai_app

_ADDRESS: Final = "127.0.0.1"
_START_LIMIT_S: Final = 60.0
_END_LIMIT_S: Final = 10.0


@contextmanager
def serve_openai(engine: AsyncEngine, name: str) -> Iterator[str]:
    """Serve until the block is left; yield the address that OpenAI's client takes as its ``base_url``.

    Raises:
        MissingDependency: a package of ``pagedcore[pytest]`` is not installed.
        EngineClosed: the server did not start.
    """
    app = openai_app(engine, name=name, hosts={_ADDRESS, "localhost"})
    server, is_up = _server(app)
    thread = threading.Thread(target=server.run, name="pagedcore-pytest-openai", daemon=True)
    thread.start()
    try:
        if not is_up.wait(_START_LIMIT_S) or not server.servers:
            raise EngineClosed("the OpenAI app of the tests did not start on 127.0.0.1; the log has the reason.")
        yield f"http://{_ADDRESS}:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(_END_LIMIT_S)


def _server(app: Any) -> tuple[Any, threading.Event]:
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise MissingDependency("openai_base_url needs uvicorn. Install pagedcore[pytest].") from None
    is_up = threading.Event()

    class Server(uvicorn.Server):
        """Says when it listens, and when it never will."""

        async def startup(self, sockets: Any = None) -> None:
            """Listen."""
            try:
                await super().startup(sockets)
            finally:
                is_up.set()

    # Why no lifespan: the app's own would freeze all objects of the test process and watch its signals.
    return Server(uvicorn.Config(app, host=_ADDRESS, port=0, lifespan="off", log_config=None, access_log=False,
                                 timeout_graceful_shutdown=1)), is_up

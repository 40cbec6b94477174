"""What an engine on a thread needs of the program it lives in: threads that are threads, and asyncio to await it."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys

from pagedcore.errors import NoEventLoop

_log = logging.getLogger(__name__)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the caller's event loop. Raises ``NoEventLoop`` if none of asyncio's runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise NoEventLoop from None


def warn_of_gevent() -> None:
    """Warn, once in a process, where gevent has made greenlets of threads: its hub stands still while a step runs."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        _warn()


@functools.cache
def _warn() -> None:
    _log.warning(
        "gevent has patched threading: the engine's thread is a greenlet, and no other runs while it computes. "
        "Use worker threads (gunicorn: gthread) or a process without monkey.patch_all()."
    )

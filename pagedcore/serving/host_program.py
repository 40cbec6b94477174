"""What an engine on a thread needs of the program it lives in: threads that are threads, and asyncio to await it."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
from typing import Final

from pagedcore.errors import CalledFromHook, NoEventLoop

_log = logging.getLogger(__name__)
_WAITS: Final = (
    "on the engine's own thread, which would wait for itself; nothing was done. Add a callback to what submit() "
    "returns, or make the call on another thread."
)


class EngineThread(threading.Thread):
    """A thread of an engine: what it calls must not wait for it."""


def require_other_thread(thread: threading.Thread | None) -> None:
    """Raise ``CalledFromHook`` on a thread that what is called here waits for."""
    if thread is threading.current_thread():
        raise CalledFromHook.here(_WAITS)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the caller's event loop. Raises ``NoEventLoop`` if none of asyncio's runs, ``CalledFromHook`` on a thread
    of an engine.
    """
    if isinstance(thread := threading.current_thread(), EngineThread):
        require_other_thread(thread)
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

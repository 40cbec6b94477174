"""One event loop on a thread of its own, where blocking callers' batches run as tasks.

LangChain's own blocking batch uses a few threads, or calls one after the other; as tasks, all of a batch is in the
engine at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop that starts at its first use and stays; its thread is a daemon, so that it delays no exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the loop's own thread, where waiting for the loop would never end."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the caller's context and wait for it; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result()
        finally:
            future.cancel()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # Why: a forked process has the objects of its parent, but not the thread.
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="pagedcore-langchain", daemon=True
                )
                self._thread.start()
            return self._loop


BACKGROUND = BackgroundLoop()
"""Shared by all models of the process."""

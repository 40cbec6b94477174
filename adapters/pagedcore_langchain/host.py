"""Who owns the engine behind a LangChain model: the model and its copies together, or the caller.

Builds the engine on first use and closes it if it built it; never sends a request. Knows nothing of LangChain.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from pagedcore import AsyncEngine


class EngineHost:
    """One engine for a model, its copies, its bindings and its reconfigured variants, on any thread.

    Invariant: at most one engine is ever built, and only an engine that was built here is closed here.
    """

    def __init__(self, model: Any, settings: Mapping[str, Any], engine: AsyncEngine | None = None) -> None:
        self._model = model
        self._settings = dict(settings)
        self._engine = engine
        self._owns_engine = engine is None
        self._lock = threading.Lock()

    @property
    def engine(self) -> AsyncEngine:
        """The engine, built now if it is not there yet. Raises ``InvalidConfig`` as ``from_pretrained``."""
        with self._lock:
            if self._engine is None:
                self._engine = AsyncEngine.from_pretrained(self._model, **self._settings)
            return self._engine

    async def ready(self) -> AsyncEngine:
        """Return the engine; if it has to be built, the event loop is not blocked meanwhile."""
        return await asyncio.to_thread(lambda: self.engine) if self._engine is None else self._engine

    def close(self) -> None:
        """Close an engine that was built here; a second call does nothing."""
        with self._lock:
            if self._owns_engine and self._engine is not None:
                self._engine.close()

    def __deepcopy__(self, memo: object) -> EngineHost:
        # Why: a copy of a model is another way of asking the same engine.
        return self

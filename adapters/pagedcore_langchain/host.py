"""Who owns the engine behind a LangChain model: the model and its copies together, or the caller.

Builds the engine on first use and closes it if it built it; never sends a request. Knows nothing of LangChain.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

from pagedcore import AsyncEngine
from pagedcore.errors import NoEventLoop, NotPicklable, UnknownAdapter

T = TypeVar("T")


def require_loop() -> None:
    """Raise ``NoEventLoop`` where no event loop of asyncio runs: LangChain would raise an error of asyncio's own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise NoEventLoop from None


async def on_loop(stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Pass a stream on. Raises ``NoEventLoop`` at the first iteration, as ``require_loop``."""
    require_loop()
    async with aclosing(cast(AsyncGenerator[T, None], stream)) as parts:
        async for part in parts:
            yield part


def _files_of(directory: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in directory.glob("*"))


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
        """Return the engine; if it has to be built, the event loop is not blocked meanwhile. Raises ``NoEventLoop``."""
        require_loop()
        return await asyncio.to_thread(lambda: self.engine) if self._engine is None else self._engine

    def close(self) -> None:
        """Close an engine that was built here; a second call does nothing."""
        with self._lock:
            if self._owns_engine and self._engine is not None:
                self._engine.close()

    @cached_property
    def identity(self) -> str:
        """What the completions follow from besides a call's own parameters; a model that is named is not loaded for it.

        Of an engine that was handed over, and of a loaded model, it is the engine's own; of a name, the name, the files
        of its directory by size and time, and the settings without the secret.
        """
        if not isinstance(self._model, str | os.PathLike):
            return self.engine.identity
        # Why: the demo model is installed together with this file.
        directory = Path(__file__).parent if self._model == "demo" else Path(self._model)
        files = _files_of(directory)
        settings = {name: value for name, value in self._settings.items() if name != "session_key"}
        return sha256(repr((os.fspath(self._model), files, sorted(settings.items()))).encode()).hexdigest()

    def identity_of(self, lora: str | None) -> str:
        """Return the same for calls with an adapter: by its contents where an engine is there, else by its files."""
        if lora is None:
            return self.identity
        if self._engine is None and isinstance(self._model, str | os.PathLike):
            place = dict(self._settings.get("adapters", {})).get(lora)
            return f"{self.identity}-{lora}-{_files_of(Path(place)) if place is not None else 'unknown'}"
        try:
            return self.engine.identity_of(lora)
        except UnknownAdapter:
            # Why no error: this is asked of a model that is only shown, too; a call with it is refused.
            return f"{self.identity}-unknown"

    def __reduce__(self) -> tuple[Any, ...]:
        # Why: an engine belongs to its process; what is pickled builds its own, at its first use.
        if not isinstance(self._model, str | os.PathLike):
            raise NotPicklable("a model made with from_engine, or of a loaded model,")
        return EngineHost, (self._model, self._settings)

    def __deepcopy__(self, memo: object) -> EngineHost:
        # Why: a copy of a model is another way of asking the same engine.
        return self

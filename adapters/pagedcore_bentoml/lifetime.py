"""The engine's life inside a BentoML worker: its model and settings, start, drain, end and health."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

import bentoml

from pagedcore import AsyncEngine
from pagedcore.metrics.recorder import engine_metrics, engine_metrics_text
from pagedcore_bentoml.checks import (
    before_any_worker,
    end_on_failed_start,
    end_supervisor,
    keep_idle_connections,
    require_model,
    require_one_worker,
    require_valid_settings,
)
from pagedcore_bentoml.packing import packed_model
from pagedcore_http.body import MAX_BODY_BYTES, body_limit
from pagedcore_http.drain import DrainSignal, OpenCalls
from pagedcore_http.present_objects import PresentObjects

MAX_NUM_WAITING: Final = 1024
"""Requests that may wait in a service whose settings have no ``max_num_waiting``: a batch engine's own default, four
times ``max_num_seqs``, refuses some of 200 clients that come at once."""
CLOSE_LIMIT_S: Final = 5.0
"""Longest wait for a step in flight when the engine is closed, in seconds."""


class EngineLifetime:
    """What a service class inherits to own one engine.

    Invariant: between the first call and ``pagedcore_stop`` there is exactly one engine.
    """

    model: ClassVar[Any] = None
    """What ``AsyncEngine.from_pretrained`` takes, or an ``AsyncEngine`` that its owner closes."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keywords of ``AsyncEngine.from_pretrained``, validated when the class is made; without ``max_num_waiting`` it is
    1,024 here."""
    drain_s: ClassVar[float] = 25.0
    """Longest wait for calls in flight when the service ends, in seconds. Those that are left get the error
    ``EngineClosed``, connections are cut 5 seconds later, and the process ends. ``bentoml serve`` itself waits a day
    for it, other supervisors often 30 seconds."""
    max_body_bytes: ClassVar[int | None] = None
    """Largest request body; ``None``: 16 bytes for each token of the context, at most 4 MiB, and 256 KiB besides. It
    may have one number or object for every 16 of these bytes, 8,192 strings, as many lists and as many of ``null``,
    ``true`` and ``false``, and 262,144 escapes."""
    degraded_after_s: ClassVar[float] = 10.0
    """Seconds without progress after which the service is not ready; longer than the longest step."""
    def __init_subclass__(cls, **keywords: Any) -> None:
        """Validate the settings, so that a wrong one fails where it is written and not in a worker.

        Raises:
            InvalidConfig: a setting is unknown or out of range.
        """
        super().__init_subclass__(**keywords)
        require_valid_settings(cls.settings)

    @classmethod
    @before_any_worker
    def pagedcore_check(cls) -> None:
        """Refuse more than one worker before any is started: each would have a model and a KV pool of its own.

        Raises:
            InvalidConfig: the service of this class has ``workers`` other than 1, or its model is a path to nothing.
        """
        # Why so: BentoML tells this hook nothing of the service, which is the class's holder.
        services = [holder for holder in gc.get_referrers(cls) if isinstance(holder, bentoml.Service)]
        for service in services:
            require_one_worker(service.config)
        # Why: what a bento has packed lies where its workers are, and not here.
        if cls.model is None or not any(service.bento for service in services):
            require_model(cls.model)
        end_on_failed_start()

    _engine: AsyncEngine | None
    _starting: threading.Lock
    _drain_signal: DrainSignal
    _present_objects: PresentObjects
    open_calls: OpenCalls
    """The calls in flight, those of a mounted ``OpenAIMount`` among them."""
    body_limit: int
    """Bytes of a request body that are accepted."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Set what a service needs, also where its class has an ``__init__`` that does not call this one's."""
        self = super().__new__(cls)
        self._engine, self._starting, self.open_calls = None, threading.Lock(), OpenCalls()
        self._drain_signal, self._present_objects = DrainSignal(self._drain_or_end), PresentObjects()
        self.body_limit = MAX_BODY_BYTES if cls.max_body_bytes is None else cls.max_body_bytes
        return self

    @property
    def shared_engine(self) -> AsyncEngine:
        """The engine, built at the first use if the start-up hook did not run: what is sent to it without a
        ``cache_salt`` shares cached prompts with everybody else who sends none.

        Raises:
            InvalidConfig: the model or a setting is refused.
        """
        with self._starting:
            if self._engine is None:
                self._engine = self._build()
            return self._engine

    def _build(self) -> AsyncEngine:
        model = packed_model(self.model)
        require_model(model)
        if isinstance(model, AsyncEngine):
            return model
        return AsyncEngine.from_pretrained(model, **{"max_num_waiting": MAX_NUM_WAITING, **self.settings})

    @bentoml.on_startup
    async def pagedcore_start(self) -> None:
        """Load the model and generate one token, so that no caller waits for compilation.

        ``bentoml serve`` ends if that fails, instead of starting one worker after another.

        Raises:
            InvalidConfig: as from ``AsyncEngine.from_pretrained``.
            RequestFailed: the model fails on its first token.
        """
        try:
            await self._start()
        except Exception as error:
            end_supervisor(error)
            raise

    async def _start(self) -> None:
        engine = await asyncio.to_thread(lambda: self.shared_engine)
        output = await asyncio.wrap_future(engine.warm_up())
        output.raise_for_error()
        if self.max_body_bytes is None:
            self.body_limit = body_limit((await asyncio.to_thread(engine.stats)).max_model_len)
        engine_metrics(engine)
        keep_idle_connections()
        self._drain_signal.install()
        self._present_objects.keep()

    @bentoml.on_shutdown
    async def pagedcore_stop(self) -> None:
        """Refuse new calls, wait up to ``drain_s`` seconds for those in flight, then close the engine.

        Where a signal ends the process, the drain has happened by then, before the listener was closed.
        """
        self._drain_signal.remove()
        await self.open_calls.drain(0.0 if self.open_calls.is_draining else self.drain_s)
        await self._close_engine()
        self._present_objects.release()

    async def _drain_or_end(self) -> None:
        if await self.open_calls.drain(self.drain_s):
            # Why: whatever still runs then would keep the server, and BentoML's supervisor, for as long as it takes.
            await self._close_engine()

    async def _close_engine(self) -> None:
        if self._engine is not None and self._engine is not self.model:
            await self._engine.aclose(CLOSE_LIMIT_S)

    async def __is_alive__(self) -> bool:
        """Whether this process may recover: its engine takes calls, which it does until it hangs for ``dead_after_s``.
        """
        return self._health() != "dead"

    async def __is_ready__(self) -> bool:
        """Whether to send calls here: the engine makes progress, its model works and the service does not drain."""
        return self._health() == "ready" and not self.open_calls.is_draining

    async def __metrics__(self, text: str) -> str:
        """Append the engine's metrics to BentoML's own."""
        if self._engine is None:
            return text
        # Why: on a thread, because the numbers are taken between two steps, which may be long.
        return text + await asyncio.to_thread(engine_metrics_text, self._engine)

    def _health(self) -> str:
        if self._engine is None:
            return "degraded"
        return self._engine.health(degraded_after_s=self.degraded_after_s).status

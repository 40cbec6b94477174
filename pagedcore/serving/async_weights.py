"""A load of other weights into an engine that serves callers: staged on another thread, swapped between two steps.

Owns how a load waits: requests that come meanwhile are held, not refused, until those that have begun have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pagedcore.engine.new_weights import NewWeights, Running, Way

if TYPE_CHECKING:
    from pagedcore.models.new_weights import Weights


class AsyncNewWeights:
    """As ``NewWeights``, to be awaited; made by ``AsyncEngine.new_weights``."""

    def __init__(
        self, call: Callable[..., Any], when_settled: Callable[..., Any], version: str, running: Running, way: Way
    ) -> None:
        """Take ``AsyncEngine.call``, what calls until it is done, and the arguments of ``Engine.new_weights``."""
        self._call, self._settled, self._arguments = call, when_settled, (version, running, way)
        self._load: NewWeights | None = None

    async def __aenter__(self) -> Self:
        version, running, way = self._arguments
        self._load = await self._call(lambda engine: engine.new_weights(version, running=running, way=way).__enter__())
        return self

    async def load(self, weights: Weights) -> None:
        """Take other weights; arguments and errors as ``NewWeights.load``. Staged ones do not stop the engine."""
        load = self._entered()
        if load.is_staged:
            await asyncio.to_thread(load.stage, weights)
        else:
            await self._when_settled(lambda: load.load(weights))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        load = self._entered()
        try:
            if kind is None:
                await self._when_settled(load.commit)
        finally:
            load.close()

    def _entered(self) -> NewWeights:
        if self._load is None:
            raise RuntimeError("new_weights: use it with 'async with'")
        return self._load

    async def _when_settled(self, change: Callable[[], None]) -> None:
        """Make a change on the engine's thread, when no request runs if it is one that waits for that."""
        load = self._entered()

        def try_it(engine: Any) -> bool:
            if load.waits and engine.has_pending_requests():
                return False
            change()
            return True

        await self._settled(try_it, is_held=load.waits)

"""An ``AsyncEngine`` that gives its memory back for a while: requests that come meanwhile are held until it is awake.

Owns how ``sleep`` waits, and that weights are read on another thread than the engine's.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from pagedcore.engine.engine import Engine
from pagedcore.engine.sleeping import Ending, Level
from pagedcore.serving.host_program import running_loop

if TYPE_CHECKING:
    from pagedcore.serving.engine_loop import EngineLoop

_LOOK_S: Final = 0.005
"""Seconds between two looks whether requests have ended."""
_T = TypeVar("_T")


class AsyncSleep:
    """The part of an ``AsyncEngine`` that gives memory back and takes it again."""

    _named: Engine

    @abstractmethod
    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """As ``AsyncEngine`` has it."""

    @abstractmethod
    async def _call_loop(self, function: Callable[[EngineLoop], _T]) -> _T:
        """As ``call``, with what runs on the engine's thread."""

    @abstractmethod
    def _hold(self, is_held: bool) -> None:
        """Hold requests that come from now on, or no longer."""

    @property
    def sleep_level(self) -> int:
        """As ``Engine.sleep_level``; never waits."""
        return self._named.sleep_level

    async def sleep(self, level: Level = 1, *, running: Ending = "wait") -> None:
        """Give memory back until ``wake``; arguments and errors as ``Engine.sleep``.

        Requests that come from now on are held until the engine is awake, as many as may wait and for no longer than
        ``queue_timeout_s``. Turns of sessions that begin while others are waited for are waited for too; later ones are
        refused with ``EngineAsleep``. Cancelling this while requests are waited for leaves the engine awake.
        """
        running_loop()

        def try_it(engine: Engine) -> bool:
            # Why first: nobody waits for what is refused.
            engine.require_sleep(level, running)
            if running == "wait" and engine.sleep_level < level and engine.has_pending_requests():
                return False
            engine.sleep(level, running=running)
            return True

        await self._when_settled(try_it, is_held=True)

    async def num_held(self) -> int:
        """Return how many requests are held, until it is awake or has room. Raises ``EngineClosed``."""
        return await self._call_loop(lambda worker: worker.num_held)

    async def wake(self) -> None:
        """Take memory again; weights are read on another thread. Errors as ``Engine.wake``; nothing if it is awake.

        Cancelling this leaves the engine asleep, unless it was awake by then.
        """
        running_loop()
        wake = await self.call(lambda engine: engine.begin_wake())
        try:
            await self.call(lambda engine: wake.begin())
            await asyncio.to_thread(wake.read)
            await self.call(lambda engine: wake.commit())
        finally:
            wake.close()

    async def _when_settled(self, try_it: Callable[[Engine], bool], *, is_held: bool) -> None:
        """Call a function on the engine's thread until it returns true; requests are held meanwhile if ``is_held``."""
        if is_held:
            self._hold(True)
        try:
            while not await self.call(try_it):
                await asyncio.sleep(_LOOK_S)
        finally:
            if is_held:
                self._hold(False)

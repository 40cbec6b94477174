"""Several engines that share the memory of one machine: who uses one wakes it, and what nobody uses makes room.

Owns who uses which engine, and which one goes to sleep. How they sleep and wake, ``async_sleep.py`` has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from pagedcore.config.field_rules import invalid_setting, seconds
from pagedcore.config.limits import MAX_TIMEOUT_S
from pagedcore.config.memory_budget import BudgetShare, MemoryBudget, parse_memory
from pagedcore.engine.kv_memory import DEFAULT_MEMORY_SHARE
from pagedcore.engine.sleeping import Ending, Level
from pagedcore.errors import EngineClosed, EngineInUse, InvalidConfig, InvalidRequest, MemoryBudgetExceeded
from pagedcore.execution.machine import free_memory_bytes
from pagedcore.protocols import Clock, MonotonicClock
from pagedcore.serving.async_engine import AsyncEngine

_log: Final = logging.getLogger("pagedcore")
_IDLE: Final = seconds(0, MAX_TIMEOUT_S, above_low=True).or_none()
_LOOK_S: Final = 0.02
"""Seconds between two looks whether users of an engine that sleeps have asked for something."""
_POOLS_PART: Final = 2
"""KV pools take one part in so many of a budget, unless their size is given."""


@dataclass(eq=False)
class _Member:
    name: str
    engine: AsyncEngine
    idle_since_s: float
    num_uses: int = 0
    is_leaving: bool = False
    """Whether it is being put to sleep."""
    waking: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.engine.sleep_level == 0 and not self.is_leaving


class SharedEngines(AbstractAsyncContextManager["SharedEngines"]):
    """Engines by name, of which as many are awake as there is memory for.

        async with SharedEngines.from_pretrained({"a": DIR, "b": DIR}, memory="8GiB", idle_s=600) as engines:
            async with engines.use("a") as engine:
                print((await engine.chat(messages)).content)

    An engine that sleeps has given back its KV pool and its weights, which are read again from their files. It is for
    one event loop.

    Invariant: an engine that is used through this is awake, and no other change of memory is made meanwhile.
    """

    def __init__(
        self, engines: Mapping[str, AsyncEngine], *, idle_s: float | None = None, clock: Clock | None = None
    ) -> None:
        """Take over engines, which are closed with this.

        Args:
            engines: by the names that ``use`` takes.
            idle_s: seconds without a use after which an engine is put to sleep; ``None``: only to make room.
            clock: what tells the time.

        Raises:
            InvalidConfig: there is none, ``idle_s`` is out of range, or an engine cannot sleep and ``idle_s`` is given.
        """
        self._idle_s = _IDLE.check("idle_s", idle_s, invalid_setting)
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._members = {name: _Member(name, one, self._clock.now()) for name, one in engines.items()}
        if not self._members:
            raise InvalidConfig("engines: got none, needed is at least one.")
        for member in self._members.values() if idle_s is not None else ():
            _require_sleeper(member)
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._seeing_off = set[asyncio.Task[None]]()

    @classmethod
    def from_pretrained(
        cls, models: Mapping[str, Any], *, memory: int | str | None = None, idle_s: float | None = None,
        **settings: Any,
    ) -> Self:
        """Build an engine of each model, in turn; those before it sleep where it would have no room else.

        Args:
            models: what ``AsyncEngine.from_pretrained`` takes, by name.
            memory: most bytes of all weights and KV pools together, as for ``MemoryBudget``; ``None``: no limit, and
                none has to sleep. The pools of several models get equal shares of ``kv_cache_memory``, by default half
                of ``memory``, so that some of the models are awake together, or without it a part of what is free;
                that of one model gets what its weights leave.
            idle_s: as here.
            settings: for each of the engines.

        Raises:
            InvalidConfig: as ``AsyncEngine.from_pretrained`` and here; ``MemoryBudgetExceeded``: a model has no room
                when all others sleep.
            RequestFailed: a model fails on its first token.
        """
        _IDLE.check("idle_s", idle_s, invalid_setting)
        if memory is not None or len(models) > 1:
            config = settings.get("config")
            pools = settings.get("kv_cache_memory") or (config and config.kv_cache_memory)
            settings["kv_cache_memory"] = _shares(memory, pools, len(models))
        with ExitStack() as undo:
            begun = dict[str, _Member]()
            for name, model in models.items():
                engine = undo.enter_context(_start(model, settings, {} if memory is None else begun))
                begun[name] = _Member(name, engine, 0.0)
                engine.warm_up().result().raise_for_error()
                if memory is not None:
                    _require_sleeper(begun[name])
            made = cls({name: one.engine for name, one in begun.items()}, idle_s=idle_s)
            undo.pop_all()
        return made

    @property
    def engines(self) -> Mapping[str, AsyncEngine]:
        """All of them, awake or not; what is called on one of these wakes none."""
        return {name: one.engine for name, one in self._members.items()}

    @asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[AsyncEngine, None]:
        """Have an engine that is awake, and stays so, for the length of a block.

        Callers of one engine share its wake, and leaving early breaks it off for nobody: one that has begun goes on,
        and one that waits for its turn is left if nobody waits for it any more. Where it has no room, the one that was
        not used for longest is put to sleep, then the next one.

        Raises:
            InvalidRequest: no engine has this name.
            MemoryBudgetExceeded, MemoryError: there is no room, as all others are used.
            InvalidWeights, InvalidConfig: as ``Engine.wake``. EngineClosed: it was closed.
        """
        member = self._member(name)
        member.num_uses += 1
        try:
            while not member.is_ready:
                await self._woken(member)
            yield member.engine
        finally:
            member.num_uses -= 1
            member.idle_since_s = self._clock.now()

    async def sleep(self, name: str, level: Level = 2, *, running: Ending = "wait") -> None:
        """Put an engine to sleep, also one that is used; what its users ask afterwards wakes it.

        Raises ``InvalidRequest`` if no engine has this name, and as ``AsyncEngine.sleep``.
        """
        member = self._member(name)
        await member.engine.sleep(level, running=running)
        seeing_off = asyncio.ensure_future(self._see_off(member))
        self._seeing_off.add(seeing_off)
        seeing_off.add_done_callback(self._seeing_off.discard)

    async def _see_off(self, member: _Member) -> None:
        """Wake an engine that was put to sleep in use as soon as a request of its users is held."""
        with suppress(EngineClosed):
            while member.num_uses and member.engine.sleep_level:
                if await member.engine.num_held():
                    try:
                        await self._woken(member)
                    except (InvalidConfig, InvalidRequest, EngineInUse, MemoryError) as error:
                        _log.warning("%s: it was not woken: %s", member.name, error)
                await asyncio.sleep(_LOOK_S)

    async def put_idle_to_sleep(self) -> float:
        """Put to sleep what nobody has used for ``idle_s``; return the seconds until there may be more of it.

        ``async with`` calls this in time; without that it is the owner's to call.
        """
        assert self._idle_s is not None  # Invariant: it is called where there is such
        for member in list(self._members.values()):
            if member.idle_since_s + self._idle_s <= self._clock.now():
                async with self._changing:
                    await self._put_to_sleep(member)
        idle_s = [self._clock.now() - one.idle_since_s for one in self._members.values() if not one.num_uses]
        return min([self._idle_s, *(self._idle_s - one for one in idle_s if one < self._idle_s)])

    async def make_room(self) -> bool:
        """Put the engine to sleep that was not used for longest; return whether there was one that is not used.

        For what else the budget has to have room for, such as a second copy of an engine's weights.
        """
        async with self._changing:
            return await self._put_one_to_sleep()

    async def __aenter__(self) -> Self:
        if self._idle_s is not None and self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Close all engines, as ``AsyncEngine.aclose``; a wake is broken off."""
        waking = [one.waking for one in self._members.values() if one.waking is not None]
        for task in [*waking, *self._seeing_off, *([] if self._watching is None else [self._watching])]:
            task.cancel()
        await asyncio.gather(*(one.engine.aclose(timeout_s) for one in self._members.values()))

    def close(self) -> None:
        """Close all engines, where no event loop has used them."""
        for one in self._members.values():
            one.engine.close()

    def _member(self, name: str) -> _Member:
        if (member := self._members.get(name)) is None:
            raise InvalidRequest("name", name, f"one of {', '.join(self._members)}")
        return member

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(await self.put_idle_to_sleep())

    async def _woken(self, member: _Member) -> None:
        """Wait for the wake of an engine, which all who want it share. Raises as ``use``."""
        if member.waking is None:
            member.waking = asyncio.ensure_future(self._wake(member))
            member.waking.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = member.waking
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineClosed("the engine was closed while it woke.") from None
            raise

    async def _wake(self, member: _Member) -> None:
        try:
            async with self._changing:
                # Why: by its turn those who asked may have left, and others shall not sleep for nobody.
                while member.num_uses:
                    try:
                        await member.engine.wake()
                        return
                    except (MemoryBudgetExceeded, MemoryError):
                        if not await self._put_one_to_sleep():
                            raise
        finally:
            member.waking = None

    async def _put_one_to_sleep(self) -> bool:
        for member in sorted(self._members.values(), key=lambda one: one.idle_since_s):
            if await self._put_to_sleep(member):
                return True
        return False

    async def _put_to_sleep(self, member: _Member) -> bool:
        """Return whether this has put an engine to sleep: one that is used, or works, or cannot, stays awake."""
        if member.num_uses or member.engine.sleep_level == 2:
            return False
        member.is_leaving = True
        try:
            if await member.engine.call(lambda engine: engine.has_pending_requests()):
                return False
            await member.engine.sleep(2)
        except (EngineClosed, EngineInUse, InvalidRequest) as error:
            _log.warning("%s: it was not put to sleep: %s", member.name, error)
            return False
        finally:
            member.is_leaving = False
            member.idle_since_s = self._clock.now()
        return True


def _require_sleeper(member: _Member) -> None:
    try:
        member.engine.send(lambda engine: engine.require_sleep(2, "wait")).result()
    except InvalidRequest as error:
        raise InvalidConfig(f"engines, {member.name}: {error}") from error


def _start(model: Any, settings: Mapping[str, Any], others: Mapping[str, _Member]) -> AsyncEngine:
    """Build an engine; where it has no room, others sleep, those first that were built first."""
    awake = [one.engine for one in others.values() if one.engine.sleep_level == 0]
    while True:
        try:
            return AsyncEngine.from_pretrained(model, **settings)
        except MemoryBudgetExceeded:
            if not awake:
                raise
        awake.pop(0).send(lambda engine: engine.sleep(2)).result()


def _shares(memory: int | str | None, kv_memory: Any, num_models: int) -> MemoryBudget | BudgetShare:
    """Return what each engine draws on. Raises ``InvalidConfig``."""
    if memory is None:
        pools = kv_memory or int(DEFAULT_MEMORY_SHARE * free_memory_bytes())
        budget = pools if isinstance(pools, MemoryBudget) else MemoryBudget(pools)
        return budget.share(budget.total_bytes // num_models)
    budget = MemoryBudget(memory, counts_weights=True)
    if isinstance(kv_memory, MemoryBudget | BudgetShare):
        raise InvalidConfig("kv_cache_memory: got a budget, allowed are bytes or a share, as memory is the budget.")
    pools = parse_memory(kv_memory, free_bytes=budget.total_bytes)
    if pools is None and num_models == 1:
        return budget
    return budget.share((budget.total_bytes // _POOLS_PART if pools is None else pools) // max(num_models, 1))

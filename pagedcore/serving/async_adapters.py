"""Adapters of an ``AsyncEngine``: files are read on another thread, and names change between two steps."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from pagedcore.engine.engine import Engine
from pagedcore.lora.registry import AdapterRegistry
from pagedcore.outputs import AdapterInfo
from pagedcore.serving.host_program import running_loop

_T = TypeVar("_T")


class AsyncAdapters:
    """The part of an ``AsyncEngine`` that knows adapters."""

    _adapter_registry: AdapterRegistry

    @property
    @abstractmethod
    def identity(self) -> str:
        """As ``AsyncEngine`` has it."""

    @abstractmethod
    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """As ``AsyncEngine`` has it."""

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> AdapterInfo:
        """Read a LoRA adapter on another thread, and let ``lora=name`` stand for it from then on.

        Of two calls for one name, the one that ends later has it. Arguments and errors as ``Engine.load_adapter``.
        """
        running_loop()
        read = await asyncio.to_thread(self._adapter_registry.read, name, directory)
        return await self.call(lambda engine: engine.add_adapter(read))

    async def unload_adapter(self, name: str) -> None:
        """Forget a name; requests, and sessions, that were accepted with it keep its adapter. As the engine's own."""
        await self.call(lambda engine: engine.unload_adapter(name))

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Describe the adapters that requests may name. Raises ``EngineClosed``."""
        return await self.call(lambda engine: engine.adapters())

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names that requests may give as ``lora`` now; never waits."""
        return self._adapter_registry.names

    def identity_of(self, lora: str | None) -> str:
        """Return ``identity`` for requests with this adapter, as ``Engine.identity_of``; never waits."""
        return self._adapter_registry.identity_of(self.identity, lora)

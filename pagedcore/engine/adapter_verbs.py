"""The verbs of an engine that load and unload adapters, and the slots that it has for them."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.limits import MAX_ADAPTER_RANK
from pagedcore.config.memory_budget import BudgetShare, MemoryBudget, parse_memory
from pagedcore.errors import InvalidAdapter, InvalidConfig
from pagedcore.execution.machine import free_memory_bytes
from pagedcore.lora.loader import AdapterLoader
from pagedcore.lora.registry import AdapterRegistry, ReadAdapter
from pagedcore.outputs import AdapterInfo
from pagedcore.protocols import TakesAdapters
from pagedcore.requests.request_table import RequestTable
from pagedcore.scheduler.adapter_slots import AdapterSlots

if TYPE_CHECKING:
    from pagedcore.engine.step import StepRunner
    from pagedcore.errors import AdapterFailed
    from pagedcore.protocols import ModelBackend
    from pagedcore.requests.output_processor import OutputProcessor
    from pagedcore.scheduler.scheduler import Scheduler

_MEMORY_SHARE: Final = 0.1
_DEFAULT_SLOTS: Final = 8


class LoadsAdapters:
    """The part of an ``Engine`` that knows adapters."""

    requests: RequestTable
    adapter_registry: AdapterRegistry
    _steps: StepRunner

    def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> AdapterInfo:
        """Read a LoRA adapter, and let ``lora=name`` stand for it from now on.

        A name that stands for another adapter already stands for this one afterwards; requests, and sessions, that were
        accepted before keep theirs. For operators: whoever may call this decides which files are read.

        Args:
            name: of 1 to 64 letters, digits, and ``_``, ``-``, ``.`` behind the first of them.
            directory: in PEFT's format.

        Raises:
            InvalidAdapter: the directory has no adapter that this model can take, it is larger than ``adapter_memory``,
                or as many names are known as may be; ``InvalidRequest``: the name is none.
            AdaptersBusy: as many adapters are being read as may be at a time.
            EngineInUse: another thread is in a call of this engine. EngineClosed: after ``close()``.
        """
        self._require_open()
        return self.add_adapter(self.adapter_registry.read(name, directory))

    def add_adapter(self, read: ReadAdapter) -> AdapterInfo:
        """Take what ``adapter_registry.read`` has read on any thread; the rest of ``load_adapter``."""
        self._require_open()
        with self._steps.change():
            known = self.adapter_registry.add(read)
            self.adapter_registry.place(known, read.adapter)
        return next(one for one in self.adapters() if one.name == read.name)

    def unload_adapter(self, name: str) -> None:
        """Forget a name; requests, and sessions, that were accepted with it keep its adapter until they are removed.

        Raises ``UnknownAdapter`` if no adapter is loaded under it, ``EngineInUse``, ``EngineClosed``.
        """
        self._require_open()
        with self._steps.change():
            self.adapter_registry.remove(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Describe the adapters that requests may name, in the order in which they were loaded first."""
        return self.adapter_registry.described(self.requests.num_by_adapter)

    def identity_of(self, lora: str | None) -> str:
        """Return ``identity`` for requests with this adapter: equal where the same one is loaded, whatever its name.

        Raises ``UnknownAdapter``.
        """
        return self.adapter_registry.identity_of(self.identity, lora)

    @property
    @abstractmethod
    def identity(self) -> str:
        """As ``Engine`` has it."""

    @abstractmethod
    def _require_open(self) -> None:
        """As ``Engine`` has it."""


def make_loader(requests: RequestTable, scheduler: Scheduler, outputs: OutputProcessor) -> AdapterLoader | None:
    """Make what reads the adapters of an engine's requests; ``None``: it takes none."""
    registry = requests.adapters
    if registry.backend is None or not registry.slots.num_slots:
        return None

    def end_those_of(number: int, error: AdapterFailed) -> None:
        outputs.end_waiting([one for one in scheduler.waiting if one.adapter == number], error)

    loader = AdapterLoader(registry.backend, registry.slots, registry, requests.clock, end_those_of)
    registry.in_use, registry.take_out = lambda: set(requests.num_by_adapter), loader.take_out
    return loader


def num_slots_of(config: EngineConfig) -> int:
    """Return how many slots the settings ask for. Raises ``InvalidConfig`` where it is seen without a model that there
    can be none.
    """
    count = config.max_adapters
    num_slots = count if count is not None else _DEFAULT_SLOTS * bool(config.adapters)
    if not num_slots and config.adapters:
        raise InvalidConfig(f"max_adapters: got 0, allowed is 1 or more with {len(config.adapters)} adapters.")
    if num_slots and config.device.startswith("cuda"):
        raise InvalidConfig(f"max_adapters: got {num_slots}, allowed is 0 on a GPU. Adapters run with device='cpu'.")
    return num_slots


def make_slots(backend: ModelBackend, config: EngineConfig, undo: ExitStack) -> AdapterSlots:
    """Make the slots that the settings ask for, before the KV pool is allocated; ``undo`` gives their memory back.

    Raises:
        InvalidConfig: the model takes no adapters, or the setting of their memory is none.
        MemoryBudgetExceeded: the budget has not that much left.
    """
    if not (num_slots := num_slots_of(config)):
        return AdapterSlots()
    if reason := why_no_adapters(backend):
        raise InvalidConfig(f"max_adapters: got {num_slots}, allowed is 0 with this model: {reason}.")
    num_bytes = parse_memory(
        config.adapter_memory if config.adapter_memory is not None else _MEMORY_SHARE,
        free_bytes=free_memory_bytes(), what="adapter_memory")
    assert num_bytes is not None  # Invariant: None was given to nobody
    source = config.kv_cache_memory
    if isinstance(source, MemoryBudget | BudgetShare):
        budget = source if isinstance(source, MemoryBudget) else source.budget
        undo.callback(budget.draw(num_bytes).close)
    assert isinstance(backend, TakesAdapters)  # Invariant: why_no_adapters
    backend.use_adapters(num_slots, MAX_ADAPTER_RANK)
    return AdapterSlots(num_slots, num_bytes)


def empty_slots(slots: AdapterSlots, backend: ModelBackend) -> None:
    """Let a model forget its adapters: it may be the caller's own, and make the next engine."""
    if isinstance(backend, TakesAdapters):
        for number in list(slots.slot_of):
            backend.drop_adapter(slots.take_out(number))


def why_no_adapters(backend: ModelBackend) -> str:
    """Return why a model takes no adapters; empty if it does."""
    return backend.why_no_adapters if isinstance(backend, TakesAdapters) else "its backend does not know any"


def load_first(registry: AdapterRegistry, config: EngineConfig) -> None:
    """Load the adapters that the settings name. Raises ``InvalidConfig`` for one that cannot be loaded."""
    for name, directory in config.adapters.items():
        try:
            read = registry.read(name, directory)
        except InvalidAdapter as error:
            raise InvalidConfig(f"adapters, {name}: {error}") from error
        registry.place(registry.add(read), read.adapter)

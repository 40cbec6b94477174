"""Brings adapters into the slots of a model: files are read on threads, and slots change between two steps.

Owns the reads that are under way and what becomes of those that fail; ``scheduler/adapter_slots`` decides which
adapters come and which leave.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pagedcore.config.limits import MAX_ADAPTER_LOAD_S, MAX_LOADING_ADAPTERS
from pagedcore.errors import AdapterFailed, InvalidAdapter
from pagedcore.lora.registry import AdapterRegistry, LoadedAdapter
from pagedcore.protocols import Clock, TakesAdapters
from pagedcore.scheduler.adapter_slots import AdapterMoves, AdapterSlots

_log = logging.getLogger("pagedcore")
_WAIT_S: Final = 0.05
"""The longest that an engine without other work waits for a read before it looks around."""


@dataclass(eq=False, slots=True)
class _Read:
    """One read that is under way, or has ended."""

    adapter: LoadedAdapter
    started_s: float
    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False, repr=False)
class AdapterLoader:
    """The reads of one engine.

    Invariant: what the scheduler has as loading is being read, and ends as loaded or failed within
        ``MAX_ADAPTER_LOAD_S`` seconds.
    """

    backend: TakesAdapters
    slots: AdapterSlots
    registry: AdapterRegistry
    clock: Clock
    on_failed: Callable[[int, AdapterFailed], None]
    """Called with the number of an adapter that could not be read."""
    num_loads: int = field(default=0, init=False)
    num_failures: int = field(default=0, init=False)
    _reads: dict[int, _Read] = field(default_factory=dict, init=False)
    _ended: deque[_Read] = field(default_factory=deque, init=False)
    _bell: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _process_id: int = field(default_factory=os.getpid, init=False)

    def move_adapters(self, moves: AdapterMoves) -> None:
        """Empty slots, and begin to read what comes into them, as far as reads that hang leave threads for it."""
        self._threads = [one for one in self._threads if one.is_alive()]
        wanted = moves.load[: max(0, MAX_LOADING_ADAPTERS - len(self._threads))]
        for number in moves.take_out if wanted else ():
            self.take_out(number, self.slots.take_out(number))
        for number in wanted:
            self.slots.begin_load(number)
            self._begin(number)

    def take_out(self, number: int, slot: int) -> None:
        """Let the model forget what is in a slot."""
        self._reads.pop(number, None)
        self.backend.drop_adapter(slot)

    def settle(self, *, wait: bool = False) -> None:
        """Put what was read into its slot, and end what failed; ``wait``: wait a moment for a read to end."""
        if not self._reads:
            return
        if os.getpid() != self._process_id:
            # Why: a fork has none of the threads.
            self._process_id, self._bell, self._threads = os.getpid(), threading.Event(), []
            for number in list(self._reads):
                self._begin(number)
        if wait and not self._ended:
            self._bell.wait(_WAIT_S)
        self._bell.clear()
        while self._ended:
            read = self._ended.popleft()
            if self._reads.get(read.adapter.number) is read:
                self._end(read)
        late_s = self.clock.now() - MAX_ADAPTER_LOAD_S
        for read in [one for one in self._reads.values() if one.started_s < late_s]:
            read.error = TimeoutError(f"it was not read within {MAX_ADAPTER_LOAD_S:g} seconds")
            self._end(read)

    def statistics(self) -> dict[str, int]:
        """Return its part of ``EngineStats``, by field."""
        return {"num_adapters": len(self.registry.names), "num_adapters_in_slots": len(self.slots.slot_of),
                "adapter_bytes": self.slots.num_held_bytes, "num_adapter_loads": self.num_loads,
                "num_adapter_failures": self.num_failures}

    def _begin(self, number: int) -> None:
        read = self._reads[number] = _Read(self.registry.by_number(number), self.clock.now())
        thread = threading.Thread(target=self._run, args=(read,), name="pagedcore-adapter", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, read: _Read) -> None:
        try:
            found = self.backend.read_adapter(str(read.adapter.directory))
            if (found.digest, found.num_bytes) != (read.adapter.digest, read.adapter.num_bytes):
                raise InvalidAdapter("files", "other contents", "those with which it was loaded", "Load it again.",
                                     is_described=True)
            read.result = found
        except BaseException as error:  # of whatever kind: its requests get it
            read.error = error
        self._ended.append(read)
        self._bell.set()

    def _end(self, read: _Read) -> None:
        number = read.adapter.number
        del self._reads[number]
        slot = self.slots.loading.get(number)
        if slot is None:
            return
        try:
            if read.error is not None:
                raise read.error
            self.backend.put_adapter(slot, read.result)
        except BaseException as error:  # the backend may be the user's own
            self._fail(read, error)
            return
        self.num_loads += 1
        self.slots.end_load(number, True, self.clock.now() - read.started_s)

    def _fail(self, read: _Read, error: BaseException) -> None:
        number = read.adapter.number
        self.num_failures += 1
        self.slots.end_load(number, False)
        _log.warning("adapter %s: it could not be read when it was needed (%s); the requests that wait for it end",
                     read.adapter.digest.hex()[:16], type(error).__name__)
        failed = AdapterFailed(f"the adapter of this request could not be read: {type(error).__name__}")
        failed.__cause__ = error
        self.on_failed(number, failed)

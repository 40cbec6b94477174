"""The adapters of one engine by name: read, numbered, replaced, and forgotten when nobody has them any more.

Names are looked up on any thread; everything else but ``read`` happens on the engine's. What brings an adapter into a
slot of the model is ``loader``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from pagedcore.config.field_rules import ADAPTER_NAME
from pagedcore.config.limits import MAX_ADAPTERS, MAX_LOADING_ADAPTERS
from pagedcore.errors import AdaptersBusy, InvalidAdapter, UnknownAdapter
from pagedcore.outputs import AdapterInfo
from pagedcore.protocols import Adapter, TakesAdapters
from pagedcore.scheduler.adapter_slots import AdapterSlots

_WITHOUT: Final = "Build the engine with adapters={name: directory}, or with max_adapters=8 to load some later."


@dataclass(eq=False, slots=True)
class LoadedAdapter:
    """An adapter that some name stands for, or that some request has still; told apart by its contents."""

    number: int
    """As the scheduler knows it."""
    digest: bytes
    num_bytes: int
    rank: int
    directory: Path
    """Where it was read last, and is read again."""


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and checked for a name, and that no engine knows yet."""

    name: str
    directory: Path
    adapter: Adapter


@dataclass(eq=False, repr=False)
class AdapterRegistry:
    """The names of one engine.

    Invariant: adapters with equal contents are one, whatever their names and directories.
    Invariant: an adapter is known to the scheduler as long as a name stands for it or a request has it.
    """

    backend: TakesAdapters | None
    slots: AdapterSlots
    in_use: Callable[[], set[int]] = set
    """Returns the numbers of the adapters of all requests that were not removed; for the engine to set."""
    take_out: Callable[[int, int], None] = lambda number, slot: None
    """Called with the number and slot of an adapter that is forgotten; for the engine to set."""
    _names: Mapping[str, LoadedAdapter] = field(default_factory=dict, init=False)
    """Replaced as a whole, because other threads read it."""
    _known: dict[bytes, LoadedAdapter] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), init=False)
    _reads: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(MAX_LOADING_ADAPTERS), init=False)
    _process_id: int = field(default_factory=os.getpid, init=False)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """Return what a request's ``lora`` stands for now. Raises ``UnknownAdapter``."""
        if name is None:
            return None
        if (found := self._names.get(name)) is None:
            raise UnknownAdapter.named(name)
        return found

    def identity_of(self, identity: str, name: str | None) -> str:
        """Return an engine's ``identity`` for requests whose ``lora`` is this name. Raises ``UnknownAdapter``."""
        found = self.find(name)
        return identity if found is None else f"{identity}-{found.digest.hex()}"

    def name_of(self, digest: bytes) -> str | None:
        """Return a name that stands for an adapter with these contents, if one does."""
        return next((name for name, one in self._names.items() if one.digest == digest), None)

    def by_number(self, number: int) -> LoadedAdapter:
        """Return a known adapter by its number."""
        return next(one for one in self._known.values() if one.number == number)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were given first; callable from any thread."""
        return tuple(self._names)

    def described(self, num_requests: Mapping[int, int]) -> tuple[AdapterInfo, ...]:
        """Describe what each name stands for; ``num_requests`` is by number."""
        slots = self.slots.slot_of
        return tuple(
            AdapterInfo(name, one.digest.hex(), one.num_bytes, one.rank, one.number in slots,
                        num_requests.get(one.number, 0))
            for name, one in self._names.items()
        )

    def read(self, name: str, directory: str | os.PathLike[str]) -> ReadAdapter:
        """Read and check an adapter; nothing is kept of one that is refused. Callable from any thread.

        Raises:
            InvalidAdapter: the engine or the model takes none, the directory has none that it can take, it is larger
                than ``adapter_memory``, or as many names are known as may be.
            InvalidRequest: the name is not 1 to 64 letters, digits, and ``_``, ``-``, ``.`` behind the first.
            AdaptersBusy: as many adapters are being read as may be at a time.
        """
        ADAPTER_NAME.check("name", name)
        backend = self.backend
        if backend is None or not self.slots.num_slots:
            raise InvalidAdapter("max_adapters", 0, "1 or more", _WITHOUT)
        if name not in self._names and len(self._names) >= MAX_ADAPTERS:
            raise InvalidAdapter("names", len(self._names), f"at most {MAX_ADAPTERS}", "Unload one first.")
        place = _directory(directory)
        with self._reading():
            try:
                num_bytes = backend.adapter_bytes(str(place))
                if num_bytes > self.slots.num_bytes:
                    raise InvalidAdapter("bytes", num_bytes, f"up to adapter_memory ({self.slots.num_bytes} bytes)")
                return ReadAdapter(name, place, backend.read_adapter(str(place)))
            except OSError as error:
                raise InvalidAdapter("files", type(error), "ones that can be read") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if os.getpid() != self._process_id:
            # Why: a fork has none of the threads that read in its parent, and they would never end here.
            self._process_id, self._reads = os.getpid(), threading.BoundedSemaphore(MAX_LOADING_ADAPTERS)
        reads = self._reads
        if not reads.acquire(blocking=False):
            raise AdaptersBusy(f"{MAX_LOADING_ADAPTERS} are being read, which is the limit. Retry later")
        try:
            yield
        finally:
            reads.release()

    def add(self, read: ReadAdapter) -> LoadedAdapter:
        """Let a name stand for an adapter from now on; requests that have another one of that name keep it."""
        adapter = read.adapter
        known = self._known.get(adapter.digest)
        if known is None:
            number = next(self._numbers)
            known = LoadedAdapter(number, adapter.digest, adapter.num_bytes, adapter.max_rank, read.directory)
            self.slots.add_adapter(number, adapter.num_bytes)
            self._known[adapter.digest] = known
        known.directory = read.directory
        self._names = {**self._names, read.name: known}
        self.forget_unused()
        return known

    def place(self, known: LoadedAdapter, adapter: Adapter) -> None:
        """Put an adapter that was just read into a slot, if there is room without another one leaving."""
        number, slots = known.number, self.slots
        if self.backend is None or number in {*slots.slot_of, *slots.loading} or not slots.has_room(known.num_bytes):
            return
        slot, is_there = slots.begin_load(number), False
        try:
            self.backend.put_adapter(slot, adapter)
            is_there = True
        finally:
            slots.end_load(number, is_there)

    def remove(self, name: str) -> None:
        """Forget a name; requests that have its adapter keep it. Raises ``UnknownAdapter``."""
        if name not in self._names:
            raise UnknownAdapter.named(name)
        self._names = {other: one for other, one in self._names.items() if other != name}
        self.forget_unused()

    def forget_unused(self) -> None:
        """Forget what no name stands for and no request has; pin what has no name, and requests."""
        named = {one.number for one in self._names.values()}
        if len(named) == len(self._known):
            return
        in_use = self.in_use()
        for one in [one for one in self._known.values() if one.number not in named]:
            if one.number in in_use:
                # Why: its files may be gone, or another version's.
                self.slots.pin_adapter(one.number)
                continue
            del self._known[one.digest]
            if (slot := self.slots.remove_adapter(one.number)) is not None:
                self.take_out(one.number, slot)


def _directory(given: str | os.PathLike[str]) -> Path:
    named = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(named, str):
        raise InvalidAdapter("directory", given, "the path of a directory")
    # Why not the method of a path: it raises for a name that is too long, and for a directory that may not be read.
    if not os.path.isdir(named):
        raise InvalidAdapter("directory", named, "an existing directory with adapter_config.json")
    return Path(named).absolute()

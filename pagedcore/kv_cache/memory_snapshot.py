"""One memory's block bookkeeping as plain values, which the state laws are checked on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Known(NamedTuple):
    """The registered contents of one block; see ``Content``."""

    block_id: int
    parent_key: bytes
    token_ids: tuple[int, ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The blocks of one kind at one moment."""

    free_blocks: tuple[int, ...]
    idle_blocks: frozenset[int]
    reference_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemorySnapshot(PoolSnapshot):
    """One pool and its prefix cache at one moment."""

    holders: Mapping[int, int]
    """How often each block is in a table, a transfer, a pin or the sources of a copy."""
    registered: Mapping[bytes, Known]
    """Blocks of known contents, by key."""


class KnownState(NamedTuple):
    """A state that can be found; see ``KeptState``."""

    state_id: int
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateSnapshot(PoolSnapshot):
    """The state blocks of one memory at one moment."""

    current: Mapping[int, int]
    """The state of each sequence, by its id; on the host, of those that it is pinned for."""
    written: Mapping[int, int]
    """What rows in flight write, by the ids of their sequences."""
    kept: Mapping[bytes, KnownState]
    """What can be found, by the keys of KV blocks."""
    moving: Mapping[int, int]
    """How often each block is part of a transfer."""


@dataclass(frozen=True, slots=True)
class WindowSnapshot(PoolSnapshot):
    """The window blocks of the device at one moment."""

    holders: Mapping[int, int]
    """How often each is held by a sequence, or by a copy that reads it."""
    kept: Mapping[int, int]
    """The blocks that idle ones stay with."""
    of_block: tuple[int, ...]
    """The window block of each block, -1 for none."""
    window: int
    """Positions that layers with a window read."""
    passed: Mapping[int, int]
    """Leading blocks of sequences that hold no window block any more, by sequence id."""


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """The whole KV cache at one moment."""

    block_size: int
    device: MemorySnapshot
    host: MemorySnapshot | None
    tables: Mapping[int, tuple[int, ...]]
    pins: Mapping[int, tuple[int, ...]]
    """Host blocks kept for sequences."""
    states: StateSnapshot | None = None
    """``None``: the model keeps none."""
    host_states: StateSnapshot | None = None
    windows: WindowSnapshot | None = None
    """``None``: no layer gives up what has left its window."""

"""Blocks on their way between two memories: who owns them meanwhile, and what happens when they have arrived.

A transfer holds a reference to every block it reads and every block it writes, so nothing it touches can be given to
anybody else before it has completed, late or failed, whatever became of the sequence it was made for. One that takes
too long is given up: it keeps what it may still write to until it ends, and nothing that comes of it is believed.
Source: the state machine of vLLM's KV offloading and the race reports about it (prepare, complete, publish).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pagedcore.kv_cache.prefix_cache import Content


class Direction(Enum):
    """Which way the bytes go."""

    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block to copy, and what it holds."""

    source: int
    destination: int
    content: Content


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of whole blocks that start together and complete together.

    Invariant: every block in it carries one reference of the transfer until ``HostCache.complete``.
    """

    transfer_id: int
    direction: Direction
    sequence_id: int
    moves: tuple[BlockMove, ...]
    device_blocks: tuple[int, ...]
    """All device blocks the transfer holds, in the order of the sequence's positions."""
    host_blocks: tuple[int, ...]
    """All host blocks the transfer holds."""
    num_tokens: int
    """Positions of the sequence that are complete when the transfer is."""
    is_pinned: bool = False
    """Of an outgoing transfer: whether the host keeps the blocks for the sequence until it takes them back."""

    @property
    def written_blocks(self) -> tuple[int, ...]:
        """The blocks that it writes to, in the memory that it goes to."""
        return tuple(move.destination for move in self.moves)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every copy."""
        return tuple((move.source, move.destination) for move in self.moves)

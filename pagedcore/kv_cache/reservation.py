"""Blocks taken for one step: what was asked for, what was taken, and how it is kept or given back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch

if TYPE_CHECKING:
    from pagedcore.kv_cache.block_manager import BlockManager


@dataclass(frozen=True, slots=True)
class Demand:
    """How many positions a sequence wants to have blocks for, and what it need not compute."""

    sequence_id: int
    num_tokens: int
    match: PrefixMatch = NO_MATCH
    """Only for a sequence without blocks; nothing of it is on the host."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What one table had before the step."""

    sequence_id: int
    table: BlockTable
    num_blocks_before: int


class _State(Enum):
    OPEN = auto()
    COMMITTED = auto()
    CANCELLED = auto()


class Reservation:
    """Blocks taken for one step: kept by ``commit``, given back by ``cancel``.

    Invariant: it closes once; closing it again the same way does nothing, the other way is an ``InternalError``.
    Invariant: blocks of a sequence that was freed meanwhile are not its business any more.
    """

    __slots__ = ("_growths", "_manager", "_state", "copies")

    def __init__(self, manager: BlockManager, growths: list[Growth], copies: tuple[tuple[int, int], ...]) -> None:
        self._manager = manager
        self._growths = growths
        self._state = _State.OPEN
        self.copies = copies
        """(source, destination) blocks to copy before the step computes; the sources are held until it is closed."""

    def commit(self) -> None:
        """Keep the blocks.

        Raises:
            InternalError: the reservation was cancelled.
        """
        if self._close(_State.COMMITTED):
            self._manager.release_sources(self.copies)

    def cancel(self) -> None:
        """Take the blocks out of the tables again and give them up, last first.

        Raises:
            InternalError: the reservation was committed.
        """
        if self._close(_State.CANCELLED):
            for growth in reversed(self._growths):
                self._manager.undo_growth(growth)
            self._manager.release_sources(self.copies)

    def _close(self, state: _State) -> bool:
        if self._state not in (_State.OPEN, state):
            raise InternalError(f"reservation: {self._state.name.lower()} before it was {state.name.lower()}")
        was_open, self._state = self._state is _State.OPEN, state
        return was_open

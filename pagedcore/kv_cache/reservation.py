"""Blocks reserved for one step: what was asked for, how the tables grew, and how the growth is kept or undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from pagedcore.errors import InternalError
from pagedcore.kv_cache.block_table import BlockTable
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch

Copies = tuple[tuple[int, int], ...]
"""(source, destination) of device blocks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The positions that a sequence needs blocks for, and the prefix that it need not compute."""

    sequence_id: int
    num_tokens: int
    match: PrefixMatch = NO_MATCH
    """Only for a sequence without blocks; it has no host blocks."""


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
    """Blocks of one step: kept by ``commit``, freed by ``cancel``.

    Invariant: it closes once; closing it again the same way does nothing, the other way is an ``InternalError``.
    Invariant: blocks of a sequence that was freed in between are left alone.
    """

    __slots__ = ("_free_sources", "_growths", "_state", "_undo_growth", "copies")

    def __init__(
        self, growths: list[Growth], copies: Copies, undo_growth: Callable[[Growth], None],
        free_sources: Callable[[Copies], None],
    ) -> None:
        """Take note of what was reserved.

        Args:
            growths: the tables that have grown.
            copies: blocks to copy before the step computes; their sources are held until the reservation is closed.
            undo_growth: shortens a table to what it was.
            free_sources: frees the references to the sources.
        """
        self._growths = growths
        self._undo_growth = undo_growth
        self._free_sources = free_sources
        self._state = _State.OPEN
        self.copies = copies

    def commit(self) -> None:
        """Keep the blocks.

        Raises:
            InternalError: the reservation was cancelled.
        """
        if self._close(_State.COMMITTED):
            self._free_sources(self.copies)

    def cancel(self) -> None:
        """Take the blocks out of the tables and free them, last first.

        Raises:
            InternalError: the reservation was committed.
        """
        if self._close(_State.CANCELLED):
            for growth in reversed(self._growths):
                self._undo_growth(growth)
            self._free_sources(self.copies)

    def _close(self, state: _State) -> bool:
        if self._state not in (_State.OPEN, state):
            raise InternalError(f"reservation: {self._state.name.lower()} before it was {state.name.lower()}")
        was_open, self._state = self._state is _State.OPEN, state
        return was_open

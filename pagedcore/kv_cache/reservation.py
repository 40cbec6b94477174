"""Blocks reserved for one step: what was asked for, and how it is kept or undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedcore.errors import InternalError
from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch


@dataclass(frozen=True, slots=True)
class Demand:
    """The positions that a sequence needs blocks for, and the prefix that it need not compute."""

    sequence_id: int
    num_tokens: int
    match: PrefixMatch = NO_MATCH
    """Only for a sequence without blocks; it has no host blocks."""
    keeps_state: bool = False
    """Whether the state behind these positions is to be found by others, where the model keeps states."""
    unsettled_from: int | None = None
    """Where the positions begin, if the last ones are of drafts: they may be taken back."""


@dataclass(slots=True)
class Reservation:
    """Blocks of one step: kept by ``commit``, freed by ``cancel``.

    Invariant: it closes once; closing it again the same way does nothing.
    Invariant: blocks of a sequence that was freed in between are left alone.
    """

    copies: tuple[tuple[int, int], ...]
    """(source, destination) of device blocks to copy before the step computes; the sources are held until it closes."""
    _keep: Callable[[], None]
    _undo: Callable[[], None]
    _state: str = "open"

    def commit(self) -> None:
        """Keep the blocks. Raises ``InternalError`` if the reservation was cancelled."""
        if self._close("committed"):
            self._keep()

    def cancel(self) -> None:
        """Take the blocks out of the tables and free them, last first. Raises ``InternalError`` if it was committed."""
        if self._close("cancelled"):
            self._undo()

    def also(self, keep: Callable[[], None], undo: Callable[[], None]) -> Reservation:
        """Return this one with more to keep, or to undo first."""
        def undo_all() -> None:
            undo()
            self.cancel()

        def keep_all() -> None:
            self.commit()
            keep()

        return Reservation(self.copies, keep_all, undo_all)

    def _close(self, state: str) -> bool:
        if self._state not in ("open", state):
            raise InternalError(f"reservation: {self._state} before it was {state}")
        was_open, self._state = self._state == "open", state
        return was_open

"""Sequences in policy order, and the bounded queue of those that wait.

Refuses when full and never drops; what was accepted once is never refused again. Read ``planner`` next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pagedcore.errors import EngineOverloaded, InternalError
from pagedcore.sequence import Sequence

OrderKey = Callable[[Sequence], Any]


class PolicyOrder:
    """A set of sequences, always sorted by a policy's key.

    Invariant: sorted by (key, sequence id), so that the order is total and the same in every run.
    """

    __slots__ = ("_key", "_keys", "sequences")

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._keys: list[tuple[Any, int]] = []
        self.sequences: list[Sequence] = []
        """In order; not for changing."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._find(sequence) is not None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place.

        Raises:
            InternalError: it is there already.
        """
        key = (self._key(sequence), sequence.sequence_id)
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            raise InternalError(f"sequence {sequence.sequence_id} is already in this queue")
        self._keys.insert(place, key)
        self.sequences.insert(place, sequence)

    def discard(self, sequence: Sequence) -> bool:
        """Take a sequence out, and say whether it was there."""
        place = self._find(sequence)
        if place is None:
            return False
        del self._keys[place], self.sequences[place]
        return True

    def _find(self, sequence: Sequence) -> int | None:
        place = bisect_left(self._keys, (self._key(sequence), sequence.sequence_id))
        is_there = place < len(self.sequences) and self.sequences[place] is sequence
        return place if is_there else None


class WaitingQueue(PolicyOrder):
    """The sequences that wait: newcomers up to a bound, preempted ones always.

    Invariant: ``num_initial_sequences`` <= ``limit``.
    """

    __slots__ = ("_newcomers", "limit")

    def __init__(self, key: OrderKey, limit: int) -> None:
        super().__init__(key)
        self.limit = limit
        self._newcomers: set[int] = set()

    @property
    def num_initial_sequences(self) -> int:
        """Sequences that count against the bound: those that have not been started since they were pushed."""
        return len(self._newcomers)

    @property
    def num_free_slots(self) -> int:
        """Newcomers that can be pushed now."""
        return self.limit - self.num_initial_sequences

    def require_room(self, num_sequences: int) -> None:
        """Check that so many newcomers can be pushed now.

        Raises:
            EngineOverloaded: they cannot; nothing changed.
        """
        if self.num_initial_sequences + num_sequences > self.limit:
            raise EngineOverloaded(self.num_initial_sequences, self.limit)

    def push(self, sequence: Sequence) -> None:
        """Accept a newcomer. Raises as ``push_all``."""
        self.push_all((sequence,))

    def push_all(self, sequences: Collection[Sequence]) -> None:
        """Accept newcomers, or none of them.

        Raises:
            EngineOverloaded: the queue has no room for all; nothing changed.
        """
        self.require_room(len(sequences))
        for sequence in sequences:
            self.add(sequence)
            self._newcomers.add(sequence.sequence_id)

    def push_preempted(self, sequence: Sequence) -> None:
        """Take back a sequence that was running: never refused, and not counted against the bound."""
        self.add(sequence)

    def discard(self, sequence: Sequence) -> bool:
        """Take a sequence out, and say whether it was there."""
        self._newcomers.discard(sequence.sequence_id)
        return super().discard(sequence)

    def newcomers(self) -> Iterator[Sequence]:
        """Iterate in order over the sequences that have not been started since they were pushed."""
        return (sequence for sequence in self if sequence.sequence_id in self._newcomers)

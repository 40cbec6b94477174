"""Sequences in policy order, and the bounded queue of those that wait.

A full queue refuses new sequences; an accepted one stays until it is removed, also after a preemption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from pagedcore.errors import EngineOverloaded, InternalError
from pagedcore.sequence import Sequence

OrderKey = Callable[[Sequence], Any]


class PolicyOrder:
    """A set of sequences, always sorted by a policy's key.

    Invariant: sorted by (key, sequence id), so that the order is total and the same in every run.
    """

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

    def add_sequence(self, sequence: Sequence) -> None:
        """Insert a sequence in order. Raises ``InternalError`` if it is in it already."""
        key = (self._key(sequence), sequence.sequence_id)
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            raise InternalError(f"sequence {sequence.sequence_id} is already in this queue")
        self._keys.insert(place, key)
        self.sequences.insert(place, sequence)

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it was in it."""
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
    """The waiting sequences: new ones up to a bound, preempted ones always.

    Invariant: ``num_never_started`` <= ``limit``.
    """

    def __init__(self, key: OrderKey, limit: int) -> None:
        super().__init__(key)
        self.limit = limit
        self._never_started: set[int] = set()

    @property
    def num_never_started(self) -> int:
        """Sequences that count against the bound: those that were not started since they were pushed."""
        return len(self._never_started)

    @property
    def num_free_slots(self) -> int:
        """New sequences that can be pushed now."""
        return self.limit - self.num_never_started

    def require_room(self, num_sequences: int) -> None:
        """Raise ``EngineOverloaded`` unless so many new sequences can be pushed now."""
        if self.num_never_started + num_sequences > self.limit:
            raise EngineOverloaded(self.num_never_started, self.limit)

    def push(self, *sequences: Sequence) -> None:
        """Accept new sequences, or none of them. Raises ``EngineOverloaded`` if the queue has no room for all."""
        self.require_room(len(sequences))
        for sequence in sequences:
            self.add_sequence(sequence)
            self._never_started.add(sequence.sequence_id)

    def push_preempted(self, sequence: Sequence) -> None:
        """Take back a sequence that was accepted before: never refused, and not counted against the bound."""
        self.add_sequence(sequence)

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it was in it."""
        self._never_started.discard(sequence.sequence_id)
        return super().remove_sequence(sequence)

    def never_started(self) -> tuple[Sequence, ...]:
        """Return in order the sequences that were not started since they were pushed."""
        return tuple(sequence for sequence in self if sequence.sequence_id in self._never_started)

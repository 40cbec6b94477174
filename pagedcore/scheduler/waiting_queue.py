"""Sequences in policy order, and the bounded queue of those that wait.

A full queue refuses new sequences; an accepted one stays until it is removed, also after a preemption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from operator import attrgetter, itemgetter, lt
from typing import Any, Final

from pagedcore.errors import EngineOverloaded, InternalError
from pagedcore.sequence import Sequence

OrderKey = Callable[[Sequence], Any]
BY_ARRIVAL: Final = attrgetter("arrival")


class PolicyOrder:
    """A set of sequences, always sorted by a policy's key, or by arrival once the key has failed.

    Invariant: sorted by (key, sequence id), so that the order is total and the same in every run.
    Invariant: the key is asked for when a sequence is added, and by ``reorder``; removing one never fails.
    """

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._keys: list[tuple[Any, int]] = []
        self._key_of: dict[int, tuple[Any, int]] = {}
        self.failure: Exception | None = None
        """Why the order is by arrival, if the policy's key raised, or gave values that cannot be ordered."""
        self.sequences: list[Sequence] = []
        """In order; not for changing."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence.sequence_id in self._key_of

    def add_sequence(self, sequence: Sequence) -> None:
        """Insert a sequence in order. Raises ``InternalError`` if it is in it already."""
        if sequence in self:
            raise InternalError(f"sequence {sequence.sequence_id} is already in this queue")
        try:
            self._insert(sequence)
        except MemoryError:  # the machine's fault, not the policy's
            raise
        except Exception as error:  # the policy may be the user's own, and the request is not to blame
            self.demote(error)
            self._insert(sequence)

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it was in it."""
        if sequence not in self:
            return False
        place = self._place_of(sequence)
        del self._keys[place], self.sequences[place], self._key_of[sequence.sequence_id]
        return True

    def reorder(self) -> None:
        """Ask for every key again, once each, because they may have changed."""
        key = self._key
        try:
            keyed = sorted([((key(one), one.sequence_id), one) for one in self.sequences], key=itemgetter(0))
            keys = [one for one, _ in keyed]
            if not all(map(lt, keys, islice(keys, 1, None))):
                raise ValueError("keys that cannot be ordered")
        except MemoryError:
            raise
        except Exception as error:  # as in add_sequence
            self.demote(error)
            return
        self._keys, self.sequences = keys, [one for _, one in keyed]
        self._key_of = {one[1]: one for one in keys}

    def reset(self, *sequences: Sequence) -> None:
        """Hold exactly these sequences, in whatever state the queue is."""
        self._keys, self._key_of, self.sequences = [], {}, []
        for sequence in sequences:
            self.add_sequence(sequence)

    def place_for(self, sequence: Sequence) -> int:
        """Return the index that a sequence would have that is not in the queue; the last one, if its key fails."""
        try:
            return bisect_left(self._keys, (self._key(sequence), sequence.sequence_id))
        except MemoryError:
            raise
        except Exception:  # as in add_sequence
            return len(self.sequences)

    def _place_of(self, sequence: Sequence) -> int:
        try:
            place = bisect_left(self._keys, self._key_of[sequence.sequence_id])
            if self.sequences[place] is sequence:
                return place
        except Exception:  # the policy's keys are the user's own
            pass
        return self.sequences.index(sequence)

    def demote(self, failure: Exception) -> None:
        """Order by arrival from now on."""
        self.failure, self._key = failure, BY_ARRIVAL
        self.sequences.sort(key=lambda one: (one.arrival, one.sequence_id))
        self._keys = [(one.arrival, one.sequence_id) for one in self.sequences]
        self._key_of = {key[1]: key for key in self._keys}

    def _insert(self, sequence: Sequence) -> None:
        key = (self._key(sequence), sequence.sequence_id)
        place = bisect_left(self._keys, key)
        # Why: NaN, and other values that are neither smaller nor larger, would be anywhere in the order.
        if not all(one < other for one, other in pairwise([*self._keys[max(0, place - 1) : place], key,
                                                           *self._keys[place : place + 1]])):
            raise ValueError("keys that cannot be ordered")
        self._keys.insert(place, key)
        self.sequences.insert(place, sequence)
        self._key_of[sequence.sequence_id] = key


class WaitingQueue(PolicyOrder):
    """The waiting sequences: new ones up to a bound, preempted ones always.

    Invariant: ``num_never_started`` <= ``limit``.
    Invariant: gated sequences wait, and were never started since they were pushed.
    """

    def __init__(self, key: OrderKey, limit: int, *, gates_new: bool = False) -> None:
        super().__init__(key)
        self.limit = limit
        self._gates_new = gates_new
        self.gated: set[int] = set()
        """Ids of new sequences that may not start before the gate opens; not for changing."""
        # Why ordered: the oldest is found in constant time, also after many before it were taken out.
        self._never_started: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def num_never_started(self) -> int:
        """Sequences that count against the bound: those that were not started since they were pushed."""
        return len(self._never_started)

    def is_never_started(self, sequence: Sequence) -> bool:
        """Whether a sequence waits and counts against the bound."""
        return sequence.sequence_id in self._never_started

    @property
    def num_free_slots(self) -> int:
        """New sequences that can be pushed now."""
        return self.limit - self.num_never_started

    def count_as_new(self, sequences: Iterable[Sequence]) -> None:
        """Count exactly these against the bound, as far as they wait."""
        oldest_first = sorted(sequences, key=BY_ARRIVAL)
        self._never_started = OrderedDict((one.sequence_id, one) for one in oldest_first if one in self)
        self.gated &= self._never_started.keys()

    def open_gate(self, *sequences: Sequence) -> None:
        """Let these gated sequences start, or all that wait now; what comes later waits for company of its own."""
        self.gated.difference_update([one.sequence_id for one in sequences] or tuple(self.gated))

    def startable(self) -> list[Sequence]:
        """Return the sequences that may start, in order; not for changing."""
        return [one for one in self.sequences if one.sequence_id not in self.gated]

    def require_room(self, num_sequences: int) -> None:
        """Raise ``EngineOverloaded`` unless so many new sequences can be pushed now."""
        if self.num_never_started + num_sequences > self.limit:
            raise EngineOverloaded(self.num_never_started, self.limit)

    def push(self, *sequences: Sequence) -> None:
        """Accept new sequences, or none of them. Raises ``EngineOverloaded`` if the queue has no room for all."""
        self.require_room(len(sequences))
        for sequence in sequences:
            self.add_sequence(sequence)
            self._never_started[sequence.sequence_id] = sequence
            if self._gates_new:
                self.gated.add(sequence.sequence_id)

    def push_preempted(self, sequence: Sequence) -> None:
        """Take back a sequence that was accepted before: never refused, and not counted against the bound."""
        self.add_sequence(sequence)

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it was in it."""
        self._never_started.pop(sequence.sequence_id, None)
        self.gated.discard(sequence.sequence_id)
        return super().remove_sequence(sequence)

    def never_started(self) -> Iterator[Sequence]:
        """Yield the sequences that were not started since they were pushed, in the order of their pushes."""
        return iter(self._never_started.values())

    def snapshot(self) -> dict[str, Any]:
        """Copy which sequences wait, by id: all of them in order, the gated ones, those that were never started."""
        return {"waiting": [one.sequence_id for one in self], "gated": sorted(self.gated),
                "never_started": list(self._never_started)}

    def restore(self, state: Mapping[str, Any], sequences: Mapping[int, Sequence]) -> None:
        """Hold the sequences that waited when it was copied; their order is the policy's."""
        self.reset(*(sequences[number] for number in state["waiting"]))
        self._never_started = OrderedDict((number, sequences[number]) for number in state["never_started"])
        self.gated = set(state["gated"])

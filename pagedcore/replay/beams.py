"""Beam searches under other settings: each round chooses what it chose, whenever its last beam is computed.

What a beam is followed by does not depend on the company, so a search has the same rounds under any schedule. Which
beam ends a round, and so which goes on in place and which as a new sequence, is decided here as ``CandidateGroups``
does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pagedcore.errors import RecordingError
from pagedcore.recorder.state import ReplayedSequence
from pagedcore.sequence import SequenceStatus

if TYPE_CHECKING:
    from array import array

    from pagedcore.recorder.recording import Recording
    from pagedcore.replay.lives import Life, Place
    from pagedcore.scheduler.scheduler import Scheduler


class Round(NamedTuple):
    """What one round chose: the parent's place in the round, and the sequence that was recorded, of each next beam."""

    place: Place
    survivors: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Search:
    """One recorded beam search.

    Invariant: ``beams`` are its present ones, in its order; those that have finished wait for the others of the round.
    """

    beams: list[int]
    rounds: list[Round] = field(default_factory=list)
    """Those to come; with the last one it ends."""


def searches_of(recording: Recording) -> list[Search]:
    """Return the searches of a recording, each as it is first seen.

    Raises ``RecordingError`` if a round chooses a beam of no parent, or one sequence twice.
    """
    found, current = list[Search](), dict[tuple[int, ...], Search]()
    for number, segment in enumerate(recording.segments):
        for beams, _ in segment["state"]["beams"]:
            if tuple(beams) not in current:
                found.append(current.setdefault(tuple(beams), Search(list(beams))))
        for place, (_, verb, given, _) in enumerate(segment["events"]):
            if verb != "beams":
                continue
            parents, survivors = tuple(given[0]), [(int(parent), int(beam)) for parent, beam in given[1]]
            numbers = [beam for _, beam in survivors]
            if not all(0 <= parent < len(parents) for parent, _ in survivors) or len({*numbers}) < len(numbers):
                raise RecordingError("a round of a beam search is not consistent in itself")
            if (search := current.pop(parents, None)) is None:
                found.append(search := Search(list(parents)))
            search.rounds.append(Round((number, place), survivors))
            current[tuple(numbers)] = search
    return found


class Searches:
    """The searches that are open from one place of a recording on.

    Args:
        recording: what was recorded.
        since: the place; rounds before it have been chosen.
        lives: by sequence, for the tokens that the recorded beams have.
    """

    def __init__(self, recording: Recording, since: Place, lives: Mapping[int, Life]) -> None:
        self._rows: dict[int, array[int]] = {number: life.row for number, life in lives.items()}
        self._new_numbers = count(1 + max(lives, default=0))
        self._of: dict[int, Search] = {}
        for search in searches_of(recording):
            for one in [one for one in search.rounds if one.place < since]:
                search.beams = [beam for _, beam in one.survivors]
                search.rounds.remove(one)
            if search.rounds:
                self._of.update(dict.fromkeys(search.beams, search))

    def find_search(self, number: int) -> Search | None:
        """Return the search of a sequence, if it is a beam of an open one."""
        return self._of.get(number)

    def drop(self, search: Search) -> None:
        """Forget a search; its sequences are no beams any more."""
        for number in search.beams:
            self._of.pop(number, None)

    def choose(
        self, search: Search, sampled: dict[int, int | None], sequences: dict[int, ReplayedSequence],
        scheduler: Scheduler,
    ) -> tuple[list[tuple[ReplayedSequence, ReplayedSequence]], list[int]]:
        """End a round if all its beams are computed, as ``CandidateGroups.choose_beams``.

        Args:
            search: one with a beam in the step.
            sampled: the step's tokens, with ``None`` for every beam; those that go on in place get theirs.
            sequences: by id; new beams are added.
            scheduler: whose step it is.

        Returns the new beams with their parents, to be added after the step, and the ids of beams that were cancelled.
        """
        branches, cancelled, chosen = list[tuple[ReplayedSequence, ReplayedSequence]](), list[int](), list[int]()
        parents = [sequences[number] for number in search.beams]
        if not all(one.sequence_id in sampled or one.status is SequenceStatus.FINISHED for one in parents):
            return branches, cancelled
        one = search.rounds.pop(0)
        if not search.rounds:
            return branches, cancelled
        for place, recorded in one.survivors:
            parent = parents[place]
            token_id = self._rows[recorded][len(parent.token_ids)]
            if sampled.get(parent.sequence_id, 0) is None:
                sampled[parent.sequence_id] = token_id
                chosen.append(parent.sequence_id)
            else:
                beam = parent.branch(next(self._new_numbers), seed=parent.seed)
                beam.token_ids.append(token_id)
                sequences[beam.sequence_id] = beam
                chosen.append(beam.sequence_id)
                branches.append((beam, parent))
        for parent in parents:
            if parent.sequence_id not in chosen:
                if parent.sequence_id in sampled:
                    scheduler.cancel_branch(parent)
                    cancelled.append(parent.sequence_id)
                scheduler.remove_sequence(parent)
        self.drop(search)
        search.beams = chosen
        self._of.update(dict.fromkeys(chosen, search))
        return branches, cancelled

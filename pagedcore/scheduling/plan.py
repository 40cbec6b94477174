"""What one step will do, as plain data: decided by the scheduler, carried out by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedcore.request import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` tokens of one sequence, from its first uncomputed position on."""

    sequence: Sequence
    num_tokens: int

    @property
    def start(self) -> int:
        """First position computed."""
        return self.sequence.num_computed_tokens

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.sequence.num_computed_tokens + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether this row reaches the last known token, so that a next one can be sampled."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One step: who runs with how many tokens, who loses its blocks for it.

    Invariant: the tokens of all rows together are within the token budget.
    Invariant: no sequence is both computed and preempted or released.
    """

    rows: tuple[ScheduledRow, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    """Running sequences that go back to waiting; their positions will be recomputed."""
    released: tuple[Sequence, ...] = ()
    """Finished sequences kept for ``extend`` whose blocks are needed by others."""
    admitted: tuple[Sequence, ...] = field(default=())
    """Waiting sequences that start running; they are also among the rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.rows

"""What one step will do and what came of it, as plain data: the scheduler decides, the engine carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore.outputs import FinishReason
from pagedcore.request import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` tokens of one sequence, from its first uncomputed position on.

    Invariant: the sequence stands still from planning to commit, so that all of this means the same throughout.
    """

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

    @property
    def is_decode(self) -> bool:
        """Whether this row computes one generated token, not a part of a prompt."""
        return self.num_tokens == 1 and self.sequence.num_computed_tokens >= self.sequence.num_prompt_tokens


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
    """Sequences that hold blocks without running (finished ones, or continued ones that wait) and lose them."""
    admitted: tuple[Sequence, ...] = ()
    """Waiting sequences that start running. They are also among the rows, except those a static batch has no
    tokens left for in its first step."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.rows


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token that a committed step appended to a sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None
    """How the token ended the turn, or ``None``."""

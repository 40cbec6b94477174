"""What one step will do and what came of it, as plain data: the scheduler decides, the engine carries it out."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Demand
from pagedcore.outputs import FinishReason
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` tokens of one sequence, from position ``start`` on."""

    sequence: Sequence
    start: int
    """First position computed."""
    num_tokens: int
    match: PrefixMatch = NO_MATCH
    """What a sequence without blocks shares or copies instead of computing it."""

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether this row reaches the last known token, so that a next one can be sampled."""
        return self.end == len(self.sequence.token_ids)

    @property
    def scored_positions(self) -> range:
        """Positions whose logits say how likely the prompt's next token was, of those that were not told yet."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return range(0)
        return range(max(self.start, len(sequence.prompt_logprobs)), min(self.end, sequence.num_prompt_tokens - 1))

    @property
    def is_decode(self) -> bool:
        """Whether this row computes one generated token, not a part of a prompt."""
        return self.num_tokens == 1 and self.start >= self.sequence.num_prompt_tokens

    @property
    def demand(self) -> Demand:
        """The blocks this row needs."""
        return Demand(self.sequence.sequence_id, self.end, self.match)


class PreemptionKind(Enum):
    """What becomes of the blocks of a preempted sequence."""

    SWAP = "swap"
    """They are copied to the host and come back from there."""
    SHRINK = "shrink"
    """As many as are needed are taken from its end; what others leave is found again."""
    RECOMPUTE = "recompute"
    """All are given up, and everything is computed again."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence that goes back to waiting."""

    sequence: Sequence
    kind: PreemptionKind
    estimated_s: float = 0.0
    """Seconds of work that the preemption is expected to cost."""
    num_left_tokens: int = 0
    """Positions that a shrunk sequence leaves to be found, by itself or by whoever needs the room."""


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A waiting sequence whose beginning is loaded from the host before it starts."""

    sequence: Sequence
    match: PrefixMatch


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One step: who runs with how many tokens; or who makes room first, after which another plan is made.

    Invariant: the tokens of all rows together are within the token budget.
    """

    rows: tuple[ScheduledRow, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    """Waiting sequences that start running. They are also among the rows, except those a static batch has no
    tokens left for in its first step."""
    preempted: tuple[Preemption, ...] = ()
    released: tuple[Sequence, ...] = ()
    """Waiting sequences that hold blocks and lose them."""
    swap_ins: tuple[SwapIn, ...] = ()
    num_stalled_rows: int = 0
    """Running sequences that wait for blocks in this step, because that is cheaper than taking them from others."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.rows

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks have to change hands before anything is computed."""
        return bool(self.preempted or self.released or self.swap_ins)

    def is_about(self, running: Container[Sequence], waiting: Container[Sequence]) -> bool:
        """Whether everybody is still where the plan found them."""
        admitted = {sequence.sequence_id for sequence in self.admitted}
        return (
            all(row.sequence in running or row.sequence.sequence_id in admitted for row in self.rows)
            and all(sequence in waiting for sequence in self.admitted)
            and all(one.sequence in running for one in self.preempted)
            and all(sequence in waiting for sequence in self.released)
            and all(one.sequence in waiting for one in self.swap_ins)
        )


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token that a committed step appended to a sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None
    """How the token ended the turn, or ``None``."""

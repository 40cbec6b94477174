"""What one step will do and what came of it, as plain data: the scheduler decides, the engine carries it out."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from pagedcore.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from pagedcore.kv_cache.reservation import Demand, Reservation
from pagedcore.outputs import FinishReason
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``num_tokens`` tokens of one sequence, from position ``start`` on."""

    sequence: Sequence
    start: int
    """First position computed."""
    num_tokens: int
    num_new_blocks: int = 0
    """Blocks that the row needs besides what its sequence holds and the match shares."""
    match: PrefixMatch = NO_MATCH
    """What a sequence without blocks shares or copies instead of computing it."""
    drafts: tuple[int, ...] = ()
    """Tokens that may follow the last known one: the last of its ``num_tokens``. They are no tokens of its sequence."""
    keeps_state: bool = False
    """Whether the state behind its last position is to be found by others, where the model keeps states."""
    end: int = field(init=False)
    """One past the last position computed."""
    num_sampled: int = field(init=False)
    """How many of its last positions a next token is sampled after: 1 if it reaches the last known token of a sequence
    that generates, and 1 for each draft, else 0."""

    def __post_init__(self) -> None:
        end, one, num_drafts = self.start + self.num_tokens, self.sequence, len(self.drafts)
        is_sampled = end - num_drafts == len(one.token_ids) and one.hidden_from is None
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "num_sampled", 1 + num_drafts if is_sampled else 0)

    @property
    def known_end(self) -> int:
        """One past the last position computed of a known token."""
        return self.end - len(self.drafts)

    @property
    def is_decode(self) -> bool:
        """Whether it computes the one token that its sequence has just generated, and perhaps drafts behind it; all
        other rows are prefill chunks."""
        is_one = self.num_sampled > 0 and self.num_tokens == self.num_sampled
        return is_one and self.start >= self.sequence.num_prompt_tokens

    def without_drafts(self) -> ScheduledRow:
        """Return the row without its drafts."""
        return replace(self, num_tokens=self.num_tokens - len(self.drafts), drafts=()) if self.drafts else self

    @property
    def scored_positions(self) -> range:
        """Positions whose logits give the log-probability of a prompt token that is not reported yet."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return range(0)
        return range(max(self.start, len(sequence.prompt_logprobs)), min(self.end, sequence.num_prompt_tokens - 1))

    @property
    def hidden_positions(self) -> range:
        """Positions whose hidden states are wanted."""
        first = self.sequence.hidden_from
        return range(0) if first is None else range(max(self.start, first), max(self.end, first))

    @property
    def demand(self) -> Demand:
        """The blocks this row needs."""
        unsettled = self.start if self.drafts else None
        return Demand(self.sequence.sequence_id, self.end, self.match, self.keeps_state, unsettled)


class PreemptionKind(Enum):
    """What becomes of the blocks of a preempted sequence."""

    SWAP = "swap"
    """They are copied to the host and come back from there."""
    SHRINK = "shrink"
    """As many as are needed are freed from its end; those that are not taken are found again."""
    RECOMPUTE = "recompute"
    """All are freed, and all positions are computed again."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence that goes back to waiting."""

    sequence: Sequence
    kind: PreemptionKind
    estimated_s: float = 0.0
    """Seconds of work that the preemption is expected to cost."""
    num_left_tokens: int = 0
    """Positions that a shrunk sequence leaves in the cache."""


class SwapIn(NamedTuple):
    """A waiting sequence whose beginning is loaded from the host before it starts."""

    sequence: Sequence
    match: PrefixMatch


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One step: its rows; or what has to make room first, after which another plan is made.

    Invariant: the tokens of all rows together are within the token budget.
    """

    rows: tuple[ScheduledRow, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    """Waiting sequences that start running. They are also among the rows, except those a static batch has no
    tokens left for in its first step."""
    preempted: tuple[Preemption, ...] = ()
    freed: tuple[Sequence, ...] = ()
    """Waiting sequences whose blocks are freed."""
    swap_ins: tuple[SwapIn, ...] = ()
    num_stalled_rows: int = 0
    """Running sequences that wait for blocks in this step, because that is cheaper than preempting others."""
    num_deferred: int = 0
    """Waiting sequences whose next block is being computed by another one."""
    capped: tuple[int, ...] = ()
    """Ids of waiting sequences that were passed over because their tenant has as much as it may."""
    view_number: int = 0
    """Of the ``PolicyView`` that it was made with."""
    stopped_by: str = ""
    """Why admission ended before the end of the queue: "rows", "tokens", "blocks", "phase", "transfer" or "batch" (a
    static one runs); "adapter": it did not, but sequences wait for theirs; empty if it did not."""
    num_drafts: int = 0
    """Of all rows together: how many of the tokens are drafts."""
    to_draft: tuple[tuple[Sequence, int], ...] = ()
    """Sequences that a model might be asked for so many drafts of, after which another plan is made."""
    awaiting: tuple[int, ...] = ()
    """Ids of waiting sequences that were passed over because their adapter is in no slot yet."""
    num_tokens: int = field(init=False)
    """Tokens computed in this step."""
    moves_blocks: bool = field(init=False)
    """Whether blocks have to change hands before anything is computed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([row.num_tokens for row in self.rows]))
        object.__setattr__(self, "moves_blocks", bool(self.preempted or self.freed or self.swap_ins))

    @property
    def work(self) -> tuple[int, int, int]:
        """Its prefill tokens, drafts among them, decode rows and KV tokens: what ``StepTimeModel`` learns from and
        predicts for."""
        num_decode = num_kv = 0
        for row in self.rows:
            num_kv += row.end
            num_decode += (row.num_tokens == 1 or bool(row.drafts)) and row.is_decode
        return self.num_tokens - num_decode, num_decode, num_kv


@dataclass(slots=True)
class StepInFlight:
    """A reserved plan, until it is committed or rolled back."""

    plan: SchedulePlan
    reservation: Reservation | None
    """``None`` for a step that needs no block."""
    is_queued: bool = False
    """Whether whatever is done with blocks from now on comes behind the step."""
    gone: set[int] = field(default_factory=set)
    """Ids of sequences that were finished since; the step continues without them, even if they come back."""

    @property
    def rows(self) -> ListOf[ScheduledRow]:
        """The rows that still count."""
        rows = self.plan.rows
        return [row for row in rows if row.sequence.sequence_id not in self.gone] if self.gone else rows


class NewToken(NamedTuple):
    """One token that a committed step appended to a sequence, or the end of one that generates none."""

    sequence: Sequence
    token_id: int | None
    """``None``: all positions of a sequence are computed whose hidden states were wanted."""
    finish_reason: FinishReason | None
    """How the token ended the turn; ``None`` if it did not."""

"""One sequence: its tokens, how many of them are computed, and the table of its legal state changes.

A ``Sequence`` is the scheduler's unit of work. It does not refer to blocks: ``kv_cache/block_manager`` maps sequence
ids to block tables.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pagedcore.errors import InternalError
from pagedcore.outputs import FinishReason, TokenLogprobs, WeightsVersion
from pagedcore.request_options import NO_OPTIONS, RECORDED_OPTIONS, RequestOptions
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.protocols import Constraint


class SequenceStatus(Enum):
    """The states of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REMOVED = "removed"


Phase = Literal["waiting", "prefill", "decode", "finished"]
"""What a caller sees of a sequence's way."""

LEGAL_MOVES: Final = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: {SequenceStatus.WAITING, SequenceStatus.REMOVED},
    SequenceStatus.REMOVED: set(),
}
"""WAITING -> RUNNING admitted; RUNNING -> WAITING preempted; FINISHED -> WAITING extended."""


def long_root(root: bytes) -> bytes:
    """Return the root of the blocks of long sequences: they share none with the short ones behind ``root``."""
    # Why no digest: a recording has to see of two roots that nothing but the angles is different.
    return root + b"long"


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """A growing list of token ids: the prompt, then what was generated.

    Each step moves ``num_computed_tokens`` towards ``len(token_ids)``; there is no prefill or decode state.

    Invariant: 0 <= num_computed_tokens < len(token_ids) while waiting or running.
    Invariant: token ids are only ever appended, so ``block_keys`` stay valid while ``is_long`` does.
    Invariant: between two steps ``is_long`` is what the number of tokens says.
    """

    sequence_id: int
    token_ids: list[int]
    params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    """The model's end tokens and the request's stop tokens; none of them is sampled before ``min_tokens``."""
    options: RequestOptions = NO_OPTIONS
    """Without the salt: policies see it."""
    arrival: int = 0
    """Counts the turns of an engine."""
    arrival_s: float = 0.0
    """When the turn was accepted, on the engine's clock."""
    cache_root: bytes = b""
    """Sequences with the same one, and of the same kind (``is_long``), may share blocks, others never do."""
    num_short_tokens: int | None = None
    """Longest sequence that the model turns by its short angles; ``None``: it has one kind of angles."""
    adapter: int | None = None
    """The number of the adapter that it is computed with, as the scheduler knows it; ``None``: the model alone."""
    constraint: Constraint | None = None
    """What this turn's completion has to look like."""
    hidden_from: int | None = None
    """Of a sequence that generates nothing: the first position whose hidden state is still wanted; it has finished when
    all are computed. ``None``: it generates."""
    scored_as: Sequence | None = None
    """Of a sequence whose tokens are scored: the turn, at its beginning, in which they are taken to have been drawn.
    ``None``: they are scored by the model's own distribution."""
    block_keys: list[bytes] = field(init=False, default_factory=list)
    """The content keys that were made for full blocks."""
    weights: tuple[tuple[int, WeightsVersion], ...] = ()
    """From which position on tokens were drawn with which weights, where these were loaded into a running engine."""
    is_long: bool = field(init=False, default=False)
    """Whether it has more than ``num_short_tokens`` tokens, so that all of it is computed with other angles."""
    num_prompt_tokens: int = field(init=False)
    is_adjusted: bool = field(init=False)
    """Whether its logits are changed before they are sampled, a minimum length aside."""
    num_logprobs: int | None = field(init=False)
    """How many of the likeliest next tokens a step reports with the chosen one; ``None``: it reports nothing."""
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int | None = field(init=False, default=None)
    num_preemptions: int = field(init=False, default=0)
    num_protected_tokens: int = field(init=False, default=0)
    """Positions that have to be computed before a policy may preempt it again: one more than at the last time."""
    is_in_session: bool = field(init=False, default=False)
    """Whether a session will continue it, so that its cached blocks will be needed."""
    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    finish_reason: FinishReason | None = field(init=False, default=None)
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False, default=None)
    """Of the one sequence that reports its prompt: the tokens from the second on, as far as they are scored; position
    ``len(prompt_logprobs)`` has to be computed for the next one."""
    score: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.follow_length()
        self.constrain(self.constraint)
        self.num_logprobs = self.params.num_step_logprobs(len(self.stop_token_ids))

    @property
    def priority(self) -> int:
        """The priority of its request."""
        return self.options.priority

    @property
    def deadline_s(self) -> float:
        """When the turn has to end, on the engine's clock; infinity without a deadline."""
        within_s = self.options.deadline_s
        return math.inf if within_s is None else self.arrival_s + within_s

    @property
    def is_protected(self) -> bool:
        """Whether it has not regained what its last preemption took, and one more token."""
        return self.num_computed_tokens < self.num_protected_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated in this turn."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated in this turn."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def block_root(self) -> bytes:
        """The parent of the keys of its first blocks."""
        return long_root(self.cache_root) if self.is_long else self.cache_root

    @property
    def has_other_angles(self) -> bool:
        """Whether its length asks for other angles than what it has computed: ``follow_length`` is due."""
        return self.num_short_tokens is not None and self.is_long != (len(self.token_ids) > self.num_short_tokens)

    def follow_length(self) -> None:
        """Be long, or short, as the number of tokens says; blocks of the other kind were freed."""
        if self.has_other_angles:
            self.is_long, self.block_keys = not self.is_long, []

    @property
    def max_total_tokens(self) -> int:
        """Positions of the sequence when this turn has grown to its limit."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_scored(self) -> bool:
        """Whether some of its prompt tokens still have to be scored."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Leading positions that need not be computed if their blocks are cached: their logits are not needed."""
        most = len(self.token_ids) - 1
        if self.prompt_logprobs is not None and self.is_scored:
            most = len(self.prompt_logprobs)
        return most if self.hidden_from is None else min(most, self.hidden_from)

    def draw_with(self, weights: WeightsVersion, cache_root: bytes) -> None:
        """Go on with other weights: nothing that was computed counts, and no block of ``cache_root`` was computed with
        the old ones. A prompt that nothing was drawn behind is scored anew.
        """
        known = self.weights[:-1] if self.weights and self.weights[-1][0] == len(self.token_ids) else self.weights
        self.weights = (*known, (len(self.token_ids), weights))
        self.cache_root, self.block_keys = cache_root, []
        if self.prompt_logprobs and self.num_output_tokens == 0:
            num_unscored = next((n for n, one in enumerate(self.prompt_logprobs) if one is not None), None)
            if num_unscored is not None:
                del self.prompt_logprobs[num_unscored:]

    def weights_of_output(self) -> tuple[WeightsVersion, ...]:
        """Return the weights that each token of this turn was drawn with; empty if they never were others."""
        if not self.weights:
            return ()
        known = ((0, WeightsVersion(0)), *self.weights)
        ends = [max(begin, self.num_prompt_tokens) for begin, _ in known[1:]] + [len(self.token_ids)]
        begins = [max(begin, self.num_prompt_tokens) for begin, _ in known]
        return tuple(one for (_, one), begin, end in zip(known, begins, ends, strict=True) for _ in range(begin, end))

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The stop tokens that end a completion: with ``ignore_eos`` only the request's own."""
        return frozenset(self.params.stop_token_ids) if self.params.ignore_eos else self.stop_token_ids

    def branch(self, sequence_id: int, *, seed: int) -> Self:
        """Return a waiting sequence that continues the same tokens in the same turn, with nothing computed."""
        other = type(self)(
            sequence_id, self.token_ids, self.params, max_tokens=self.max_tokens, seed=seed,
            stop_token_ids=self.stop_token_ids, options=self.options, arrival=self.arrival, arrival_s=self.arrival_s,
            cache_root=self.cache_root, num_short_tokens=self.num_short_tokens, adapter=self.adapter,
            weights=self.weights,
            constraint=self.constraint.branch() if self.constraint is not None else None,
        )
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_cached_tokens = self.num_cached_tokens
        other.block_keys = list(self.block_keys)
        return other

    @property
    def phase(self) -> Phase:
        """Where the sequence is on its way; a preempted one waits, and computes its tokens again in "prefill"."""
        if self.status is not SequenceStatus.RUNNING:
            return "waiting" if self.status is SequenceStatus.WAITING else "finished"
        return "prefill" if self.num_computed_tokens < len(self.token_ids) - 1 else "decode"

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status. Raises ``InternalError`` if the move is not in ``LEGAL_MOVES``."""
        if status not in LEGAL_MOVES[self.status]:
            raise InternalError(f"sequence {self.sequence_id}: {self.status.value} -> {status.value} is not legal")
        self.status = status

    def append_token(self, token_id: int) -> FinishReason | None:
        """Append a generated token; return why it ends the turn, or ``None``."""
        self.token_ids.append(token_id)
        return self.end_at(token_id, self.num_output_tokens)

    def end_at(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Say why a token ends the turn as the last one of so many, or ``None``."""
        is_stop = token_id in self.stop_token_ids and token_id in self.end_token_ids
        if is_stop and num_output_tokens >= self.params.min_tokens:
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None

    def begin_turn(self, new_token_ids: list[int], params: SamplingParams, *, max_tokens: int,
                   stop_token_ids: frozenset[int], arrival: int, arrival_s: float = 0.0,
                   constraint: Constraint | None = None) -> None:
        """Continue a finished sequence: append a further prompt part; computed positions stay computed."""
        self.reopen_turn(arrival, arrival_s)
        self.token_ids.extend(new_token_ids)
        if params.prompt_logprobs != self.params.prompt_logprobs:
            # Why: with the same number, the scores of earlier turns stay valid and only the rest is computed.
            self.prompt_logprobs = None if params.prompt_logprobs is None else []
        self.params, self.max_tokens, self.stop_token_ids = params, max_tokens, stop_token_ids
        self.constrain(constraint)
        self.num_logprobs = params.num_step_logprobs(len(stop_token_ids))
        self.follow_length()
        if self.is_long and self.num_prompt_tokens <= (self.num_short_tokens or 0) and self.prompt_logprobs:
            # Why: those of earlier turns are scores by other angles.
            self.prompt_logprobs = []
        self.num_prompt_tokens = len(self.token_ids)
        if params.seed is not None:
            self.seed = params.seed
        self.logprobs = []
        self.score = None

    def reopen_turn(self, arrival: int, arrival_s: float = 0.0) -> None:
        """Continue a completion that was aborted, as if it had not been."""
        self.move_to(SequenceStatus.WAITING)
        self.num_cached_tokens = None
        self.arrival, self.arrival_s, self.num_protected_tokens = arrival, arrival_s, 0
        self.finish_reason = None

    def constrain(self, constraint: Constraint | None) -> None:
        """Keep this turn's completion to what a constraint allows."""
        self.constraint, self.is_adjusted = constraint, constraint is not None or self.params.adjusts_logits

    def revert(self, before: Sequence, num_tokens: int) -> None:
        """Be as a copy that was made of it when it had ``num_tokens`` tokens."""
        for one in fields(Sequence):
            setattr(self, one.name, getattr(before, one.name))
        del self.token_ids[num_tokens:]

    def take_back(self, num_tokens: int, block_size: int) -> None:
        """Be waiting again with the first ``num_tokens`` tokens, as if this turn had not generated the others."""
        del self.token_ids[num_tokens:], self.block_keys[num_tokens // block_size :]
        del self.logprobs[self.num_output_tokens :]
        self.status, self.finish_reason, self.score = SequenceStatus.WAITING, None, None
        self.reset_computed()
        self.follow_length()

    def snapshot(self) -> dict[str, Any]:
        """Copy what decisions about the sequence depend on, and how its tokens are sampled, as plain values.

        ``params`` is the object itself. Left out are what only its own tokens depend on, such as the state of a
        grammar, and reported log-probabilities.
        """
        scored = self.prompt_logprobs
        # Why if: models with two kinds of angles are few, like sequences that generate nothing, and what others have
        # recorded stays as it is.
        border = {name: value for name in _RARE if (value := getattr(self, name)) is not None}
        return {
            "plain": {name: getattr(self, name) for name in _PLAIN} | border
                | {name: getattr(self.options, name) for name in RECORDED_OPTIONS},
            "status": self.status.value, "num_keys": len(self.block_keys),
            "num_scored": None if scored is None else len(scored), "num_sequences": self.params.num_sequences,
            "num_tokens": len(self.token_ids), "tokens": array("q", self.token_ids), "root": self.cache_root,
            "params": self.params,
            **({"weights": [[begin, one.number] for begin, one in self.weights]} if self.weights else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be as it was copied, in a sequence of the same cache root; block keys are the caller's.

        What only its own tokens depend on becomes the default.
        """
        plain, num_scored = state["plain"], state["num_scored"]
        for name in _PLAIN:
            setattr(self, name, plain[name])
        # Why if: whoever copied this before there was an option has asked nothing of it.
        self.options = RequestOptions(**{name: plain[name] for name in RECORDED_OPTIONS if name in plain})
        self.token_ids, self.params = list(state["tokens"]), SamplingParams(n=state["num_sequences"])
        self.prompt_logprobs = None if num_scored is None else [None] * num_scored  # type: ignore[list-item]
        self.status = SequenceStatus(state["status"])
        for name in _RARE:
            setattr(self, name, plain.get(name))
        self.follow_length()

    def reset_computed(self) -> None:
        """Mark all positions as not computed, because the sequence has lost its blocks."""
        self.num_computed_tokens = 0


_RARE: Final = ("num_short_tokens", "hidden_from", "adapter")
_PLAIN: Final = (
    "sequence_id", "max_tokens", "seed", "arrival", "arrival_s", "num_prompt_tokens", "is_adjusted", "num_logprobs",
    "num_computed_tokens", "num_cached_tokens", "num_preemptions", "num_protected_tokens", "is_in_session",
    "finish_reason", "score",
)

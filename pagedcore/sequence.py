"""One sequence: what is known of it, what is computed, and the table of its legal moves.

A ``Sequence`` is what the scheduler moves about: one growing list of token ids. It knows nothing of blocks;
``kv_cache/block_manager`` maps sequence ids to block tables.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from pagedcore.errors import InternalError
from pagedcore.outputs import FinishReason, TokenLogprobs
from pagedcore.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """The places a live sequence can be."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    REMOVED = "removed"


#: WAITING -> RUNNING admitted; RUNNING -> WAITING preempted; FINISHED -> WAITING extended.
LEGAL_MOVES: Final = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: {SequenceStatus.WAITING, SequenceStatus.REMOVED},
    SequenceStatus.REMOVED: set(),
}


class Sequence:
    """One growing list of token ids: the prompt, then what was generated.

    A step lets ``num_computed_tokens`` catch up with ``len(token_ids)``; there is no prefill or decode state.

    Invariant: 0 <= num_computed_tokens < len(token_ids) while waiting or running.
    Invariant: token ids are only ever appended, so ``block_keys``, the content keys of full blocks that were asked
        for, stay true.
    Invariant: sequences with the same ``cache_root`` may share blocks, others never do.
    Invariant: ``prompt_logprobs``, of the one sequence that reports its prompt, has the tokens from the second on, as
        far as they were told; position ``len(prompt_logprobs)`` has to be computed for the next one.
    Invariant: ``is_in_session`` says that a session goes on with it, so that what it leaves is going to be needed.
    """

    __slots__ = (
        "arrival", "block_keys", "cache_root", "finish_reason", "is_in_session", "logprobs", "max_tokens",
        "num_cached_tokens", "num_computed_tokens", "num_logprobs", "num_preemptions", "num_prompt_tokens", "params",
        "priority", "prompt_logprobs", "score", "seed", "sequence_id", "status", "stop_token_ids", "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        arrival: int = 0,
        cache_root: bytes = b"",
    ) -> None:
        self.sequence_id = sequence_id
        self.cache_root = cache_root
        self.block_keys: list[bytes] = []
        self.token_ids = list(token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.arrival = arrival
        self.num_prompt_tokens = len(token_ids)
        self.num_logprobs = _num_logprobs(params, stop_token_ids)
        """How many of the likeliest next tokens a step reports with the chosen one; ``None``: it reports nothing."""
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.is_in_session = False
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.score: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated in this turn."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated in this turn."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known positions whose K/V is not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_total_tokens(self) -> int:
        """Positions of the sequence when this turn has grown to its limit."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_scored(self) -> bool:
        """Whether something of its prompt has to be told yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Leading positions that need not be computed if they are found: those whose logits nobody waits for."""
        if self.prompt_logprobs is not None and self.is_scored:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    def branch(self, sequence_id: int, *, seed: int) -> Sequence:
        """Return a waiting sequence that goes on from the same tokens, in the same turn, with nothing computed."""
        other = Sequence(
            sequence_id, self.token_ids, self.params, max_tokens=self.max_tokens, seed=seed,
            stop_token_ids=self.stop_token_ids, priority=self.priority, arrival=self.arrival,
            cache_root=self.cache_root,
        )
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_cached_tokens = self.num_cached_tokens
        other.block_keys = list(self.block_keys)
        return other

    def move_to(self, status: SequenceStatus) -> None:
        """Change place.

        Raises:
            InternalError: the move is not in ``LEGAL_MOVES``.
        """
        if status not in LEGAL_MOVES[self.status]:
            raise InternalError(f"sequence {self.sequence_id}: {self.status.value} -> {status.value} is not legal")
        self.status = status

    def append_token(self, token_id: int) -> FinishReason | None:
        """Append a generated token and say whether it ends the turn, and how."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.params.min_tokens:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def begin_turn(self, new_token_ids: list[int], params: SamplingParams, *, max_tokens: int,
                   stop_token_ids: frozenset[int], arrival: int) -> None:
        """Continue a finished sequence: append a further prompt part; computed positions stay computed."""
        self.move_to(SequenceStatus.WAITING)
        self.token_ids.extend(new_token_ids)
        if params.prompt_logprobs != self.params.prompt_logprobs:
            # Why: else what was told of the turns before is still true, and only the rest is computed for it.
            self.prompt_logprobs = None if params.prompt_logprobs is None else []
        self.params, self.max_tokens, self.stop_token_ids = params, max_tokens, stop_token_ids
        self.num_logprobs = _num_logprobs(params, stop_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if params.seed is not None:
            self.seed = params.seed
        self.num_cached_tokens = None
        self.arrival = arrival
        self.finish_reason = None
        self.logprobs = []
        self.score = None

    def reopen_turn(self, arrival: int) -> None:
        """Go on with an answer that was cut off, as if it had not been."""
        self.move_to(SequenceStatus.WAITING)
        self.num_cached_tokens = None
        self.arrival = arrival
        self.finish_reason = None

    def reset_computed(self) -> None:
        """Note that the sequence holds no blocks any more; what is not found again has to be computed again."""
        self.num_computed_tokens = 0


def _num_logprobs(params: SamplingParams, stop_token_ids: frozenset[int]) -> int | None:
    if params.beam_width > 1:
        return max(params.beam_width + len(stop_token_ids), params.logprobs or 0)
    return 0 if params.logprobs is None and params.is_contest else params.logprobs

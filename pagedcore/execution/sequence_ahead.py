"""A sequence as it will be when tokens are appended to it that a step has drawn and not committed."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from pagedcore.sequence import Sequence


class SequenceAhead:
    """What the sampler reads of a sequence, with further tokens behind those that it has.

    Invariant: the sequence is not changed, and has no token appended while this is in use.
    """

    __slots__ = ("_drawn", "_token_ids", "constraint", "is_adjusted", "max_tokens", "num_logprobs", "num_output_tokens",
                 "num_prompt_tokens", "params", "seed", "sequence", "sequence_id", "stop_token_ids")

    def __init__(self, sequence: Sequence, drawn: ListOf[int]) -> None:
        """Let ``drawn`` follow the tokens of a sequence."""
        self.sequence, self._drawn = sequence, drawn
        self._token_ids: list[int] | None = None
        self.sequence_id, self.params, self.seed = sequence.sequence_id, sequence.params, sequence.seed
        self.constraint, self.is_adjusted = sequence.constraint, sequence.is_adjusted
        self.max_tokens, self.num_logprobs = sequence.max_tokens, sequence.num_logprobs
        self.num_prompt_tokens, self.stop_token_ids = sequence.num_prompt_tokens, sequence.stop_token_ids
        self.num_output_tokens = sequence.num_output_tokens + len(drawn)

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        if self._token_ids is None:
            self._token_ids = [*self.sequence.token_ids, *self._drawn]
        return self._token_ids

    @property
    def output_token_ids(self) -> list[int]:
        """Those of this turn's completion."""
        return self.token_ids[self.num_prompt_tokens :]


def origin(sequence: Sequence | SequenceAhead) -> Sequence:
    """Return the sequence itself."""
    return sequence.sequence if isinstance(sequence, SequenceAhead) else sequence

"""A sequence between two turns as plain values: enough to continue it in another request, engine or process.

Owns no behaviour. The randomness of a completion is a function of seed and position, its text a function of its tokens,
so neither a sampler's nor a detokenizer's state has to be kept; both are made again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore.outputs import FinishReason, TokenLogprobs
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """All that is known of a sequence.

    Invariant: ``1 <= num_prompt_tokens <= len(token_ids)``.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    """Tokens before the latest completion."""
    params: SamplingParams
    """Of the latest turn."""
    max_tokens: int
    """Most tokens of the latest completion."""
    seed: int
    finish_reason: FinishReason
    """How the latest completion ended; "abort" for one that was cut off and can be completed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """As far as they are known; they are in no file, and are computed again for a turn that asks for them."""

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceSnapshot:
        """Copy a sequence; a completion that has not ended counts as cut off here."""
        return cls(
            token_ids=tuple(sequence.token_ids), num_prompt_tokens=sequence.num_prompt_tokens, params=sequence.params,
            max_tokens=sequence.max_tokens, seed=sequence.seed, finish_reason=sequence.finish_reason or "abort",
            logprobs=tuple(sequence.logprobs), prompt_logprobs=tuple(sequence.prompt_logprobs or ()),
        )

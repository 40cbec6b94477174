"""How one request wants its tokens chosen. Frozen, and completely checked when it is made.

What depends on the model or the prompt (vocabulary size, room for the answer) is checked by the engine's one
validator, ``resolve_max_tokens`` and ``check_token_ids`` below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; the names and meanings are the field's common ones."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

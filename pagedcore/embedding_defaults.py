"""What a model's directory says of the vectors that are made of texts: pooling, prompts, normalisation.

Owns the record and its choices. ``models/checkpoints/sentence_files.py`` reads it from files,
``requests/embedding.py`` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

Pooling = Literal["last", "mean"]
POOLINGS: Final[tuple[Pooling, ...]] = ("last", "mean")
_NO_PROMPTS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingDefaults:
    """How texts become vectors where a caller does not say otherwise; without files as decoders are trained mostly."""

    pooling: str = "last"
    """One of ``POOLINGS``, or the name of another one, which has no default then."""
    normalize: bool = True
    """Whether vectors have the length 1."""
    prompts: Mapping[str, str] = field(default_factory=lambda: _NO_PROMPTS)
    """Texts that are put before others, by the names that callers choose them by."""
    default_prompt: str | None = None
    """The name of the one that is used where none is chosen; ``None``: none is."""
    pools_prompt: bool = True
    """Whether the tokens of the prompt are among those whose mean is taken."""
    max_tokens: int | None = None
    """Tokens of the longest text; ``None``: as many as the model has positions."""
    refusal: str = ""
    """Why this model makes no vectors here; empty if it does."""
    generates: bool = True
    """Whether the model has an output layer, and so completions."""

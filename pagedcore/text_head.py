"""What makes numbers of a text's last hidden state: the head of a classifier or of a reranker, and how pairs are made.

Owns the records and their arithmetic. ``classifier_files.py`` and ``pair_files.py`` read them from files,
``requests/classification.py`` and ``requests/reranking.py`` apply them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Activation = Literal["softmax", "sigmoid", "identity"]
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextHead:
    """Turns a hidden state into one number for each class, or into the relevance of a document.

    Its arithmetic is that of one text alone, in float64 and in a fixed order, so that company changes no bit of it.
    """

    weight: npt.NDArray[np.float64]
    """[rows, hidden size]: of classes, or of the tokens that stand for yes and, if there are two, for no."""
    labels: tuple[str, ...] = ()
    """The names of the classes; none: its rows are those of tokens, and it makes one number."""
    activation: Activation = "softmax"
    """What makes probabilities of the numbers of classes."""
    pad_token_id: int | None = None
    """The token at the end of a text that classifiers look past."""
    multiplier: float = 1.0
    """What the output layer's numbers are multiplied by."""
    cap: float | None = None
    """What they are held below, softly."""

    def logits(self, state: npt.NDArray[np.float32]) -> tuple[float, ...]:
        """Return the numbers of a hidden state, float32 [hidden size], before any activation."""
        # Why not a product of a library: the order in which one adds may depend on the machine's load.
        found = ((self.weight * state.astype(np.float64)).sum(axis=1) * self.multiplier).tolist()
        if self.cap is not None:
            found = [self.cap * math.tanh(one / self.cap) for one in found]
        return tuple(found) if self.labels or len(found) == 1 else (found[0] - found[1],)

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Return a text up to the token whose hidden state counts: the last one that is no padding, or else the first.
        """
        # Rule: so do the classes of transformers, also where the tokenizer itself appends such a token.
        end = len(token_ids)
        while self.labels and end > 1 and token_ids[end - 1] == self.pad_token_id:
            end -= 1
        return token_ids[:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDefaults:
    """How a query and a document become one text, and their relevance one number, as a model's directory says."""

    activation: Activation = "sigmoid"
    """What makes the score of the head's number."""
    uses_template: bool | None = None
    """Whether the chat template writes the pair; ``None``: if there is one."""
    template_arguments: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What the template is told besides."""
    prompts: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Instructions by the names that callers choose them by."""
    default_prompt: str | None = None
    """The name of the one that is used where none is chosen; ``None``: none is."""
    max_tokens: int | None = None
    """Tokens of the longest pair; ``None``: as many as the model has positions."""
    refusal: str = ""
    """Why this model reranks nothing here; empty if it does."""


def activated(activation: Activation, logits: tuple[float, ...]) -> tuple[float, ...]:
    """Return what an activation makes of numbers."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return tuple(_sigmoid(one) for one in logits)
    largest = max(logits)
    shares = [math.exp(one - largest) for one in logits]
    total = math.fsum(shares)
    return tuple(one / total for one in shares)


def _sigmoid(number: float) -> float:
    # Why two forms: neither overflows.
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    grown = math.exp(number)
    return grown / (1.0 + grown)

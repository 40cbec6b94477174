"""Rotary embeddings of type "longrope", whose angles follow the length of the sequence, for batches of both kinds.

The modules of transformers turn all rows of a call by the longest of them. Here every token has a place: its position
in a short sequence, and behind all of those its position in a long one, so that a place alone says how to turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.protocols import Int64Array, RaggedRows

Rotary = Callable[..., tuple[torch.Tensor, ...]]
"""Called with a tensor of the model's dtype and positions [1, n]; returns cosines and sines [1, n, R]."""


def places_of(batch: RaggedRows, num_short_tokens: int | None) -> Int64Array:
    """Return the place [T] of each token: its position, and in rows that are long ``num_short_tokens`` more."""
    if num_short_tokens is None or batch.is_long is None:
        return batch.positions
    shifts = np.repeat(batch.is_long * np.int64(num_short_tokens), np.diff(batch.query_start))
    return batch.positions + np.pad(shifts, (0, len(batch.positions) - len(shifts)))


def by_place(rotary: Rotary, num_short_tokens: int | None) -> Rotary:
    """Return what takes places where ``rotary`` takes positions; ``None``: they are the same."""
    return rotary if num_short_tokens is None else partial(_turn, rotary, num_short_tokens)


def turn_by_place(model: Any, num_short_tokens: int | None) -> None:
    """Let a model of transformers take places where it takes positions.

    Raises:
        ModelNotSupported: its rotary embeddings are not those of transformers.
    """
    if num_short_tokens is None:
        return
    modules = [module for module in model.modules() if "rope_type" in vars(module)]
    if not modules:
        raise ModelNotSupported("model: its angles follow the length of a sequence, in a way that is not known here.")
    for module in modules:
        module.forward = by_place(module.forward, num_short_tokens)


def _turn(
    rotary: Rotary, num_short_tokens: int, x: torch.Tensor, position_ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    is_long = position_ids >= num_short_tokens
    # Why two calls: the module looks at the largest position, and turns all of a call by what follows from it.
    short = rotary(x, position_ids.masked_fill(is_long, 0), **options)
    largest = position_ids.new_full((*position_ids.shape[:-1], 1), num_short_tokens)
    long = rotary(x, torch.cat([(position_ids - num_short_tokens).clamp(min=0), largest], dim=-1), **options)
    return tuple(torch.where(is_long[..., None], far[..., :-1, :], near) for far, near in zip(long, short, strict=True))

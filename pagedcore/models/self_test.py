"""The check at load that a model computes the same through paged attention as it does by itself.

Owns the twelve tokens, the schedules they go through and the comparison. It catches what no other check knows:
an architecture that keeps state, ignores positions, or bends attention in a way that never reaches the attention
function. It also finds out whether results depend on the schedule bit for bit. Read ``transformers_model.py`` next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.protocols import Int32Array, Int64Array, RaggedRows

NUM_TOKENS: Final = 12
_CHUNK: Final = 7
_NUM_SEQUENCES: Final = 4

#: Largest relative difference of one token's logits, by number format: summation order, not a different function.
_TOLERANCE: Final = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
#: Share of the tokens that may differ more in a coarse format, where a router's near tie can send a token elsewhere.
_OUTLIERS: Final = 0.25

Forward = Callable[[RaggedRows], torch.Tensor]


def probe_tokens(vocab_size: int) -> Int64Array:
    """Return the twelve tokens, spread over the vocabulary."""
    return (np.arange(NUM_TOKENS, dtype=np.int64) * 7919 + 17) % vocab_size


def num_blocks(block_size: int) -> int:
    """Blocks the test needs."""
    return _NUM_SEQUENCES * -(-NUM_TOKENS // block_size)


def check_against(
    expected: torch.Tensor, forward: Forward, tokens: Int64Array, block_size: int, dtype: torch.dtype
) -> bool:
    """Compare the paged path, in two chunks, with logits of one plain forward.

    Args:
        expected: [12, vocabulary] logits of the model before it was changed, in any float type.
        forward: computes a batch with ``num_blocks(block_size)`` blocks of memory.
        tokens: those ``expected`` was computed for.
        block_size: tokens per block.
        dtype: number format of the weights, which sets how far rounding may go.

    Returns:
        Whether the logits were the same bits chunked, whole and in company.

    Raises:
        ModelNotSupported: they differ by more than rounding; the message says where and by how much.
    """
    schedule = _Schedule(tokens, block_size)
    chunked = torch.cat([
        forward(schedule.batch((0, 0, _CHUNK))), forward(schedule.batch((0, _CHUNK, NUM_TOKENS)))
    ])
    _compare(chunked, expected.float(), dtype)
    whole = forward(schedule.batch((1, 0, 5), (2, 0, NUM_TOKENS), (3, 0, NUM_TOKENS - 1)))
    decoded = forward(schedule.batch((1, 5, 6), (3, NUM_TOKENS - 1, NUM_TOKENS)))
    return torch.equal(chunked, whole[5 : 5 + NUM_TOKENS]) and torch.equal(chunked[-1], decoded[-1])


class _Schedule:
    """Builds batches of (sequence, start, end) of the test's tokens; blocks of a sequence run backwards."""

    def __init__(self, tokens: Int64Array, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        ids = np.arange(num_blocks(block_size), dtype=np.int32)[::-1]
        self._tables: list[Int32Array] = np.split(ids, _NUM_SEQUENCES)

    def batch(self, *rows: tuple[int, int, int]) -> RaggedBatch:
        """Return the batch with the logits of every token wanted."""
        ids, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        batch = assemble(
            np.concatenate([self._tokens[start:end] for _, start, end in rows]), starts, ends - starts,
            seq_ids=ids, tables=[self._tables[i] for i in ids], block_size=self._block_size,
            is_sampled=np.ones(len(rows), dtype=np.bool_),
        )
        return dataclasses.replace(batch, logits_rows=np.arange(batch.num_tokens))


def _compare(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare per token: the distance of the logits, relative to their spread around their mean."""
    if not expected.isfinite().all():
        raise ModelNotSupported("model: self-test failed. Its own logits are not finite; its weights are damaged.")
    tolerance = _TOLERANCE[dtype]
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
    error = (actual - expected).norm(dim=-1) / spread
    allowed = 0 if dtype == torch.float32 else int(_OUTLIERS * NUM_TOKENS)
    wrong = (~(error <= tolerance)).nonzero().flatten().tolist()
    if len(wrong) > allowed:
        where = "the second chunk" if wrong[0] >= _CHUNK else "the first chunk"
        raise ModelNotSupported(
            f"model: self-test failed. Logits of {len(wrong)} of {NUM_TOKENS} tokens differ from a plain forward by up "
            f"to {error.max().item():.3g} of their spread (allowed {tolerance}), from token {wrong[0]} on, in {where}. "
            "The architecture does something that paged attention does not see."
        )

"""Which attention kernel a layer gets: the constants it is compiled for, fitted to the host's registers.

Nothing here changes a result: see the invariant of ``microkernels.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore_kernels.cpu.features import has_wide_vectors
from pagedcore_kernels.cpu.simd import LANES

TILE = 256
"""Positions per online-softmax step: long enough to amortise it, short enough for scores to stay in L1."""
_ROWS = 16
"""Rows of a work item: few enough for their scores and outputs to stay in L1."""


def accumulator_budget() -> int:
    """How many 16-lane float accumulators the host's registers hold, with room left for operands."""
    return 28 if has_wide_vectors() else 6


@dataclass(frozen=True)
class Variant:
    """What an attention kernel is compiled for.

    ``heads`` x ``queries`` rows share each block; ``decode_blocks`` blocks are scored at once where a sequence
    brings one query only, so that enough independent sums are in flight. ``is_bf16`` is the model's number format,
    and the pool's unless ``is_int8``.
    """

    key_size: int
    value_size: int
    block_size: int
    is_bf16: bool
    heads: int
    queries: int
    decode_blocks: int
    budget: int
    is_int8: bool = False

    @classmethod
    def choose(
        cls, group: int, key_size: int, value_size: int, block_size: int, is_bf16: bool, budget: int | None = None,
        *, is_int8: bool = False,
    ) -> Variant:
        """Fit rows and blocks to the host's registers for ``group`` query heads per KV head."""
        registers = budget or accumulator_budget()
        head_tiles = -(-group // _ROWS)
        heads = -(-group // head_tiles)
        vectors = heads * max(1, block_size // LANES)
        decode_blocks = 1
        while vectors * decode_blocks * 2 <= registers and block_size * decode_blocks * 2 <= TILE // 2:
            decode_blocks *= 2
        return cls(key_size, value_size, block_size, is_bf16, heads, _ROWS // heads, decode_blocks, registers, is_int8)

"""Sizes that host and kernels must agree on: formats, tiles, work items, partial results. Imports no compiler.

Owns every number that is part of a kernel's contract with its launch. Read ``variants.py`` for which shapes exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

THREADS: Final = 128
"""Threads of an attention CTA: four warps."""
WARPS: Final = 4
DECODE_ROWS: Final = 16
"""Packed query rows of a decode item, as many as one tensor-core instruction takes."""
PREFILL_ROWS: Final = 16 * WARPS
"""Packed query rows of a prefill item."""
HALF_PREFILL: Final = PREFILL_ROWS // 2
"""Rows of a CTA of prefill where shared memory is too small for an item: two share one then."""
_SMALL: Final = 99 * 1024
_SHARED_BYTES: Final = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024,
                        (10, 3): 227 * 1024}
SEGMENT_SHIFT: Final = 9
"""Of the 512 tokens of a segment, in which contexts are split; a multiple of every tile. See ``device/numerics.py``."""
_MANY_HEADS: Final = 8
ROW_PADDING: Final = 16
"""Bytes after each row in shared memory; makes ldmatrix free of bank conflicts for every head size."""

LOG2_E: Final = 1.4426950408889634
"""A score in natural units times this is an exponent of 2."""

ROW_THREADS: Final = 256
"""Threads of a CTA of the kernels that work on rows of hidden states and of heads."""
NORM_VECTORS: Final = (1, 2, 4, 8)
"""Vectors of 16 bytes that a thread of a norm can hold; one kernel is made for each."""
GATED_VECTORS: Final = 2
"""Vectors of 16 bytes of the result that a thread of a gated activation computes."""
SAMPLE_THREADS: Final = 512
SAMPLE_WARPS: Final = SAMPLE_THREADS // 32
SAMPLE_ROW_BYTES: Final = 48
"""Parameters of one row of the sampler: scale, offset in two parts, top_k; top_p, seed; position, nothing."""
SAMPLE_CANDIDATES: Final = 4096
"""Logits that fit into the sampler's shared memory; a multiple of 128."""
SAMPLE_SHARED_BYTES: Final = SAMPLE_CANDIDATES * 8 + SAMPLE_WARPS * 16
"""Candidates' logits and ids, and a slot per warp."""


class Format(Enum):
    """What an element of query, result or pool is."""

    BF16 = "bf16"
    F16 = "f16"
    E4M3 = "e4m3"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 2 if self in (Format.BF16, Format.F16) else 1


LARGEST: Final = {Format.INT8: 127.0, Format.E4M3: 448.0}
"""The largest number of each format with scales."""
SMALLEST: Final = 2.0**-100
"""A row in such a format whose magnitudes are below this is all zeros: the inverse of its scale would not be finite."""


def most_shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that a CTA can have on GPUs of a compute capability, for kernels that are built ahead of one."""
    return _SHARED_BYTES.get(capability, _SMALL)


def tile_size(key_size: int, value_size: int) -> int:
    """Tokens of a tile, as many as registers allow. Part of the order of additions, so of the head sizes alone."""
    return 64 if max(key_size, value_size) <= 128 else 32


def segment_shift(kv_heads: int) -> int:
    """Of the tokens of a segment: half as many in layers of few KV heads, whose contexts make few CTAs otherwise. Part
    of the order of additions, so of nothing that a row's company decides.
    """
    return SEGMENT_SHIFT if kv_heads >= _MANY_HEADS else SEGMENT_SHIFT - 1


def partial_bytes(value_size: int) -> int:
    """Bytes of one partial result: float32 values [16, value_size], maxima [16], sums of weights [16]."""
    return DECODE_ROWS * (value_size + 2) * 4


@dataclass(frozen=True)
class AttentionShape:
    """What an attention kernel is compiled for; everything else is a parameter of the launch."""

    key_size: int
    value_size: int
    query: Format
    pool: Format

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return tile_size(self.key_size, self.value_size)

    @property
    def stages(self) -> int:
        """Tiles that decode has in shared memory at once."""
        return 2

    @property
    def query_row(self) -> int:
        """Bytes of a staged query row."""
        return self.key_size * 2 + ROW_PADDING

    @property
    def is_scaled(self) -> bool:
        """Whether elements have 8 bits and a token a scale; K then has a row for each element, not for each token."""
        return self.pool.itemsize == 1

    @property
    def pool_key_bytes(self) -> int:
        """Bytes of a token's K of one head in the pool, with its scale."""
        return self.key_size * self.pool.itemsize + (4 if self.is_scaled else 0)

    @property
    def pool_value_bytes(self) -> int:
        """Bytes of a token's V of one head in the pool, with its scale."""
        return self.value_size * self.pool.itemsize + (4 if self.is_scaled else 0)

    @property
    def key_row(self) -> int:
        """Bytes of a K row in shared memory."""
        return (self.tile if self.is_scaled else self.key_size * 2) + ROW_PADDING

    @property
    def value_row(self) -> int:
        """Bytes of a V row in shared memory."""
        return self.value_size * self.pool.itemsize + ROW_PADDING

    @property
    def key_scales_at(self) -> int:
        """Bytes of a tile of K in shared memory, behind which its scales are."""
        return (self.key_size if self.is_scaled else self.tile) * self.key_row

    @property
    def value_scales_at(self) -> int:
        """Bytes of a tile of V in shared memory, behind which its scales are."""
        return self.tile * self.value_row

    @property
    def key_tile_bytes(self) -> int:
        """Bytes of a tile of K in shared memory, with its scales."""
        return self.key_scales_at + (self.tile * 4 if self.is_scaled else 0)

    @property
    def value_tile_bytes(self) -> int:
        """Bytes of a tile of V in shared memory, with its scales."""
        return self.value_scales_at + (self.tile * 4 if self.is_scaled else 0)

    @property
    def key_steps(self) -> int:
        """Steps of the product with K: 32 bytes of a token."""
        return self.key_size * self.pool.itemsize // 32

    @property
    def value_groups(self) -> int:
        """Groups of 32 bytes in a V row."""
        return self.value_size * self.pool.itemsize // 32

    @property
    def words_per_step(self) -> int:
        """Query registers that one step of a K row meets."""
        return 8 // self.pool.itemsize

    @property
    def floats_per_group(self) -> int:
        """Result registers that one group of a V row feeds."""
        return 16 // self.pool.itemsize

    @property
    def keeps_query_in_registers(self) -> bool:
        """Whether prefill does; beyond this size it reads the query again for every tile."""
        return self.key_size <= 128

    @property
    def decode_shared_bytes(self) -> int:
        """Dynamic shared memory of decode: ring of tiles, query, maxima, weights, sums of those with scales, flag."""
        ring = self.stages * (self.key_tile_bytes + self.value_tile_bytes)
        weights = DECODE_ROWS * (self.tile * 2 + ROW_PADDING + (self.tile if self.is_scaled else 0))
        return ring + DECODE_ROWS * self.query_row + WARPS * DECODE_ROWS * 4 + weights + 16

    def prefill_shared_bytes(self, rows: int = PREFILL_ROWS) -> int:
        """Dynamic shared memory of prefill: one tile, query, each thread's share of the total."""
        tile = self.key_tile_bytes + self.value_tile_bytes
        return tile + rows * self.query_row + self.value_groups * self.floats_per_group * 4 * (rows * 2)

    def prefill_rows(self, most_shared: int) -> int:
        """Rows of a CTA of prefill on a GPU that gives it so many bytes of shared memory."""
        return PREFILL_ROWS if self.prefill_shared_bytes() <= most_shared else HALF_PREFILL

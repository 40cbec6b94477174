"""Ragged batches for the CUDA backend under the PTX interpreter: builders and the float64 answer, not tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.attention_cases import LAYER, Rows, Shape, Tokens, in_8_bits, nan_pool, random_tables
from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.layout import LayerShape, ScaledKVLayout, TokenMajorLayout
from pagedcore_kernels.reference import attention_float64

LENGTHS = [(3, 700), (20, 300), (1, 1), (2, 37), (1, 530)]
"""Rows of (tokens, known positions): chunks, decode rows, around tiles, segments and pages."""


@dataclass
class Case:
    """One pool with the whole sequences of ``LENGTHS`` in it, and a backend per simulated GPU."""

    shape: Shape
    pool_dtype: torch.dtype | None = None
    lengths: Sequence[tuple[int, int]] = field(default_factory=lambda: list(LENGTHS))

    def __post_init__(self) -> None:
        s = self.shape
        layer = LayerShape(s.kv_heads, s.key_size, s.value_size)
        self.layout = TokenMajorLayout(s.block_size, s.dtype, (layer, layer)) if self.pool_dtype is None else \
            ScaledKVLayout(s.block_size, self.pool_dtype, (layer, layer), s.dtype)
        self.num_blocks = sum(-(-length // s.block_size) for _, length in self.lengths) + 3
        self.tables = random_tables(self.lengths, s.block_size, self.num_blocks, seed=5)
        self.sequences = [Tokens.random(s, length, seed=i) for i, (_, length) in enumerate(self.lengths)]
        self.pool = nan_pool(self.layout, self.num_blocks)
        self.fill_pool()

    def numbers(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """K or V [L, KVH, D] as the pool has to hold it, in float64."""
        return tensor.double().numpy() if self.pool_dtype is None else in_8_bits(tensor, self.pool_dtype)[2]

    def fill_pool(self, pool: torch.Tensor | None = None, new_only: bool = False) -> None:
        """Put every sequence's K and V, or those of the rows' own tokens, where its table says, by plain indexing."""
        pool, layout = self.pool if pool is None else pool, self.layout
        for row, (tokens, (count, length)) in enumerate(zip(self.sequences, self.lengths, strict=True)):
            position = torch.arange(length - count if new_only else 0, length)
            blocks = torch.from_numpy(self.tables[row]).long()[position // self.shape.block_size]
            offsets = position % self.shape.block_size
            views = layout.key_view(pool, LAYER).transpose(-1, -2), layout.value_view(pool, LAYER)
            for which, tensor in enumerate((tokens.key[position], tokens.value[position])):
                if isinstance(layout, ScaledKVLayout):
                    stored, scales, _ = in_8_bits(tensor, layout.dtype)
                    views[which].view(torch.uint8)[blocks, :, offsets] = torch.from_numpy(stored)
                    of_scales = (layout.key_scales, layout.value_scales)[which](pool, LAYER)
                    of_scales[blocks, :, offsets] = torch.from_numpy(scales)
                else:
                    views[which].view(torch.int16)[blocks, :, offsets] = tensor.view(torch.int16)

    def backend(self, **gpu: Any) -> NumbaCudaAttention:
        """A backend over the pool on a simulated GPU."""
        return NumbaCudaAttention(self.layout, self.pool, driver=SimulatedDriver(**gpu))

    def rows(self, lengths: Sequence[tuple[int, int]] | None = None, padding: int = 0) -> Rows:
        """The batch of some lengths of the same sequences; stale table entries must not be followed."""
        tables = np.where(self.tables < 0, np.int32(2**30), self.tables)
        return Rows(lengths or self.lengths, tables, self.shape.block_size, padding=padding)

    def attend(self, backend: NumbaCudaAttention, rows: Rows, **options: Any) -> torch.Tensor:
        """Attend with the rows' tokens over the pool as it is."""
        query = [t.query[length - n : length] for t, (n, length) in zip(self.sequences, rows.lengths, strict=True)]
        filler = torch.full((rows.padding, *query[0].shape[1:]), float("nan"), dtype=self.shape.dtype)
        backend.plan(rows)
        return backend.attend(LAYER, torch.cat([*query, filler]), scale=self.shape.scale, **options)

    def expected(self, rows: Rows, *, of_magnitudes: bool = False, **options: Any) -> np.ndarray[Any, Any]:
        """The float64 answer over what the pool holds, or over the magnitudes of its V."""
        outputs = []
        for tokens, (n, length) in zip(self.sequences, rows.lengths, strict=True):
            key, value = self.numbers(tokens.key)[:length], self.numbers(tokens.value)[:length]
            query = tokens.query[length - n : length].double().numpy()
            value = np.abs(value) if of_magnitudes else value
            outputs.append(attention_float64(query, key, value, scale=self.shape.scale, **options))
        return np.concatenate(outputs)


def relative_error(output: torch.Tensor, exact: np.ndarray[Any, Any]) -> float:
    """How far the output is from the answer, as a share of the answer's length."""
    found = output[: len(exact)].double().numpy()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

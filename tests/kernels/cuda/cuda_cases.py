"""Ragged batches for the CUDA backend under the PTX interpreter: builders and the float64 answer, not tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.attention_cases import LAYER, Rows, Shape, Tokens, nan_pool, random_tables
from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.layout import LayerShape, TokenMajorLayout
from pagedcore_kernels.reference import attention_float64

LENGTHS = [(3, 700), (20, 300), (1, 1), (2, 37), (1, 530)]
"""Rows of (tokens, known positions): chunks, decode rows, around tiles, segments and pages."""
SCALES = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.03125, 0.0625], [0.0625, 0.03125]]])
"""Of layers 0 and 1 for K and V of two heads: powers of two, by which division is exact."""


@dataclass
class Case:
    """One pool with the whole sequences of ``LENGTHS`` in it, and a backend per simulated GPU."""

    shape: Shape
    pool_dtype: torch.dtype | None = None
    lengths: Sequence[tuple[int, int]] = field(default_factory=lambda: list(LENGTHS))

    def __post_init__(self) -> None:
        s = self.shape
        self.dtype = self.pool_dtype or s.dtype
        layer = LayerShape(s.kv_heads, s.key_size, s.value_size)
        self.layout = TokenMajorLayout(s.block_size, self.dtype, (layer, layer), s.dtype)
        self.num_blocks = sum(-(-length // s.block_size) for _, length in self.lengths) + 3
        self.tables = random_tables(self.lengths, s.block_size, self.num_blocks, seed=5)
        self.sequences = [Tokens.random(s, length, seed=i) for i, (_, length) in enumerate(self.lengths)]
        self.pool = nan_pool(self.layout, self.num_blocks)
        self.fill_pool()

    @property
    def scales(self) -> torch.Tensor | None:
        return SCALES[:, :, : self.shape.kv_heads] if self.dtype.itemsize == 1 else None

    def scale(self, which: int) -> torch.Tensor:
        """The scales of K (0) or V (1) of the layer under test, [KVH, 1]."""
        scales = self.scales
        return torch.ones(self.shape.kv_heads, 1) if scales is None else scales[LAYER, which][:, None]

    def stored(self, tensor: torch.Tensor, which: int) -> torch.Tensor:
        """K or V [L, KVH, D] as the pool has to hold it."""
        if self.dtype.itemsize == 2:
            return tensor
        divided = tensor.float() / self.scale(which)
        if self.dtype == torch.int8:
            return divided.round().clamp(-127, 127).to(torch.int8)
        return divided.clamp(-448, 448).to(torch.float8_e4m3fn)

    def fill_pool(self) -> None:
        """Put every sequence's K and V where its table says, by plain indexing."""
        keys = self.layout.key_view(self.pool, LAYER).transpose(-1, -2)
        values = self.layout.value_view(self.pool, LAYER)
        for row, tokens in enumerate(self.sequences):
            position = torch.arange(len(tokens.key))
            blocks = torch.from_numpy(self.tables[row]).long()[position // self.shape.block_size]
            for view, tensor, which in ((keys, tokens.key, 0), (values, tokens.value, 1)):
                as_bytes = torch.uint8 if self.dtype.itemsize == 1 else torch.int16
                offsets = position % self.shape.block_size
                view.view(as_bytes)[blocks, :, offsets] = self.stored(tensor, which).view(as_bytes)

    def backend(self, **gpu: Any) -> NumbaCudaAttention:
        """A backend over the pool on a simulated GPU."""
        return NumbaCudaAttention(self.layout, self.pool, kv_scales=self.scales, driver=SimulatedDriver(**gpu))

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

    def expected(self, rows: Rows, **options: Any) -> np.ndarray[Any, Any]:
        """The float64 answer over what the pool holds."""
        outputs = []
        for tokens, (n, length) in zip(self.sequences, rows.lengths, strict=True):
            key, value = (
                (self.stored(tensor, which).float() * self.scale(which))[:length].double().numpy()
                for which, tensor in enumerate((tokens.key, tokens.value))
            )
            query = tokens.query[length - n : length].double().numpy()
            outputs.append(attention_float64(query, key, value, scale=self.shape.scale, **options))
        return np.concatenate(outputs)


def relative_error(output: torch.Tensor, exact: np.ndarray[Any, Any]) -> float:
    """How far the output is from the answer, as a share of the answer's length."""
    found = output[: len(exact)].double().numpy()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

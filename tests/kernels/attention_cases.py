"""Ragged batches over random sequences, for the tests of attention: builders, not tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pagedcore.protocols import AttentionBackend, Int32Array, Int64Array
from pagedcore_kernels.layout import KVLayout, LayerShape, ScaledKVLayout
from pagedcore_kernels.reference import attention_float64
from pagedcore_ptxsim.formats import f32_to_fp8, fp8_to_f32

LAYER = 1
"""The layer under test; layer 0 is there so that offsets are not zero."""


@dataclass
class Rows:
    """A ``RaggedRows`` made of (number of tokens, known positions) pairs and their block ids."""

    lengths: Sequence[tuple[int, int]]
    block_tables: Int32Array
    block_size: int
    padding: int = 0
    token_ids: Int64Array = field(init=False)
    positions: Int64Array = field(init=False)
    seq_ids: Int64Array = field(init=False)
    slot_mapping: Int64Array = field(init=False)
    query_start: Int64Array = field(init=False)
    kv_lens: Int64Array = field(init=False)
    logits_rows: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        positions = [np.arange(length - n, length) for n, length in self.lengths]
        size = self.block_size
        slots = [self.block_tables[i][p // size] * np.int64(size) + p % size for i, p in enumerate(positions)]
        pad = np.zeros(self.padding, np.int64)
        self.positions = np.concatenate([*positions, pad]).astype(np.int64)
        self.slot_mapping = np.concatenate([*slots, pad - 1]).astype(np.int64)
        self.token_ids = np.zeros_like(self.positions)
        self.seq_ids = np.arange(len(self.lengths))
        self.query_start = np.cumsum([0] + [n for n, _ in self.lengths]).astype(np.int64)
        self.kv_lens = np.array([length for _, length in self.lengths], np.int64)
        self.logits_rows = self.query_start[1:] - 1


@dataclass(frozen=True)
class Shape:
    """One attention layer: G query heads for each of the KV heads, the pool's block size, and the dtype of the model
    and, unless that is int8, of the pool.
    """

    group: int
    kv_heads: int
    key_size: int
    value_size: int
    block_size: int
    dtype: torch.dtype
    is_int8: bool = False

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.key_size**-0.5)

    @property
    def layout(self) -> Any:
        other = LayerShape(1, 24, 8)
        layers = (other, LayerShape(self.kv_heads, self.key_size, self.value_size), other)
        if self.is_int8:
            return ScaledKVLayout(self.block_size, torch.int8, layers, self.dtype)
        return KVLayout(self.block_size, self.dtype, layers)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"{self.heads}q{self.kv_heads}kv-{self.key_size}-{self.value_size}-b{self.block_size}"
        return f"{sizes}-{dtype}{'-int8' if self.is_int8 else ''}"


@dataclass(frozen=True)
class Tokens:
    """Query [L, H, D], key [L, KVH, D] and value [L, KVH, Dv] of one whole sequence."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, length: int, seed: int) -> Tokens:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(shape.dtype)

        return cls(
            normal(length, shape.heads, shape.key_size) * 2,
            normal(length, shape.kv_heads, shape.key_size),
            normal(length, shape.kv_heads, shape.value_size),
        )


def random_tables(lengths: Sequence[tuple[int, int]], block_size: int, num_blocks: int, seed: int) -> Int32Array:
    """Tables of distinct blocks in random order for known lengths; -1 past each row's end."""
    ids = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    needed = [-(-length // block_size) for _, length in lengths]
    tables = np.full((len(lengths), max(needed)), -1, np.int32)
    for row, (stop, count) in enumerate(zip(np.cumsum(needed), needed, strict=True)):
        tables[row, :count] = ids[stop - count : stop]
    return tables


def nan_pool(layout: Any, num_blocks: int) -> torch.Tensor:
    """A pool whose every unwritten element, in every dtype, is NaN; of int8, its scale is."""
    return layout.allocate(num_blocks).fill_(0xFF)


def run(
    backend: AttentionBackend, rows: Rows, sequences: Sequence[Tokens], shape: Shape, **options: Any
) -> torch.Tensor:
    """Write the rows' own tokens and attend with them, as one step of a model would."""
    spans = [(tokens, slice(length - n, length)) for tokens, (n, length) in zip(sequences, rows.lengths, strict=True)]

    def gather(name: str) -> torch.Tensor:
        parts = [getattr(tokens, name)[span] for tokens, span in spans]
        return torch.cat([*parts, torch.full((rows.padding, *parts[0].shape[1:]), float("nan"), dtype=shape.dtype)])

    backend.plan(rows)
    backend.write_kv(LAYER, gather("key"), gather("value"))
    return backend.attend(LAYER, gather("query"), scale=shape.scale, **options)


def in_8_bits(
    rows: torch.Tensor, dtype: torch.dtype
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What a pool of int8 or e4m3 has of rows [..., D] without infinities and NaN: bytes, scales [...], numbers."""
    most = np.float32(127 if dtype == torch.int8 else 448)
    exact = rows.float().numpy()
    largest = np.abs(exact).max(-1, keepdims=True)
    is_used = largest >= np.float32(2.0**-100)
    factor = np.where(is_used, most / np.where(is_used, largest, np.float32(1)), np.float32(0))
    scales = np.where(is_used, largest / most, np.float32(0))
    divided = exact * factor
    stored = np.rint(divided).astype(np.int8).view(np.uint8) if dtype == torch.int8 else f32_to_fp8(divided)
    numbers = stored.view(np.int8).astype(np.float64) if dtype == torch.int8 else fp8_to_f32(stored).astype(np.float64)
    return stored, scales[..., 0], numbers * scales


def rounded_to_int8(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """What an int8 pool holds of rows [..., D] without infinities and NaN, in float64."""
    return in_8_bits(rows, torch.int8)[2]


@dataclass
class Expected:
    """What ``run`` has to return, in float64, and how far rounded weights may take it from there."""

    exact: np.ndarray[Any, Any]
    reach: np.ndarray[Any, Any]


def expected(rows: Rows, sequences: Sequence[Tokens], shape: Shape, **options: Any) -> Expected:
    """What ``run`` has to return for the rows' tokens."""
    outputs, reaches = [], []
    for tokens, (n, length) in zip(sequences, rows.lengths, strict=True):
        stored = rounded_to_int8 if shape.is_int8 else lambda t: t.double().numpy()
        query, key, value = tokens.query[:length].double().numpy(), stored(tokens.key), stored(tokens.value)
        query, key, value = query[length - n :], key[:length], value[:length]
        outputs.append(attention_float64(query, key, value, scale=shape.scale, **options))
        reaches.append(attention_float64(query, key, np.abs(value), scale=shape.scale, **options))
    return Expected(np.concatenate(outputs), np.concatenate(reaches))


def assert_close(output: torch.Tensor, wanted: Expected) -> None:
    """Compare with float64: float32 sums of some hundred terms, bfloat16 rounded once at the end.

    With bfloat16 each weight, and so their sum, may be rounded to bfloat16 too: by 2**-9 of itself.
    """
    exact, is_bf16 = wanted.exact, output.dtype == torch.bfloat16
    relative = 2**-8 if is_bf16 else 2**-20
    bound = relative * np.abs(exact) + 1e-5 + (2 * 2**-9 * wanted.reach if is_bf16 else 0)
    error = np.abs(output[: len(exact)].double().numpy() - exact)
    assert (error <= bound).all(), f"largest error {error.max():.2e}"
    assert not output[len(exact) :].any(), "padding tokens must come out as zeros"

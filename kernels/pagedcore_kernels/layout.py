"""Where every K and V element of a KV pool lies; the only place that knows.

Owns the arithmetic of one block-major pool: offsets, shapes, padding and the views that tests and swaps use.
It computes no attention and imports no compiler. Read ``reference.py`` next for how the views are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from pagedcore_kernels.errors import InvalidConfig

ALIGNMENT = 64
"""Block rows and the K and V of each layer start at multiples of this: one cache line."""
VALUE_LANES = 16
"""Value rows hold a multiple of this many elements, so that kernels read whole vectors."""
SCALE_BYTES = 4
"""Bytes of the scale of one token and head, a float32."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def scaled_head_bytes(num_elements: int, block_size: int) -> int:
    """Bytes of one head's K or V in a ``ScaledKVLayout``: its elements, padding up to a float32, a scale a token."""
    return _round_up(num_elements, SCALE_BYTES) + SCALE_BYTES * block_size


@dataclass(frozen=True)
class LayerShape:
    """K and V of one token in one layer: so many heads of so many elements; K and V may differ in size."""

    num_kv_heads: int
    key_head_size: int
    value_head_size: int

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_head_size", "value_head_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}: got {getattr(self, name)}, allowed is a positive integer.")

    @property
    def padded_value_size(self) -> int:
        """Elements from one value row to the next; the surplus is never written and never used."""
        return _round_up(self.value_head_size, VALUE_LANES)


@dataclass(frozen=True)
class BlockLayout:
    """One KV block: ``[layer][K then V]``; what the order inside K and V is, a subclass says. Of a model without
    attention it has no layers and no bytes, and is but a name for some positions.

    Moves of whole blocks (swap, copy-on-write, export) need ``block_bytes`` alone.

    Invariant: the byte ranges of all layers' K and V are disjoint, in order, and lie inside ``block_bytes``.
    Invariant: ``block_bytes`` and all offsets are multiples of ``ALIGNMENT``.
    """

    block_size: int
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    window: int = field(default=0, kw_only=True, repr=False)
    """The last positions, the own one included, that any layer reads; 0: all. Tables name no blocks before these."""

    _dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidConfig(f"block_size: got {self.block_size}, allowed is a positive integer.")
        if self.dtype not in self._dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise InvalidConfig(f"KV dtype: got {self.dtype}, allowed for {type(self).__name__}: {allowed}.")

    @property
    def model_dtype(self) -> torch.dtype:
        """Number format of the K, V and queries that a model hands over."""
        return self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, padding included."""
        return self._offsets[-1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token of context takes over all layers, its share of the padding included, rounded up."""
        return -(-self.block_bytes // self.block_size)

    def key_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the layer's K."""
        return self._offsets[2 * layer]

    def value_offset(self, layer: int) -> int:
        """Bytes from the start of a block to the layer's V."""
        return self._offsets[2 * layer + 1]

    def key_bytes(self, layer: int) -> int:
        """Bytes of the layer's K in one block."""
        return math.prod(self._key_shape(layer)) * self.dtype.itemsize

    def value_bytes(self, layer: int) -> int:
        """Bytes of the layer's V in one block, row padding included."""
        return math.prod(self._stored_value_shape(layer)) * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a uint8 pool [num_blocks, block_bytes] whose rows start on cache lines, content undefined.

        The memory is not touched: pages of blocks that are never used cost nothing.
        """
        if num_blocks < 1:
            raise InvalidConfig(f"num_blocks: got {num_blocks}, allowed is a positive integer.")
        size = num_blocks * self.block_bytes
        raw = torch.empty(size + ALIGNMENT - 1, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size].view(num_blocks, self.block_bytes)

    def key_view(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """View the layer's K as [num_blocks, KVH, D, block_size]."""
        return self._view(pool, self.key_offset(layer), self._key_shape(layer))

    def value_view(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """View the layer's V as [num_blocks, KVH, block_size, Dv], without the padding of the rows."""
        stored = self._view(pool, self.value_offset(layer), self._stored_value_shape(layer))
        return stored[..., : self.layers[layer].value_head_size]

    def _view(self, pool: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape) * self.dtype.itemsize
        return pool[:, offset : offset + size].view(self.dtype).view(pool.shape[0], *shape)

    def _key_shape(self, layer: int) -> tuple[int, ...]:
        shape = self.layers[layer]
        return shape.num_kv_heads, shape.key_head_size, self.block_size

    def _stored_value_shape(self, layer: int) -> tuple[int, ...]:
        shape = self.layers[layer]
        return shape.num_kv_heads, self.block_size, shape.padded_value_size

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets = [0]
        for layer in range(len(self.layers)):
            offsets.append(_round_up(offsets[-1] + self.key_bytes(layer), ALIGNMENT))
            offsets.append(_round_up(offsets[-1] + self.value_bytes(layer), ALIGNMENT))
        return tuple(offsets)


@dataclass(frozen=True)
class KVLayout(BlockLayout):
    """The CPU kernels' order: K as ``[kv_head, dim, token]``, V as ``[kv_head, token, dim]``.

    K is stored with tokens innermost so that these kernels multiply one query element with 16 tokens at a time.
    """


@dataclass(frozen=True)
class ScaledKVLayout(BlockLayout):
    """The CPU kernels' order in 8 bits, each token and head with a float32 scale for its K and one for its V.

    A head's K is ``[dim, token]`` bytes, then its scales ``[token]``; its V is ``[token, dim]`` bytes, then its scales.
    So whatever moves a block moves the scales with it. CPUs and GPUs have the same.

    Invariant: an element is ``value * scale``; the scale is the largest magnitude of the token's K or V over the
    largest number of the format, 127 of int8 and 448 of e4m3.
    """

    query_dtype: torch.dtype | None = None
    """What the model computes in."""

    _dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int8, torch.float8_e4m3fn)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_dtype is None:
            raise InvalidConfig("query_dtype: got None, a KV pool of 8 bits needs the dtype the model computes in.")

    @property
    def model_dtype(self) -> torch.dtype:
        """Number format of the K, V and queries that a model hands over."""
        assert self.query_dtype is not None  # Invariant: it was checked
        return self.query_dtype

    def key_bytes(self, layer: int) -> int:
        """Bytes of the layer's K in one block, scales included."""
        return self._num_bytes(self._key_shape(layer))

    def value_bytes(self, layer: int) -> int:
        """Bytes of the layer's V in one block, row padding and scales included."""
        return self._num_bytes(self._stored_value_shape(layer))

    def key_scales(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """View the scales of the layer's K as float32 [num_blocks, KVH, block_size]."""
        return self._scales(pool, self.key_offset(layer), self._key_shape(layer))

    def value_scales(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """View the scales of the layer's V as float32 [num_blocks, KVH, block_size]."""
        return self._scales(pool, self.value_offset(layer), self._stored_value_shape(layer))

    def _num_bytes(self, shape: tuple[int, ...]) -> int:
        return shape[0] * scaled_head_bytes(math.prod(shape[1:]), self.block_size)

    def _heads(self, pool: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return pool[:, offset : offset + self._num_bytes(shape)].view(pool.shape[0], shape[0], -1)

    def _view(self, pool: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        elements = self._heads(pool, offset, shape)[..., : math.prod(shape[1:])]
        return elements.view(self.dtype).view(pool.shape[0], *shape)

    def _scales(self, pool: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._heads(pool, offset, shape)[..., -SCALE_BYTES * self.block_size :].view(torch.float32)


@dataclass(frozen=True)
class TokenMajorLayout(BlockLayout):
    """The order for tensor cores: K and V both as ``[kv_head, token, dim]``, so that one row is one run of bytes."""

    def key_view(self, pool: torch.Tensor, layer: int) -> torch.Tensor:
        """View the layer's K as [num_blocks, KVH, D, block_size], though the elements of a token lie together."""
        return super().key_view(pool, layer).transpose(-1, -2)

    def _key_shape(self, layer: int) -> tuple[int, ...]:
        shape = self.layers[layer]
        return shape.num_kv_heads, self.block_size, shape.key_head_size

"""Everything in a decoder layer that is neither a matrix product nor attention, on NVIDIA GPUs.

Owns the objects that launch the kernels of ``device/rms_norm.py``, ``gated.py``, ``rotate.py`` and ``quantize.py``,
and what they check first. The first three compute what the CPU's objects of the same names do, with the same roundings;
they never see a model.

Invariant: the bits of a row depend on that row and the weights alone.
Invariant: a call is one launch on the stream that ``driver.begin_step`` noted; nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from pagedcore_kernels.cuda.build.variants import (
    ACTIVATIONS,
    gated_name,
    needed_capability,
    norm_name,
    quantize_name,
    rotate_name,
)
from pagedcore_kernels.cuda.driver import Driver
from pagedcore_kernels.cuda.formats import FORMATS, check_kernel_layout, layer_views
from pagedcore_kernels.cuda.shapes import GATED_VECTORS, NORM_VECTORS, ROW_THREADS, Format
from pagedcore_kernels.errors import InternalError, InvalidConfig
from pagedcore_kernels.layout import BlockLayout

_VECTOR: Final = 8
"""Elements of 16 bits in a vector."""
_MOST_UNITS: Final = 2**31 - 1
"""Kernels number what they work on in 32 bits."""
_MOST_HEAD: Final = 512
"""Elements of a head at most: 16 for each lane of a warp."""


def can_compute(
    *, hidden_size: int, intermediate_size: int, head_size: int, rotary_size: int, dtype: torch.dtype
) -> bool:
    """Whether the kernels handle rows and heads of these sizes in this dtype."""
    most = NORM_VECTORS[-1] * ROW_THREADS * _VECTOR
    rows_fit = hidden_size % _VECTOR == 0 and hidden_size <= most and intermediate_size % _VECTOR == 0
    heads_fit = head_size % 16 == 0 and rotary_size % 16 == 0 and rotary_size <= head_size <= _MOST_HEAD
    return rows_fit and heads_fit and dtype in (torch.bfloat16, torch.float16)


class RmsNorm:
    """``weight * x / rms(x)`` over rows, after an optional residual add.

    Args:
        weight: [hidden], of the rows' dtype, or float32: then the product alone is rounded.
        epsilon: added to the mean of squares.
        driver: the GPU.
        dtype: of all rows, bfloat16 or float16; ``None``: the weight's.

    Raises:
        InvalidConfig: no kernel holds rows of this size or dtype.
    """

    def __init__(
        self, weight: torch.Tensor, epsilon: float, driver: Driver, dtype: torch.dtype | None = None
    ) -> None:
        self._weight = weight.detach().clone(memory_format=torch.contiguous_format)
        self._like = torch.empty(0, dtype=dtype or weight.dtype, device=weight.device)
        self._is_wide = _is_wide(weight, self._like.dtype)
        self._epsilon = epsilon
        self._driver = driver
        self._name = norm_name(_storage(self._like.dtype), weight.numel())
        driver.prepare(self._name)

    def __call__(self, residual: torch.Tensor, addend: torch.Tensor | None, out: torch.Tensor) -> None:
        """Add ``addend`` to ``residual`` in place, if there is one, and write the norm of the sum to ``out``.

        All are [T, hidden], contiguous, of one dtype; ``out`` may be ``residual`` without an ``addend``, else neither.
        """
        for name, tensor in (("residual", residual), ("addend", addend), ("out", out)):
            if tensor is not None:
                _check_rows(name, tensor, (residual.shape[0], self._weight.numel()), self._like)
        if residual.shape[0]:
            self._driver.launch(self._name, residual.shape[0], (
                residual, addend, self._weight, out, self._weight.numel() // _VECTOR, self._is_wide, self._epsilon,
            ))


class GatedActivation:
    """``f(gate) * up`` over rows that hold gate and up side by side.

    Args:
        activation: one of ``ACTIVATIONS``.
        dtype: of all rows, bfloat16 or float16.
        driver: the GPU.

    Raises:
        InvalidConfig: there is no such kernel.
    """

    def __init__(self, activation: str, dtype: torch.dtype, driver: Driver) -> None:
        if activation not in ACTIVATIONS:
            raise InvalidConfig(f"activation: got {activation!r}, allowed are {', '.join(ACTIVATIONS)}.")
        self._driver = driver
        self._name = gated_name(_storage(dtype), activation)
        self._like = torch.empty(0, dtype=dtype, device=driver.device)
        driver.prepare(self._name)

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Read gate_up [T, 2 * intermediate] and write out [T, intermediate]; both contiguous."""
        num_rows, size = out.shape
        _check_rows("out", out, (num_rows, size), self._like)
        _check_rows("gate_up", gate_up, (num_rows, 2 * size), self._like)
        num_vectors = num_rows * size // _VECTOR
        if num_vectors:
            self._driver.launch(self._name, _ctas(num_vectors, ROW_THREADS * GATED_VECTORS), (
                gate_up, out, size // _VECTOR, num_vectors,
            ))


class RowQuantizer:
    """Rows in e4m3 with a scale for each.

    Args:
        dtype: of the rows, bfloat16 or float16.
        driver: the GPU, of compute capability 8.9 or newer.

    Raises:
        InvalidConfig: there is no such kernel.
    """

    def __init__(self, dtype: torch.dtype, driver: Driver) -> None:
        if driver.capability < needed_capability(Format.E4M3):
            raise InvalidConfig("rows in e4m3: this GPU has no instructions for them, needed is sm_89 or newer.")
        self._driver = driver
        self._name = quantize_name(_storage(dtype))
        self._like = torch.empty(0, dtype=dtype, device=driver.device)
        driver.prepare(self._name)

    def __call__(self, rows: torch.Tensor, scale: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes [T, size] of rows [T, size], contiguous, and their scales, float32 [T, 1].

        A scale is a 448th of its row's largest magnitude, or the one that is given if it is not 0. A row with an
        infinity or a NaN has the scale NaN.
        """
        num_rows, size = rows.shape
        _check_rows("rows", rows, (num_rows, size), self._like)
        codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
        scales = rows.new_empty(num_rows, 1, dtype=torch.float32)
        if num_rows:
            self._driver.launch(self._name, num_rows, (rows, codes, scales, size // _VECTOR, scale))
        return codes, scales


class RotaryEmbedding:
    """Rotary embedding of the queries and keys of a step, and the write of its K and V to their slots, in one launch.

    Args:
        layout: of the pool; heads of K and V of a layer have one size, a multiple of 16.
        pool: uint8 [blocks, block_bytes].
        driver: the GPU.
        rotary_size: elements of a head that turn, its first ones, a multiple of 16; ``None`` for all.
        interleaved: whether neighbours turn together, not the elements of two halves.

    Raises:
        InvalidConfig: there is no kernel for these sizes, this GPU or these formats.
    """

    def __init__(
        self, layout: BlockLayout, pool: torch.Tensor, driver: Driver, *, rotary_size: int | None = None,
        interleaved: bool = False,
    ) -> None:
        check_kernel_layout(layout, pool)
        stored = FORMATS.get(layout.dtype)
        if stored is None or driver.capability < needed_capability(stored):
            raise InvalidConfig(f"KV dtype: got {layout.dtype}, which this GPU cannot store. Choose another.")
        self._driver = driver
        self._layout = layout
        self._rotary_sizes = [_rotary_size(shape.key_head_size, rotary_size) for shape in layout.layers]
        if any(shape.key_head_size != shape.value_head_size for shape in layout.layers):
            raise InvalidConfig("head sizes: K and V differ, allowed for the fused rotary embedding is one size.")
        self._keys, self._values = layer_views(layout, pool)
        self._block_shift = layout.block_size.bit_length() - 1
        self._name = rotate_name(_storage(layout.model_dtype), stored, interleaved)
        driver.prepare(self._name)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor,
        angles: torch.Tensor, slots: torch.Tensor | None, *, norms: Sequence[torch.Tensor] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Turn query [T, H, D] in place; store key turned and value, both [T, KVH, D], which keep their contents.

        Args:
            layer: of the pool.
            query: in the model's dtype, as key and value are; heads and tokens start at multiples of 16 bytes.
            key: see there.
            value: see there.
            positions: int32 [T], each below the number of ``angles``; it is the caller who sees to that.
            angles: float32 [positions, rotary_size], cosines and then sines, in the precision of the model's dtype.
            slots: int32 [T], -1 for nowhere; ``None`` stores nothing.
            norms: weights [D] of query heads and of key heads, which are RMS-normed first, as ``RmsNorm`` does.
            epsilon: of the norms.
        """
        shape, rotary = self._layout.layers[layer], self._rotary_sizes[layer]
        num_tokens, heads, size = query.shape
        self._check_heads("query", query, (num_tokens, heads, shape.key_head_size))
        for name, tensor in (("key", key), ("value", value)):
            self._check_heads(name, tensor, (num_tokens, shape.num_kv_heads, size))
        _check_numbers("positions", positions, num_tokens)
        if slots is not None:
            _check_numbers("slots", slots, num_tokens)
        is_table = angles.is_contiguous() and angles.data_ptr() % 16 == 0
        if angles.shape[1:] != (rotary,) or angles.dtype != torch.float32 or not is_table:
            raise InternalError(f"angles: {angles.dtype} {tuple(angles.shape)}, expected float32 [N, {rotary}].")
        query_norm, key_norm = (self._weight(weight, size) for weight in norms) if norms else (None, None)
        is_wide = query_norm is not None and _is_wide(query_norm, query.dtype)
        if not num_tokens:
            return
        group_shift = (size // 16 - 1).bit_length()
        self._driver.launch(
            self._name, _ctas(num_tokens * (heads + 2 * shape.num_kv_heads) << group_shift, ROW_THREADS), (
                query, key, value, positions, angles, query_norm, key_norm, slots, self._keys[layer],
                self._values[layer], self._layout.block_bytes, num_tokens, *_steps(query), *_steps(key),
                *_steps(value), heads, shape.num_kv_heads, size, size, rotary, group_shift, self._block_shift,
                is_wide, epsilon,
            ),
        )

    def _check_heads(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != self._layout.model_dtype:
            raise InternalError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {self._layout.model_dtype} {shape}."
            )
        token, head = _steps(tensor)
        if (token | head | tensor.data_ptr()) % 16 or tensor.stride(-1) != 1:
            raise InternalError(f"{name}: strides {tensor.stride()}, expected heads at multiples of 16 bytes.")

    def _weight(self, weight: torch.Tensor, size: int) -> torch.Tensor:
        if tuple(weight.shape) != (size,) or not weight.is_contiguous() or weight.data_ptr() % 16:
            raise InternalError(f"norm weight: {weight.dtype} {tuple(weight.shape)}, expected [{size}] in one piece.")
        return weight


def _is_wide(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    if weight.dtype not in (dtype, torch.float32):
        raise InvalidConfig(f"norm weight: got {weight.dtype}, allowed for rows of {dtype} is the same or float32.")
    return weight.dtype == torch.float32


def _storage(dtype: torch.dtype) -> Format:
    found = FORMATS.get(dtype)
    if found is None or found.itemsize != 2:
        raise InvalidConfig(f"dtype: got {dtype}, allowed for CUDA kernels are bfloat16 and float16.")
    return found


def _rotary_size(head_size: int, wanted: int | None) -> int:
    size = head_size if wanted is None else wanted
    if head_size % 16 or head_size > _MOST_HEAD or size % 16 or not 0 <= size <= head_size:
        raise InvalidConfig(
            f"rotary size: got {size} of {head_size}, allowed are multiples of 16, and of a head at most {_MOST_HEAD}."
        )
    return size


def _check_numbers(name: str, tensor: torch.Tensor, count: int) -> None:
    if tuple(tensor.shape) != (count,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise InternalError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected int32 [{count}].")


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int], like: torch.Tensor) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise InternalError(
            f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {like.dtype} {shape} on "
            f"{like.device}."
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % 16 or shape[1] % _VECTOR:
        raise InternalError(f"{name}: rows of {shape[1]} elements, expected whole vectors of 16 bytes without gaps.")


def _steps(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes from token to token and from head to head."""
    return tensor.stride(0) * tensor.itemsize, tensor.stride(1) * tensor.itemsize


def _ctas(units: int, per_cta: int) -> int:
    if units > _MOST_UNITS:
        raise InternalError(f"CUDA launch: {units} pieces of work, expected at most {_MOST_UNITS}. Cut the batch.")
    return -(-units // per_cta)

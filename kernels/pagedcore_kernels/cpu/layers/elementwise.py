"""Everything in a decoder layer that is neither a matrix product nor attention, over all rows of a step.

Owns four kernels and the objects that call them: residual add with RMS norm, gated activation, rotary embedding
together with the write of K and V into the pool, and the soft cap of logits. They compute what the modules of
transformers compute, with the same rounding (``hidden_rows.py``); they never see a model. Read
``pagedcore/models/decoders/fused.py`` for who uses them.

Invariant: work is split by rows, so the bits of a row depend neither on the other rows nor on the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any

import torch

from pagedcore_kernels.cpu.layers import hidden_rows
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.simd import LANES, address_of, claim, load_float32, load_int64
from pagedcore_kernels.errors import InternalError

if TYPE_CHECKING:
    from pagedcore_kernels.layout import KVLayout

ACTIVATIONS = {"silu": hidden_rows.SILU, "gelu_tanh": hidden_rows.GELU_TANH}
"""Activations of ``GatedActivation``, by the names of ``torch.nn.functional``."""

SMALLEST_VECTOR = 4
"""Fewest lanes for which vectors are worth their while; sizes must be multiples of it."""
_MOST_ROWS_AT_ONCE = 32
_ROUNDS_OF_WORK = 8
_CAPPED_AT_ONCE = 8192
"""Logits that a thread claims together."""
_BYTES_OF_ONE_THREAD = 2**15
"""Up to so many bytes of rows one thread is done before they have reached the cache of a second one."""


def can_compute(
    *, hidden_size: int, intermediate_size: int, head_size: int, dtype: torch.dtype, rotary_size: int | None = None
) -> bool:
    """Whether the kernels handle rows of these sizes in this dtype; ``rotary_size`` as in ``RotaryEmbedding``."""
    sizes_fit = hidden_size % LANES == 0 and intermediate_size % LANES == 0
    heads_fit = all(
        size % 2 == 0 and size // 2 % SMALLEST_VECTOR == 0 for size in (head_size, rotary_size or head_size)
    )
    return sizes_fit and heads_fit and dtype in (torch.float32, torch.bfloat16)


def rows_at_once(num_rows: int) -> int:
    """Rows that a thread claims together: several where there are many, so that the counter is not fought over."""
    return min(_MOST_ROWS_AT_ONCE, max(1, num_rows // _ROUNDS_OF_WORK))


def tokens_at_once(num_tokens: int, *, are_apart: bool) -> int:
    """Rows that a thread claims together where K is written, to blocks of their own if tokens are apart.

    Why: a cache line has the same element of K of 32 consecutive tokens in bfloat16. With fewer at once two threads
    write to the same lines, which takes four times as long.
    """
    is_shared = num_tokens >= _MOST_ROWS_AT_ONCE and not are_apart
    return _MOST_ROWS_AT_ONCE if is_shared else rows_at_once(num_tokens)


def threads_for(num_rows: int, row_bytes: int) -> int | None:
    """How many threads share the light work on so many rows; ``None``: all."""
    return 1 if num_rows * row_bytes <= _BYTES_OF_ONE_THREAD else None


class RmsNorm:
    """``weight * x / rms(x)`` over rows, after an optional residual add.

    Args:
        weight: [hidden], float32 or bfloat16; with a weight of float32 the quotient is not rounded before the product.
        epsilon: added to the mean of squares.
        dtype: of all rows; ``None``: the weight's.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, dtype: torch.dtype | None = None) -> None:
        self._weight = weight.detach().clone(memory_format=torch.contiguous_format)
        formats = [int(one == torch.bfloat16) for one in (dtype or weight.dtype, weight.dtype)]
        self._kernels = [_norm_kernel(*formats, adds) for adds in (0, 1)]
        self._parameters = ParameterBlock(8)
        self._parameters.set_float(7, epsilon)

    def __call__(self, residual: torch.Tensor, addend: torch.Tensor | None, out: torch.Tensor) -> None:
        """Add ``addend`` to ``residual`` in place, if there is one, and write the norm of the sum to ``out``.

        All are [T, hidden], contiguous, of one dtype; ``out`` may be ``residual`` if there is no ``addend``.
        """
        num_rows, hidden = residual.shape
        self._parameters.fill(
            residual.data_ptr(), 0 if addend is None else addend.data_ptr(), self._weight.data_ptr(),
            out.data_ptr(), num_rows, hidden, rows_at_once(num_rows),
        )  # fmt: skip
        row_bytes = hidden * residual.itemsize
        self._kernels[addend is not None].run(
            self._parameters, threads_for(num_rows, row_bytes), (_sizes_of_norm, row_bytes)
        )  # fmt: skip


class GatedActivation:
    """``f(gate) * up`` over rows that hold gate and up side by side.

    Args:
        activation: a key of ``ACTIVATIONS``.
        dtype: of all rows.
    """

    def __init__(self, activation: str, dtype: torch.dtype) -> None:
        self._kernel = _gated_kernel(int(dtype == torch.bfloat16), ACTIVATIONS[activation])
        self._parameters = ParameterBlock(5)

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """Read gate_up [T, 2 * intermediate] and write out [T, intermediate]; both contiguous."""
        num_rows, size = out.shape
        self._parameters.fill(gate_up.data_ptr(), out.data_ptr(), num_rows, size, rows_at_once(num_rows))
        self._kernel.run(self._parameters, resize=(_sizes_of_activation,))


class SoftCap:
    """``cap * tanh(x / cap)`` over logits, in place.

    Args:
        cap: a positive bound.
        dtype: of the logits.
    """

    def __init__(self, cap: float, dtype: torch.dtype) -> None:
        self._kernel = _cap_kernel(int(dtype == torch.bfloat16))
        self._parameters = ParameterBlock(3)
        self._parameters.set_float(2, cap)

    def __call__(self, logits: torch.Tensor) -> None:
        """Bound ``logits``, contiguous and of any shape."""
        self._parameters.fill(logits.data_ptr(), logits.numel())
        self._kernel.run(self._parameters, resize=(_sizes_of_cap, logits.shape[-1]))


@dataclass(frozen=True, slots=True)
class KVDestination:
    """Where the K and V of a step go: slots [T] int64 of a pool with this layout, negative for nowhere."""

    layout: KVLayout
    pool: torch.Tensor
    slots: torch.Tensor
    are_apart: bool = False
    """Whether each slot is in a block of its own; what is computed does not depend on it."""


class RotaryEmbedding:
    """Rotary embedding of the queries and keys of a step, in place, and the write of its K and V to a pool.

    Optionally every query head and key head is RMS-normed first, or all of a row's together.

    Args:
        num_heads: query heads H.
        num_kv_heads: key and value heads KVH.
        head_size: D, of queries, keys and values.
        dtype: of all rows and of the pool.
        norms: weights [D] of query heads and of key heads, or [H * D] and [KVH * D] of rows; see ``RmsNorm`` for their
            dtype.
        epsilon: of the norms.
        rotary_size: elements R at the beginning of a head that are rotated; ``None``: all.
        rounds: round every product of the rotation, not only their sums.
        has_gates: whether every query head is followed by a gate of its size, which is left as it is.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        *,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        epsilon: float = 0.0,
        rotary_size: int | None = None,
        rounds: bool = True,
        has_gates: bool = False,
    ) -> None:
        self._heads, query_heads = (num_heads, num_kv_heads), num_heads * (2 if has_gates else 1)
        self._row_size = (query_heads + 2 * num_kv_heads) * head_size
        self._norms = norms
        self._norm_addresses = (norms[0].data_ptr(), norms[1].data_ptr()) if norms else (0, 0)
        is_bf16 = int(dtype == torch.bfloat16)
        scope = 0 if norms is None else 1 if all(len(weight) == head_size for weight in norms) else 2
        if has_gates and scope == 2:
            raise InternalError("rotary embedding: with gates between query heads their rows have no norm together")
        weights_bf16 = is_bf16 if norms is None else int(norms[0].dtype == torch.bfloat16)
        self._kernel = _rotary_kernel(
            is_bf16, head_size, scope, weights_bf16, head_size if rotary_size is None else rotary_size, int(rounds),
            1 + int(has_gates),
        )
        self._parameters = ParameterBlock(18)
        self._parameters.set_float(17, epsilon)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        angles: torch.Tensor,
        destination: KVDestination | None = None,
        layer: int = 0,
    ) -> None:
        """Rotate ``qkv`` and store its keys and values.

        Args:
            qkv: [T, (H + 2 KVH) * D], contiguous: query heads, key heads, value heads; changed in place. With gates
                [T, (2 H + 2 KVH) * D].
            positions: [T] int64, each a row of ``angles``.
            angles: [positions, R] float32: cosines of the first half of R, then sines.
            destination: where keys and values are written, if anywhere.
            layer: index into the destination's layers.
        """
        if qkv.shape[1] != self._row_size:
            raise InternalError(f"qkv rows have {qkv.shape[1]} elements, expected {self._row_size}")
        # Safety: of narrower numbers the kernel would read two as one, and angles beyond the table.
        if positions.dtype != torch.int64:
            raise InternalError(f"positions: {positions.dtype}, expected torch.int64")
        num_rows = qkv.shape[0]
        at_once = tokens_at_once(num_rows, are_apart=destination is not None and destination.are_apart)
        self._parameters.fill(
            qkv.data_ptr(), positions.data_ptr(), angles.data_ptr(), *self._norm_addresses, num_rows, *self._heads,
            at_once, *_places(destination, layer),
        )  # fmt: skip
        row_bytes = self._row_size * qkv.itemsize
        self._kernel.run(self._parameters, threads_for(num_rows, row_bytes), (_sizes_of_rotary, row_bytes))


def _sizes_of_norm(shape: StepShape, row_bytes: int) -> Sizes:
    num_rows = shape.num_rows
    return Sizes([(5, num_rows), (7, rows_at_once(num_rows))], threads_for(num_rows, row_bytes))


def _sizes_of_activation(shape: StepShape) -> Sizes:
    return Sizes([(3, shape.num_rows), (5, rows_at_once(shape.num_rows))])


def _sizes_of_cap(shape: StepShape, row_size: int) -> Sizes:
    return Sizes([(2, shape.num_rows * row_size)])


def _sizes_of_rotary(shape: StepShape, row_bytes: int) -> Sizes:
    num_rows, at_once = shape.num_rows, tokens_at_once(shape.num_rows, are_apart=shape.are_apart)
    return Sizes([(6, num_rows), (9, at_once)], threads_for(num_rows, row_bytes))


def _places(destination: KVDestination | None, layer: int) -> tuple[int, ...]:
    """Slots, K and V of the layer, then strides in bytes: block; K and V from head to head; V from token to token."""
    if destination is None:
        return 0, 0, 0, 1, 0, 0, 0, 0
    layout, pool = destination.layout, destination.pool.data_ptr()
    shape, item = layout.layers[layer], layout.dtype.itemsize
    value_row = shape.padded_value_size * item
    return (
        destination.slots.data_ptr(), pool + layout.key_offset(layer), pool + layout.value_offset(layer),
        layout.block_size, layout.block_bytes, shape.key_head_size * layout.block_size * item,
        layout.block_size * value_row, value_row,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Kernels. Closures hold integers only; every argument is a word of the parameter block.


@lru_cache
def _norm_kernel(is_bf16: int, is_weight_bf16: int, adds: int) -> Kernel:
    size = 2 if is_bf16 else 4
    lanes = LANES

    def add_rms_norm(parameters: Any) -> None:
        p = address_of(parameters)
        counter = load_int64(p, 0)
        residual, addend, weight, out = load_int64(p, 1), load_int64(p, 2), load_int64(p, 3), load_int64(p, 4)
        num_rows, hidden, chunk = load_int64(p, 5), load_int64(p, 6), load_int64(p, 7)
        epsilon = load_float32(p, 16)
        vectors = hidden // lanes
        while True:
            first = claim(counter) * chunk
            if first >= num_rows:
                break
            for row in range(first, min(first + chunk, num_rows)):
                distance = row * hidden * size
                if adds:
                    hidden_rows.add_row(is_bf16, lanes, residual + distance, addend + distance, vectors)
                scale = hidden_rows.inverse_rms(is_bf16, lanes, residual + distance, vectors, epsilon)
                hidden_rows.scale_row(
                    is_bf16, is_weight_bf16, lanes, residual + distance, weight, out + distance, vectors, scale
                )  # fmt: skip

    return compile_kernel(add_rms_norm)


@lru_cache
def _gated_kernel(is_bf16: int, activation: int) -> Kernel:
    size = 2 if is_bf16 else 4
    lanes = LANES

    def gated_activation(parameters: Any) -> None:
        p = address_of(parameters)
        counter = load_int64(p, 0)
        gate_up, out = load_int64(p, 1), load_int64(p, 2)
        num_rows, row_size, chunk = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        while True:
            first = claim(counter) * chunk
            if first >= num_rows:
                break
            for row in range(first, min(first + chunk, num_rows)):
                gate = gate_up + row * 2 * row_size * size
                hidden_rows.gated_activation(
                    is_bf16, lanes, activation, gate, gate + row_size * size, out + row * row_size * size,
                    row_size // lanes,
                )  # fmt: skip

    return compile_kernel(gated_activation)


@lru_cache
def _cap_kernel(is_bf16: int) -> Kernel:
    size = 2 if is_bf16 else 4
    lanes, chunk = LANES, _CAPPED_AT_ONCE

    def soft_cap(parameters: Any) -> None:
        p = address_of(parameters)
        counter, logits, number = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        cap = load_float32(p, 6)
        while True:
            first = claim(counter) * chunk
            if first >= number:
                break
            share = min(chunk, number - first)
            vectors = share // lanes
            row = logits + first * size
            hidden_rows.cap_row(is_bf16, lanes, row, vectors, cap)
            hidden_rows.cap_row(is_bf16, 1, row + vectors * lanes * size, share - vectors * lanes, cap)

    return compile_kernel(soft_cap)


@lru_cache
def _rotary_kernel(
    is_bf16: int, head_size: int, norms: int, is_weight_bf16: int, rotary_size: int, rounds: int, apart: int
) -> Kernel:
    """``norms``: 0 for none, 1 for one of each head, 2 for one of all query heads and one of all key heads; ``apart``:
    heads from a query head to the next one.
    """
    size = 2 if is_bf16 else 4
    lanes = gcd(head_size // 2, LANES)
    rotary_lanes = gcd(rotary_size // 2, LANES)
    vectors = head_size // lanes
    head_bytes = head_size * size

    def rotate_and_write(parameters: Any) -> None:
        p = address_of(parameters)
        counter = load_int64(p, 0)
        qkv, positions, angles = load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        query_norm, key_norm = load_int64(p, 4), load_int64(p, 5)
        num_rows, num_heads, num_kv_heads = load_int64(p, 6), load_int64(p, 7), load_int64(p, 8)
        chunk = load_int64(p, 9)
        slots, keys, values = load_int64(p, 10), load_int64(p, 11), load_int64(p, 12)
        block_size, block_bytes = load_int64(p, 13), load_int64(p, 14)
        key_head_bytes, value_head_bytes, value_bytes = load_int64(p, 15), load_int64(p, 16), load_int64(p, 17)
        epsilon = load_float32(p, 36)
        while True:
            first = claim(counter) * chunk
            if first >= num_rows:
                break
            for row in range(first, min(first + chunk, num_rows)):
                queries = qkv + row * (apart * num_heads + 2 * num_kv_heads) * head_bytes
                heads_of_keys = queries + apart * num_heads * head_bytes
                # Safety: a negative slot means "nowhere"; as an address it would be memory before the pool.
                slot = load_int64(slots, row) if slots != 0 else -1
                key_place = keys + max(slot, 0) // block_size * block_bytes + max(slot, 0) % block_size * size
                if slot >= 0:
                    # Why here: the lines come while heads are rotated.
                    for head in range(num_kv_heads):
                        hidden_rows.ask_for_scattered(
                            is_bf16, head_size, key_place + head * key_head_bytes, block_size
                        )  # fmt: skip
                cosines = angles + load_int64(positions, row) * rotary_size * 4
                if norms == 2:
                    for part in range(2):
                        weight = key_norm if part else query_norm
                        address = heads_of_keys if part else queries
                        width = (num_kv_heads if part else num_heads) * vectors
                        scale = hidden_rows.inverse_rms(is_bf16, lanes, address, width, epsilon)
                        hidden_rows.scale_row(is_bf16, is_weight_bf16, lanes, address, weight, address, width, scale)
                for head in range(num_heads + num_kv_heads):
                    address = queries + head * apart * head_bytes
                    if head >= num_heads:
                        address = heads_of_keys + (head - num_heads) * head_bytes
                    if norms == 1:
                        weight = query_norm if head < num_heads else key_norm
                        scale = hidden_rows.inverse_rms(is_bf16, lanes, address, vectors, epsilon)
                        hidden_rows.scale_row(is_bf16, is_weight_bf16, lanes, address, weight, address, vectors, scale)
                    hidden_rows.rotate_head(
                        is_bf16, rounds, rotary_lanes, rotary_size, address, cosines, cosines + rotary_size * 2
                    )  # fmt: skip
                if slot < 0:
                    continue
                block, offset = slot // block_size, slot % block_size
                for head in range(num_kv_heads):
                    source = heads_of_keys + head * head_bytes
                    key = key_place + head * key_head_bytes
                    hidden_rows.scatter_row(is_bf16, head_size, source, key, block_size)
                    value = values + block * block_bytes + head * value_head_bytes + offset * value_bytes
                    hidden_rows.copy_row(is_bf16, head_size, source + num_kv_heads * head_bytes, value)

    return compile_kernel(rotate_and_write)

"""Rows of activations in int8, each with a scale of its own: its largest magnitude is 127.

Invariant: what a row becomes depends on the row alone.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT32,
    LANES,
    ROUNDING,
    Builder,
    Typing,
    Value,
    address_of,
    claim,
    constant,
    int64,
    integer_constant,
    item_bytes,
    larger,
    load_floats,
    load_int64,
    reduce_lanes,
    splat,
    store,
)
from pagedcore_kernels.interface import RowRoom

ROW_MULTIPLE = LANES
"""Inputs of a row are a multiple of this."""
UNSIGNED_OFFSET = 128
"""Added to every value where the product takes the rows as uint8."""

_LARGEST = 127.0
_SMALLEST = 2.0**-100
"""A row whose magnitudes are below this is all zeros: the inverse of its scale would not be finite."""
_WHOLE = ir.VectorType(INT32, LANES)
_BYTE_VECTOR = ir.VectorType(ir.IntType(8), LANES)
_ROWS_AT_ONCE = 8


class RowQuantizer:
    """Turns rows into int8 and scales.

    Args:
        dtype: of the rows, float32 or bfloat16.
        offset: 0, or ``UNSIGNED_OFFSET``, which is added to every value modulo 256.
    """

    def __init__(self, dtype: torch.dtype, offset: int) -> None:
        self._kernel = _kernel(int(dtype == torch.bfloat16), offset)
        self._parameters = ParameterBlock(5)

    def __call__(
        self, rows: torch.Tensor, workspace: RowRoom | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 [M, in] and float32 scales [M] of ``rows`` [M, in], contiguous, ``in`` a multiple of 16.

        A value is the nearest integer to ``row / scale``, ties to even, and ``scale`` is a 127th of the row's largest
        magnitude. The scale of a row with an infinity or a NaN is NaN. Both lie in the workspace, if there is one.
        """
        take = workspace.take if workspace is not None else _new
        values = take("int8 rows", len(rows), rows.shape[1], torch.int8)
        scales = take("scales of rows", len(rows), 1, torch.float32)[:, 0]
        self._parameters.fill(rows.data_ptr(), values.data_ptr(), scales.data_ptr(), *rows.shape)
        self._kernel.run(self._parameters, resize=(_sizes,))
        return values, scales


def _sizes(shape: StepShape) -> Sizes:
    return Sizes([(4, shape.num_rows)])


def _new(purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_rows, size, dtype=dtype)


@cache
def _kernel(is_bf16: int, offset: int) -> Kernel:
    row_item_bytes, lanes, at_once = item_bytes(is_bf16), LANES, _ROWS_AT_ONCE

    def quantize(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, values = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2)
        scales, num_rows, size = load_int64(p, 3), load_int64(p, 4), load_int64(p, 5)
        first = claim(counter) * at_once
        while first < num_rows:
            for row in range(first, min(first + at_once, num_rows)):
                source, target = rows + row * size * row_item_bytes, values + row * size
                quantize_row(is_bf16, offset, source, size // lanes, target, scales + row * 4)
            first = claim(counter) * at_once

    return compile_kernel(quantize)


@intrinsic(prefer_literal=True)
def quantize_row(
    typing: Typing, is_bf16: Any, offset: Any, row: Any, num_vectors: Any, values: Any, scale: Any
) -> Any:  # fmt: skip
    """Quantise ``num_vectors`` * 16 inputs. Literal: is_bf16, offset."""
    bf16, added = is_bf16.literal_value, offset.literal_value
    vector_bytes = LANES * item_bytes(bf16)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, count, target, scale_address = args
        scale, factor = scale_and_factor(b, largest_magnitude(b, source, count, bf16))
        store(b, scale, scale_address, 0, 4)
        factor = splat(b, factor)
        with cgutils.for_range(b, count) as loop:
            inputs = load_floats(b, source, b.mul(loop.index, int64(vector_bytes)), bf16)
            rounded = b.fadd(b.fmul(inputs, factor), constant(ROUNDING))
            whole = b.add(b.bitcast(rounded, _WHOLE), integer_constant(added, _WHOLE))
            store(b, b.trunc(whole, _BYTE_VECTOR), target, b.mul(loop.index, int64(LANES)), 1)
        return context.get_dummy_value()

    return types.void(is_bf16, offset, *[types.int64] * 4), codegen


def scale_and_factor(b: Builder, largest: Value) -> tuple[Value, Value]:
    """Return the scale of inputs whose largest magnitude is known, and what each of them is multiplied with."""
    is_finite = b.fcmp_ordered("<", largest, constant(float("inf"), FLOAT))
    is_large = b.fcmp_ordered(">=", largest, constant(_SMALLEST, FLOAT))
    quotient = b.fdiv(largest, constant(_LARGEST, FLOAT))
    known = b.select(is_large, quotient, constant(0.0, FLOAT))
    scale = b.select(is_finite, known, constant(float("nan"), FLOAT))
    inverse = b.fdiv(constant(_LARGEST, FLOAT), largest)
    return scale, b.select(b.and_(is_finite, is_large), inverse, constant(0.0, FLOAT))


def largest_magnitude(b: Builder, row: Value, count: Value, is_bf16: int, lanes: int = LANES) -> Value:
    """Return the largest magnitude of ``count`` * ``lanes`` inputs, a NaN if there is one.

    Why as integers: the bits of magnitudes are in the order of the magnitudes, those of NaN after that of infinity.
    """
    whole, vector_bytes = ir.VectorType(INT32, lanes), lanes * item_bytes(is_bf16)
    magnitude = integer_constant(0x7FFFFFFF, whole)
    largest = cgutils.alloca_once_value(b, integer_constant(0, whole))
    with cgutils.for_range(b, count) as loop:
        inputs = load_floats(b, row, b.mul(loop.index, int64(vector_bytes)), is_bf16, lanes)
        here, before = b.and_(b.bitcast(inputs, whole), magnitude), b.load(largest)
        b.store(larger(b, here, before), largest)
    bits = reduce_lanes(b, b.load(largest), partial(larger, b))
    return b.bitcast(bits, FLOAT)

"""Rows of activations in int8 for weights with groups of inputs: each group of a row has a scale of its own.

A group of a row becomes what ``quantize_rows`` makes of a whole row. Its inputs are put in the order in which units of
packed weights of 4 bits have them, see ``grouped_bytes.py``.

Invariant: what a group of a row becomes depends on that group alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.grouped_tiles import UNIT
from pagedcore_kernels.cpu.matmul.quantize_rows import largest_magnitude, scale_and_factor
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.recorded_calls import Sizes, StepShape
from pagedcore_kernels.cpu.simd import (
    INT8,
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
    load_floats,
    load_int64,
    reduce_lanes,
    splat,
    store,
)
from pagedcore_kernels.interface import RowRoom

ORDER_OF_UNIT = (0, 4, 1, 5, 2, 6, 3, 7)
"""The inputs of a unit in the order in which its bytes have them: the lower halves of four bytes, then the upper."""
GROUP_WORDS = 2
"""Words of 4 bytes that are known of a group of a row: its scale, float32, and the sum of its values, int32."""

_ROUNDING_BITS = 0x4B400000
"""Those of ``ROUNDING``."""
_ROWS_AT_ONCE = 4


class RowGroupQuantizer:
    """Turns rows into int8 with scales and sums of groups.

    Args:
        dtype: of the rows, float32 or bfloat16.
        num_groups: of a row.
        group_inputs: a multiple of ``UNIT``.
    """

    def __init__(self, dtype: torch.dtype, num_groups: int, group_inputs: int) -> None:
        lanes = LANES if group_inputs % LANES == 0 else UNIT
        self._kernel = _kernel(int(dtype == torch.bfloat16), lanes)
        self._sizes = num_groups, group_inputs // lanes
        self._parameters = ParameterBlock(6)

    def __call__(
        self, rows: torch.Tensor, workspace: RowRoom | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 [M, in] and [M, groups * ``GROUP_WORDS``] of ``rows`` [M, in], contiguous.

        A value is the nearest integer to ``row / scale``, ties to even, and ``scale`` is a 127th of the group's largest
        magnitude; that of a group with an infinity or a NaN is NaN. Both lie in the workspace, if there is one.
        """
        take = workspace.take if workspace is not None else _new
        values = take("int8 rows", len(rows), rows.shape[1], torch.int8)
        groups = take("groups of rows", len(rows), self._sizes[0] * GROUP_WORDS, torch.float32)
        self._parameters.fill(rows.data_ptr(), values.data_ptr(), groups.data_ptr(), len(rows), *self._sizes)
        self._kernel.run(self._parameters, resize=(_sizes,))
        return values, groups


def _sizes(shape: StepShape) -> Sizes:
    return Sizes([(4, shape.num_rows)])


def _new(purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_rows, size, dtype=dtype)


@cache
def _kernel(is_bf16: int, lanes: int) -> Kernel:
    vector_bytes, known_bytes, at_once = lanes * item_bytes(is_bf16), 4 * GROUP_WORDS, _ROWS_AT_ONCE

    def quantize(parameters: Any) -> None:
        p = address_of(parameters)
        counter, rows, values, groups = load_int64(p, 0), load_int64(p, 1), load_int64(p, 2), load_int64(p, 3)
        num_rows, num_groups, num_vectors = load_int64(p, 4), load_int64(p, 5), load_int64(p, 6)
        first = claim(counter) * at_once
        while first < num_rows:
            for number in range(first * num_groups, min(first + at_once, num_rows) * num_groups):
                start = number * num_vectors
                quantize_group_of_row(
                    is_bf16, lanes, rows + start * vector_bytes, num_vectors, values + start * lanes,
                    groups + number * known_bytes,
                )  # fmt: skip
            first = claim(counter) * at_once

    return compile_kernel(quantize)


@intrinsic(prefer_literal=True)
def quantize_group_of_row(
    typing: Typing, is_bf16: Any, lanes: Any, inputs: Any, num_vectors: Any, values: Any, known: Any
) -> Any:  # fmt: skip
    """Quantise ``num_vectors`` * ``lanes`` inputs. Literal: is_bf16, lanes (a multiple of ``UNIT``)."""
    bf16, width = is_bf16.literal_value, lanes.literal_value
    vector_bytes, whole = width * item_bytes(bf16), ir.VectorType(INT32, width)
    order = [start + place for start in range(0, width, UNIT) for place in ORDER_OF_UNIT]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, _, source, count, target, of_group = args
        scale, factor = scale_and_factor(b, largest_magnitude(b, source, count, bf16, width))
        factor = splat(b, factor, width)
        total = cgutils.alloca_once_value(b, integer_constant(0, whole))
        with cgutils.for_range(b, count) as loop:
            numbers = load_floats(b, source, b.mul(loop.index, int64(vector_bytes)), bf16, width)
            rounded = b.fadd(b.fmul(numbers, factor), constant(ROUNDING, numbers.type))
            integers = b.sub(b.bitcast(rounded, whole), integer_constant(_ROUNDING_BITS, whole))
            b.store(b.add(b.load(total), integers), total)
            made = b.trunc(integers, ir.VectorType(INT8, width))
            mixed = b.shuffle_vector(made, made, ir.Constant(whole, order))
            store(b, mixed, target, b.mul(loop.index, int64(width)), 1)
        store(b, scale, of_group, 0, 4)
        store(b, reduce_lanes(b, b.load(total), b.add), of_group, 4, 4)
        return context.get_dummy_value()

    return types.void(is_bf16, lanes, *[types.int64] * 4), codegen

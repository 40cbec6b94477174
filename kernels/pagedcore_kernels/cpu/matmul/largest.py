"""The largest output of each row of a product, found panel by panel, where nobody reads the others.

An output layer has one output for each token of the vocabulary, and of a row that is decoded greedily only the number
of the largest is wanted. A kernel that is asked for it keeps one *candidate* for each row and panel, where it would
store 64 outputs: an int64 whose upper half is the largest of them, as an integer that is ordered as float32 are, and
whose lower half is the complement of that output's number. So the largest candidate of a row says its largest output
and, of equal ones, the lowest number.

Some outputs of some rows may be *barred*: they are no candidates, as if they were minus infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, register_jitable

from pagedcore_kernels.cpu.matmul.tiles import PANEL
from pagedcore_kernels.cpu.simd import (
    AS_BFLOAT16,
    AS_FLOAT32,
    FLOAT,
    INT32,
    INT64,
    LANES,
    Builder,
    Typing,
    Value,
    combine_pairwise,
    constant,
    int64,
    integer_constant,
    item_bytes,
    load_floats,
    load_int64,
    maximum,
    reduce_lanes,
    splat,
    store,
    store_floats,
)

_VECTORS = PANEL // LANES
_INFINITY = float("inf")
_NOT_A_NUMBER = 2**63 - 1
"""Of a panel that holds NaN: above every number."""
_LOWER = 2**32 - 1
"""The lower half of a candidate."""


def _upper_of(number: float) -> int:
    """Return the upper half of a candidate of this value, of either sign."""
    bits = int(np.float32(number).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


_UPPER_OF_INFINITY, _UPPER_OF_MINUS_INFINITY = _upper_of(_INFINITY), _upper_of(-_INFINITY)


@intrinsic(prefer_literal=True)
def keep_candidate(typing: Typing, is_bf16: Any, outputs: Any, num_outputs: Any, first: Any, candidate: Any) -> Any:
    """Store the candidate of one row and panel: of the first ``num_outputs`` of ``outputs`` [PANEL], all readable.

    ``first`` is the number of the first one. Outputs are as they would be stored, so rounded to bfloat16 if
    ``is_bf16``, which is a literal.
    """
    bf16 = is_bf16.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        def larger(x: Value, y: Value) -> Value:
            return maximum(b, x, y)

        _, source, wanted, number, target = args
        lanes = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
        vectors = []
        for v in range(_VECTORS):
            # Why added to 0: minus zero and zero are equal, and their bits become so.
            values = b.fadd(load_floats(b, source, v * LANES * item_bytes(bf16), bf16), constant(0.0))
            is_output = b.icmp_signed("<", lanes, splat(b, b.sub(wanted, int64(v * LANES))))
            vectors.append(b.select(is_output, values, constant(-_INFINITY)))
        largest = reduce_lanes(b, combine_pairwise(vectors, larger), larger)
        # Why: an unordered comparison of two vectors finds the NaNs of both at once.
        nans = [_mask(b, b.fcmp_unordered("uno", *vectors[v : v + 2])) for v in range(0, _VECTORS, 2)]
        has_nan = b.icmp_signed("!=", combine_pairwise(nans, b.or_), int64(0))
        equal = int64(0)
        for v, values in enumerate(vectors):
            mask = _mask(b, b.fcmp_ordered("==", values, splat(b, largest)))
            equal = b.or_(equal, b.shl(mask, int64(v * LANES)))
        place = b.add(number, b.cttz(equal, ir.Constant(ir.IntType(1), 0)))
        bits = b.bitcast(largest, INT32)
        sign = b.ashr(bits, integer_constant(31, INT32))
        upper = b.sext(b.xor(bits, b.and_(sign, integer_constant(0x7FFFFFFF, INT32))), INT64)
        made = b.or_(b.shl(upper, int64(32)), b.sub(int64(_LOWER), place))
        store(b, b.select(has_nan, int64(_NOT_A_NUMBER), made), target, 0, 8)
        return context.get_dummy_value()

    return types.void(is_bf16, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def bar_output(typing: Typing, is_bf16: Any, outputs: Any, place: Any) -> Any:
    """Make output number ``place`` of ``outputs`` minus infinity, unless it is NaN or infinity: those stay seen."""
    bf16 = is_bf16.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _, source, place = args
        offset = b.mul(place, int64(item_bytes(bf16)))
        value = load_floats(b, source, offset, AS_BFLOAT16 if bf16 else AS_FLOAT32, 0)
        is_number = b.fcmp_ordered("<", value, constant(_INFINITY, FLOAT))
        store_floats(b, b.select(is_number, constant(-_INFINITY, FLOAT), value), source, offset, bf16)
        return context.get_dummy_value()

    return types.void(is_bf16, types.int64, types.int64), codegen


@register_jitable
def first_barred(barred: int, first: int) -> int:
    """Number of the first pair whose output is ``first`` or larger.

    ``barred`` is the address of int64: how many pairs there are, then row and output of each, sorted by outputs.
    """
    low, high = 0, load_int64(barred, 0)
    while low < high:
        middle = (low + high) // 2
        if load_int64(barred, 2 + 2 * middle) < first:
            low = middle + 1
        else:
            high = middle
    return low


@njit(inline="always")
def bar_outputs(is_bf16: int, barred: int, pair: int, row: int, first: int, outputs: int) -> None:
    """Bar those of a row's ``outputs`` [PANEL], numbers ``first`` and up, that are in ``barred`` from ``pair`` on."""
    # Why not all pairs: one caller's many stop tokens would cost every row.
    while pair < load_int64(barred, 0) and load_int64(barred, 2 + 2 * pair) < first + PANEL:
        if load_int64(barred, 1 + 2 * pair) == row:
            bar_output(is_bf16, outputs, load_int64(barred, 2 + 2 * pair) - first)
        pair += 1


def largest_outputs(candidates: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return [M] numbers of the largest outputs of ``candidates`` [panels, M], the lowest number of equal ones.

    -1 where an output is NaN or plus infinity, or none is finite.
    """
    best = candidates.max(axis=0)
    upper = best >> 32
    is_valid = (upper > _UPPER_OF_MINUS_INFINITY) & (upper < _UPPER_OF_INFINITY)
    return np.where(is_valid, _LOWER - (best & _LOWER), -1)


def _mask(b: Builder, flags: Value) -> Value:
    """Turn a flag for each of sixteen lanes into the lowest bits of an int64."""
    return b.zext(b.bitcast(flags, ir.IntType(LANES)), INT64)

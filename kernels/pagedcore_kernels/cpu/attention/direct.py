"""Attention of few rows straight from the pool, in the very order of the products of ``attend_pairs.py``.

To put 64 positions in panels costs as much as multiplying a few rows by them does. So a decode step whose heads share
keys and values with few others reads them where they lie, and each is multiplied by all rows while it is in a register.

Invariant: every sum is that of a panel's product, bit by bit, so which of the two is taken changes nothing. On matrix
units that is, for 32 inputs at a time, a chain of fused products of the even inputs and one of the odd ones from zero
on, the two added, and this added to what was there; with denormal numbers taken for zero. By pairs it is a chain of the
instruction for pairs, over all elements of a key, and from zero over the 64 positions of a panel of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu.matmul.tiles import MATRIX_UNITS, PAIR_VECTOR, PANEL, SUM_BYTES, add_pairs
from pagedcore_kernels.cpu.simd import (
    FLOAT,
    INT16,
    INT32,
    LANES,
    LINE,
    Builder,
    Typing,
    Value,
    constant,
    floats,
    fma,
    int64,
    integer_constant,
    load,
    pointer,
    prefetch_line,
    splat,
    store,
)

MOST_ROWS: Final = 4
"""More rows are faster in panels."""
POSITIONS: Final = 32
"""Positions of a block that lie side by side, at least: what a cache line of keys holds."""
_HALVES: Final = PANEL // POSITIONS
_INPUTS: Final = 32
"""Inputs that the matrix units sum up before they add them to what was there."""
_UNROLLED: Final = 4
_SUMS: Final = 24
"""Vectors of sums in registers at once."""
_WORDS = ir.VectorType(INT32, LANES)
_UPPER_HALF: Final = -0x10000
_FLUSH: Final = 0x8040
"""Of the thread's floating-point state: denormal inputs and results are zero."""


def may_be_direct(key_size: int, value_size: int, block_size: int, rows: int) -> bool:
    """Whether this is written for such heads and blocks, and pays for so many rows."""
    return rows <= MOST_ROWS and block_size >= POSITIONS and key_size % _INPUTS == 0 and value_size % _INPUTS == 0


@intrinsic
def flush_denormals(typing: Typing, memory: Any) -> Any:
    """``flush_denormals(memory)``: as the matrix units do; the state before is kept in eight bytes of memory."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _state(b, "stmxcsr", args[0])
        state = load(b, args[0], 0, INT32, 4)
        store(b, b.or_(state, ir.Constant(INT32, _FLUSH)), args[0], 4, 4)
        _state(b, "ldmxcsr", b.add(args[0], int64(4)))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def restore_denormals(typing: Typing, memory: Any) -> Any:
    """``restore_denormals(memory)``: what ``flush_denormals`` found there holds again."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        _state(b, "ldmxcsr", args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _state(b: Builder, instruction: str, address: Value) -> None:
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer()])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.sse.{instruction}")
    b.call(function, [pointer(b, address, 0, byte)])


@intrinsic(prefer_literal=True)
def widen_rows(typing: Typing, rows: Any, width: Any, source: Any, source_bytes: Any, target: Any) -> Any:
    """Write rows of ``width`` bfloat16, ``source_bytes`` apart, as float32: of each 32 the even ones come first.

    Literal: rows, width (a multiple of 32).
    """
    literals = rows, width
    count, size = (literal.literal_value for literal in literals)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        from_, distance, to = args[len(literals) :]
        for m in range(count):
            row = b.add(from_, b.mul(distance, int64(m)))
            for start in range(0, size, _INPUTS):
                for parity, vector in enumerate(_halves(b, row, int64(start * 2))):
                    store(b, vector, to, (m * size + start) * 4 + parity * LINE, 4)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def score_directly(
    typing: Typing, form: Any, rows: Any, key_size: Any, block_size: Any, queries: Any, query_bytes: Any, first: Any,
    second: Any, scores: Any, first_ahead: Any, second_ahead: Any,
) -> Any:  # fmt: skip
    """scores[rows, 64] = queries[rows, key_size] @ K, of which ``first`` and ``second`` are 32 positions each.

    Literal: form, rows, key_size, block_size. ``queries``: on matrix units as ``widen_rows`` writes them, else in
    bfloat16. As much memory as the keys take is asked for at ``first_ahead`` and ``second_ahead``.
    """
    literals = form, rows, key_size, block_size
    kind, count, size, slots = (literal.literal_value for literal in literals)
    row_bytes = slots * 2
    at_once = _HALVES if count * 2 * _HALVES * (3 if kind == MATRIX_UNITS else 1) <= _SUMS else 1

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        q, stride, first, second, target, *aheads = args[len(literals) :]
        keys = first, second

        def ask(half: int, element: Value) -> None:
            for row in range(2):
                prefetch_line(b, aheads[half], b.mul(b.add(element, int64(row)), int64(row_bytes)))

        def by_units(halves: range) -> None:
            places = [(m, half, v) for half in halves for m in range(count) for v in range(2)]
            totals = _sums(b, places)
            with cgutils.for_range(b, int64(size // _INPUTS)) as part:
                base, sums = b.mul(part.index, int64(_INPUTS)), [_sums(b, places), _sums(b, places)]

                def multiply(pair: Value) -> None:
                    element = b.add(base, b.mul(pair, int64(2)))
                    for half in halves:
                        ask(half, element)
                        for parity in range(2):
                            row = b.mul(b.add(element, int64(parity)), int64(row_bytes))
                            vectors = _halves(b, keys[half], row)
                            place = b.add(b.mul(base, int64(4)), b.add(b.mul(pair, int64(4)), int64(parity * LINE)))
                            for m in range(count):
                                query = splat(b, load(b, q, b.add(place, int64(m * size * 4)), FLOAT, 4))
                                for v in range(2):
                                    at = sums[parity][m, half, v]
                                    b.store(fma(b, query, vectors[v], b.load(at)), at)

                _unroll(b, _INPUTS // 2, multiply)
                for at, total in totals.items():
                    chains = b.fadd(b.load(sums[0][at]), b.load(sums[1][at]))
                    b.store(b.fadd(b.load(total), chains), total)
            for half in halves:
                for m in range(count):
                    both = [b.load(totals[m, half, v]) for v in range(2)]
                    for part_, vector in enumerate(_side_by_side(b, *both)):
                        store(b, vector, target, m * SUM_BYTES + (2 * half + part_) * LINE, 4)

        def by_pairs(halves: range) -> None:
            totals = _sums(b, [(m, half, v) for half in halves for m in range(count) for v in range(2)])

            def multiply(pair: Value) -> None:
                element = b.mul(pair, int64(2))
                for half in halves:
                    ask(half, element)
                    row = b.mul(element, int64(row_bytes))
                    vectors = _pairs(b, keys[half], row, b.add(row, int64(row_bytes)))
                    for m in range(count):
                        place = b.add(b.mul(stride, int64(m)), b.mul(pair, int64(4)))
                        query = b.bitcast(splat(b, load(b, q, place, FLOAT, 4)), PAIR_VECTOR)
                        for v in range(2):
                            at = totals[m, half, v]
                            b.store(add_pairs(b, b.load(at), vectors[v], query), at)

            _unroll(b, size // 2, multiply)
            for (m, half, v), at in totals.items():
                store(b, b.load(at), target, m * SUM_BYTES + (2 * half + v) * LINE, 4)

        for start in range(0, _HALVES, at_once):
            (by_units if kind == MATRIX_UNITS else by_pairs)(range(start, start + at_once))
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def weigh_directly(
    typing: Typing, form: Any, rows: Any, width: Any, weights: Any, weight_bytes: Any, first: Any, second: Any,
    outputs: Any, panel_bytes: Any, first_ahead: Any, second_ahead: Any,
) -> Any:  # fmt: skip
    """outputs[rows, width] += weights[rows, 64] @ V, whose rows of 32 positions each begin at ``first`` and ``second``.

    Literal: form, rows, width. ``weights``: on matrix units as ``widen_rows`` writes them, else in bfloat16.
    ``outputs`` are panels of 64 columns, ``panel_bytes`` apart. As much memory as the values take is asked for ahead.
    """
    literals = form, rows, width
    kind, count, size = (literal.literal_value for literal in literals)
    uses_units = kind == MATRIX_UNITS
    chains = 2 if uses_units else 1
    lines = max(1, min(size // _INPUTS, _SUMS // max(1, count * 2 * chains)))

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        w, stride, first, second, target, distance, *aheads = args[len(literals) :]
        values = first, second

        def address(half: int, pair: Value, parity: int) -> Value:
            return b.mul(b.add(b.mul(pair, int64(2)), int64(parity)), int64(size * 2))

        def add_to_outputs(m: int, line: int, both: list[Value]) -> None:
            place = b.add(target, b.mul(distance, int64(line * _INPUTS // PANEL)))
            for v, vector in enumerate(both):
                offset = m * SUM_BYTES + line * _INPUTS % PANEL * 4 + v * LINE
                store(b, b.fadd(load(b, place, offset, floats(), 4), vector), place, offset, 4)

        def by_units(half: int, columns: range) -> None:
            places = [(m, line, v) for m in range(count) for line in columns for v in range(2)]
            sums = [_sums(b, places), _sums(b, places)]

            def multiply(pair: Value) -> None:
                for parity in range(2):
                    row = address(half, pair, parity)
                    for line in columns:
                        prefetch_line(b, aheads[half], b.add(row, int64(line * LINE)))
                    vectors = {line: _halves(b, values[half], b.add(row, int64(line * LINE))) for line in columns}
                    for m in range(count):
                        place = b.add(b.mul(pair, int64(4)), int64((m * PANEL + half * POSITIONS) * 4 + parity * LINE))
                        weight = splat(b, load(b, w, place, FLOAT, 4))
                        for line in columns:
                            for v in range(2):
                                at = sums[parity][m, line, v]
                                b.store(fma(b, weight, vectors[line][v], b.load(at)), at)

            _unroll(b, POSITIONS // 2, multiply)
            for m in range(count):
                for line in columns:
                    both = [b.fadd(b.load(sums[0][m, line, v]), b.load(sums[1][m, line, v])) for v in range(2)]
                    add_to_outputs(m, line, _side_by_side(b, *both))

        def by_pairs(columns: range) -> None:
            sums = _sums(b, [(m, line, v) for m in range(count) for line in columns for v in range(2)])
            for half in range(_HALVES):

                def multiply(pair: Value, half: int = half) -> None:
                    one, other = (address(half, pair, parity) for parity in range(2))
                    for line in columns:
                        offset = int64(line * LINE)
                        prefetch_line(b, aheads[half], b.add(one, offset))
                        prefetch_line(b, aheads[half], b.add(other, offset))
                        vectors = _pairs(b, values[half], b.add(one, offset), b.add(other, offset))
                        for m in range(count):
                            place = b.add(b.mul(stride, int64(m)), b.add(b.mul(pair, int64(4)), int64(half * LINE)))
                            weight = b.bitcast(splat(b, load(b, w, place, FLOAT, 4)), PAIR_VECTOR)
                            for v in range(2):
                                at = sums[m, line, v]
                                b.store(add_pairs(b, b.load(at), vectors[v], weight), at)

                _unroll(b, POSITIONS // 2, multiply)
            for m in range(count):
                for line in columns:
                    add_to_outputs(m, line, [b.load(sums[m, line, v]) for v in range(2)])

        for start in range(0, size // _INPUTS, lines):
            columns = range(start, min(start + lines, size // _INPUTS))
            if uses_units:
                for half in range(_HALVES):
                    by_units(half, columns)
            else:
                by_pairs(columns)
        return context.get_dummy_value()

    return types.void(*literals, *[types.int64] * 8), codegen


def _sums(b: Builder, places: Any) -> dict[Any, Value]:
    """Make a vector of sums, zero from here on, for each of some places."""
    sums = {place: cgutils.alloca_once(b, floats()) for place in places}
    for at in sums.values():
        b.store(constant(0.0), at)
    return sums


def _unroll(b: Builder, count: int, body: Callable[[Value], None]) -> None:
    """Call ``body`` for ``count`` numbers, a multiple of ``_UNROLLED``."""
    with cgutils.for_range(b, int64(count // _UNROLLED)) as loop:
        for number in range(_UNROLLED):
            body(b.add(b.mul(loop.index, int64(_UNROLLED)), int64(number)))


def _halves(b: Builder, address: Value, offset: Value) -> tuple[Value, Value]:
    """Load 32 bfloat16 as float32: the even ones, and the odd ones."""
    words = load(b, address, offset, _WORDS, 2)
    even, odd = b.shl(words, integer_constant(16, _WORDS)), b.and_(words, integer_constant(_UPPER_HALF, _WORDS))
    return b.bitcast(even, floats()), b.bitcast(odd, floats())


def _side_by_side(b: Builder, even: Value, odd: Value) -> list[Value]:
    """Undo what ``_halves`` did: the first sixteen numbers, and the last."""
    return [_mixed(b, even, odd, start, LANES) for start in (0, LANES // 2)]


def _pairs(b: Builder, address: Value, first: Value, second: Value) -> list[Value]:
    """Load 32 bfloat16 from each of two places, and put them side by side."""
    kind = ir.VectorType(INT16, 2 * LANES)
    one, other = (load(b, address, offset, kind, 2) for offset in (first, second))
    return [b.bitcast(_mixed(b, one, other, start, 2 * LANES), PAIR_VECTOR) for start in (0, LANES)]


def _mixed(b: Builder, one: Value, other: Value, start: int, lanes: int) -> Value:
    """one[start], other[start], one[start + 1], ...: of two vectors of ``lanes`` one."""
    numbers = [number for i in range(start, start + lanes // 2) for number in (i, lanes + i)]
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, lanes), numbers))

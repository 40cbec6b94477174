"""Intrinsics for some columns of one head's state: a matrix whose rows are the elements of a key.

All recurrences of matrices are one: ``S = decay * S + key update^T``, output ``S^T query``. They differ in where the
decay comes from and in what the update is: ``form``, a literal. What comes of a column is a sum over the rows in
ascending order, whatever the other columns are, so its bits depend neither on how many columns are taken together nor
on how many lanes a vector has. Used by ``outer_products.py``.

Columns are taken in groups of vectors that fit the registers, and rows in tiles: of a tile all groups are next to each
other in memory, which is read and written as fast as it can only in long runs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedcore_kernels.cpu import simd
from pagedcore_kernels.cpu.simd import AS_FLOAT32, LANES, Builder, Typing, Value, int64

DELTA, DELTA_PER_KEY, ATTENTION, MAMBA2, MAMBA1, CHANNELS = range(6)
"""Forms. The decay is of the head, with ``DELTA_PER_KEY`` of each row, with ``MAMBA1`` of each element and with
``CHANNELS`` of each column, where it is given as it is. The update is the value, with the delta rule less what the
state holds of it, times a factor unless it is of ``PLAIN``.
"""
CORRECTING = DELTA, DELTA_PER_KEY
"""Forms of the delta rule."""
PLAIN = ATTENTION, CHANNELS
BY_COLUMN = MAMBA1, CHANNELS
"""Forms with one head that have for each column what others have for each head."""
NORM_EPSILON = 1e-6
"""Added to the sum of squares of what is normalized."""

TILE_ROWS = 16
"""Rows of a tile, at most."""

_address = types.int64


def _exp(b: Builder, rate: Value, factor: Value) -> Value:
    return simd.exp2(b, b.fmul(b.fmul(rate, factor), simd.constant(simd.LOG2_E, rate.type)))


def _places(b: Builder, group: Value, number: int, bytes_of_vector: int) -> list[Value]:
    """Bytes from the first column to each vector of a group."""
    first = b.mul(group, int64(number * bytes_of_vector))
    return [b.add(first, int64(vector * bytes_of_vector)) for vector in range(number)]


def _sum_rows(
    b: Builder, size: int, lanes: int, vectors: int, num_groups: Value, sums: list[Value],
    begin: Callable[[list[Value]], Callable[[Value, list[Value]], None]],
) -> None:
    """Emit sums over the rows of a state for groups of columns, at addresses of float32 rows; these are zeros at first.

    ``begin(places)`` is emitted for a tile's group and returns ``add(row, totals)``, emitted for each row of it, which
    adds to variables: so many ``vectors`` of each sum.
    """
    tile_rows = gcd(size, TILE_ROWS)
    zero = simd.constant(0.0, simd.floats(lanes))
    totals = [cgutils.alloca_once(b, zero.type) for _ in range(len(sums) * vectors)]
    with cgutils.for_range(b, num_groups) as groups:
        for place in _places(b, groups.index, vectors, 4 * lanes):
            for row in sums:
                simd.store(b, zero, row, place, 4)
    with cgutils.for_range(b, int64(size // tile_rows)) as tiles, cgutils.for_range(b, num_groups) as groups:
        places = _places(b, groups.index, vectors, 4 * lanes)
        kept = [(row, place) for row in sums for place in places]
        for total, (row, place) in zip(totals, kept, strict=True):
            b.store(simd.load_floats(b, row, place, AS_FLOAT32, lanes), total)
        add = begin(places)
        first = b.mul(tiles.index, int64(tile_rows))
        with cgutils.for_range(b, int64(tile_rows)) as rows:
            add(b.add(first, rows.index), totals)
        for total, (row, place) in zip(totals, kept, strict=True):
            simd.store(b, b.load(total), row, place, 4)


def _of_row(b: Builder, numbers: Value, row: Value, lanes: int) -> Value:
    """Load one float32 of a row of them, in all lanes."""
    return simd.splat(b, simd.load(b, numbers, b.mul(row, int64(4)), simd.FLOAT, 4), lanes)


def _for_vectors(b: Builder, size: int, body: Callable[[Value], None]) -> int:
    """Emit ``body(first element)`` for the vectors of a row of so many elements; return their lanes."""
    lanes = gcd(size, LANES)
    with cgutils.for_range(b, int64(size // lanes)) as loop:
        body(b.mul(loop.index, int64(lanes)))
    return lanes


def _of_columns(b: Builder, form: int, address: Value, place: Value, lanes: int) -> Value:
    """Load what is one number a head, but with ``MAMBA1`` one a column."""
    if form == MAMBA1:
        return simd.load_floats(b, address, place, AS_FLOAT32, lanes)
    return simd.splat(b, simd.load(b, address, 0, simd.FLOAT, 4), lanes)


@intrinsic
def exp_product(typing: Typing, rate: Any, factor: Any) -> Any:
    """``exp_product(rate, factor) -> float32``: ``exp(rate * factor)`` for a product of at most 88."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return _exp(b, *args)

    return types.float32(types.float32, types.float32), codegen


@intrinsic(prefer_literal=True)
def exp_row(typing: Typing, size: Any, source: Any, target: Any) -> Any:
    """``exp_row(size, source, target)``: exponentials of ``size``, a literal, float32."""
    count, lanes = size.literal_value, gcd(size.literal_value, LANES)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        def body(first: Value) -> None:
            place = b.mul(first, int64(4))
            rate = simd.load_floats(b, args[1], place, AS_FLOAT32, lanes)
            simd.store(b, _exp(b, rate, simd.constant(1.0, rate.type)), args[2], place, 4)

        _for_vectors(b, count, body)
        return context.get_dummy_value()

    return types.void(size, _address, _address), codegen


@intrinsic(prefer_literal=True)
def read_key(
    typing: Typing, is_bf16: Any, size: Any, source: Any, target: Any, scale: Any, normalizes: Any
) -> Any:
    """``read_key(is_bf16, size, source, target, scale, normalizes)``: a key or query times ``scale``, as float32.

    Literal: is_bf16, size. It is divided by its length first unless ``normalizes`` is 0.
    """
    bf16, count = is_bf16.literal_value, size.literal_value
    item, lanes = simd.item_bytes(bf16), gcd(count, LANES)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        squares = cgutils.alloca_once_value(b, simd.constant(0.0, simd.floats(lanes)))

        def widen(first: Value) -> None:
            x = simd.load_floats(b, args[2], b.mul(first, int64(item)), bf16, lanes)
            simd.store(b, x, args[3], b.mul(first, int64(4)), 4)
            b.store(simd.fma(b, x, x, b.load(squares)), squares)

        _for_vectors(b, count, widen)
        total = simd.reduce_lanes(b, b.load(squares), b.fadd)
        length = simd.call_llvm(b, "sqrt", b.fadd(total, simd.constant(NORM_EPSILON, simd.FLOAT)))
        factor = b.select(b.icmp_signed("!=", args[5], int64(0)), b.fdiv(args[4], length), args[4])
        factors = simd.splat(b, factor, lanes)

        def multiply(first: Value) -> None:
            place = b.mul(first, int64(4))
            x = simd.load_floats(b, args[3], place, AS_FLOAT32, lanes)
            simd.store(b, b.fmul(x, factors), args[3], place, 4)

        _for_vectors(b, count, multiply)
        return context.get_dummy_value()

    signature = types.void(is_bf16, size, _address, _address, types.float32, types.int64)
    return signature, codegen


@intrinsic(prefer_literal=True)
def decay_key(typing: Typing, form: Any, size: Any, keys: Any, decays: Any, decay: Any, target: Any) -> Any:
    """``decay_key(form, size, keys, decays, decay, target)``: a key times the decay of each row.

    Literal: form, size.
    """
    per_key, count, lanes = form.literal_value == DELTA_PER_KEY, size.literal_value, gcd(size.literal_value, LANES)

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        def body(first: Value) -> None:
            place = b.mul(first, int64(4))
            x = simd.load_floats(b, args[2], place, AS_FLOAT32, lanes)
            of_head = simd.splat(b, args[4], lanes)
            factor = simd.load_floats(b, args[3], place, AS_FLOAT32, lanes) if per_key else of_head
            simd.store(b, b.fmul(x, factor), args[5], place, 4)

        _for_vectors(b, count, body)
        return context.get_dummy_value()

    return types.void(form, size, _address, _address, types.float32, _address), codegen


@intrinsic(prefer_literal=True)
def recall(
    typing: Typing, lanes: Any, vectors: Any, size: Any, num_groups: Any, state: Any, step: Any, keys: Any, known: Any
) -> Any:
    """``recall(lanes, vectors, size, num_groups, state, step, keys, known)``: ``known = S^T keys`` of some columns.

    Literal: lanes, vectors, size. ``step``: bytes from row to row of the state.
    """
    width, number = lanes.literal_value, vectors.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        num_groups, state, step, keys, known = args[3:]

        def begin(places: list[Value]) -> Callable[[Value, list[Value]], None]:
            def add(row: Value, totals: list[Value]) -> None:
                key, start = _of_row(b, keys, row, width), b.add(state, b.mul(row, step))
                for place, total in zip(places, totals, strict=True):
                    x = simd.load_floats(b, start, place, AS_FLOAT32, width)
                    b.store(simd.fma(b, key, x, b.load(total)), total)

            return add

        _sum_rows(b, size.literal_value, width, number, num_groups, [known], begin)
        return context.get_dummy_value()

    return types.void(lanes, vectors, size, types.int64, *[_address] * 4), codegen


@intrinsic(prefer_literal=True)
def begin_update(
    typing: Typing, form: Any, is_bf16: Any, lanes: Any, num_vectors: Any, value: Any, known: Any, factors: Any,
    updates: Any,
) -> Any:
    """``begin_update(form, is_bf16, lanes, num_vectors, value, known, factors, updates)``: what the key is multiplied
    with, float32.

    Literal: form, is_bf16, lanes. ``factors`` is the address of one factor, with ``MAMBA1`` of one a column.
    """
    kind, bf16, width = form.literal_value, is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        num_vectors, value, known, factors, updates = args[3:]
        with cgutils.for_range(b, num_vectors) as loop:
            place, stored = (b.mul(loop.index, int64(width * size)) for size in (4, simd.item_bytes(bf16)))
            x = simd.load_floats(b, value, stored, bf16, width)
            if kind in CORRECTING:
                x = b.fsub(x, simd.load_floats(b, known, place, AS_FLOAT32, width))
            if kind not in PLAIN:
                x = b.fmul(x, _of_columns(b, kind, factors, place, width))
            simd.store(b, x, updates, place, 4)
        return context.get_dummy_value()

    return types.void(form, is_bf16, lanes, types.int64, *[_address] * 4), codegen


@intrinsic(prefer_literal=True)
def advance(
    typing: Typing, form: Any, lanes: Any, vectors: Any, size: Any, streams: Any, num_groups: Any, source: Any,
    source_step: Any, target: Any, target_step: Any, decay: Any, decays: Any, decays_step: Any, factors: Any, keys: Any,
    updates: Any, queries: Any, outputs: Any, next_keys: Any, known: Any,
) -> Any:
    """``advance(form, lanes, vectors, size, streams, num_groups, source, source_step, target, target_step, decay,
    decays, decays_step, factors, keys, updates, queries, outputs, next_keys, known)``: columns one position further.

    Writes the state to ``target``, which may be ``source``, ``S^T queries`` to ``outputs`` and, with the delta rule,
    ``S^T next_keys`` to ``known``. Literal: form, lanes, vectors, size, streams: whether to write past the caches, see
    ``simd.stream``. Steps are bytes from row to row. ``decays`` are those of rows; with ``MAMBA1`` the exponents of
    elements, which ``factors`` of columns are multiplied with, and with ``CHANNELS`` these factors are the decays.
    """
    kind, width, number = form.literal_value, lanes.literal_value, vectors.literal_value
    corrects = kind in CORRECTING

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        (num_groups, source, source_step, target, target_step, decay, decays, decays_step, factors, keys, updates,
         queries, outputs, next_keys, known) = args[5:]  # fmt: skip
        of_head = simd.splat(b, decay, width)

        def begin(places: list[Value]) -> Callable[[Value, list[Value]], None]:
            update = [simd.load_floats(b, updates, place, AS_FLOAT32, width) for place in places]
            factor = [simd.load_floats(b, factors, place, AS_FLOAT32, width) for place in places if kind in BY_COLUMN]

            def add(row: Value, totals: list[Value]) -> None:
                key, query = _of_row(b, keys, row, width), _of_row(b, queries, row, width)
                next_key = _of_row(b, next_keys, row, width) if corrects else None
                kept = _of_row(b, decays, row, width) if kind == DELTA_PER_KEY else of_head
                old, new = b.add(source, b.mul(row, source_step)), b.add(target, b.mul(row, target_step))
                for vector, place in enumerate(places):
                    if kind == MAMBA1:
                        rates = simd.load_floats(b, b.add(decays, b.mul(row, decays_step)), place, AS_FLOAT32, width)
                        kept = _exp(b, rates, factor[vector])
                    elif kind == CHANNELS:
                        kept = factor[vector]
                    x = b.fmul(kept, simd.load_floats(b, old, place, AS_FLOAT32, width))
                    x = simd.fma(b, key, update[vector], x)
                    if streams.literal_value:
                        simd.stream(b, x, new, place)
                    else:
                        simd.store(b, x, new, place, 4)
                    b.store(simd.fma(b, query, x, b.load(totals[vector])), totals[vector])
                    if corrects:
                        total = totals[number + vector]
                        b.store(simd.fma(b, next_key, x, b.load(total)), total)

            return add

        sums = [outputs, known] if corrects else [outputs]
        _sum_rows(b, size.literal_value, width, number, num_groups, sums, begin)
        return context.get_dummy_value()

    literals = form, lanes, vectors, size, streams
    return types.void(*literals, types.int64, *[_address] * 4, types.float32, *[_address] * 9), codegen


@intrinsic(prefer_literal=True)
def write_output(
    typing: Typing, form: Any, is_bf16: Any, lanes: Any, num_vectors: Any, outputs: Any, value: Any, passed: Any,
    target: Any,
) -> Any:
    """``write_output(form, is_bf16, lanes, num_vectors, outputs, value, passed, target)``: round outputs to storage.

    With Mamba the value times ``passed`` is added, the address of one float32 or with ``MAMBA1`` of one a column.
    Literal: form, is_bf16, lanes.
    """
    kind, bf16, width = form.literal_value, is_bf16.literal_value, lanes.literal_value

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        num_vectors, outputs, value, passed, target = args[3:]
        with cgutils.for_range(b, num_vectors) as loop:
            place, stored = (b.mul(loop.index, int64(width * size)) for size in (4, simd.item_bytes(bf16)))
            total = simd.load_floats(b, outputs, place, AS_FLOAT32, width)
            if kind in (MAMBA1, MAMBA2):
                x = simd.load_floats(b, value, stored, bf16, width)
                total = simd.fma(b, _of_columns(b, kind, passed, place, width), x, total)
            simd.store_floats(b, total, target, stored, bf16)
        return context.get_dummy_value()

    return types.void(form, is_bf16, lanes, types.int64, *[_address] * 4), codegen

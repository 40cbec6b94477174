"""A row of logits as the compiled functions see it: views, maxima of chunks, sums of weights.

A *view* is the address of whole chunks, their number, and the address of one more chunk (0 if there is none) that
holds the row's last logits padded with minus infinity. The whole row is a view, and so is a list of some of its
logits; everything works on either. What a weight is, ``logit_vectors.py`` says. Read ``logit_search.py`` next.

Invariant: results depend on the row alone; every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from pagedcore_kernels.cpu.sampling.logit_vectors import (
    CHUNK,
    chunk_maxima,
    lowest_bit,
    mask_equal,
    split_chunks,
    weigh_chunks,
    widen_chunks,
)
from pagedcore_kernels.cpu.simd import exp2_float32, load_bfloat16, load_float32, store_float32

BLOCK: Final = 64
"""Chunks that are added up in float32."""
CHUNK_BYTES: Final = CHUNK * 4
SMALLEST: Final = np.float32(-3.4028234663852886e38)
NOTHING: Final = np.float32(-np.inf)
# Why: a plain 0 is a type of its own to Numba, and every function would be compiled once more for it.
NONE: Final = np.int64(0)

compiled = njit(error_model="numpy", nogil=True)
"""Compiled on first use, to run without the GIL; division by zero gives an infinity as in C."""

Integer = Any
"""What compiled functions take and return has Numba's types: addresses, sizes and indices are int64, logits float32,
sums of weights float64."""
Number = Any
View = Any
"""(address, number of whole chunks, address of the padded last chunk or 0)"""


@compiled
def chunk_address(view: View, chunk: Integer) -> Integer:
    """Address of a chunk by its number."""
    address, num_whole, last = view
    return address + chunk * CHUNK_BYTES if chunk < num_whole else last


@compiled
def count_chunks(view: View) -> Integer:
    """Number of chunks, the padded one included."""
    return view[1] + (view[2] != 0)


@compiled
def pad_last_chunk(address: Integer, size: Integer, target: Integer) -> View:
    """View of ``size`` logits; those past the last whole chunk are copied to ``target`` and padded."""
    num_whole = size // CHUNK
    rest = size - num_whole * CHUNK
    if rest == 0:
        return address, num_whole, NONE
    for i in range(CHUNK):
        store_float32(target, i, load_float32(address, num_whole * CHUNK + i) if i < rest else NOTHING)
    return address, num_whole, target


@compiled
def find_maxima(view: View, maxima: Integer) -> tuple[Number, bool]:
    """Write the maximum of every chunk to ``maxima``, padded to whole chunks; return the largest and if all is well.

    All is well when no logit is NaN or plus infinity and at least one is finite.
    """
    address, num_whole, last = view
    holds_nan = chunk_maxima(address, num_whole, maxima)
    if last != 0:
        holds_nan |= chunk_maxima(last, 1, maxima + 4 * num_whole)
    count = count_chunks(view)
    for i in range(count, -(-count // CHUNK) * CHUNK):
        store_float32(maxima, i, NOTHING)
    largest = largest_of(maxima, count)
    return largest, bool(holds_nan == 0 and abs(largest) < np.inf)


@compiled
def largest_of(maxima: Integer, count: Integer) -> Number:
    """The largest of some numbers."""
    largest = NOTHING
    for i in range(count):
        largest = max(largest, load_float32(maxima, i))
    return largest


@compiled
def widen(address: Integer, size: Integer, target: Integer) -> Integer:
    """Write ``size`` logits in bfloat16 to ``target`` as float32, padded to whole chunks; return how many these are."""
    num_whole = size // CHUNK
    widen_chunks(address, num_whole, target)
    num_chunks = -(-size // CHUNK)
    for i in range(num_whole * CHUNK, num_chunks * CHUNK):
        store_float32(target, i, load_bfloat16(address, i) if i < size else NOTHING)
    return num_chunks


@compiled
def find_maxima_of_bfloat16(address: Integer, size: Integer, room: Integer, maxima: Integer) -> tuple[Number, bool]:
    """As ``find_maxima``, of a row of ``size`` logits in bfloat16; ``room`` is for a block of chunks."""
    holds_nan, num_chunks = NONE, -(-size // CHUNK)
    for first in range(0, num_chunks, BLOCK):
        count = widen(address + first * CHUNK * 2, min(BLOCK * CHUNK, size - first * CHUNK), room)
        holds_nan |= chunk_maxima(room, count, maxima + 4 * first)
    largest = largest_of(maxima, num_chunks)
    return largest, bool(holds_nan == 0 and abs(largest) < np.inf)


@compiled
def find_first_of_bfloat16(address: Integer, size: Integer, room: Integer, maxima: Integer, largest: Number) -> Integer:
    """As ``find_first``, of a row of ``size`` logits in bfloat16; ``room`` is for one chunk."""
    for i in range(-(-size // CHUNK)):
        if load_float32(maxima, i) == largest:
            widen(address + i * CHUNK * 2, min(CHUNK, size - i * CHUNK), room)
            return i * CHUNK + lowest_bit(mask_equal(room, largest))
    return -1


@compiled
def find_first(view: View, maxima: Integer, largest: Number) -> Integer:
    """Index of the first logit that is the largest."""
    for i in range(count_chunks(view)):
        if load_float32(maxima, i) == largest:
            return i * CHUNK + lowest_bit(mask_equal(chunk_address(view, i), largest))
    return -1


@compiled
def weight_of(logit: Number, largest: Number, scale: Number) -> Number:
    """The weight of one logit."""
    return exp2_float32(max(SMALLEST, logit - largest) * scale)


@compiled
def block_of(view: View, number: Integer) -> tuple[Integer, Integer]:
    """Address and number of chunks of a block; the padded last chunk is a block of its own."""
    address, num_whole, last = view
    first = number * BLOCK
    return (address + first * CHUNK_BYTES, min(BLOCK, num_whole - first)) if first < num_whole else (last, 1)


@compiled
def count_blocks(view: View) -> Integer:
    """Number of blocks."""
    return -(-view[1] // BLOCK) + (view[2] != 0)


@compiled
def weigh(view: View, largest: Number, scale: Number, low: Number) -> Number:
    """Sum of the weights of all logits >= low."""
    total = 0.0
    # Why: sums of a block are float32, sums of blocks float64, so that long rows lose no precision.
    for i in range(count_blocks(view)):
        address, count = block_of(view, i)
        total += weigh_chunks(address, count, largest, scale, low)
    return total


@compiled
def split(view: View, largest: Number, scale: Number, pivot: Number, neighbours: Integer) -> Number:
    """Sum of the weights of all logits >= pivot; the logits next to it go to ``neighbours``."""
    store_float32(neighbours, 0, np.float32(np.inf))
    store_float32(neighbours, 1, NOTHING)
    total = 0.0
    for i in range(count_blocks(view)):
        address, count = block_of(view, i)
        total += split_chunks(address, count, largest, scale, pivot, neighbours)
    return total

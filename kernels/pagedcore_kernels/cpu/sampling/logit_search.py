"""One row of logits searched without sorting it: the k-th largest, the nucleus, the best few, a drawn one.

Compiled functions over the views of ``logit_views.py``. The idea: one vectorised pass has found the maximum of every
chunk. The k-th largest of those maxima is a lower bound of the k-th largest logit, so that the candidates are found
by looking into few chunks. What is left is a bisection with vectorised sums that snaps to logits which exist, and
therefore ends at exactly the right one. Read ``samplers.py`` next.

Invariant: results depend on the row alone; every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pagedcore_kernels.cpu.sampling.logit_vectors import (
    CHUNK,
    load_float64,
    lowest_bit,
    mask_at_least,
    mask_equal,
    store_float64,
    weigh_chunks,
)
from pagedcore_kernels.cpu.sampling.logit_views import (
    BLOCK,
    CHUNK_BYTES,
    NONE,
    NOTHING,
    SMALLEST,
    Integer,
    Number,
    View,
    block_of,
    chunk_address,
    compiled,
    count_blocks,
    count_chunks,
    split,
    weigh,
    weight_of,
)
from pagedcore_kernels.cpu.simd import LOG2_E, load_float32, load_int64, stack_floats, store_float32, store_int64

MAX_CANDIDATES: Final = 4096
"""Candidates that ``gather`` can hold."""
_FEWEST_PASSES, _MOST_PASSES = 4, 16
"""Passes over a long row before what is left can be few enough to be gathered, and after which there are ties."""

Memory = Any
"""Addresses of room for (candidates' ids, their logits, the padded last chunk, weights, maxima of chunks)."""
Places = tuple[Integer, Integer]
"""Addresses of (ids, logits)."""


@compiled
def find_cut(view: View, largest: Number, scale: Number, target: Number) -> tuple[Number, Number]:
    """The largest logit such that those at least as large weigh ``target``, and what the larger ones weigh.

    With a scale of 0 this is the ``target``-th largest logit. If all together weigh less it is the smallest one.
    """
    neighbours = stack_floats(2)
    low, high, above, middle = SMALLEST, largest, 0.0, SMALLEST
    # Invariant: after the first round low and high are logits, low <= the answer <= high, what is > high weighs above.
    while True:
        weight = split(view, largest, scale, middle, neighbours)
        if weight >= target or middle == SMALLEST:
            low = load_float32(neighbours, 0)
        else:
            high, above = load_float32(neighbours, 1), weight
        if low >= high:
            return low, above
        middle = np.float32(0.5 * (np.float64(low) + np.float64(high)))
        if middle <= low:
            middle = high


@compiled
def drop_ties(view: View, cut: Number, num_kept: Integer) -> None:
    """Set logits equal to ``cut`` to minus infinity, but for the first ``num_kept``."""
    for i in range(count_chunks(view)):
        chunk = chunk_address(view, i)
        mask = mask_equal(chunk, cut)
        while mask != 0:
            if num_kept <= 0:
                store_float32(chunk, lowest_bit(mask), NOTHING)
            num_kept -= 1
            mask &= mask - 1


@compiled
def gather(view: View, maxima: Integer, low: Number, memory: Memory) -> Integer:
    """Copy all logits >= low and their indices, in order; return how many, or -1 if they are too many.

    The copied logits are padded to whole chunks with minus infinity.
    """
    count = NONE
    for i in range(count_chunks(view)):
        if load_float32(maxima, i) >= low:
            if count > MAX_CANDIDATES - CHUNK:
                return -1
            chunk = chunk_address(view, i)
            count = _copy(chunk, i * CHUNK, mask_at_least(chunk, low), memory, count)
    return _pad(memory, count)


@compiled
def gather_between(view: View, low: Number, high: Number, memory: Memory) -> Integer:
    """Copy all logits >= low and < high; otherwise as ``gather``."""
    count = NONE
    for i in range(count_chunks(view)):
        if count > MAX_CANDIDATES - CHUNK:
            return -1
        chunk = chunk_address(view, i)
        count = _copy(chunk, i * CHUNK, mask_at_least(chunk, low) & ~mask_at_least(chunk, high), memory, count)
    return _pad(memory, count)


@compiled
def _copy(chunk: Integer, first: Integer, mask: Integer, memory: Memory, count: Integer) -> Integer:
    while mask != 0:
        place = lowest_bit(mask)
        store_int64(memory[0], count, first + place)
        store_float32(memory[1], count, load_float32(chunk, place))
        count += 1
        mask &= mask - 1
    return count


@compiled
def _pad(memory: Memory, count: Integer) -> Integer:
    for i in range(count, -(-count // CHUNK) * CHUNK):
        store_float32(memory[1], i, NOTHING)
    return count


@compiled
def gather_largest(view: View, maxima: Integer, largest: Number, target: Integer, memory: Memory) -> Integer:
    """Copy a few more than the ``target`` largest logits; return how many, or -1 if no bound is known or fits."""
    count = count_chunks(view)
    if target > count:
        return -1
    maxima_view = (maxima, -(-count // CHUNK), NONE)
    cut, _ = find_cut(maxima_view, largest, np.float32(0.0), np.float64(target))
    return gather(view, maxima, cut, memory)


@compiled
def short_view(view: View, memory: Memory, count: Integer) -> View:
    """View of what was gathered, or the view it was gathered from if ``count`` is negative."""
    return (memory[1], -(-count // CHUNK), NONE) if count >= 0 else view


@compiled
def keep_heaviest(view: View, memory: Memory, largest: Number, scale: Number, target: Number) -> Number:
    """Keep the fewest of the largest logits that weigh ``target``; return the smallest one that is kept.

    Equal logits are kept in order of their index; those that are not kept any more become minus infinity.
    """
    part, outside = view, 0.0
    if count_chunks(view) * CHUNK > MAX_CANDIDATES:
        part, outside = narrow(view, memory, largest, scale, target)
    cut, above = find_cut(part, largest, scale, target - outside)
    weight = weight_of(cut, largest, scale)
    if weight > 0.0:
        drop_ties(view, cut, max(1, np.int64(min(np.ceil((target - outside - above) / weight), 2.0**62))))
    return cut


@compiled
def narrow(view: View, memory: Memory, largest: Number, scale: Number, target: Number) -> tuple[View, Number]:
    """A short view of the logits around the cut of a long one, and what the logits above it weigh.

    Bisects by plain sums, without looking for logits to snap to. Where too many logits are equal it gives up and
    returns the view itself.
    """
    low, high, above = _bottom(view, largest, scale), np.float32(np.inf), 0.0
    # Invariant: the cut is in [low, high), unless rounding makes all logits together weigh less than the target.
    for i in range(_MOST_PASSES):
        middle = np.float32(0.5 * (np.float64(low) + np.float64(min(high, largest))))
        weight = weigh(view, largest, scale, middle)
        if weight >= target:
            low = middle
        else:
            high, above = middle, weight
        if i >= _FEWEST_PASSES:
            count = gather_between(view, low, high, memory)
            if count > 0:
                return short_view(view, memory, count), above
    return view, 0.0


@compiled
def _bottom(view: View, largest: Number, scale: Number) -> Number:
    """A logit at or below all that have a weight."""
    if scale > 0.0:
        return np.float32(max(SMALLEST, largest - 126.0 / scale))
    neighbours = stack_floats(2)
    split(view, largest, scale, SMALLEST, neighbours)
    return load_float32(neighbours, 0)


@compiled
def collect_largest(view: View, memory: Memory, largest: Number, count: Integer, places: Places) -> None:
    """Write ids (int64) and values (float32) of the ``count`` largest logits to two places, best first.

    Of equal ones the lowest id comes first. What lies behind the last finite logit is left as it was.
    """
    num_gathered = gather_largest(view, memory[4], largest, count, memory)
    source = short_view(view, memory, num_gathered)
    cut, above = find_cut(source, largest, np.float32(0.0), np.float64(count))
    num_ties, num_found = count - np.int64(above), NONE
    for i in range(count_chunks(source)):
        chunk = chunk_address(source, i)
        mask = mask_at_least(chunk, cut)
        while mask != 0:
            index = i * CHUNK + lowest_bit(mask)
            value = load_float32(chunk, lowest_bit(mask))
            mask &= mask - 1
            if value == cut:
                num_ties -= 1
                if num_ties < 0:
                    continue
            _insert(places, num_found, load_int64(memory[0], index) if num_gathered >= 0 else index, value)
            num_found += 1


@compiled
def _insert(places: Places, count: Integer, index: Integer, value: Number) -> None:
    ids, values = places
    while count > 0 and load_float32(values, count - 1) < value:
        store_int64(ids, count, load_int64(ids, count - 1))
        store_float32(values, count, load_float32(values, count - 1))
        count -= 1
    store_int64(ids, count, index)
    store_float32(values, count, value)


@compiled
def pick(weights: Integer, count: Integer, remainder: Number) -> tuple[Integer, Number]:
    """First index whose cumulative weight exceeds ``remainder``, and what is left of that within it.

    Should rounding have left too much, the last index with a weight.
    """
    last = 0
    for i in range(count):
        weight = load_float64(weights, i)
        if remainder < weight:
            return i, remainder
        remainder -= weight
        if weight > 0.0:
            last = i
    return last, np.inf


@compiled
def draw(view: View, largest: Number, scale: Number, low: Number, uniform: Number, weights: Integer) -> Integer:
    """The first index at which the cumulative weight of the logits >= low exceeds ``uniform`` of their sum.

    ``weights`` is room for float64: one per block of the view, 64 at least.
    """
    num_blocks, total = count_blocks(view), 0.0
    for i in range(num_blocks):
        address, count = block_of(view, i)
        weight = np.float64(weigh_chunks(address, count, largest, scale, low))
        store_float64(weights, i, weight)
        total += weight
    block, rest = pick(weights, num_blocks, uniform * total)
    address, count = block_of(view, block)
    for i in range(count):
        store_float64(weights, i, weigh_chunks(address + i * CHUNK_BYTES, 1, largest, scale, low))
    chunk, rest = pick(weights, count, rest)
    address += chunk * CHUNK_BYTES
    for i in range(CHUNK):
        logit = load_float32(address, i)
        store_float64(weights, i, weight_of(logit, largest, scale) if logit >= low else 0.0)
    first = block * BLOCK * CHUNK if block * BLOCK < view[1] else view[1] * CHUNK
    return first + chunk * CHUNK + pick(weights, np.int64(CHUNK), rest)[0]


@compiled
def leave_drawable(
    view: View, size: Integer, kept: View, ids: Integer, largest: Number, scale: Number, low: Number
) -> None:
    """Write over a row of ``size`` logits those that ``draw`` chose from, divided by the temperature, with the largest
    at 0; the others become minus infinity. At a temperature of 1 they stay as they are.

    ``kept`` is the row's own view, or a short one of the logits with these ``ids``.
    """
    row = view[0]
    if kept[0] == row:
        num_whole = view[1] * CHUNK
        for i in range(num_whole):
            store_float32(row, i, _tempered(load_float32(row, i), largest, scale, low))
        for i in range(num_whole, size):
            store_float32(row, i, _tempered(load_float32(view[2], i - num_whole), largest, scale, low))
        return
    for i in range(size):
        store_float32(row, i, NOTHING)
    for i in range(kept[1] * CHUNK):
        logit = load_float32(kept[0], i)
        # Why: the padding of a short view has no ids.
        if logit > NOTHING:
            store_float32(row, load_int64(ids, i), _tempered(logit, largest, scale, low))


@compiled
def _tempered(logit: Number, largest: Number, scale: Number, low: Number) -> Number:
    if logit < low or logit == NOTHING:
        return NOTHING
    if scale == np.float32(LOG2_E):
        return logit
    heated = (np.float64(logit) - np.float64(largest)) * (np.float64(scale) / LOG2_E)
    return np.float32(max(np.float64(SMALLEST), heated))

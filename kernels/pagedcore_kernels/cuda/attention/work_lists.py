"""Which CTA computes what: the work lists of the two attention kernels, made once a step on the host.

Owns the choice of kernel for each row and the split of long contexts among CTAs. Pure NumPy on a checked ``StepPlan``,
no loop over rows. Layers that see the same keys share a list. How the work is cut changes speed and no bit of a
result; ``device/numerics.py`` says why. Read ``device/decode.py`` for what an item means to the kernel.

An item serves every KV head: CTA b computes head ``b % kv_heads`` of item ``b // kv_heads``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.cuda.shapes import DECODE_ROWS, PREFILL_ROWS, SEGMENT_SHIFT, segment_shift
from pagedcore_kernels.interface import Int32Array, Int64Array
from pagedcore_kernels.step_plan import StepPlan

LONG_CONTEXT = 4 << SEGMENT_SHIFT
"""From here on even a few tokens too many for one decode item are better off with the context split."""


_NO_PREFILL = np.empty((0, 2), np.int32)


@dataclass(frozen=True)
class Visibility:
    """What a layer's queries see and how many of its query heads share a KV head."""

    group: int
    window: int = 0
    chunk: int = 0

    def first_visible(self, positions: Int64Array) -> Int64Array:
        """The first key each position sees."""
        first = np.zeros_like(positions)
        if self.window > 0:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk > 0:
            first = np.maximum(first, positions - positions % self.chunk)
        return first


@dataclass(frozen=True)
class WorkLists:
    """What to launch for one step and one kind of layer.

    ``decode`` [N, 8]: row, first packed query row, first segment, end segment, slot of the first partial or -1,
    first slot of these query rows, how many partials they have, how many items. ``prefill`` [M, 2]: row, first packed
    query row.

    Invariant: every packed query row is in exactly one prefill item or one set of decode items, and that set covers
    each segment the rows see exactly once. Slots of different sets are disjoint.
    """

    decode: Int32Array
    prefill: Int32Array
    num_partials: int


def make_work_lists(plan: StepPlan, visibility: Visibility, kv_heads: int, num_ctas: int) -> WorkLists:
    """Cut the step into items.

    Args:
        plan: the checked batch.
        visibility: of the layers that will share the lists.
        kv_heads: KV heads of these layers.
        num_ctas: CTAs that run at once on the device; contexts are split until about so many have work.
    """
    packed = plan.query_lens * visibility.group
    few = packed <= DECODE_ROWS
    prefill = _NO_PREFILL
    if not few.all():
        few |= (packed <= PREFILL_ROWS) & (plan.kv_lens >= LONG_CONTEXT)
        prefill = _prefill_items(plan, visibility, packed, ~few)
    decode, num_partials = _decode_items(plan, visibility, packed, few, kv_heads, num_ctas)
    return WorkLists(decode, prefill, num_partials)


def _row_tiles(packed: Int64Array, chosen: npt.NDArray[np.bool_], size: int) -> tuple[Int64Array, Int64Array]:
    """The row and the first packed query row of each tile of the chosen rows."""
    rows = np.flatnonzero(chosen & (packed > 0))
    tiles = (packed[rows] + (size - 1)) // size
    if len(rows) == 0 or tiles.max() == 1:
        return rows, np.zeros_like(rows)
    starts = np.cumsum(tiles)
    starts -= tiles
    first = np.arange(int(tiles.sum()))
    first -= np.repeat(starts, tiles)
    return np.repeat(rows, tiles), first * size


def _span(
    plan: StepPlan, visibility: Visibility, packed: Int64Array, rows: Int64Array, first: Int64Array, size: int
) -> tuple[Int64Array, Int64Array]:
    """The first key that each tile sees, and the end of what it sees."""
    past = (plan.kv_lens - plan.query_lens)[rows]
    last = np.minimum(first + size, packed[rows]) - 1
    end = past + last // visibility.group + 1
    if not (visibility.window or visibility.chunk):
        return np.zeros_like(end), end
    return visibility.first_visible(past + first // visibility.group), end


def _prefill_items(
    plan: StepPlan, visibility: Visibility, packed: Int64Array, chosen: npt.NDArray[np.bool_]
) -> Int32Array:
    rows, first = _row_tiles(packed, chosen, PREFILL_ROWS)
    items = np.empty((len(rows), 2), np.int32)
    if len(rows) == 0:
        return items
    begin, end = _span(plan, visibility, packed, rows, first, PREFILL_ROWS)
    items[:, 0], items[:, 1] = rows, first
    return items[np.argsort(begin - end, kind="stable")]


def _decode_items(
    plan: StepPlan, visibility: Visibility, packed: Int64Array, chosen: npt.NDArray[np.bool_], kv_heads: int,
    num_ctas: int,
) -> tuple[Int32Array, int]:
    """Split each tile's segments into runs of nearly equal length, about as many runs as run at once."""
    rows, first = _row_tiles(packed, chosen, DECODE_ROWS)
    if len(rows) == 0:
        return np.empty((0, 8), np.int32), 0
    begin, end = _span(plan, visibility, packed, rows, first, DECODE_ROWS)
    shift = segment_shift(kv_heads)
    start = begin >> shift
    segments = (end - 1 >> shift) + 1 - start
    longest = max(1, -(-int(segments.sum()) // max(1, num_ctas // kv_heads)))
    if segments.max() <= longest:
        return _ordered((rows, first, start, start + segments, -1, 0, 0, 1), segments), 0
    return _split_items(rows, first, start, segments, -(-segments // longest))


def _split_items(
    rows: Int64Array, first: Int64Array, start: Int64Array, segments: Int64Array, pieces: Int64Array
) -> tuple[Int32Array, int]:
    """Cut each tile's segments into so many pieces and give their partial results slots."""
    # The first run leaves one partial, each further segment one of its own.
    head = segments // np.maximum(pieces, 1)
    partials = np.where(pieces > 1, 1 + segments - head, 0)
    first_slot = np.cumsum(partials) - partials

    tile = np.repeat(np.arange(len(rows)), pieces)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    many, total = pieces[tile], segments[tile]
    low = piece * total // many
    high = (piece + 1) * total // many
    slot = np.where(many > 1, first_slot[tile] + np.where(piece > 0, 1 + low - head[tile], 0), -1)
    begin = start[tile]
    columns = rows[tile], first[tile], begin + low, begin + high, slot, first_slot[tile], partials[tile], many
    return _ordered(columns, high - low), int(partials.sum())


def _ordered(columns: tuple[Int64Array | int, ...], sizes: Int64Array) -> Int32Array:
    """Items of these columns, the largest first."""
    items = np.empty((len(sizes), len(columns)), np.int32)
    for i, column in enumerate(columns):
        items[:, i] = column
    return items[np.argsort(-sizes, kind="stable")]

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

from pagedcore.ports import Int32Array, Int64Array
from pagedcore_kernels.cuda.shapes import DECODE_ROWS, PREFILL_ROWS, SEGMENT
from pagedcore_kernels.plan import StepPlan

LONG_CONTEXT = 4 * SEGMENT
"""From here on even a few tokens too many for one decode item are better off with the context split."""


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
    few = (packed <= DECODE_ROWS) | ((packed <= PREFILL_ROWS) & (plan.kv_lens >= LONG_CONTEXT))
    decode, num_partials = _decode_items(plan, visibility, packed, few, max(1, num_ctas // kv_heads))
    return WorkLists(decode, _prefill_items(plan, visibility, packed, ~few), num_partials)


def _row_tiles(packed: Int64Array, chosen: npt.NDArray[np.bool_], size: int) -> tuple[Int64Array, Int64Array]:
    """The row and the first packed query row of each tile of the chosen rows."""
    tiles = np.where(chosen, -(-packed // size), 0)
    rows = np.repeat(np.arange(len(packed)), tiles)
    first = np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return rows, first * size


def _span(
    plan: StepPlan, visibility: Visibility, rows: Int64Array, first: Int64Array, size: int
) -> tuple[Int64Array, Int64Array]:
    """The first key that each tile sees, and the end of what it sees."""
    past = (plan.kv_lens - plan.query_lens)[rows]
    last = np.minimum(first + size, plan.query_lens[rows] * visibility.group) - 1
    begin = visibility.first_visible(past + first // visibility.group)
    return begin, past + last // visibility.group + 1


def _prefill_items(
    plan: StepPlan, visibility: Visibility, packed: Int64Array, chosen: npt.NDArray[np.bool_]
) -> Int32Array:
    rows, first = _row_tiles(packed, chosen, PREFILL_ROWS)
    begin, end = _span(plan, visibility, rows, first, PREFILL_ROWS)
    order = np.argsort(begin - end, kind="stable")
    return np.stack([rows[order], first[order]], axis=1).astype(np.int32)


def _decode_items(
    plan: StepPlan, visibility: Visibility, packed: Int64Array, chosen: npt.NDArray[np.bool_], num_items: int
) -> tuple[Int32Array, int]:
    """Split each tile's segments into runs of nearly equal length, about as many runs as run at once."""
    rows, first = _row_tiles(packed, chosen, DECODE_ROWS)
    begin, end = _span(plan, visibility, rows, first, DECODE_ROWS)
    start = begin // SEGMENT
    segments = -(-end // SEGMENT) - start
    longest = max(1, -(-int(segments.sum()) // num_items))
    pieces = -(-segments // longest)
    # The first run leaves one partial, each further segment one of its own.
    partials = np.where(pieces > 1, 1 + segments - segments // np.maximum(pieces, 1), 0)
    first_slot = np.cumsum(partials) - partials

    tile = np.repeat(np.arange(len(rows)), pieces)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low = piece * segments[tile] // pieces[tile]
    high = (piece + 1) * segments[tile] // pieces[tile]
    head = segments[tile] // pieces[tile]
    slot = np.where(pieces[tile] > 1, first_slot[tile] + np.where(piece > 0, 1 + low - head, 0), -1)
    items = np.empty((len(tile), 8), np.int32)
    columns = (rows[tile], first[tile], start[tile] + low, start[tile] + high, slot, first_slot[tile], partials[tile],
               pieces[tile])
    for i, column in enumerate(columns):
        items[:, i] = column
    return items[np.argsort(low - high, kind="stable")], int(partials.sum())

"""What a step's layers share on the device: tables, rows, slots, and a work list per kind of layer.

Owns the copies of a step. Kinds of layers that were met before are cut and copied together with the batch, in one
copy; a kind met for the first time brings a copy of its own, once. Read ``work_lists.py`` for what a list means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cuda.attention.uploads import Scratch, StepBuffer
from pagedcore_kernels.cuda.attention.work_lists import Visibility, WorkLists, make_work_lists
from pagedcore_kernels.cuda.shapes import DECODE_ROWS, partial_bytes, segment_shift
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import Int32Array, RaggedRows
from pagedcore_kernels.layout import BlockLayout, LayerShape
from pagedcore_kernels.step_plan import StepPlan

_NUMBERS_PER_ROW: Final = 16
"""Of a decode step, and what keeps them apart: its description, its slot, and what the caller sends along."""
_Kind = tuple[Visibility, int]
"""What a layer's queries see, and its KV heads."""


@dataclass(frozen=True)
class DeviceWork:
    """Work on the device: the family of the kernel, the items and how many, for each launch that is not empty."""

    launches: tuple[tuple[str, torch.Tensor, int], ...]

    @classmethod
    def of(cls, lists: WorkLists, decode: torch.Tensor, prefill: torch.Tensor) -> DeviceWork:
        """Pair lists with their copies; prefill first, because its items take longest."""
        both = (("prefill", prefill, len(lists.prefill)), ("decode", decode, len(lists.decode)))
        return cls(tuple(launch for launch in both if launch[2]))


@dataclass
class SharedStep:
    """One step on the device: ``rows`` [R, 4] are first token, tokens, positions and the place of its table among
    ``tables``; ``numbers`` are the caller's; all int32.
    """

    plan: StepPlan
    tables: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    numbers: list[torch.Tensor]
    is_framed: bool = False
    """Whether its launches are those of every step in its frame, whatever of it is padding."""
    work: dict[_Kind, DeviceWork] = field(default_factory=dict)


class StepFrame:
    """Where the numbers of decode steps stay on the device, so that recorded launches find those of the next step.

    Invariant: every step of as many rows has as many items of work, some of them empty, at the same places.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self.buffer = StepBuffer(device, room)


class LayerPlans:
    """Prepares steps for all layers of one pool, in items for so many CTAs as run at once."""

    def __init__(self, layout: BlockLayout, pool: torch.Tensor, num_ctas: int) -> None:
        self._layout = layout
        self._num_blocks = pool.shape[0]
        self._num_ctas = num_ctas
        self._partial_floats = max(partial_bytes(shape.value_head_size) // 4 for shape in layout.layers)
        self._kinds: list[_Kind] = []
        self._step_buffer = StepBuffer(pool.device)
        self._late_buffers: list[StepBuffer] = []
        self._scratch = Scratch(pool.device)
        self._before: StepPlan | None = None

    @property
    def partials(self) -> torch.Tensor:
        """Memory for partial results."""
        return self._scratch.partials

    @property
    def counters(self) -> torch.Tensor:
        """One counter per set of partial results, all 0."""
        return self._scratch.counters

    def new_frame(self, most_rows: int, most_blocks: int) -> StepFrame | None:
        """Return room for decode steps of up to so many rows with up to so many blocks each, and for their partial
        results; ``None``: such steps are not cut into items for one kernel, because no step was computed yet, or a kind
        of layers has more query heads for a KV head than an item has rows.
        """
        if not self._kinds or any(visibility.group > DECODE_ROWS for visibility, _ in self._kinds):
            return None
        # Why the pool bounds it: rows that share no blocks have no more tokens. For those that do it may have to grow.
        tokens = min(most_rows * most_blocks, self._num_blocks) * self._layout.block_size
        partials = max(((tokens >> segment_shift(heads)) + most_rows) * heads for _, heads in self._kinds)
        self._scratch.reserve(partials * self._partial_floats, partials)
        items = sum(8 * self._num_items(most_rows, kv_heads) for _, kv_heads in self._kinds)
        return StepFrame(self.partials.device, most_rows * (_NUMBERS_PER_ROW + most_blocks) + items)

    def addresses(self, frame: StepFrame) -> tuple[int, ...]:
        """Return what launches of a step in a frame have been told, and what stays until something has to grow."""
        return frame.buffer.address, self.partials.data_ptr(), self.counters.data_ptr(), len(self._kinds)

    def begin(
        self, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]] = (), frame: StepFrame | None = None
    ) -> SharedStep:
        """Check a batch and copy everything that known kinds of layers need, in one copy.

        Args:
            batch: the rows.
            numbers: further arrays of integers that go along; in a frame of as many as there are rows.
            frame: where the numbers go; ``None``: they go where there is room.

        Raises:
            InternalError: a block id, slot or length is out of range, or a row has too many tokens for a frame.
        """
        plan = self._before = StepPlan(batch, self._num_blocks, self._layout.block_size, before=self._before)
        lists = [self._cut(plan, kind) for kind in self._kinds]
        if frame is not None:
            lists = [self._fill(each, kv_heads, plan) for each, (_, kv_heads) in zip(lists, self._kinds, strict=True)]
        parts = [part for each in lists for part in (each.decode, each.prefill)]
        # Why tables last: they are as wide as the longest row needs, and all else of a frame stays in its place.
        sent = (self._step_buffer if frame is None else frame.buffer).upload(
            [*numbers, _rows_of(plan), plan.slots, *parts, plan.block_tables])
        rows, slots, *work, tables = sent[len(numbers) :]
        step = SharedStep(plan, tables, rows, slots, sent[: len(numbers)], frame is not None)
        for i, (kind, each) in enumerate(zip(self._kinds, lists, strict=True)):
            step.work[kind] = DeviceWork.of(each, work[2 * i], work[2 * i + 1])
        return step

    def work(self, step: SharedStep, visibility: Visibility, shape: LayerShape) -> DeviceWork:
        """The work of a layer, cut and copied now if no layer of its kind was met before."""
        kind = visibility, shape.num_kv_heads
        if kind not in step.work:
            each = self._cut(step.plan, kind)
            self._late_buffers.append(StepBuffer(step.tables.device))
            decode, prefill = self._late_buffers[-1].upload([each.decode, each.prefill])
            step.work[kind] = DeviceWork.of(each, decode, prefill)
            self._kinds.append(kind)
        return step.work[kind]

    def _fill(self, lists: WorkLists, kv_heads: int, plan: StepPlan) -> WorkLists:
        """Add empty items up to the most that a step of so many rows is cut into."""
        if len(lists.prefill):
            raise InternalError("CUDA step: a row has more tokens than a decode item, expected one token of each row.")
        items = np.full((self._num_items(plan.num_rows, kv_heads), 8), -1, np.int32)
        items[: len(lists.decode)] = lists.decode
        return WorkLists(items, lists.prefill, lists.num_partials)

    def _num_items(self, num_rows: int, kv_heads: int) -> int:
        """Return how many items so many decode rows are cut into at most."""
        return num_rows + max(1, self._num_ctas // kv_heads)

    def _cut(self, plan: StepPlan, kind: _Kind) -> WorkLists:
        visibility, kv_heads = kind
        lists = make_work_lists(plan, visibility, kv_heads, self._num_ctas)
        self._scratch.reserve(lists.num_partials * kv_heads * self._partial_floats, lists.num_partials * kv_heads)
        return lists


def _rows_of(plan: StepPlan) -> Int32Array:
    rows = np.zeros((plan.num_rows, 4), np.int32)
    rows[:, 0] = plan.query_start[:-1]
    rows[:, 1] = plan.query_lens
    rows[:, 2] = plan.kv_lens
    rows[:, 3] = np.arange(plan.num_rows) * plan.block_tables.shape[1]
    return rows

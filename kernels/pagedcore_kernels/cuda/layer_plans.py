"""What a step's layers share on the device: tables, rows, slots, and a work list per kind of layer.

Owns the copies of a step. Kinds of layers that were met before are cut and copied together with the batch, in one
copy; a kind met for the first time brings a copy of its own, once. Read ``work_lists.py`` for what a list means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagedcore_kernels.cuda.attention.uploads import Scratch, StepBuffer
from pagedcore_kernels.cuda.attention.work_lists import Visibility, WorkLists, make_work_lists
from pagedcore_kernels.cuda.shapes import DECODE_ROWS, partial_bytes
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import Int32Array, RaggedRows
from pagedcore_kernels.layout import BlockLayout, LayerShape
from pagedcore_kernels.step_plan import StepPlan

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
    """One step on the device: ``rows`` [R, 4] are first token, tokens, positions and 0 of each row; all int32."""

    plan: StepPlan
    tables: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    is_framed: bool = False
    """Whether its launches are those of every step in its frame, whatever of it is padding."""
    work: dict[_Kind, DeviceWork] = field(default_factory=dict)


class StepFrame:
    """Where the numbers of decode steps of one size stay on the device, so that recorded launches find those of the
    next step: every step has as many rows, tables as wide, and as many items of work, some of them empty.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = StepBuffer(device)


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

    @property
    def partials(self) -> torch.Tensor:
        """Memory for partial results."""
        return self._scratch.partials

    @property
    def counters(self) -> torch.Tensor:
        """One counter per set of partial results, all 0."""
        return self._scratch.counters

    @property
    def can_frame(self) -> bool:
        """Whether decode steps are cut into items for one kernel: all kinds of layers are known, and none has more
        query heads for a KV head than an item has rows.
        """
        return bool(self._kinds) and all(visibility.group <= DECODE_ROWS for visibility, _ in self._kinds)

    def addresses(self, frame: StepFrame) -> tuple[int, ...]:
        """Return what launches of a step in a frame have been told, and what stays until something has to grow."""
        return frame.buffer.address, self.partials.data_ptr(), self.counters.data_ptr(), len(self._kinds)

    def begin(self, batch: RaggedRows, frame: StepFrame | None = None) -> SharedStep:
        """Check a batch and copy everything that known kinds of layers need, in one copy.

        Args:
            batch: the rows; in a frame as many as in every other step there, and tables as wide.
            frame: where the numbers go; ``None``: they go where there is room.

        Raises:
            InternalError: a block id, slot or length is out of range, or a row has too many tokens for a frame.
        """
        plan = StepPlan(batch, self._num_blocks, self._layout.block_size)
        lists = [self._cut(plan, kind) for kind in self._kinds]
        if frame is not None:
            lists = [self._fill(each, kv_heads, plan) for each, (_, kv_heads) in zip(lists, self._kinds, strict=True)]
        arrays: list[Int32Array] = [plan.block_tables, _rows_of(plan), plan.slots.astype(np.int32)]
        tables, rows, slots, *work = (self._step_buffer if frame is None else frame.buffer).upload(
            [*arrays, *(part for each in lists for part in (each.decode, each.prefill))]
        )
        step = SharedStep(plan, tables, rows, slots, frame is not None)
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
        items = np.full((plan.num_rows + max(1, self._num_ctas // kv_heads), 8), -1, np.int32)
        items[: len(lists.decode)] = lists.decode
        return WorkLists(items, lists.prefill, lists.num_partials)

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
    return rows

"""Recordings of the kernel calls of a decoder's steps, which are repeated in the steps that follow.

Owns the recordings and what makes one void. Preparing the calls of a step of 24 layers in Python takes 8 ms on a Xeon,
where a step of one row computes for 25 ms. A recording is repeated for any number of rows that its memory holds.

Invariant: a repeated step computes the same bits as one that is not: the calls are the same, and they find the step's
numbers at the same addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from pagedcore.protocols import AttentionBackend
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls, StepShape
from pagedcore_kernels.cpu.runtime.workspace import Workspace

MOST_ROWS: Final = 1024
"""Most rows of a step that is computed in the workspace, whose memory stays, and most rows of logits there."""
MOST_LOGITS: Final = 128


@dataclass(frozen=True, slots=True)
class _Recording:
    calls: RecordedCalls
    state: Hashable
    """What it depends on, besides the attention backend."""
    most_rows: int


class RecordedSteps:
    """The recordings of one decoder."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        """What the calls read and write."""
        self._parts: dict[str, _Recording] = {}
        self._attention: Callable[[], object] = lambda: None

    def run(
        self, part: str, attention: AttentionBackend, others: Hashable, shape: StepShape,
        compute: Callable[[], object],
    ) -> None:
        """Run ``compute``, or repeat the calls that it made before.

        Args:
            part: what is computed: one recording is kept for each.
            attention: has planned the step.
            others: what else the calls depend on, besides the workspace.
            shape: of the step.
            compute: computes the part by kernels alone.
        """
        # Why by a weak reference: another backend may have its pool and arrays at the addresses of one that is gone.
        if self._attention() is not attention:
            self._parts.clear()
            self._attention = weakref.ref(attention)
        known = self._parts.get(part)
        is_valid = known is not None and known.state == (self.workspace.version, others)
        if known is not None and is_valid and shape.num_rows <= known.most_rows:
            known.calls.run(shape)
            return
        with RecordedCalls() as calls:
            compute()
        if not calls.is_empty:
            # Why asked now: the memory may have grown meanwhile.
            most_rows = self.workspace.capacity(shape.num_rows)
            self._parts[part] = _Recording(calls, (self.workspace.version, others), most_rows)

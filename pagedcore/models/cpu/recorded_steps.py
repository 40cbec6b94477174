"""Recordings of the kernel calls of small steps, which are repeated when a step of the same shape comes.

Owns the recordings and what makes one void. Most steps are of this kind: each sequence gets one token. Preparing the
calls of a step of 24 layers in Python takes 8 ms on a Xeon, where a step of one row computes for 25 ms.

Invariant: a repeated step computes the same bits as one that is not: the calls are the same, and they find the step's
numbers at the same addresses.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from pagedcore.protocols import RecordableAttention
from pagedcore_kernels.cpu.runtime.recorded_calls import RecordedCalls
from pagedcore_kernels.cpu.runtime.threads import num_threads
from pagedcore_kernels.cpu.runtime.workspace import Workspace

#: Most rows of a step that is recorded: with more of them Python's share is small, and their logits are large.
MOST_ROWS: Final = 128
#: Most rows of any step that is computed in the workspace, whose memory stays.
MOST_KEPT_ROWS: Final = 1024
#: Recordings that are kept: a few numbers of rows in turn, while sequences come and go. Each takes half a KiB per call.
_MOST_RECORDINGS: Final = 16


class RecordedSteps:
    """The recordings of one decoder."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        """What the calls read and write."""
        self._recordings: OrderedDict[Hashable, RecordedCalls] = OrderedDict()
        self._attention: Callable[[], object] = lambda: None

    def run(self, attention: RecordableAttention, others: Hashable, compute: Callable[[], None]) -> None:
        """Run ``compute``, or repeat the calls that it made in a step like this one.

        Args:
            attention: has planned the step.
            others: what else its calls depend on, besides the workspace and the number of threads.
            compute: computes the step by kernels alone.
        """

        def key() -> Hashable:
            return num_threads(), self.workspace.version, others, attention.call_key()

        # Why by a weak reference: another backend may have its pool and arrays at the addresses of one that is gone.
        if self._attention() is not attention:
            self._recordings.clear()
            self._attention = weakref.ref(attention)
        recorded = self._recordings.get(key())
        if recorded is not None:
            self._recordings.move_to_end(key())
            recorded.run()
            return
        with RecordedCalls() as recorded:
            compute()
        # Why asked again: only now is everything there that the calls need.
        self._recordings[key()] = recorded
        if len(self._recordings) > _MOST_RECORDINGS:
            self._recordings.popitem(last=False)

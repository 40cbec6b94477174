"""The end of a fused decoder: the last norm and the output layer, for logits or for the most likely tokens alone.

The logits of a vocabulary are the largest thing that a step writes, and of rows that are decoded greedily nobody reads
more than which is the largest. Then the product keeps that alone; see ``largest.py`` of the kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedcore.models.decoders.step_rows import StepRows
from pagedcore.models.linears.packed_linear import PackedLinear
from pagedcore.protocols import Int64Array, PicksLargest, RecordableMatmul
from pagedcore_kernels.cpu.layers.elementwise import RmsNorm, SoftCap
from pagedcore_kernels.cpu.matmul.largest import largest_outputs
from pagedcore_kernels.cpu.matmul.tiles import PANEL


class OutputLayer:
    """Turns the last layer's rows into logits, or into candidates of the largest ones."""

    def __init__(
        self, norm: RmsNorm, head: PackedLinear, cap: float | None, divisor: float, dtype: torch.dtype
    ) -> None:
        """Compute ``head`` of what ``norm`` makes of the rows, then cap the logits if there is a cap, then divide."""
        self._head = head
        self._norm, self._cap, self._divisor = norm, SoftCap(cap, dtype) if cap else None, divisor
        self.only_runs_kernels = isinstance(head.multiply, RecordableMatmul) and head.multiply.only_runs_kernels
        """Whether ``compute`` can be recorded."""
        # Why: a cap and a divisor round, and may make equal what was not.
        self.can_pick = self._cap is None and divisor == 1.0 and isinstance(head.multiply, PicksLargest)
        """Whether there are candidates."""

    def compute(
        self, work: StepRows, addend: torch.Tensor | None, barred: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [S, vocabulary] of the rows, not divided yet, or candidates [panels, S] if something is
        ``barred``, be it nothing: what ``bar`` returns.
        """
        self._norm(work.residual, addend, work.normed)
        if barred is not None:
            candidates = self._candidates(work)
            multiply: Any = self._head.multiply
            multiply.pick_to(candidates, work.normed, barred, work.workspace)
            return candidates
        logits = work.multiply("logits", self._head, work.normed)
        if self._cap is not None:
            self._cap(logits)
        return logits

    def with_hidden(
        self, work: StepRows, addend: torch.Tensor | None, num_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [S, vocabulary] of the first ``num_logits`` rows, not divided yet and not in a workspace, and
        the normed states [T - S, hidden] of the others.
        """
        self._norm(work.residual, addend, work.normed)
        states, hidden = work.normed[:num_logits], work.normed[num_logits:]
        if not num_logits:
            return self.no_logits(work), hidden
        logits = self._head.multiply(states)
        if self._cap is not None:
            self._cap(logits)
        return logits, hidden

    def computed(self, work: StepRows, barred: torch.Tensor | None) -> torch.Tensor:
        """Return what was computed last, where there is a workspace."""
        return work.logits(self._head) if barred is None else self._candidates(work)

    @staticmethod
    def bar(work: StepRows, barred: Int64Array) -> torch.Tensor:
        """Return pairs of row and token, [B, 2], as the product takes them."""
        count = len(barred)
        if work.workspace is None:
            room = torch.empty(1 + 2 * count, dtype=torch.int64)
        else:
            room = work.workspace.take("barred", 1 + 2 * count, 1, torch.int64).view(-1)
        room[0] = count
        room[1:] = torch.from_numpy(barred[barred[:, 1].argsort()]).flatten()
        return room

    def logits(self, computed: torch.Tensor) -> torch.Tensor:
        """Return the logits of what was computed for them."""
        return computed if self._divisor == 1.0 else computed.div_(self._divisor)

    def token_ids(self, candidates: torch.Tensor) -> Int64Array:
        """Return the [S] most likely tokens, see ``DecodesGreedily``."""
        return largest_outputs(candidates.numpy())

    def no_logits(self, work: StepRows) -> torch.Tensor:
        """Return logits of no row."""
        return work.residual.new_empty(0, self._head.out_features)

    def _candidates(self, work: StepRows) -> torch.Tensor:
        num_panels, num_rows = -(-self._head.out_features // PANEL), len(work.residual)
        if work.workspace is None:
            return torch.empty(num_panels, num_rows, dtype=torch.int64)
        return work.workspace.take("candidates", num_rows, num_panels, torch.int64).view(num_panels, num_rows)

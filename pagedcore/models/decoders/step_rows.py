"""The rows of one step on their way through a fused decoder, and where products and attention write.

Owns the tensors of a step: new ones, or those of a workspace, whose addresses stay, so that the step can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.attention.windows import WindowSplit
from pagedcore.models.linears.packed_linear import PackedLinear
from pagedcore.models.lora.slots import RowAdapters, new_room
from pagedcore_kernels.cpu.layers.elementwise import KVDestination
from pagedcore_kernels.cpu.runtime.workspace import Workspace


@dataclass(slots=True)
class StepRows:
    """What the layers of one step work on."""

    residual: torch.Tensor
    """[T, hidden]; every half of a layer adds to it."""
    normed: torch.Tensor
    """[T, hidden]: room for norms."""
    gated: torch.Tensor
    """[T, intermediate]: room for activations."""
    positions: torch.Tensor
    """[T] int64."""
    destination: KVDestination | None
    """Where K and V go; ``None`` if the attention backend writes them itself."""
    workspace: Workspace | None = None
    """Where results of products and of attention are; ``None``: in new tensors."""
    adapters: RowAdapters | None = None
    """Those of the rows; ``None``: no row has one."""
    windows: tuple[WindowSplit, KVDestination] | None = None
    """Where K and V of layers with a window go, if that is elsewhere."""

    def place_of(self, layer: int) -> tuple[KVDestination | None, int]:
        """Return where K and V of a layer go, and its number there."""
        if self.windows is None:
            return self.destination, layer
        has_window, number = self.windows[0].places[layer]
        return (self.windows[1] if has_window else self.destination), number

    def add(self, addend: torch.Tensor | None) -> torch.Tensor:
        """Add ``addend`` to the residual, if there is one, and return it."""
        if addend is not None:
            self.residual += addend
        return self.residual

    def keep(self, chosen: torch.Tensor) -> None:
        """Drop all rows but the chosen ones, of which there may be more than rows: each may be chosen several times."""
        self.residual, num_rows = self.residual[chosen], len(chosen)
        # Safety: kernels write as many rows as the residual has.
        if num_rows > len(self.normed):
            self.normed, self.gated = (one.new_empty(num_rows, one.shape[1]) for one in (self.normed, self.gated))
        self.normed, self.gated = self.normed[:num_rows], self.gated[:num_rows]
        self.adapters = None if self.adapters is None else self.adapters.chosen(chosen, new_room)

    def multiply(self, purpose: str, product: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of ``rows`` [T, in], which stays until the next one for the same purpose."""
        if self.workspace is None:
            out = product.multiply(rows)
        else:
            out = self.workspace.take(purpose, len(rows), product.out_features, rows.dtype)
            multiply: Any = product.multiply
            multiply.multiply_to(out, rows, self.workspace)
        if self.adapters is not None and product.update is not None:
            product.update.add_to(out, rows, self.adapters.updates)
        return out

    def room(self, purpose: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return room [T, size] for a purpose, in the rows' number format unless there is another."""
        dtype = self.residual.dtype if dtype is None else dtype
        if self.workspace is None:
            return self.residual.new_empty(len(self.residual), size, dtype=dtype)
        return self.workspace.take(purpose, len(self.residual), size, dtype)

    def mixed(self, size: int) -> torch.Tensor:
        """Return room for what a layer mixes, [T, size]: in a workspace what the last one of this size has mixed."""
        return self.room("mixed", size)

    def wanted(self, rows: torch.Tensor, size: int) -> tuple[StepRows, torch.Tensor]:
        """Return the chosen rows, and what the last layer of this size has mixed for them, at places of their own."""
        workspace, num_rows = self.workspace, len(rows)
        assert workspace is not None

        def take(purpose: str, like: torch.Tensor) -> torch.Tensor:
            return workspace.take(f"wanted {purpose}", num_rows, like.shape[1], like.dtype)

        mixed, residual = self.mixed(size), take("residual", self.residual).copy_(self.residual[rows])
        adapters = None if self.adapters is None else self.adapters.chosen(rows, workspace.take, "wanted ")
        kept = StepRows(
            residual, take("normed", self.normed), take("gated", self.gated), self.positions, None, workspace, adapters
        )
        return kept, take("mixed", mixed).copy_(mixed[rows])

    def apart(self, rows: torch.Tensor, size: int) -> tuple[StepRows, torch.Tensor]:
        """Return the same in new tensors, which the next step leaves alone."""
        residual = self.residual[rows]
        gated = residual.new_empty(len(rows), self.gated.shape[1])
        adapters = None if self.adapters is None else self.adapters.chosen(rows, new_room)
        kept = StepRows(residual, torch.empty_like(residual), gated, self.positions, None, adapters=adapters)
        return kept, self.mixed(size)[rows]

    def logits(self, head: PackedLinear) -> torch.Tensor:
        """Return the logits [T, vocabulary] that were computed last, where there is a workspace."""
        assert self.workspace is not None
        return self.workspace.take("logits", len(self.residual), head.out_features, self.residual.dtype)

    def attend(self, step: PagedStep, place: AttentionLayer, query: torch.Tensor) -> torch.Tensor:
        """Return the attention of a query [T, H, D] as [T, H * Dv]."""
        how: dict[str, Any] = {"scale": place.scale, "window": place.window, "chunk": place.chunk,
                               "softcap": place.softcap}  # fmt: skip
        attention: Any = step.attention
        if self.workspace is None:
            attended: torch.Tensor = attention.attend(place.index, query, **how)
            return attended.view(len(query), -1)
        out = self.mixed(place.num_heads * place.value_head_size)
        attention.attend_to(out.view(len(query), place.num_heads, -1), place.index, query, **how)
        return out

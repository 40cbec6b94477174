"""Owns the memory of the KV pool: one tensor of a layout's blocks, and the sums about its size.

It never decides who gets a block; ``cache/`` does. The meaning of the bytes is ``pagedcore_kernels.layout``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedcore.errors import InvalidConfig
from pagedcore.execution.huge_pages import use_huge_pages

if TYPE_CHECKING:
    import torch

    from pagedcore_kernels.layout import KVLayout


class KVStorage:
    """The pool of one model.

    Invariant: ``pool`` is allocated once and never moves, so attention backends may keep its address.
    """

    __slots__ = ("layout", "num_blocks", "pool")

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        """Allocate the pool.

        Raises:
            InvalidConfig: there is not one block, or the memory for them cannot be had.
        """
        if num_blocks < 1:
            raise InvalidConfig(f"num_kv_blocks: got {num_blocks}, allowed is at least 1. Raise kv_cache_memory.")
        self.layout = layout
        self.num_blocks = num_blocks
        try:
            self.pool: torch.Tensor = layout.allocate(num_blocks)
            use_huge_pages(self.pool)
        # Why: beyond 2**63 bytes torch complains about the type of the number.
        except (RuntimeError, MemoryError, TypeError):
            raise InvalidConfig(
                f"num_kv_blocks: got {num_blocks}, which are {num_blocks * layout.block_bytes} bytes, more than "
                "this machine gives. Lower num_kv_blocks or kv_cache_memory."
            ) from None

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.layout.block_bytes


def num_blocks_for(layout: KVLayout, num_bytes: int) -> int:
    """Return how many whole blocks fit into ``num_bytes``; 0 if not even one does."""
    return num_bytes // layout.block_bytes

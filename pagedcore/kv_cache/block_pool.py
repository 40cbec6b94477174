"""Free list and reference counts of the KV blocks of one memory.

A block is a number here; sequences, tokens and addresses are not known. ``prefix_cache`` owns what idle blocks hold,
``block_manager`` which sequence owns which number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagedcore.errors import InternalError


class BlockPool:
    """Free list and reference counts of ``num_blocks`` blocks, numbered from 0; its attributes are not for changing.

    A block is free, referenced, or idle: an idle block has no reference and is not free, because its contents may be
    found again.

    Invariant: a block is in the free list exactly when it has no reference and is not idle, and then once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        """Blocks without a reference: the free and the idle ones."""
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        """What ``allocate`` can give now: last what was used before, and below it the others, lowest number next."""
        self.idle_blocks: set[int] = set()
        self.reference_counts = [0] * num_blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` blocks with one reference each, or none at all when too few are free."""
        if num_blocks > len(self.free_blocks):
            return None
        taken = [self.free_blocks.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self.reference_counts[block_id] = 1
        self.num_available -= num_blocks
        return taken

    def add_reference(self, block_id: int) -> None:
        """Add a reference to a block that is referenced or idle. Raises ``InternalError`` if it is free."""
        if block_id in self.idle_blocks:
            self.idle_blocks.remove(block_id)
            self.num_available -= 1
        else:
            self._require_referenced(block_id, "add_reference")
        self.reference_counts[block_id] += 1

    def free_reference(self, block_id: int) -> bool:
        """Remove a reference; return whether the block is idle now. Raises ``InternalError`` if it has none."""
        self._require_referenced(block_id, "free_reference")
        self.reference_counts[block_id] -= 1
        if self.reference_counts[block_id] > 0:
            return False
        self.idle_blocks.add(block_id)
        self.num_available += 1
        return True

    def free_idle_block(self, block_id: int) -> None:
        """Make an idle block free. Raises ``InternalError`` if it is not idle."""
        if block_id not in self.idle_blocks:
            raise InternalError(f"free_idle_block: block {block_id} is not idle")
        self.idle_blocks.remove(block_id)
        self.free_blocks.append(block_id)

    def snapshot(self) -> dict[str, Any]:
        """Copy free list and reference counts as plain values; the idle blocks follow from what is registered."""
        return {"free": list(self.free_blocks), "counts": list(self.reference_counts)}

    def restore(self, state: Mapping[str, Any], registered: Iterable[int]) -> None:
        """Be as the pool was copied; ``registered`` are the blocks whose contents are known."""
        self.free_blocks, self.reference_counts = list(state["free"]), list(state["counts"])
        self.idle_blocks = {block_id for block_id in registered if self.reference_counts[block_id] == 0}
        self.num_available = len(self.idle_blocks) + len(self.free_blocks)

    def _require_referenced(self, block_id: int, verb: str) -> None:
        # Safety: a negative id would wrap around to another sequence's block.
        if not 0 <= block_id < self.num_blocks:
            raise InternalError(f"{verb}: block {block_id} is outside the pool of {self.num_blocks} blocks")
        if self.reference_counts[block_id] == 0:
            raise InternalError(f"{verb}: block {block_id} has no reference; it was freed before")

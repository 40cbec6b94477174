"""Which KV blocks of one device are free and how often the others are referenced.

Knows nothing about sequences, tokens or memory addresses: a block is a number. Read ``block_table`` next for what
owns the numbers, and ``block_manager`` for who hands them out.
"""

from __future__ import annotations

from pagedcore.errors import InternalError


class BlockPool:
    """Free list and reference counts of ``num_blocks`` blocks, numbered from 0.

    Invariant: a block is in the free list exactly when its reference count is 0, and then once.
    """

    __slots__ = ("_free", "_num_references")

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free or not."""
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give now."""
        return len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list, as it is; its order means nothing to callers."""
        return tuple(self._free)

    @property
    def reference_counts(self) -> tuple[int, ...]:
        """References of every block, by block id."""
        return tuple(self._num_references)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` blocks with one reference each, or none at all when too few are free."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_references[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add a reference to a block that somebody holds.

        Raises:
            InternalError: nobody holds it.
        """
        self._require_referenced(block_id, "share")
        self._num_references[block_id] += 1

    def free(self, block_id: int) -> None:
        """Give up one reference; the last one makes the block free.

        Raises:
            InternalError: nobody holds the block.
        """
        self._require_referenced(block_id, "free")
        self._num_references[block_id] -= 1
        if self._num_references[block_id] == 0:
            self._free.append(block_id)

    def _require_referenced(self, block_id: int, verb: str) -> None:
        # Safety: a negative id would wrap around to another sequence's block.
        if not 0 <= block_id < len(self._num_references):
            raise InternalError(f"{verb}: block {block_id} is outside the pool of {self.num_blocks} blocks")
        if self._num_references[block_id] == 0:
            raise InternalError(f"{verb}: block {block_id} has no reference; it was freed before")

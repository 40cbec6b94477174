"""Free list and reference counts of the KV blocks of one memory.

A block is a number here; sequences, tokens and addresses are not known. ``prefix_cache`` owns what idle blocks hold,
``block_manager`` which sequence owns which number.
"""

from __future__ import annotations

from pagedcore.errors import InternalError


class BlockPool:
    """Free list and reference counts of ``num_blocks`` blocks, numbered from 0.

    A block is free, referenced, or idle: an idle block has no reference and is not free, because its contents may be
    found again.

    Invariant: a block is in the free list exactly when it has no reference and is not idle, and then once.
    """

    __slots__ = ("_free", "_idle", "_num_references", "num_available", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: set[int] = set()
        self._num_references = [0] * num_blocks
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        """Blocks without a reference: the free and the idle ones."""

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give now."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks without references that keep their contents."""
        return len(self._idle)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """The free list; its order means nothing to callers."""
        return tuple(self._free)

    @property
    def idle_blocks(self) -> frozenset[int]:
        """The idle blocks."""
        return frozenset(self._idle)

    @property
    def reference_counts(self) -> tuple[int, ...]:
        """References of every block, by block id."""
        return tuple(self._num_references)

    def num_references(self, block_id: int) -> int:
        """References of one block."""
        return self._num_references[block_id]

    def is_idle(self, block_id: int) -> bool:
        """Whether the block has no reference and keeps its contents."""
        return block_id in self._idle

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` blocks with one reference each, or none at all when too few are free."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_references[block_id] = 1
        self.num_available -= num_blocks
        return taken

    def add_reference(self, block_id: int) -> None:
        """Add a reference to a block that is referenced or idle.

        Raises:
            InternalError: it is free.
        """
        if block_id in self._idle:
            self._idle.remove(block_id)
            self.num_available -= 1
        else:
            self._require_referenced(block_id, "add_reference")
        self._num_references[block_id] += 1

    def free_reference(self, block_id: int) -> bool:
        """Remove one reference; return whether it was the last one, which leaves the block idle.

        Raises:
            InternalError: the block has no reference.
        """
        self._require_referenced(block_id, "free_reference")
        self._num_references[block_id] -= 1
        if self._num_references[block_id] > 0:
            return False
        self._idle.add(block_id)
        self.num_available += 1
        return True

    def free_idle_block(self, block_id: int) -> None:
        """Make an idle block free.

        Raises:
            InternalError: it is not idle.
        """
        if block_id not in self._idle:
            raise InternalError(f"free_idle_block: block {block_id} is not idle")
        self._idle.remove(block_id)
        self._free.append(block_id)

    def _require_referenced(self, block_id: int, verb: str) -> None:
        # Safety: a negative id would wrap around to another sequence's block.
        if not 0 <= block_id < self.num_blocks:
            raise InternalError(f"{verb}: block {block_id} is outside the pool of {self.num_blocks} blocks")
        if self._num_references[block_id] == 0:
            raise InternalError(f"{verb}: block {block_id} has no reference; it was freed before")

"""Which KV blocks of one memory are free, which are referenced and which only keep what they hold.

Knows nothing about sequences, tokens or memory addresses: a block is a number. Read ``prefix_cache`` next for what
idle blocks keep, and ``block_manager`` for who owns the numbers.
"""

from __future__ import annotations

from pagedcore.errors import InternalError


class BlockPool:
    """Free list and reference counts of ``num_blocks`` blocks, numbered from 0.

    A block is free, referenced, or idle: idle blocks have no reference and are not free yet, because their contents
    may be of use again.

    Invariant: a block is in the free list exactly when it has no reference and is not idle, and then once.
    """

    __slots__ = ("_free", "_idle", "_num_references")

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: set[int] = set()
        self._num_references = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, whatever their state."""
        return len(self._num_references)

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
        """The free list, as it is; its order means nothing to callers."""
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
        """Whether nobody holds the block and it still keeps its contents."""
        return block_id in self._idle

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` blocks with one reference each, or none at all when too few are free."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._num_references[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Add a reference to a block that somebody holds, or that is idle.

        Raises:
            InternalError: it is free.
        """
        if not self.is_idle(block_id):
            self._require_referenced(block_id, "share")
        self._idle.discard(block_id)
        self._num_references[block_id] += 1

    def drop(self, block_id: int) -> bool:
        """Give up one reference; return whether it was the last one, which leaves the block idle.

        Raises:
            InternalError: nobody holds the block.
        """
        self._require_referenced(block_id, "drop")
        self._num_references[block_id] -= 1
        if self._num_references[block_id] > 0:
            return False
        self._idle.add(block_id)
        return True

    def recycle(self, block_id: int) -> None:
        """Make an idle block free.

        Raises:
            InternalError: it is not idle.
        """
        if not self.is_idle(block_id):
            raise InternalError(f"recycle: block {block_id} is not idle")
        self._idle.discard(block_id)
        self._free.append(block_id)

    def _require_referenced(self, block_id: int, verb: str) -> None:
        # Safety: a negative id would wrap around to another sequence's block.
        if not 0 <= block_id < len(self._num_references):
            raise InternalError(f"{verb}: block {block_id} is outside the pool of {self.num_blocks} blocks")
        if self._num_references[block_id] == 0:
            raise InternalError(f"{verb}: block {block_id} has no reference; it was given up before")

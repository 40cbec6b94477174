"""The memory of a virtual GPU, given out again as torch's caching allocator does.

Owns blocks and whom they are free for. Whoever allocates on the same stream may take a freed block at once, while the
operations that use it are still queued; a tensor that another stream reads is overwritten then, unless that stream was
named with ``record_stream``.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch

from virtual_gpu.machine import Item, Machine, Stream

ROUND = 512
"""Bytes that every block is a multiple of."""
POISON = 0xA5


class Block:
    """Bytes of one GPU."""

    __slots__ = ("key", "raw", "size", "uses")

    def __init__(self, raw: torch.Tensor, key: Hashable) -> None:
        self.raw, self.key, self.size = raw, key, len(raw)
        self.uses: dict[Stream, int] = {}

    @property
    def address(self) -> int:
        return self.raw.data_ptr()

    def is_free(self) -> bool:
        """Whether streams that were named have got past what used it."""
        return all(stream.done >= position for stream, position in self.uses.items())


class Allocation:
    """A block that tensors share; it goes back when the last of them is gone."""

    __slots__ = ("_memory", "block", "streams")

    def __init__(self, memory: Memory, block: Block) -> None:
        self._memory, self.block, self.streams = memory, block, set[Stream]()

    def __del__(self) -> None:
        self.block.uses = {stream: stream.put for stream in self.streams}
        self._memory.give_back(self.block)


class Memory:
    """The memory of one GPU."""

    def __init__(self, machine: Machine, index: int) -> None:
        self._machine, self._index = machine, index
        self._free: defaultdict[Hashable, list[Block]] = defaultdict(list)
        self._blocks: list[Block] = []
        self._addresses: list[int] = []
        self.allocated = self.peak = self.reserved = 0
        self.reused = 0

    def tensor(
        self, size: Any, stride: Any, dtype: torch.dtype, *, is_poisoned: bool = False
    ) -> tuple[torch.Tensor, Allocation]:
        """A CPU tensor over memory of the GPU for the current stream, and what keeps it from others.

        Raises:
            torch.OutOfMemoryError: the GPU has not so much.
        """
        machine, stream = self._machine, self._machine.stream(self._index)
        machine.require_alive()
        last = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
        needed = -(-last * dtype.itemsize // ROUND) * ROUND
        with machine.lock, torch.inference_mode(False):
            block = self._take(needed, stream)
            made = torch.empty(0, dtype=dtype).set_(block.raw.untyped_storage(), 0, size, stride)
            self.allocated += block.size
            self.peak = max(self.peak, self.allocated)
        if is_poisoned and block.size:
            # Why queued: the bytes of before are still read by what is queued already.
            item = Item(lambda: block.raw.fill_(POISON), "poison")
            (stream.capture.items.append if stream.capture is not None else stream.launch)(item)
        return made, Allocation(self, block)

    def _take(self, needed: int, stream: Stream) -> Block:
        pool = None if stream.capture is None else stream.capture.pool
        key = (stream.cuda_stream, pool)
        free = self._free[key]
        fitting = [one for one in free if needed <= one.size <= 2 * needed and one.is_free()]
        if fitting:
            best = min(fitting, key=lambda one: (one.size, one.address))
            free.remove(best)
            self.reused += 1
            return best
        if self.reserved + needed > self._machine.memory_bytes:
            self.empty_cache()
        if self.reserved + needed > self._machine.memory_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {needed} bytes.")
        self._machine.counts["allocations"] += 1
        self.reserved += needed
        block = Block(torch.empty(needed, dtype=torch.uint8), key)
        at = bisect.bisect(self._addresses, block.address)
        self._addresses.insert(at, block.address)
        self._blocks.insert(at, block)
        return block

    def give_back(self, block: Block) -> None:
        with self._machine.lock:
            self.allocated -= block.size
            self._free[block.key].append(block)

    def empty_cache(self) -> None:
        """Wait for the GPU, then forget blocks that nobody has and that no graph will have."""
        self._machine.synchronize(self._index)
        for key, free in self._free.items():
            if key[1] is None:  # type: ignore[index]
                for block in free:
                    self.reserved -= block.size
                    at = self._blocks.index(block)
                    del self._blocks[at], self._addresses[at]
                free.clear()

    def bytes_at(self, address: int) -> Any:
        """The bytes from an address to the end of its block, as a NumPy array; ``None`` if nothing is there."""
        at = bisect.bisect(self._addresses, address) - 1
        if at < 0 or address >= self._addresses[at] + self._blocks[at].size:
            return None
        return self._blocks[at].raw.numpy()[address - self._addresses[at] :]

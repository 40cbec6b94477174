"""Owns the memory of one model's KV blocks, on the device and on the host, and copies whole blocks in it.

``kv_cache`` and ``scheduler`` decide which block goes where; ``pagedcore_kernels.layout`` defines the bytes. On a CPU a
transfer is a copy in memory that has ended when it was started; ``cuda_kv_pool`` is for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cpu.runtime.huge_pages import HUGE_PAGE, populate, use_huge_pages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from pagedcore_kernels.layout import BlockLayout

BlockPairs = Sequence[tuple[int, int]]


class KVPool:
    """The pool of one model, and the host slab next to it; a ``CacheStore``.

    Invariant: ``pool`` is allocated once and stays until ``close``, so attention backends may keep its address; what
    ``open_again`` makes is another one.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        """Allocate the pool on a device.

        Raises:
            InvalidConfig: there is not one block, or the memory for them cannot be had.
        """
        self.layout, self.block_bytes = layout, layout.block_bytes
        self.num_bytes = num_blocks * layout.block_bytes
        self._num_blocks, self._num_host_blocks = num_blocks, 0
        self.pool: torch.Tensor = _allocate(layout, num_blocks, device, "num_kv_blocks", "kv_cache_memory")
        self._host: torch.Tensor | None = None
        self._num_populated = 0
        self._ended: list[tuple[int, bool]] = []

    def allocate_host(self, num_blocks: int) -> None:
        """Make room for so many blocks on the host.

        Raises:
            InvalidConfig: the memory for them cannot be had.
        """
        self._host = _allocate(self.layout, num_blocks, "cpu", "host_kv_memory", "host_kv_memory")
        self._num_host_blocks = num_blocks
        # Why: the first touch of a page takes several times as long as a transfer; it would make transfers look slow,
        # and happen between two steps.
        populate(self._host)

    def populate(self, num_blocks: int) -> bool:
        """Let the kernel clear the next huge page of the first ``num_blocks`` blocks, instead of in the step that first
        writes to it; contents stay. Return whether there is another one. On a GPU there is nothing to do.
        """
        end = min(num_blocks * self.block_bytes, self.num_bytes) if self.pool.device.type == "cpu" else 0
        if self._num_populated + HUGE_PAGE <= end:
            populate(self.pool.view(-1)[self._num_populated : self._num_populated + HUGE_PAGE])
            self._num_populated += HUGE_PAGE
        return self._num_populated + HUGE_PAGE <= end

    def close(self) -> None:
        """Free all memory, also while this object is referenced; no block can be read or moved afterwards."""
        import torch

        # Why on the CPU: a device that has failed makes no tensor.
        self.pool, self._host = torch.empty(0, dtype=torch.uint8), None

    def open_again(self) -> None:
        """Allocate on the CPU what ``close`` has freed, with whatever bytes. Raises ``InvalidConfig``: closed then."""
        try:
            self.pool = _allocate(self.layout, self._num_blocks, "cpu", "num_kv_blocks", "kv_cache_memory")
            self._num_populated = 0
            if self._num_host_blocks:
                self.allocate_host(self._num_host_blocks)
        except BaseException:
            self.close()
            raise

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy device blocks (source, destination)."""
        _copy(self.pool, self.pool, pairs)

    def start_swap_out(self, transfer_id: int, pairs: BlockPairs) -> None:
        """Begin to copy device blocks to host blocks."""
        self._start(transfer_id, self.pool, self._require_host(), pairs)

    def start_swap_in(self, transfer_id: int, pairs: BlockPairs) -> None:
        """Begin to copy host blocks to device blocks."""
        self._start(transfer_id, self._require_host(), self.pool, pairs)

    def _start(self, transfer_id: int, source: torch.Tensor, destination: torch.Tensor, pairs: BlockPairs) -> None:
        is_ok = False
        try:
            _copy(source, destination, pairs)
            is_ok = True
        finally:
            self._ended.append((transfer_id, is_ok))

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Return what was copied since the last call; there is never anything to wait for."""
        ended, self._ended = self._ended, []
        return ended

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of device blocks, shape [N, block_bytes]."""
        contents: npt.NDArray[np.uint8] = self.pool.numpy()[list(block_ids)]
        return contents

    def read_host_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of host blocks, shape [N, block_bytes]."""
        contents: npt.NDArray[np.uint8] = self._require_host().numpy()[list(block_ids)]
        return contents

    def write_blocks(self, block_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite device blocks.

        Raises:
            InternalError: the bytes are not those of so many blocks.
        """
        if contents.shape != (len(block_ids), self.block_bytes):
            raise InternalError(f"write: got bytes of shape {contents.shape} for {len(block_ids)} blocks")
        for block_id, block in zip(block_ids, contents, strict=True):
            self._write_block(block_id, block)

    def _write_block(self, block_id: int, contents: npt.NDArray[np.uint8]) -> None:
        self.pool.numpy()[block_id] = contents

    def _require_host(self) -> torch.Tensor:
        if self._host is None:
            raise InternalError("transfer: there is no host memory")
        return self._host


def _allocate(
    layout: BlockLayout, num_blocks: int, device: torch.device | str, what: str, setting: str
) -> torch.Tensor:
    if num_blocks < 1:
        raise InvalidConfig(f"{what}: got {num_blocks} blocks, allowed is at least 1. Raise {setting}.")
    try:
        memory = layout.allocate(num_blocks, device)
        if memory.device.type == "cpu":
            use_huge_pages(memory)
        return memory
    # Why: beyond 2**63 bytes torch complains about the type of the number.
    except (RuntimeError, MemoryError, TypeError):
        raise InvalidConfig(
            f"{what}: got {num_blocks} blocks, which are {num_blocks * layout.block_bytes} bytes, more than this "
            f"{'machine' if str(device) == 'cpu' else 'GPU'} gives. Lower {setting}."
        ) from None


def _copy(source: torch.Tensor, destination: torch.Tensor, pairs: BlockPairs) -> None:
    # Shape: both [blocks, block_bytes]; one block is one contiguous run, so each copy is one memcpy.
    # Why not torch's: it would wake OpenMP's threads for a large block, and hang on them in a forked child.
    sources, destinations = source.numpy(), destination.numpy()
    for here, there in pairs:
        destinations[there] = sources[here]

"""Moving many scattered blocks of a pool to or from one contiguous slab in one launch.

Owns the device's half of a transfer to the host: gathered blocks leave in one long copy, and one long copy is
scattered. The slab may be device memory or pinned host memory, which the GPU writes to directly. Which block goes
where and when, and on which stream, is the caller's; ``NumbaCudaAttention.copy_blocks`` copies within a pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cuda.attention.uploads import StepBuffer
from pagedcore_kernels.cuda.build.variants import GATHER_NAME, SCATTER_NAME
from pagedcore_kernels.cuda.driver import Driver
from pagedcore_kernels.cuda.shapes import SLICE_BYTES
from pagedcore_kernels.errors import InternalError
from pagedcore_kernels.interface import Int32Array


class BlockStaging:
    """Gathers blocks of one pool into a slab and scatters them back, in stream order.

    Args:
        pool: uint8 [blocks, block_bytes], contiguous; blocks are a multiple of 16 bytes.
        driver: the GPU.
        max_ctas: CTAs of a launch at most. A few fill a bus and leave the GPU to the model; a slab on the GPU wants
            as many as the GPU runs at once.
    """

    def __init__(self, pool: torch.Tensor, driver: Driver, max_ctas: int = 16) -> None:
        if pool.dtype != torch.uint8 or pool.dim() != 2 or not pool.is_contiguous() or pool.shape[1] % 16:
            raise InternalError(f"KV pool: {pool.dtype} {tuple(pool.shape)}, expected uint8 rows of whole vectors.")
        if max_ctas < 1:
            raise InternalError(f"max_ctas: got {max_ctas}, expected at least 1.")
        self._pool = pool
        self._driver = driver
        self._max_ctas = max_ctas
        for name in (GATHER_NAME, SCATTER_NAME):
            driver.prepare(name)

    def gather(self, block_ids: npt.ArrayLike, slab: torch.Tensor) -> None:
        """Copy block ``block_ids[i]`` of the pool to row i of the slab.

        Args:
            block_ids: [N]; a negative one leaves its row as it was.
            slab: uint8 [N or more, block_bytes], on the GPU or pinned.

        Raises:
            InternalError: a number is out of range, or the slab has another shape; nothing was copied.
        """
        self._launch(GATHER_NAME, self._numbers(block_ids, slab), slab)

    def scatter(self, slab: torch.Tensor, block_ids: npt.ArrayLike) -> None:
        """Copy row i of the slab to block ``block_ids[i]`` of the pool; no block is named twice. See ``gather``."""
        numbers = self._numbers(block_ids, slab)
        named = numbers[numbers >= 0]
        if len(np.unique(named)) < len(named):
            raise InternalError("block staging: a block is written twice, expected each once.")
        self._launch(SCATTER_NAME, numbers, slab)

    def _numbers(self, block_ids: npt.ArrayLike, slab: torch.Tensor) -> Int32Array:
        numbers = np.ascontiguousarray(block_ids, np.int32).reshape(-1)
        if len(numbers) and numbers.max() >= len(self._pool):
            raise InternalError(f"block staging: block {numbers.max()}, expected less than {len(self._pool)}.")
        expected = (slab.dtype, slab.dim(), slab.shape[-1]) == (torch.uint8, 2, self._pool.shape[1])
        if not expected or len(slab) < len(numbers) or not slab.is_contiguous() or slab.data_ptr() % 16:
            raise InternalError(
                f"block staging: slab {slab.dtype} {tuple(slab.shape)}, expected uint8 [{len(numbers)} or more, "
                f"{self._pool.shape[1]}] without gaps."
            )
        # Safety: pageable memory has no address that a GPU may use.
        if slab.device.type != self._driver.device.type and not slab.is_pinned():
            raise InternalError(f"block staging: slab on {slab.device} and not pinned, expected pinned memory.")
        return numbers

    def _launch(self, name: str, numbers: Int32Array, slab: torch.Tensor) -> None:
        if not len(numbers):
            return
        block_bytes = self._pool.shape[1]
        slices = -(-block_bytes // SLICE_BYTES)
        self._driver.begin_step()
        (on_device,) = StepBuffer(self._pool.device).upload([numbers])
        self._driver.launch(name, min(self._max_ctas, len(numbers) * slices), (
            self._pool, slab, on_device, block_bytes, len(numbers), slices,
        ))

"""Moving scattered blocks to and from one contiguous slab: the device's half of transfers to the host.

A few CTAs share all slices of all blocks, because a bus is full long before a GPU is: each takes every n-th slice and
has four vectors of every thread in flight. A negative block number moves nothing and leaves its place as it was.
"""

from __future__ import annotations

from typing import Any

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import i32, u32, u64
from pagedcore_kernels.cuda.shapes import ROW_THREADS, SLICE_BYTES

_STEP = ROW_THREADS * 16


def staging_kernel(to_slab: bool) -> Any:
    """Make the kernel that gathers blocks into the slab, or the one that scatters them out of it."""

    def move_blocks(pool, slab, block_ids, block_bytes, num_blocks, block_slices):
        """Move block ``block_ids[i]`` of the pool to or from place i of the slab; blocks are whole vectors."""
        item = u32(cuda.blockIdx.x)
        while item < u32(num_blocks * block_slices):
            place = u32(item // block_slices)
            block = i32(ptx.ldg32_nc(block_ids + u64(place) * u64(4)))
            at = u64(u32(item % block_slices)) * u64(SLICE_BYTES) + u64(u32(u32(cuda.threadIdx.x) * u32(16)))
            if block >= 0:
                in_pool = pool + u64(u32(block)) * block_bytes + at
                in_slab = slab + u64(place) * block_bytes + at
                source = in_pool if to_slab else in_slab
                target = in_slab if to_slab else in_pool
                if at + u64(3 * _STEP) < block_bytes:
                    a = ptx.ldg128_nc(source)
                    b = ptx.ldg128_nc(source + u64(_STEP))
                    c = ptx.ldg128_nc(source + u64(2 * _STEP))
                    d = ptx.ldg128_nc(source + u64(3 * _STEP))
                    ptx.stg128(target, a[0], a[1], a[2], a[3])
                    ptx.stg128(target + u64(_STEP), b[0], b[1], b[2], b[3])
                    ptx.stg128(target + u64(2 * _STEP), c[0], c[1], c[2], c[3])
                    ptx.stg128(target + u64(3 * _STEP), d[0], d[1], d[2], d[3])
                else:                                 # the last slice of a block may be short
                    while at < block_bytes:
                        a = ptx.ldg128_nc(source)
                        ptx.stg128(target, a[0], a[1], a[2], a[3])
                        source += u64(_STEP)
                        target += u64(_STEP)
                        at += u64(_STEP)
            item = u32(item + u32(cuda.gridDim.x))

    return move_blocks

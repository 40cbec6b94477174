"""Copying whole blocks: copy-on-write within a pool, gather and scatter between a pool and mapped host memory."""

from __future__ import annotations

from pagedcore_kernels.cuda.device import primitives as ptx
from pagedcore_kernels.cuda.device.intrinsics import cuda
from pagedcore_kernels.cuda.device.primitives import i32, u32, u64
from pagedcore_kernels.cuda.shapes import ROW_THREADS


def copy_blocks(source, target, pairs, block_bytes, num_slices):
    """Copy block pairs[i, 0] of ``source`` to pairs[i, 1] of ``target``; CTA b takes slice ``b % num_slices`` of pair
    ``b // num_slices``. Blocks are a multiple of 16 bytes; a pair with a negative number copies nothing.
    """
    pair = u32(u32(cuda.blockIdx.x) // u32(num_slices))
    part = u32(u32(cuda.blockIdx.x) % u32(num_slices))
    ids = ptx.ldg64(pairs + u64(pair) * u64(8))
    if i32(ids[0]) < 0 or i32(ids[1]) < 0:
        return
    origin = source + u64(ids[0]) * block_bytes
    to = target + u64(ids[1]) * block_bytes
    step = u64(u32(u32(num_slices) * u32(ROW_THREADS * 16)))
    at = u64(u32(u32(part * u32(ROW_THREADS)) + u32(cuda.threadIdx.x))) * u64(16)
    while at + u64(3) * step < block_bytes:          # four loads in flight per thread
        a = ptx.ldg128(origin + at)
        b = ptx.ldg128(origin + at + step)
        c = ptx.ldg128(origin + at + u64(2) * step)
        d = ptx.ldg128(origin + at + u64(3) * step)
        ptx.stg128(to + at, a[0], a[1], a[2], a[3])
        ptx.stg128(to + at + step, b[0], b[1], b[2], b[3])
        ptx.stg128(to + at + u64(2) * step, c[0], c[1], c[2], c[3])
        ptx.stg128(to + at + u64(3) * step, d[0], d[1], d[2], d[3])
        at += u64(4) * step
    while at < block_bytes:
        a = ptx.ldg128(origin + at)
        ptx.stg128(to + at, a[0], a[1], a[2], a[3])
        at += step

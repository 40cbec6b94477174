"""Kernels that Numba compiles at test time: between them they use what compiled CUDA Python looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))
THREADS = 128


@cache
def compiled(name: str, capability: tuple[int, int]) -> str:
    """The PTX of a kernel of this module; skips the test where the compiler is not installed."""
    pytest.importorskip("numba_cuda")
    from numba import cuda

    function, signature = _kernels()[name]
    try:
        ptx, _ = cuda.compile(function, signature, device=False, abi="numba", cc=capability)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"no compiler: {error}")
    return str(ptx)


def _kernels() -> dict[str, tuple[Callable[..., None], Sequence[Any]]]:
    import numpy as np
    from numba import cuda, types

    def block_sum(values: Any, out: Any, count: int) -> None:
        tile = cuda.shared.array(THREADS, dtype=np.float32)
        t = cuda.threadIdx.x
        total = types.float32(0)
        i = cuda.blockIdx.x * cuda.blockDim.x + t
        while i < count:
            total += values[i]
            i += cuda.gridDim.x * cuda.blockDim.x
        tile[t] = total
        cuda.syncthreads()
        half = THREADS // 2
        while half > 0:
            if t < half:
                tile[t] += tile[t + half]
            cuda.syncthreads()
            half //= 2
        if t == THREADS - 1:
            cuda.atomic.add(out, 0, tile[0])

    def histogram(values: Any, counts: Any, count: int) -> None:
        bins = cuda.shared.array(16, dtype=np.int32)
        t = cuda.threadIdx.x
        if t < 16:
            bins[t] = 0
        cuda.syncthreads()
        i = cuda.grid(1)
        if i < count:
            cuda.atomic.add(bins, values[i] % 16, 1)
        cuda.syncthreads()
        if t < 16:
            cuda.atomic.add(counts, t, bins[t])

    def softmax_rows(values: Any, out: Any, width: int) -> None:
        row, lane = cuda.blockIdx.x, cuda.threadIdx.x
        x = values[row, lane] if lane < width else types.float32(-1e30)
        top = x
        for step in (16, 8, 4, 2, 1):
            top = max(top, cuda.shfl_xor_sync(0xFFFFFFFF, top, step))
        e = types.float32(2.0) ** ((x - top) * types.float32(1.4426950408889634))
        total = e
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        if lane < width:
            out[row, lane] = e / total

    def divided(a: Any, b: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i >= out.size:
            return
        private = cuda.local.array(4, dtype=np.int64)
        for k in range(4):
            private[(k + a[i]) & 3] = k + a[i] // b[i]
        out[i] = private[a[i] & 3] + a[i] % b[i] + (cuda.popc(a[i]) if a[i] > 5 else cuda.clz(b[i]))

    f32, i64, i32 = types.float32, types.int64, types.int32
    return {
        "block_sum": (block_sum, (f32[::1], f32[::1], i64)),
        "histogram": (histogram, (i32[::1], i32[::1], i64)),
        "softmax_rows": (softmax_rows, (f32[:, ::1], f32[:, ::1], i64)),
        "divided": (divided, (i64[::1], i64[::1], i64[::1])),
    }


def array_arguments(*arrays: Any) -> list[Any]:
    """Numba's calling convention for an array: two unused pointers, size, item size, data, shape, strides."""
    flat: list[Any] = []
    for array in arrays:
        flat += [0, 0, array.size, array.itemsize, array, *array.shape, *array.strides] if hasattr(array, "shape") \
            else [array]
    return flat

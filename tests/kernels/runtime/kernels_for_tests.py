"""Kernels that show what threads do: one that counts, and one that holds its threads."""

from __future__ import annotations

from functools import cache
from typing import Any

from pagedcore_kernels.cpu.runtime.atomics import call_function, load_shared, pause, store_shared
from pagedcore_kernels.cpu.runtime.kernel import Kernel, compile_kernel
from pagedcore_kernels.cpu.simd import address_of, claim, load_float32, load_int64, store_float32, store_int64

RELEASED = 2_000_000_000
"""What a word has to be set to for ``spin_kernel`` to return."""


@cache
def count_kernel() -> Kernel:
    """Adds 1 to each of n numbers, and keeps a float argument in a last place."""

    def count_up(parameters: Any) -> None:
        p = address_of(parameters)
        numbers, n = load_int64(p, 1), load_int64(p, 2)
        while True:
            i = claim(load_int64(p, 0))
            if i >= n:
                break
            store_int64(numbers, i, load_int64(numbers, i) + 1)
        store_float32(load_int64(p, 3), 0, load_float32(p, 2 * 4))

    return compile_kernel(count_up)


@cache
def spin_kernel() -> Kernel:
    """Waits until a word of memory changes."""

    def spin(parameters: Any) -> None:
        p = address_of(parameters)
        while claim(load_int64(p, 1)) < 1_000_000_000:
            pass

    return compile_kernel(spin)


@cache
def hold_kernel() -> Kernel:
    """The caller returns as soon as a helper is there, which waits until a word of memory changes."""

    def hold(parameters: Any) -> None:
        p = address_of(parameters)
        state, released = load_int64(p, 1), load_int64(p, 2)
        if call_function(load_int64(p, 3), 0, 0, 0, 0, 0) == load_int64(p, 4):
            while load_shared(state) == 0:
                pause()
        else:
            store_shared(state, 1)
            while load_shared(released) == 0:
                pause()
            store_shared(state, 2)

    return compile_kernel(hold)

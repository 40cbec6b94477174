"""Compiled kernels: work is done once, on any threads, without the GIL, from the cache."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from numba import cfunc

from kernels.runtime.kernels_for_tests import RELEASED, count_kernel, spin_kernel
from pagedcore.errors import InternalError
from pagedcore_kernels.cpu.runtime import compiled
from pagedcore_kernels.cpu.runtime.kernel import Kernel, ParameterBlock, compile_kernel
from pagedcore_kernels.cpu.runtime.threads import Computing
from pagedcore_kernels.cpu.simd import address_of, load_int64, store_float32, store_int64


@pytest.mark.parametrize("uses_openmp", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_piece_of_work_is_done_once(num_threads: int, uses_openmp: bool) -> None:
    """For any number of threads, from any pool, the counter gives out each item once."""
    kernel = count_kernel()
    numbers, flag = np.zeros(10_000, np.int64), np.zeros(1, np.float32)
    block = ParameterBlock(4)
    for turn in range(1, 6):
        block.fill(numbers.ctypes.data, len(numbers), flag.ctypes.data)
        block.set_float(3, 0.5 * turn)
        with Computing(num_threads, uses_openmp=uses_openmp):
            kernel.run(block)
        assert (numbers == turn).all()
        assert flag[0] == 0.5 * turn


def test_the_gil_is_free_while_a_kernel_runs() -> None:
    """Another Python thread makes progress, and can end the kernel, while it runs."""
    kernel = spin_kernel()
    counter = np.zeros(1, np.int64)
    block = ParameterBlock(1)
    block.fill(counter.ctypes.data)
    running = threading.Thread(target=kernel.run, args=(block, 1))
    running.start()
    while counter[0] == 0:
        time.sleep(0.001)
    counter[0] = RELEASED
    running.join(timeout=60)
    assert not running.is_alive()


SECOND_PROCESS = """
import torch
from pagedcore_kernels.cpu.attention.attend import attention_kernel
from pagedcore_kernels.cpu.attention.variants import Variant
from pagedcore_kernels.cpu.attention.write_kv import write_kv_kernel
kernels = attention_kernel(Variant.choose(3, 12, 8, 4, True)), write_kv_kernel(12, 8, 4, 1)
print(*(kernel.entry.was_cached for kernel in kernels))
"""


def test_a_second_process_finds_compiled_kernels() -> None:
    """Kernels compiled here are taken from the cache on disk by another process."""
    from pagedcore_kernels.cpu.attention.attend import attention_kernel
    from pagedcore_kernels.cpu.attention.variants import Variant
    from pagedcore_kernels.cpu.attention.write_kv import write_kv_kernel

    attention_kernel(Variant.choose(3, 12, 8, 4, True))
    write_kv_kernel(12, 8, 4, 1)
    answer = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS],
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout.split() == ["True", "True"]


def test_a_place_without_a_cache_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Numba finds nowhere to write its cache, kernels are compiled all the same."""

    def without_cache(signature: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("no locator available")
        return cfunc(signature, **options)

    monkeypatch.setattr(compiled, "cfunc", without_cache)
    kernel = spin_kernel.__wrapped__()
    assert not kernel.entry.was_cached
    counter = np.full(1, RELEASED)
    block = ParameterBlock(1)
    block.fill(counter.ctypes.data)
    kernel.run(block, 1)
    assert counter[0] == 2_000_000_001


def test_a_kernel_may_close_over_integers_only() -> None:
    """A closure over anything else would compile anew in every process: it is refused."""
    table = np.zeros(3)

    def lookup(parameters: Any) -> None:
        store_float32(address_of(parameters), 0, table[0])

    with pytest.raises(InternalError, match="integers only"):
        compile_kernel(lookup)


def test_variants_have_names_of_their_own() -> None:
    """Two kernels from one function with different constants get different symbols and cache files."""

    def make(number: int) -> Kernel:
        def put(parameters: Any) -> None:
            store_int64(load_int64(address_of(parameters), 1), 0, number)

        return compile_kernel(put)

    target = np.zeros(1, np.int64)
    block = ParameterBlock(1)
    kernels = [make(7), make(8)]
    assert kernels[0].entry._compiled.native_name != kernels[1].entry._compiled.native_name
    for number, kernel in zip((7, 8), kernels, strict=True):
        block.fill(target.ctypes.data)
        kernel.run(block, 1)
        assert target[0] == number

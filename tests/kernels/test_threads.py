"""Running kernels on threads: work is done once, by either team, without the GIL, from the cache."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numba import cfunc

from pagedcore.errors import InternalError
from pagedcore_kernels.cpu import threads
from pagedcore_kernels.cpu.simd import (
    address_of,
    claim,
    load_float32,
    load_int64,
    store_float32,
    store_int64,
)
from pagedcore_kernels.cpu.threads import Kernel, ParameterBlock, compile_kernel, run_on_threads


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


def spin_kernel() -> Kernel:
    """Waits until a word of memory changes."""

    def spin(parameters: Any) -> None:
        p = address_of(parameters)
        while claim(load_int64(p, 1)) < 1_000_000_000:
            pass

    return compile_kernel(spin)


@pytest.mark.parametrize("has_team", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_piece_of_work_is_done_once(num_threads: int, has_team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads and whoever lends them, the counter gives out each item once."""
    if not has_team:
        monkeypatch.setattr(threads, "_torch_team", lambda: None)
    kernel = count_kernel()
    numbers, flag = np.zeros(10_000, np.int64), np.zeros(1, np.float32)
    block = ParameterBlock(4)
    for turn in range(1, 6):
        block.fill(numbers.ctypes.data, len(numbers), flag.ctypes.data)
        block.set_float(3, 0.5 * turn)
        kernel.run(block, num_threads)
        assert (numbers == turn).all()
        assert flag[0] == 0.5 * turn


def test_torch_lends_its_threads_here() -> None:
    """With a torch that brings libgomp, the team is torch's own."""
    if "libgomp" not in torch.__config__.show() and sys.platform != "linux":
        pytest.skip("this torch does not use libgomp")
    assert threads._torch_team() is not None


def test_a_torch_without_libgomp_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Where torch has no libgomp to share, Numba's threads do the work."""
    monkeypatch.setattr(threads.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(threads, "_libgomp", threads._libgomp.__wrapped__)
    assert threads._torch_team.__wrapped__() is None
    threads.release_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the helpers of libgomp")
def test_a_thread_gives_its_helpers_up_and_gets_new_ones() -> None:
    """The helpers of a thread that hands its work over end at once, and come anew with its next kernel."""
    kernel, numbers = count_kernel(), np.zeros(1000, np.int64)
    block, flag, process = ParameterBlock(4), np.zeros(1, np.float32), psutil.Process()
    counts = []

    def compute() -> None:
        for _ in range(2):
            block.fill(numbers.ctypes.data, len(numbers), flag.ctypes.data)
            kernel.run(block, 4)
            counts.append(process.num_threads())
            threads.release_threads()
            counts.append(process.num_threads())

    without = process.num_threads() + 1
    computing = threading.Thread(target=compute)
    computing.start()
    computing.join()
    assert counts == [without + 3, without] * 2
    assert (numbers == 2).all()


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
    counter[0] = 2_000_000_000
    running.join(timeout=60)
    assert not running.is_alive()


SECOND_PROCESS = """
import torch
from pagedcore_kernels.cpu.attention import attention_kernel
from pagedcore_kernels.cpu.variants import Variant
from pagedcore_kernels.cpu.write_kv import write_kv_kernel
print(attention_kernel(Variant.choose(3, 12, 8, 4, True)).was_cached, write_kv_kernel(12, 8, 4, 1).was_cached)
"""


def test_a_second_process_finds_compiled_kernels() -> None:
    """Kernels compiled here are taken from the cache on disk by another process."""
    from pagedcore_kernels.cpu.attention import attention_kernel
    from pagedcore_kernels.cpu.variants import Variant
    from pagedcore_kernels.cpu.write_kv import write_kv_kernel

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

    monkeypatch.setattr(threads, "cfunc", without_cache)
    kernel = spin_kernel()
    assert not kernel.was_cached
    counter = np.full(1, 2_000_000_000)
    block = ParameterBlock(1)
    block.fill(counter.ctypes.data)
    run_on_threads(kernel.address, block.address, 1)
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
    assert kernels[0]._compiled.native_name != kernels[1]._compiled.native_name
    for number, kernel in zip((7, 8), kernels, strict=True):
        block.fill(target.ctypes.data)
        kernel.run(block, 1)
        assert target[0] == number

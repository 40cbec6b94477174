"""Huge pages, memory ahead of its use and mapped files: nothing but speed and size may change."""

from __future__ import annotations

import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.linears.packed_linear import PackedLinear
from pagedcore_kernels.cpu.runtime import huge_pages
from pagedcore_kernels.cpu.runtime.huge_pages import empty_in_huge_pages, populate, use_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_keep_their_bits(dtype: torch.dtype) -> None:
    """A packed weight of several huge pages multiplies as before after it was moved."""
    generator = torch.Generator().manual_seed(0)
    layer = PackedLinear(torch.randn(2048, 2048, generator=generator).to(dtype), None)
    rows = torch.randn(3, 2048, generator=generator).to(dtype)
    before = layer(rows)
    layer.use_huge_pages()
    assert torch.equal(layer(rows), before)


@pytest.mark.parametrize("advise", [use_huge_pages, populate])
@pytest.mark.parametrize("num_floats", [3, 2**21 + 5])
def test_tensors_keep_their_contents(num_floats: int, advise: Callable[[torch.Tensor], None]) -> None:
    """Advice about a tensor, however small and wherever it starts, changes no element of it."""
    tensor = torch.arange(num_floats, dtype=torch.float32)[1:]
    advise(tensor)
    assert torch.equal(tensor, torch.arange(1, num_floats, dtype=torch.float32))


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no such advice, no library is called."""
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", None)
    use_huge_pages(torch.zeros(2**21))


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_memory_is_there_before_it_is_used() -> None:
    """What was populated counts as this process's memory although it was never written to."""
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("Linux knows this advice from 5.14 on")
    # Why: torch's own memory may be some that was used before.
    process, tensor = psutil.Process(), torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.uint8)
    before = process.memory_info().rss
    populate(tensor)
    assert process.memory_info().rss - before > 2**25


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_advice_covers_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every huge page that overlaps the tensor is named once, and none else."""
    pages: list[int] = []

    class Library:
        @staticmethod
        def madvise(address: object, length: object, advice: object) -> int:
            pages.append(address.value)  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: Library)
    tensor = torch.zeros(2**20)
    use_huge_pages(tensor)
    first = tensor.data_ptr() // 2**21 * 2**21
    assert pages == list(range(first, tensor.data_ptr() + tensor.nbytes, 2**21))


# Memory for weights --------------------------------------------------------------------------------------------------


def test_tensors_lie_side_by_side_and_apart() -> None:
    """At cache lines, of the shape and number format that was asked for; none shares a byte with another."""
    tensors = [empty_in_huge_pages((3, size), dtype) for size in (1, 1000, 200_000)
               for dtype in (torch.int8, torch.bfloat16, torch.float32)]  # fmt: skip
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert [(tensor.shape, tensor.dtype) for tensor in tensors[-2:]] == [
        ((3, 200_000), torch.bfloat16), ((3, 200_000), torch.float32)
    ]
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert tensors[1].data_ptr() - tensors[0].data_ptr() in (64, -64) or sys.platform != "linux"


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_huge_pages_are_there_at_once() -> None:
    """What is written is in huge pages, where the system gives them, without being moved."""
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system gives none")
    tensors = [empty_in_huge_pages((3 * 2**19,), torch.uint8).fill_(1) for _ in range(8)]
    begin, fields = tensors[0].data_ptr(), Path("/proc/self/smaps").read_text().split("\n")
    starts = [index for index, line in enumerate(fields) if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]]
    for index in starts:
        low, _, high = fields[index].split(" ")[0].partition("-")
        if int(low, 16) <= begin < int(high, 16):
            huge = next(line for line in fields[index:] if line.startswith("AnonHugePages"))
            assert int(huge.split()[1]) >= 5 * 2048
            return
    raise AssertionError("the memory is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_memory_goes_back_with_the_last_tensor() -> None:
    """Not before, so that a neighbour's weights stay, and not later."""
    process = psutil.Process()
    large = empty_in_huge_pages((2**27,), torch.uint8).fill_(1)
    neighbour = empty_in_huge_pages((2**20,), torch.uint8).fill_(7)
    before = process.memory_info().rss
    del large
    assert (neighbour == 7).all()
    del neighbour
    assert before - process.memory_info().rss > 2**26
    assert (empty_in_huge_pages((2**20,), torch.uint8).fill_(3) == 3).all()


def test_a_thread_has_its_own_memory() -> None:
    """Two threads that load models at once never get the same bytes."""
    found: list[torch.Tensor] = []

    def take(number: int) -> None:
        found.extend(empty_in_huge_pages((1000,), torch.int32).fill_(number * 100 + part) for part in range(100))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(tensor[0]) for tensor in found) == list(range(400))
    assert all((tensor == tensor[0]).all() for tensor in found)


@pytest.mark.skipif(sys.platform != "linux", reason="a fork")
def test_a_child_writes_into_memory_of_its_own() -> None:
    """What a forked child has written, into old tensors and into new ones, its parent never sees."""
    old = empty_in_huge_pages((1000,), torch.int32).fill_(1)
    if not (child := os.fork()):
        old.fill_(2)
        new = empty_in_huge_pages((1000,), torch.int32).fill_(3)
        os._exit(int(not ((old == 2).all() and (new == 3).all())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (old == 1).all()
    assert (empty_in_huge_pages((1000,), torch.int32) == 0).all()


def test_what_no_system_has_is_a_lack_of_memory() -> None:
    """As any other allocation that fails, and the next one succeeds."""
    with pytest.raises((MemoryError, RuntimeError), match="can't allocate memory"):
        empty_in_huge_pages((2**62,), torch.uint8)
    assert empty_in_huge_pages((0, 5), torch.float32).shape == (0, 5)
    assert empty_in_huge_pages((), torch.float32).shape == ()
    assert len(empty_in_huge_pages((5,), torch.float32)) == 5


def test_other_systems_use_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no such advice, memory is torch's own."""
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    monkeypatch.setattr(huge_pages.mmap, "mmap", None)
    assert empty_in_huge_pages((3, 5), torch.bfloat16).shape == (3, 5)


# Mapped files --------------------------------------------------------------------------------------------------------

SHAPE = (512, 1024)


def mapped(directory: Path) -> torch.Tensor:
    """A weight that is a view of a mapped file."""
    save_file({"weight": torch.arange(512 * 1024, dtype=torch.float32).view(SHAPE)}, directory / "one.safetensors")
    return load_file(directory / "one.safetensors")["weight"]


def resident_file_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_mapped_files_are_recognised(tmp_path: Path) -> None:
    """Only what lies in a mapping of a file counts; the heap and large allocations do not."""
    weight, own, small = mapped(tmp_path), torch.zeros(SHAPE), torch.zeros(4)
    mappings = FileMappings()
    assert mappings.holds(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
    assert not mappings.holds(weight.data_ptr(), weight.data_ptr() + 10**15)
    for tensor in (own, small):
        assert not mappings.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    assert not mappings.holds(0, 1)


def test_freed_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    """Freeing gives the pages back; the file still has the values."""
    weight = mapped(tmp_path)
    assert weight.sum() > 0
    before = resident_file_bytes()
    FileMappings().free_pages(weight)
    assert before - resident_file_bytes() > weight.nbytes // 2
    assert torch.equal(weight, torch.arange(512 * 1024, dtype=torch.float32).view(SHAPE))


def test_freeing_other_memory_changes_nothing() -> None:
    """A tensor that no file backs keeps every value: freeing its pages would zero it."""
    own = torch.arange(512 * 1024, dtype=torch.float32)
    FileMappings().free_pages(own)
    assert torch.equal(own, torch.arange(512 * 1024, dtype=torch.float32))


def test_detached_parameters_no_longer_depend_on_the_file(tmp_path: Path) -> None:
    """Parameters and buffers in files are copied, ties are kept, others stay where they are."""
    weight = mapped(tmp_path)
    model = nn.ModuleDict({"one": nn.Linear(1024, 512), "two": nn.Linear(1024, 512), "own": nn.Linear(4, 4)})
    model["one"].weight = model["two"].weight = nn.Parameter(weight)
    model["one"].register_buffer("table", weight[:4])
    own_address = model["own"].weight.data_ptr()
    mappings = FileMappings()
    mappings.detach(model)
    assert model["one"].weight is model["two"].weight
    assert torch.equal(model["one"].weight, weight)
    assert model["own"].weight.data_ptr() == own_address
    for tensor in (*model.parameters(), *model.buffers()):
        assert not mappings.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

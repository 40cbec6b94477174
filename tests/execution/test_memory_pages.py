"""Huge pages, memory ahead of its use and mapped files: nothing but speed and size may change."""

from __future__ import annotations

import mmap
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.cpu.packed_linear import PackedLinear
from pagedcore_kernels.cpu.runtime import huge_pages
from pagedcore_kernels.cpu.runtime.huge_pages import populate, use_huge_pages


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

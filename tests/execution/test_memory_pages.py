"""Huge pages and memory ahead of its use: nothing but speed may change."""

from __future__ import annotations

import mmap
import platform
import sys
from collections.abc import Callable

import psutil
import pytest
import torch

from pagedcore.execution import memory_pages
from pagedcore.execution.memory_pages import populate, use_huge_pages
from pagedcore.models.cpu.packed_linear import PackedLinear


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
    monkeypatch.setattr(memory_pages.sys, "platform", "darwin")
    monkeypatch.setattr(memory_pages.ctypes, "CDLL", None)
    use_huge_pages(torch.zeros(2**21))


@pytest.mark.skipif(sys.platform != "linux", reason="advice to Linux")
def test_memory_is_there_before_it_is_used() -> None:
    """What was populated counts as this process's memory although nobody has written to it."""
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

    monkeypatch.setattr(memory_pages.ctypes, "CDLL", lambda name: Library)
    tensor = torch.zeros(2**20)
    use_huge_pages(tensor)
    first = tensor.data_ptr() // 2**21 * 2**21
    assert pages == list(range(first, tensor.data_ptr() + tensor.nbytes, 2**21))

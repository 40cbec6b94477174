from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pagedcore.execution.file_pages import FileMappings

SHAPE = (512, 1024)


def mapped(directory: Path) -> torch.Tensor:
    """A weight that is a view of a mapped file."""
    save_file({"weight": torch.arange(512 * 1024, dtype=torch.float32).view(SHAPE)}, directory / "one.safetensors")
    return load_file(directory / "one.safetensors")["weight"]


def resident_file_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_files_are_told_from_other_memory(tmp_path: Path) -> None:
    """Only what lies in a mapping of a file counts; the heap and large allocations do not."""
    weight, own, small = mapped(tmp_path), torch.zeros(SHAPE), torch.zeros(4)
    mappings = FileMappings()
    assert mappings.holds(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
    assert not mappings.holds(weight.data_ptr(), weight.data_ptr() + 10**15)
    for tensor in (own, small):
        assert not mappings.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    assert not mappings.holds(0, 1)


def test_released_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    """Releasing gives the pages back; the file still has the values."""
    weight = mapped(tmp_path)
    assert weight.sum() > 0
    before = resident_file_bytes()
    FileMappings().release(weight)
    assert before - resident_file_bytes() > weight.nbytes // 2
    assert torch.equal(weight, torch.arange(512 * 1024, dtype=torch.float32).view(SHAPE))


def test_releasing_other_memory_changes_nothing() -> None:
    """A tensor that no file backs keeps every value: dropping its pages would zero it."""
    own = torch.arange(512 * 1024, dtype=torch.float32)
    FileMappings().release(own)
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

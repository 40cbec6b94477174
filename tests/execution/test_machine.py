from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedcore.errors import InvalidConfig
from pagedcore.execution import machine
from pagedcore.execution.machine import free_memory_bytes, this_machine
from support.doubles import raising

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
OLD = "model name\t: Old CPU\nflags\t\t: fpu sse2 avx2\n"


def pretend(monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Let the machine's files read as given; the others are absent."""
    paths = {"cpuinfo": "/proc/cpuinfo", "limit": "/sys/fs/cgroup/memory.max",
             "used": "/sys/fs/cgroup/memory.current", "stat": "/sys/fs/cgroup/memory.stat"}
    texts = {paths[name]: text for name, text in files.items()}
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(path, ""))


@pytest.mark.parametrize(("cpuinfo", "sets", "dtype"), [
    (X86, ("avx2", "avx512f", "avx512_bf16", "amx_tile"), "bfloat16"),
    (ARM, ("asimd", "sve", "bf16", "i8mm"), "bfloat16"),
    (OLD, ("avx2",), "float32"),
    ("", (), "float32"),
], ids=["x86", "arm", "old", "unreadable"])
def test_formats_follow_the_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, sets: tuple[str, ...], dtype: str
) -> None:
    """bfloat16 is the default exactly where the processor multiplies it."""
    pretend(monkeypatch, cpuinfo=cpuinfo)
    found = this_machine()
    assert found.instruction_sets == sets
    assert found.default_dtype == dtype == found.dtypes[0]
    assert sorted(found.dtypes) == ["bfloat16", "float16", "float32"]


def test_a_container_limit_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of machine and container counts."""
    pretend(monkeypatch, limit="1048576")
    assert this_machine().memory_bytes == 1048576
    pretend(monkeypatch, limit="max")
    assert this_machine().memory_bytes > 1048576


def test_this_machine_has_a_name_and_cores() -> None:
    """The real files of the machine the tests run on can be read."""
    found = this_machine()
    assert found.cpu_name
    assert found.num_cores >= 1


@pytest.mark.parametrize(("files", "free"), [
    ({"limit": "1000", "used": "400", "stat": "active_file 7\ninactive_file 150\n"}, 750),
    ({"limit": "1000", "used": "400"}, 600),
    ({"limit": "1000", "used": "1200"}, 0),
    ({"limit": "max", "used": "400"}, 5000),
    ({}, 5000),
])
def test_free_memory_is_what_a_container_has_left(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    """A container's limit less what it uses and cannot reclaim, where that is less than the machine has."""
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    pretend(monkeypatch, **files)
    assert free_memory_bytes() == free


@pytest.mark.parametrize("read", [this_machine, free_memory_bytes])
def test_a_lack_of_file_handles_is_not_taken_for_another_machine(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read now is an error, not an older processor without a limit on memory."""
    refuse = raising(OSError(errno.EMFILE, "Too many open files", "/proc/cpuinfo"))
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(machine.psutil, "virtual_memory", refuse)
    with pytest.raises(InvalidConfig, match="Too many open files") as raised:
        read()
    assert "/proc" not in str(raised.value)

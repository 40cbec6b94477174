"""How many cores a process may use, read from trees of files as Linux and containers show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedcore_kernels.cpu.runtime import cores
from pagedcore_kernels.cpu.runtime.cores import cpu_quotas, num_usable_cores

V2 = "30 29 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "35 32 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "36 32 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def make(root: Path, group: str, mounts: str, **files: str) -> Path:
    """Write /proc and the files of control groups; ``__`` in a name stands for a slash."""
    contents = {"proc/self/cgroup": group, "proc/self/mountinfo": mounts}
    contents |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("group", "mounts", "files", "expected"), [
    ("0::/\n", V2, {"cpu.max": "300000 100000\n"}, [3.0]),
    ("0::/a/b\n", V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "800000 100000"},
     [1.5, 8.0]),
    ("0::/a\n", V2, {"a/cpu.max": "max 100000"}, []),
    ("0::/a\n", V2, {"a/cpu.max": "garbage"}, []),
    ("3:cpu,cpuacct:/a\n2:memory:/a\n", f"{V1}\n{MEMORY}",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
      "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
      "memory/a/cpu.cfs_quota_us": "1", "memory/a/cpu.cfs_period_us": "100000"}, [2.5]),
    ("3:cpu,cpuacct:/docker/x\n0::/\n",
     f"{V1.replace(' / ', ' /docker/x ', 1)}\n{V2.replace('cgroup ', 'cgroup/unified ', 1)}",
     {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, [2.0]),
    ("0::/../other\n", V2, {"cpu.max": "400000 100000"}, [4.0]),
    ("", "", {}, []),
], ids=["v2", "nested", "unlimited", "garbage", "v1", "mounted in a container", "outside of the mount", "no files"])
def test_quotas(
    tmp_path: Path, group: str, mounts: str, files: dict[str, str], expected: list[float]
) -> None:
    """Every group around the process counts, in both versions, wherever its files are."""
    assert list(cpu_quotas(make(tmp_path, group, mounts, **files))) == expected


@pytest.mark.parametrize(("quota", "expected"), [("150000 100000", 1), ("20000 100000", 1), ("max 100000", 8),
                                                 ("600000 100000", 6), ("9900000 100000", 8)])
def test_the_smaller_of_affinity_and_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    """Whole cores, at least one, never more than the process may run on."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_usable_cores(make(tmp_path, "0::/a\n", V2, **{"a/cpu.max": quota})) == expected


def test_this_machine_has_cores() -> None:
    """The files of the machine that the tests run on can be read."""
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)

"""How many cores this process may use: affinity, and the CPU quotas of its control groups.

A group's quota binds all groups inside of it, so every group from the process's own up to the root is read, version 1
and version 2, wherever they are mounted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pagedcore_kernels.errors import InvalidConfig, is_passing


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, at least 1; a quota of one and a half cores is one core.

    Args:
        root: where ``proc`` is found and the mount points that it names.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in cpu_quotas(root))]))


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yield every CPU quota that binds this process, in cores."""
    for folder, version in _group_folders(root):
        if version == 2:
            quota, _, period = read_of_system(folder / "cpu.max").partition(" ")
        else:
            quota, period = read_of_system(folder / "cpu.cfs_quota_us"), read_of_system(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def _group_folders(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the groups that this process is in and of all groups around them, with their version."""
    groups = dict(_groups(root))
    for mount_root, mount_point, kind, options in _mounts(root):
        version = 2 if kind == "cgroup2" else 1
        if kind not in ("cgroup", "cgroup2") or (version == 1 and "cpu" not in options.split(",")):
            continue
        inside = _below(groups.get(version, "/"), mount_root)
        folder = root / mount_point.lstrip("/")
        for part in (inside, *inside.parents):
            yield folder / str(part).lstrip("/"), version


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the version of a hierarchy that can limit the CPU, and the path of this process's group in it."""
    for line in read_of_system(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "cpu" in controllers.split(","):
            yield 1, path


def _mounts(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield root, mount point, type and options of every mount; see proc_pid_mountinfo(5)."""
    for line in read_of_system(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) >= 5 and len(kinds) >= 3:
            yield fields[3], fields[4], kinds[0], kinds[2]


def _below(group: str, mount_root: str) -> PurePosixPath:
    """Return a group's path below a mount: in a container, mounts often show nothing above the own group."""
    path = PurePosixPath(group)
    if mount_root != "/" and path.is_relative_to(mount_root):
        path = PurePosixPath("/") / path.relative_to(mount_root)
    return path if ".." not in path.parts else PurePosixPath("/")


def read_of_system(path: Path) -> str:
    """Return what a file of the system's says, without whitespace around it; nothing where there is no such file.

    Raises:
        InvalidConfig: the system lacks file handles or memory now, so that this says nothing about the file.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        if is_passing(error):
            raise unreadable_system(error) from error
        return ""


def unreadable_system(error: OSError) -> InvalidConfig:
    """Return the error of what the system cannot say at present."""
    return InvalidConfig(f"machine: what the system says of it cannot be read now ({error.strerror}). Close files or "
                         "raise the limit (ulimit -n), and try again.")

"""What this machine computes with: cores, instruction sets, and the number formats that are fast on them.

Owns the reading of the processor's flags; it never changes a setting. ``pagedcore doctor`` prints it, model loading
takes ``dtype="auto"`` from it.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from pagedcore_kernels.cpu.runtime.cores import num_usable_cores, read_of_system, unreadable_system

_INTERESTING = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "sve", "sve2", "bf16", "i8mm",
)
"""Flags worth knowing, as Linux names them; x86 first, then ARM."""
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Any of these multiplies bfloat16 matrices in hardware."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor this process may use."""

    cpu_name: str
    num_cores: int
    """Logical cores this process may run on: affinity and container quota are respected."""
    instruction_sets: tuple[str, ...]
    """Those that matter for inference, in the words of /proc/cpuinfo."""
    memory_bytes: int
    """Memory of the machine, or of the container if that is less."""

    @property
    def default_dtype(self) -> str:
        """What ``dtype="auto"`` means here: bfloat16 if the processor multiplies it in hardware."""
        return "float32" if _BFLOAT16.isdisjoint(self.instruction_sets) else "bfloat16"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number formats that models run in here, the default first."""
        others = ("float32", "bfloat16", "float16")
        return (self.default_dtype, *(name for name in others if name != self.default_dtype))


def this_machine() -> Machine:
    """Read the machine; nothing is cached, because a container's limits may change.

    Raises:
        InvalidConfig: the system lacks file handles or memory now.
    """
    info = _read("/proc/cpuinfo")
    flags = set(_field(info, "flags").split()) | set(_field(info, "Features").split())
    limit, total = _read("/sys/fs/cgroup/memory.max"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu_name=_field(info, "model name") or platform.processor() or platform.machine(),
        num_cores=num_usable_cores(),
        instruction_sets=tuple(name for name in _INTERESTING if name in flags),
        memory_bytes=min(total, int(limit)) if limit.isdigit() else total,
    )


def _read(path: str) -> str:
    return read_of_system(Path(path))


def _field(info: str, name: str) -> str:
    """Return the first value of ``name`` in text made of ``name : value`` lines."""
    lines = (line.partition(":") for line in info.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def free_memory_bytes() -> int:
    """Return the memory that can be had now without swapping: the machine's, or the container's if that is less.

    Raises:
        InvalidConfig: the system lacks file handles or memory now.
    """
    try:
        free = int(psutil.virtual_memory().available)
    except OSError as error:
        raise unreadable_system(error) from error
    limit = _read("/sys/fs/cgroup/memory.max")
    used = _read("/sys/fs/cgroup/memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return free
    # Why: the kernel counts file pages as used, but reclaims inactive ones before it refuses.
    reclaimable = next((line.split()[1] for line in _read("/sys/fs/cgroup/memory.stat").splitlines()
                        if line.startswith("inactive_file ")), "0")
    return max(0, min(free, int(limit) - int(used) + int(reclaimable)))

"""The OpenMP threads of torch, seen by the thread that computes: how many it uses, and kernels run on them.

torch brings a libgomp of its own. Its settings belong to the calling thread, so no other thread sees them.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_OMP_PAUSE_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0, section 3.2.44."""


class OpenMPThreads:
    """How many threads torch uses for what the calling thread computes."""

    def __init__(self, libgomp: ctypes.CDLL, mkl_set_num_threads_local: Any) -> None:
        self._libgomp, self._set_mkl = libgomp, mkl_set_num_threads_local
        libgomp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        libgomp.GOMP_parallel.restype = None
        self.parallel, self.number_of_thread = (
            int(ctypes.cast(function, ctypes.c_void_p).value or 0)
            for function in (libgomp.GOMP_parallel, libgomp.omp_get_thread_num))
        """Addresses of ``GOMP_parallel`` and ``omp_get_thread_num``."""

    def set(self, num_threads: int, num_mkl_threads: int) -> int:
        """Set both for the calling thread; return the number for MKL before, where 0 means "as many as OpenMP"."""
        self._libgomp.omp_set_num_threads(num_threads)
        return int(self._set_mkl(num_mkl_threads)) if self._set_mkl is not None else 0

    def run(self, entry: int, parameters: int, num_helpers: int) -> None:
        """Call the C function at address ``entry`` with ``parameters`` on this thread and so many of OpenMP's."""
        self._libgomp.GOMP_parallel(entry, parameters, num_helpers + 1, 0)

    def end_helpers(self) -> None:
        """End the OpenMP threads that help the calling thread; they come anew if it computes with them again.

        Why: libgomp lets helpers watch for work only while the process has no more of them than processors, and counts
        those of every thread that ever computed.
        """
        self._libgomp.omp_pause_resource_all(_OMP_PAUSE_SOFT)


@cache
def openmp_threads() -> OpenMPThreads | None:
    """Return the threads of the libgomp that torch has loaded, or ``None`` where it uses something else."""
    folder = Path(torch.__file__).parent / "lib"
    # Why not glob: it takes a directory that cannot be listed at the moment for an empty one.
    names = sorted(fnmatch.filter(os.listdir(folder), "libgomp*.so*")) if folder.is_dir() else []
    if not names:
        return None
    torch_cpu = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    return OpenMPThreads(ctypes.CDLL(str(folder / names[0])), getattr(torch_cpu, "MKL_Set_Num_Threads_Local", None))


_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def is_forked() -> bool:
    """Whether this process is a forked child, where libgomp waits for ever for helpers that stayed in the parent."""
    return _is_forked


@contextmanager
def usable_torch() -> Iterator[None]:
    """Let torch compute on the calling thread alone in a forked child; elsewhere nothing changes."""
    openmp = openmp_threads() if _is_forked else None
    if openmp is None:
        yield
        return
    before = torch.get_num_threads()
    mkl_before = openmp.set(1, 1)
    try:
        yield
    finally:
        openmp.set(before, mkl_before)


def end_openmp_helpers() -> None:
    """Do as ``OpenMPThreads.end_helpers`` where torch uses libgomp."""
    if (threads := openmp_threads()) is not None:
        threads.end_helpers()

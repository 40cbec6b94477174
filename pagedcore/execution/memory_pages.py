"""Pages of memory: huge ones for weights and KV blocks, and those of weight files that are mapped into memory.

Reading a gigabyte of weights in every step costs a tenth of the time in address translation alone where pages are of
4 KiB. Weights loaded from safetensors are views of the mapped file: ``FileMappings`` gives the pages of a weight back
once it has been rearranged, so that they do not count twice, and moves the others into memory of their own, so that a
file replaced on disk cannot change a running model. Where the kernel declines, nothing changes: contents and addresses
stay.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Final

import torch
from torch import nn

_HUGE_PAGE: Final = 2**21
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Back a tensor on the CPU with huge pages where it is touched later; moves nothing now."""
    _advise(tensor.data_ptr(), tensor.nbytes, _MADV_HUGEPAGE)


def populate(tensor: torch.Tensor) -> None:
    """Allocate a tensor's pages now, not when each is first written to; contents stay."""
    _advise(tensor.data_ptr(), tensor.nbytes, _MADV_POPULATE_WRITE)


def move_to_huge_pages(address: int, num_bytes: int) -> None:
    """Move memory into huge pages now; contents stay."""
    _advise(address, num_bytes, _MADV_HUGEPAGE)
    _advise(address, num_bytes, _MADV_COLLAPSE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Give the same advice for every huge page that overlaps a range; the kernel refuses those it cannot serve."""
    if sys.platform != "linux" or num_bytes < _HUGE_PAGE:
        return
    libc = ctypes.CDLL(None)
    for page in range(address // _HUGE_PAGE * _HUGE_PAGE, address + num_bytes, _HUGE_PAGE):
        # Safety: no advice changes what any address holds, so a page shared with other memory does no harm.
        libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), ctypes.c_int(advice))


class FileMappings:
    """The address ranges of this process that were mapped from files when the object was made.

    Invariant: ranges are half-open, disjoint and sorted, as the kernel lists them.
    """

    def __init__(self) -> None:
        """Read /proc/self/maps: ``begin-end permissions offset device inode path``; no ranges without such a file."""
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        self._ranges: list[tuple[int, int]] = []
        for fields in (line.split(None, 5) for line in lines):
            if len(fields) == 6 and fields[4] != "0" and fields[5].startswith("/"):
                begin, _, end = fields[0].partition("-")
                self._ranges.append((int(begin, 16), int(end, 16)))
        self._ranges.sort()

    def holds(self, begin: int, end: int) -> bool:
        """Return whether [begin, end) lies inside one mapping of a file."""
        index = bisect_right(self._ranges, (begin, 2**64)) - 1
        return index >= 0 and end <= self._ranges[index][1]

    def free_pages(self, tensor: torch.Tensor) -> None:
        """Give the pages of a tensor that is not read any more back to the kernel, if they are a file's."""
        page = mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        # Safety: on memory that is not a file's this call would zero it.
        if end > begin and self.holds(begin, end):
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_DONTNEED))

    def detach(self, model: nn.Module) -> None:
        """Copy every parameter and buffer that lives in a mapped file; tied ones stay tied."""
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and self.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes):
                tensor.data = tensor.data.clone()

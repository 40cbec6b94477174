"""Keeps weight files that are mapped into memory from counting twice.

Weights loaded from safetensors are views of the mapped file. Owns the two things to do about that: give the pages of a
weight back once it has been rearranged, and move what stays into memory of its own, so that a file replaced on disk
cannot change a running model. It never touches memory that is not mapped from a file.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

import torch
from torch import nn

_MADV_DONTNEED = 4


class FileMappings:
    """The address ranges of this process that were mapped from files when the object was made.

    Invariant: ranges are half-open, disjoint and sorted, as the kernel lists them.
    """

    def __init__(self) -> None:
        self._ranges = sorted(_file_ranges())

    def holds(self, begin: int, end: int) -> bool:
        """Return whether [begin, end) lies inside one mapping of a file."""
        index = bisect_right(self._ranges, (begin, 2**64)) - 1
        return index >= 0 and end <= self._ranges[index][1]

    def release(self, tensor: torch.Tensor) -> None:
        """Let the kernel drop the pages of a tensor nobody reads any more; it does nothing unless they are a file's."""
        page = mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // page) * page
        end = (tensor.data_ptr() + tensor.nbytes) // page * page
        # Safety: on memory that is not a file's this call would zero it, and its owner may be somebody else by now.
        if end > begin and self.holds(begin, end):
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_DONTNEED))

    def detach(self, model: nn.Module) -> None:
        """Copy every parameter and buffer that lives in a mapped file; tied ones stay tied."""
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and self.holds(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes):
                tensor.data = tensor.data.clone()


def _file_ranges() -> list[tuple[int, int]]:
    """Read /proc/self/maps: ``begin-end permissions offset device inode path``; nothing where there is no such file."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    ranges = []
    for fields in (line.split(None, 5) for line in lines):
        if len(fields) == 6 and fields[4] != "0" and fields[5].startswith("/"):
            begin, _, end = fields[0].partition("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges

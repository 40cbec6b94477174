"""Files that are mapped into memory: what a process holds of weight files.

Weights loaded from safetensors are views of the mapped file: ``FileMappings`` gives the pages of a weight back
once it has been rearranged, so that they do not count twice, and moves the others into memory of their own, so that a
file replaced on disk cannot change a running model.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from torch import nn

from pagedcore_kernels.cpu.runtime.huge_pages import empty_in_huge_pages

_MADV_DONTNEED: Final = 4
_GIVEN_BACK_AFTER: Final = 2**25
"""Bytes of weights that are rearranged before memory that was freed is given back, which takes a millisecond or so."""


def give_back_freed() -> None:
    """Give memory that was freed and that the allocator of C keeps back to the kernel, where it can: after tensors of a
    few MiB were unpacked layer by layer among others that stay, that comes to a third of a model."""
    with suppress(AttributeError):  # of another C library than GNU's
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class FileMappings:
    """The address ranges of this process that were mapped from files when the object was made.

    Invariant: ranges are half-open, disjoint and sorted, as the kernel lists them.
    """

    def __init__(self) -> None:
        """Read /proc/self/maps: ``begin-end permissions offset device inode path``; no ranges without such a file.

        Left out is what is shared between processes: files of packed weights, which are meant to stay mapped.
        """
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        self._ranges: list[tuple[int, int]] = []
        for fields in (line.split(None, 5) for line in lines):
            if len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0" and fields[5].startswith("/"):
                begin, _, end = fields[0].partition("-")
                self._ranges.append((int(begin, 16), int(end, 16)))
        self._ranges.sort()
        self._num_bytes = 0

    def holds(self, begin: int, end: int) -> bool:
        """Return whether [begin, end) lies inside one mapping of a file."""
        index = bisect_right(self._ranges, (begin, 2**64)) - 1
        return index >= 0 and end <= self._ranges[index][1]

    def free_pages(self, tensor: torch.Tensor) -> None:
        """Give the pages of a tensor that is not read any more back to the kernel, if they are a file's, and now and
        then what was freed after such tensors were read."""
        self._num_bytes += tensor.nbytes
        if self._num_bytes > _GIVEN_BACK_AFTER:
            self._num_bytes = 0
            give_back_freed()
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
                tensor.data = empty_in_huge_pages(tensor.shape, tensor.dtype).copy_(tensor.data)

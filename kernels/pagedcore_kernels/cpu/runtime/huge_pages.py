"""Huge pages of memory, for weights and KV blocks.

Reading a gigabyte of weights in every step costs a tenth of the time in address translation alone where pages are of
4 KiB. Where the kernel declines, nothing changes: contents and addresses stay.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import torch

HUGE_PAGE: Final = 2**21
"""Bytes."""
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
    if sys.platform != "linux" or num_bytes < HUGE_PAGE:
        return
    libc = ctypes.CDLL(None)
    for page in range(address // HUGE_PAGE * HUGE_PAGE, address + num_bytes, HUGE_PAGE):
        # Safety: no advice changes what any address holds, so a page shared with other memory does no harm.
        libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), ctypes.c_int(advice))

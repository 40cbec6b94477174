"""Transparent huge pages (THP) of memory, for weights and KV blocks.

Reading a gigabyte of weights in every step costs a tenth of the time in address translation alone where pages are of
4 KiB. Where the kernel declines, nothing changes: contents and addresses stay.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch

HUGE_PAGE: Final = 2**21
"""Bytes."""
_MAPPED_AT_ONCE: Final = 32 * HUGE_PAGE
"""Bytes that are mapped for tensors at once; of the last huge page of them some stay unused."""
_ALIGNMENT: Final = 64
"""Tensors begin at cache lines."""
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Back a tensor on the CPU with huge pages where it is touched later; moves nothing now."""
    _advise(tensor.data_ptr(), tensor.nbytes, _MADV_HUGEPAGE)


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU, its numbers undefined, in memory that becomes huge pages when it is first touched.

    The allocator's memory was touched before in part, and would have to be moved. Tensors of one thread lie one behind
    the other, because most weights are no multiple of a huge page. Memory that several share, 64 MiB or one large
    tensor and others, goes back to the system when the last of them is gone.

    Raises:
        MemoryError: the system gives no more addresses.
    """
    num_items = math.prod(shape)
    if sys.platform != "linux" or not num_items:
        return torch.empty(tuple(shape), dtype=dtype)
    num_bytes = num_items * dtype.itemsize
    memory, start = _newest.memory(), -(-_newest.end // _ALIGNMENT) * _ALIGNMENT
    if memory is None or start + num_bytes > len(memory):
        memory, start = _map(num_bytes)
        _newest.memory = weakref.ref(memory)
    _newest.end = start + num_bytes
    return torch.frombuffer(memory, dtype=dtype, count=num_items, offset=start).view(tuple(shape))


class _Newest(threading.local):
    """The memory from which this thread's next tensor is taken; whoever has a tensor of it keeps it."""

    def __init__(self) -> None:
        self.memory: Callable[[], mmap.mmap | None] = lambda: None
        self.end = 0


_newest: Final = _Newest()


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return new memory, for so many bytes at least, and its first huge page."""
    size = HUGE_PAGE + max(_MAPPED_AT_ONCE, num_bytes)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {size:,} bytes for weights") from error
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _advise(address, size, _MADV_HUGEPAGE)
    return memory, -address % HUGE_PAGE


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

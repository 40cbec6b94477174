"""Many copies between a GPU and pinned memory in one call of its driver.

Owns the question whether the driver has such a call. A loop over single copies costs the host some microseconds for
each, and small ones do not fill the bus (``cuMemcpyBatchAsync``, CUDA 12.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagedcore_kernels.cuda import driver
from pagedcore_kernels.errors import InternalError, MissingDependency

_FIRST_VERSION: Final = 12080
"""The first driver that has the call."""
_NOT_SUPPORTED: Final = 801


class BatchCopies:
    """The call, on whatever GPU is current."""

    def __init__(self, api: Any) -> None:
        """Take the module ``cuda.bindings.driver``, or what stands for it."""
        self._api, self._attributes = api, api.CUmemcpyAttributes()
        # Why: a source that is computed before has to be read after that.
        self._attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = int(api.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)

    def copy(self, pieces: Sequence[tuple[int, int, int]], stream: int) -> bool:
        """Queue copies of so many bytes from one address to another one, in any order of theirs; nothing is waited for.

        Args:
            pieces: one at least, (source, destination, bytes); no destination is also a source.
            stream: handle of a stream that is not the default one.

        Returns:
            Whether they were queued; else this driver has no such call, and none was.

        Raises:
            InternalError: the driver refused them; the message has its status.
        """
        address, (sources, destinations, sizes) = self._api.CUdeviceptr, zip(*pieces, strict=True)
        try:
            # Why a rest: bindings of CUDA 12 also return which copy failed.
            status, *_ = self._api.cuMemcpyBatchAsync(
                list(map(address, destinations)), list(map(address, sources)), list(sizes), len(pieces),
                [self._attributes], [0], 1, self._api.CUstream(stream))
        except RuntimeError:  # as bindings of CUDA 13 raise over a driver for CUDA 12, whose call is another
            return False
        if int(status) not in (0, _NOT_SUPPORTED):
            raise InternalError(f"CUDA driver: {len(pieces)} copies failed with status {driver._named(status)}.")
        return int(status) == 0


def find_batch_copies() -> BatchCopies | None:
    """Return the call, or ``None`` where this machine has none."""
    try:
        api = driver._bindings()
        status, version = api.cuDriverGetVersion()
    except (MissingDependency, RuntimeError):  # no bindings, or no driver for them
        return None
    return BatchCopies(api) if int(status) == 0 and int(version) >= _FIRST_VERSION else None

"""KV blocks in the memory of a GPU, and the pinned host slab that they are swapped to, moved by its copy engines.

Transfers run beside the computation and are polled without waiting; the runs of neighbours of one are one call of the
driver, where it has such a call. Owns the order between the two: a transfer begins
after everything that was computed before it was started, and is reported when its bytes are there. ``kv_pool`` does
the same on a CPU.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore.execution.cuda_streams import EngineStream
from pagedcore.execution.kv_pool import BlockPairs, KVPool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pagedcore_kernels.cuda.copies import BatchCopies
    from pagedcore_kernels.layout import BlockLayout

Unpin = Callable[[], None]
_PAUSE_S: Final = 0.0002
_LOOKS: Final = 250


class CudaCopies:
    """A CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """What the driver calls the stream."""
        return int(self._stream.cuda_stream)

    def start(self, copy: Callable[[], None]) -> torch.cuda.Event:
        """Queue what ``copy`` does behind the work that is on the current stream, and return its end."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                copy()
        except BaseException:
            # Safety: blocks of a copy that failed are used again, and a part of it may be on its way.
            with suppress(RuntimeError):  # a GPU that has failed orders nothing
                current.wait_stream(self._stream)
            raise
        event: torch.cuda.Event = self._stream.record_event()
        return event


class CudaKVPool(KVPool):
    """The pool of one model on a GPU and the pinned slab next to it; a ``CacheStore``.

    Invariant: a transfer is reported after its last byte was copied, once, in the order of the starts of its direction.
    Invariant: host memory stays pinned until the last copy that was started has ended.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, stream: EngineStream) -> None:
        """Allocate the pool, on the stream that computes with it; see ``KVPool``."""
        # Why here: an engine on a CPU does without the driver's modules.
        from pagedcore_kernels.cuda.copies import find_batch_copies

        with stream.current():
            super().__init__(layout, num_blocks, stream.device)
        # Why two: a bus has two directions.
        self._stream, self._outgoing, self._incoming = stream, CudaCopies(stream.device), CudaCopies(stream.device)
        self._batches: BatchCopies | None = find_batch_copies()
        self._in_flight: list[tuple[int, torch.cuda.Event]] = []
        self._end_pinning: Callable[[], object] | None = None

    def allocate_host(self, num_blocks: int) -> None:
        """Make room for so many blocks in pinned host memory; see ``KVPool``."""
        super().allocate_host(num_blocks)
        slab = self._require_host()
        self._end_pinning = weakref.finalize(self, _unpin, _pin(slab), self._in_flight, slab)

    def close(self) -> None:
        """Wait for the copies in flight, then free all memory; see ``KVPool``."""
        if self._end_pinning is not None:
            self._end_pinning()
        super().close()

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy device blocks (source, destination); the device does so when it gets there."""
        with self._stream.current():
            for here, there in pairs:
                self.pool[there].copy_(self.pool[here])

    def poll_transfers(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Return what has ended since the last call; with ``wait``, look again for a twentieth of a second."""
        ended = self._take_ended()
        for _ in range(_LOOKS if wait else 0):
            if ended or not self._in_flight:
                break
            time.sleep(_PAUSE_S)
            ended = self._take_ended()
        return ended

    def _take_ended(self) -> list[tuple[int, bool]]:
        # Why: each event is queried once; one that is reached between two queries would be lost.
        states = [(transfer_id, end, end.query()) for transfer_id, end in self._in_flight]  # type: ignore[no-untyped-call]
        self._in_flight[:] = [(transfer_id, end) for transfer_id, end, is_done in states if not is_done]
        return [(transfer_id, True) for transfer_id, _, is_done in states if is_done]

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of device blocks, shape [N, block_bytes]; waits for the GPU."""
        with self._stream.current():
            contents: npt.NDArray[np.uint8] = self.pool[list(block_ids)].cpu().numpy()
        return contents

    def _write_block(self, block_id: int, contents: npt.NDArray[np.uint8]) -> None:
        with self._stream.current():
            self.pool[block_id].copy_(torch.from_numpy(contents.copy()))

    def _start(self, transfer_id: int, source: torch.Tensor, destination: torch.Tensor, pairs: BlockPairs) -> None:
        copies = self._outgoing if source is self.pool else self._incoming
        runs = list(_runs(pairs))

        def copy() -> None:
            if len(runs) > 1 and self._batches is not None:
                if self._batches.copy(_pieces(runs, source, destination), copies.handle):
                    return
                self._batches = None
            for here, there, count in runs:
                destination[there : there + count].copy_(source[here : here + count], non_blocking=True)

        with self._stream.current():
            self._in_flight.append((transfer_id, copies.start(copy)))


def _runs(pairs: BlockPairs) -> Iterator[tuple[int, int, int]]:
    """Join pairs that are adjacent on both sides: (source, destination, blocks), one copy each."""
    # Why: along a run both numbers grow as the place in the list does.
    for _, run in groupby(enumerate(pairs), key=lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        first, *others = (pair for _, pair in run)
        yield *first, 1 + len(others)


def _pieces(
    runs: Sequence[tuple[int, int, int]], source: torch.Tensor, destination: torch.Tensor
) -> list[tuple[int, int, int]]:
    """Return the addresses and bytes of runs of blocks; both tensors are [blocks, block_bytes].

    Raises:
        InternalError: a run is beyond one of them.
    """
    # Safety: the driver copies raw memory.
    if any(min(here, there) < 0 or here + count > len(source) or there + count > len(destination)
           for here, there, count in runs):
        raise InternalError(f"transfer: blocks {runs[:3]} of {len(source)} and {len(destination)}")
    size, begins = source.stride(0), (source.data_ptr(), destination.data_ptr())
    return [(begins[0] + here * size, begins[1] + there * size, count * size) for here, there, count in runs]


def _unpin(unpin: Unpin, in_flight: list[tuple[int, torch.cuda.Event]], slab: torch.Tensor) -> None:
    """Unpin a slab whose pool is gone; the argument keeps the slab's memory until then."""
    for _, end in in_flight:
        # Why: a GPU that has failed copies nothing any more.
        with suppress(RuntimeError):
            end.synchronize()
    in_flight.clear()
    unpin()


def _pin(slab: torch.Tensor) -> Unpin:
    """Pin memory that is there already: torch's own pinned memory is rounded up to a power of two.

    Raises:
        InvalidConfig: the driver does not pin so much.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = slab.data_ptr()
    status = runtime.cudaHostRegister(address, slab.nbytes, 0)
    if int(status) != 0:
        raise InvalidConfig(
            f"host_kv_memory: the CUDA driver did not pin {slab.nbytes} bytes (status {int(status)}). Lower it."
        )
    return lambda: runtime.cudaHostUnregister(address)

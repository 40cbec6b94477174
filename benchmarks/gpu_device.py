"""An NVIDIA GPU for the measurements: memory, copies, launches and timing through cuda-bindings, with any torch.

Owns the contact with the driver besides ``CudaDriver``, which it launches through. Tests put another GPU in its
place that executes the PTX on the CPU. Read ``gpu_stages.py`` for what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.driver import Argument, CudaDriver

_ALIGN = 256


@dataclass(frozen=True)
class Buffer:
    """Bytes on the GPU."""

    address: int
    nbytes: int

    def at(self, offset: int) -> Buffer:
        """The rest from a byte on."""
        return Buffer(self.address + offset, self.nbytes - offset)


class CudaDevice:
    """One GPU, on a stream of its own."""

    def __init__(self, kernels: Sequence[Path], api: Any = None) -> None:
        if api is None:
            from cuda.bindings import driver as api
        self._api = api
        self._driver = CudaDriver(torch.device("cuda", 0), KernelLibrary(kernels), api, lambda: int(self._stream))
        self._stream = self._check(api.cuStreamCreate(0))
        self._driver.begin_step()
        self._buffers: list[int] = []
        self.capability, self.num_sms, self.arch = self._driver.capability, self._driver.num_sms, self._driver.arch

    def describe(self) -> dict[str, Any]:
        """What the GPU is."""
        api = self._api
        name = self._check(api.cuDeviceGetName(128, self._check(api.cuDeviceGet(0))))
        return {
            "gpu": bytes(name).split(b"\0")[0].decode(), "arch": self.arch, "multiprocessors": self.num_sms,
            "driver": self._check(api.cuDriverGetVersion()), "free_bytes": self._check(api.cuMemGetInfo()),
        }

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Free at the end what is allocated inside."""
        known = len(self._buffers)
        try:
            yield
        finally:
            self.synchronize()
            while len(self._buffers) > known:
                self._check(self._api.cuMemFree(self._buffers.pop()))

    def alloc(self, nbytes: int) -> Buffer:
        """Bytes of undefined content."""
        address = int(self._check(self._api.cuMemAlloc(max(1, nbytes))))
        self._buffers.append(address)
        return Buffer(address, nbytes)

    def upload(self, array: npt.NDArray[Any], align_as: int = 0) -> Buffer:
        """A copy of an array, at an address that is ``align_as`` modulo 256."""
        array = np.ascontiguousarray(array)
        buffer = self.alloc(array.nbytes + _ALIGN).at(align_as % _ALIGN)
        if array.nbytes:
            self._check(self._api.cuMemcpyHtoD(buffer.address, array.ctypes.data, array.nbytes))
        return Buffer(buffer.address, array.nbytes)

    def download(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        """The bytes of a buffer, after everything that was launched."""
        self.synchronize()
        array = np.empty(buffer.nbytes, np.uint8)
        if array.nbytes:
            self._check(self._api.cuMemcpyDtoH(array.ctypes.data, buffer.address, array.nbytes))
        return array

    def copy(self, target: Buffer, source: Buffer, nbytes: int) -> None:
        """Copy on the GPU, in stream order."""
        self._check(self._api.cuMemcpyDtoDAsync(target.address, source.address, nbytes, self._stream))

    def zero(self, buffer: Buffer) -> None:
        """Set all bytes to 0, in stream order."""
        self._check(self._api.cuMemsetD8Async(buffer.address, 0, buffer.nbytes, self._stream))

    def prepare(self, name: str) -> None:
        """Load a kernel."""
        self._driver.prepare(name)

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Buffer | int | float | None]) -> None:
        """Launch a prepared kernel."""
        self._driver.launch(name, num_ctas, [a.address if isinstance(a, Buffer) else a for a in arguments])

    def synchronize(self) -> None:
        """Wait for everything."""
        self._check(self._api.cuStreamSynchronize(self._stream))

    def time_ms(self, work: Callable[[], None], repeats: int) -> list[float]:
        """Milliseconds of each of so many runs on the GPU, by its own clock; two more run before."""
        api = self._api
        for _ in range(2):
            work()
        events = [(self._check(api.cuEventCreate(0)), self._check(api.cuEventCreate(0))) for _ in range(repeats)]
        for begin, end in events:
            self._check(api.cuEventRecord(begin, self._stream))
            work()
            self._check(api.cuEventRecord(end, self._stream))
        self.synchronize()
        found = [float(self._check(api.cuEventElapsedTime(begin, end))) for begin, end in events]
        for event in (one for pair in events for one in pair):
            self._check(api.cuEventDestroy(event))
        return found

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture launches as a graph and return what replays it."""
        api = self._api
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(api.cuStreamBeginCapture(self._stream, mode))
        work()
        graph = self._check(api.cuGraphInstantiate(self._check(api.cuStreamEndCapture(self._stream)), 0))

        def replay() -> None:
            self._check(api.cuGraphLaunch(graph, self._stream))

        return replay

    def _check(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA driver: status {int(result[0])} ({result[0]!s})")
        return result[1] if len(result) == 2 else result[1:] or None


@dataclass
class HardwareDriver:
    """A ``Driver`` for tensors in ordinary memory: every launch takes them to a GPU and brings them back.

    So the cases of the execute gate run on a GPU as they are, whatever torch is installed.
    """

    gpu: Any
    arch: str = "sm_90"
    num_sms: int = 8
    most_shared_bytes: int = 227 * 1024
    seed: int = 0
    check_races: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launched: list[tuple[str, int]] = field(default_factory=list)

    @property
    def capability(self) -> tuple[int, int]:
        """Of the GPU; the case's architecture is the interpreter's business."""
        return int(self.gpu.capability[0]), int(self.gpu.capability[1])

    def prepare(self, name: str) -> None:
        """Load a kernel."""
        self.gpu.prepare(name)

    def num_ctas(self, name: str) -> int:
        """As many as the interpreter has, whose cases these are."""
        return 2 * self.num_sms

    def begin_step(self) -> None:
        """Every launch is a step of its own."""

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Argument]) -> None:
        """Copy in, launch, copy out."""
        self.launched.append((name, num_ctas))
        copies: dict[int, tuple[npt.NDArray[np.uint8], Any]] = {}
        with self.gpu.memory():
            self.gpu.launch(name, num_ctas, [self._sent(argument, copies) for argument in arguments])
            for array, buffer in copies.values():
                array[:] = self.gpu.download(buffer)

    def _sent(self, argument: Argument, copies: dict[int, tuple[npt.NDArray[np.uint8], Any]]) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        storage = argument.untyped_storage()
        begin = storage.data_ptr()
        if not storage.nbytes():
            return self.gpu.alloc(16)
        if begin not in copies:
            array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            copies[begin] = array, self.gpu.upload(array, begin)
        return copies[begin][1].at(argument.data_ptr() - begin)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return float(np.median(values))


def host_us(work: Callable[[], None], repeats: int) -> float:
    """Microseconds that the host takes for one run, on the average of so many."""
    work()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begin) / repeats * 1e6

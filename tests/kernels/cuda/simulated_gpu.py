"""A GPU for the measuring script that executes every launch with the PTX interpreter; its times mean nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cuda.simulated_driver import compiled
from pagedcore_ptxsim import launch


@dataclass(frozen=True)
class ArrayBuffer:
    """Bytes of the simulated GPU."""

    array: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def at(self, offset: int) -> ArrayBuffer:
        return ArrayBuffer(self.array[offset:])


class SimulatedGpu:
    """Has the members of ``gpu_device.CudaDevice``."""

    capability, num_sms, arch = (9, 0), 4, "sm_90"

    def __init__(self, kernels: Sequence[Any]) -> None:
        self.num_launches = 0

    def describe(self) -> dict[str, Any]:
        return {"gpu": "simulated", "arch": self.arch}

    @contextmanager
    def memory(self) -> Iterator[None]:
        yield

    def alloc(self, nbytes: int) -> ArrayBuffer:
        return ArrayBuffer(np.full(max(1, nbytes), 0xFF, np.uint8))

    def upload(self, array: npt.NDArray[Any], align_as: int = 0) -> ArrayBuffer:
        return ArrayBuffer(np.frombuffer(np.ascontiguousarray(array).tobytes() or b"\0", np.uint8).copy())

    def download(self, buffer: ArrayBuffer) -> npt.NDArray[np.uint8]:
        return buffer.array.copy()

    def copy(self, target: ArrayBuffer, source: ArrayBuffer, nbytes: int) -> None:
        target.array[:nbytes] = source.array[:nbytes]

    def zero(self, buffer: ArrayBuffer) -> None:
        buffer.array[:] = 0

    def prepare(self, name: str) -> None:
        compiled(name, self.arch)

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Any]) -> None:
        source, ptx = compiled(name, self.arch)
        self.num_launches += 1
        launch(
            ptx, None, num_ctas, source.threads,
            [a.array if isinstance(a, ArrayBuffer) else 0 if a is None else a for a in arguments],
            dynamic_shared_bytes=source.shared_bytes, check_races=False,
            block_order=np.random.default_rng(self.num_launches).permutation(num_ctas).tolist(),
        )

    def synchronize(self) -> None:
        pass

    def time_ms(self, work: Callable[[], None], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

"""Where a model computes: this machine's CPU or one NVIDIA GPU, with all that differs between them in one record.

Owns the meaning of ``EngineConfig.device`` and the refusal of a device that is not there. Nothing is allocated before
it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from pagedcore.errors import DeviceUnavailable
from pagedcore.execution.cuda_graphs import CudaGraphs
from pagedcore.execution.cuda_kv_pool import CudaKVPool
from pagedcore.execution.cuda_streams import EngineStream
from pagedcore.execution.kv_pool import KVPool
from pagedcore.execution.machine import free_memory_bytes

if TYPE_CHECKING:
    from pagedcore.protocols import Int32Array, Int64Array
    from pagedcore_kernels.layout import BlockLayout


@dataclass(frozen=True)
class Device:
    """One device, and how to put things on it."""

    kind: str
    """"cpu" or "cuda"."""
    torch_device: torch.device
    default_attention: str
    """What ``attention_backend="auto"`` means there."""
    default_dtype: str
    """What ``dtype="auto"`` means there for a model that is loaded; "auto" is the machine's own choice."""
    free_bytes: Callable[[], int]
    """Bytes that can be had there now."""
    new_storage: Callable[[BlockLayout, int], KVPool]
    """Makes a KV pool of so many blocks there."""
    gpu_name: str = ""
    graphs: CudaGraphs | None = None
    """What records launches there."""
    stream: EngineStream | None = None
    """What one engine's launches are ordered on there."""

    def computing(self) -> AbstractContextManager[None]:
        """Let what a block computes go to the engine's own stream, in order with the caller's."""
        return nullcontext() if self.stream is None else self.stream.current()

    def take(self, model: Any) -> Any:
        """Return a model of transformers with all its weights there."""
        devices = {parameter.device for parameter in model.parameters()}
        return model if devices <= {self.torch_device} else model.to(self.torch_device)

    def send(self, numbers: Int32Array | Int64Array) -> torch.Tensor:
        """Return an array there; the copy is ordered before what is computed later and not waited for."""
        tensor = torch.from_numpy(numbers)
        if self.torch_device.type != "cuda":
            return tensor
        # Why: torch keeps pinned memory from being used again until the copy out of it has been made.
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def upload(self, arrays: Sequence[Int64Array]) -> list[torch.Tensor]:
        """Return several arrays there, on a GPU flat and in int32, in one copy like that of ``send``."""
        if self.torch_device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        joined = np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int32, casting="same_kind")
        return list(torch.split(self.send(joined), [array.size for array in arrays]))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor there has, in this process's memory, once it has been computed."""
        return self.fetch_all([tensor])[0]

    def fetch_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Do so with several, and wait once."""
        return self.begin_fetch(tensors)()

    def begin_fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to fetch several; return what waits for them, and for nothing that is launched after this call."""
        if self.torch_device.type != "cuda":
            known = [tensor.cpu() for tensor in tensors]
            return lambda: known
        # Why: into memory that is not pinned the logits of 256 rows take 90 ms, twenty times what computing them takes.
        fetched = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                   for tensor in tensors]
        # Why of no rows too: what a step took is known when it has been computed, and a chunk has nothing to fetch.
        end = torch.cuda.current_stream(self.torch_device).record_event()

        def wait() -> list[torch.Tensor]:
            end.synchronize()
            return fetched

        return wait

    def room_beside(self, compute: Callable[[], object]) -> int:
        """Run a function there, and return the bytes that may be taken for good so that it can be run again.

        A tenth of all memory is left out: for recorded steps, what other libraries take, and gaps.

        Raises:
            RuntimeError: it ran out of memory.
        """
        device = self.torch_device
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        most = torch.cuda.max_memory_allocated(device) - before
        return max(0, self.free_bytes() - most - int(_LEFT_OUT * torch.cuda.mem_get_info(device)[1]))

    def is_lost(self) -> bool:
        """Say whether nothing can be computed there any more, as after an illegal address on a GPU; waits for it."""
        if self.torch_device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return True
        return False


_LEFT_OUT: Final = 0.1
CPU: Final = Device("cpu", torch.device("cpu"), "numba-cpu", "auto", free_memory_bytes, KVPool)


def find_device(name: str) -> Device:
    """Return the device that ``EngineConfig.device`` names, for one engine.

    Raises:
        DeviceUnavailable: it is not here; the message says what is missing.
    """
    return CPU if name in ("auto", "cpu") else _cuda_device(name)


def why_no_cuda() -> str | None:
    """Return what keeps this process from computing on an NVIDIA GPU; ``None`` if nothing does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU: there is none, it has no driver, or it is hidden"
    return None


def _cuda_device(name: str) -> Device:
    if (reason := why_no_cuda()) is not None:
        raise DeviceUnavailable(
            f"device: got {name!r}, and {reason}. Install a torch with CUDA and pagedcore[cuda] on a machine with a "
            "GPU, or set device='cpu'; `pagedcore doctor` says what this machine has."
        )
    count, _, number = torch.cuda.device_count(), *name.partition(":")[1:]
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise DeviceUnavailable(f"device: got {name!r}, allowed is cuda:0 to cuda:{count - 1}, the GPUs there are.")
    device = torch.device("cuda", index)
    stream = EngineStream(device)
    return Device(
        "cuda", device, "numba-cuda", "bfloat16", lambda: _free_bytes(device),
        lambda layout, num_blocks: CudaKVPool(layout, num_blocks, stream),
        torch.cuda.get_device_name(device), CudaGraphs(device), stream,
    )


def _free_bytes(device: torch.device) -> int:
    # Why: what torch keeps for the next tensor is free too, but the driver does not say so.
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])

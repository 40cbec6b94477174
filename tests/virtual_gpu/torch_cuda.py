"""``torch.cuda`` as a machine of virtual GPUs, while a test runs.

Owns the names of torch that are replaced, and that each is what it was afterwards.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors

from pagedcore.models.decoders import fused_match
from virtual_gpu.machine import MACHINES, Event, Graph, Machine, Stream, in_use
from virtual_gpu.tensors import DeviceTensor, is_pinned, memory_of, pin, register

_CUDA, _META, _TYPES = 1, 14, 21
"""Numbers of ``c10::DeviceType``, and how many there are at least."""
_FUNCTIONS = 32
"""Virtual functions of ``c10::impl::DeviceGuardImplInterface`` at least: type, exchangeDevice, getDevice, ..."""
_TYPE = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
_EXCHANGE = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p, ctypes.c_int16)
_GET = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p)


class _Current:
    """``torch.cuda.device``: a thread's current GPU within a block."""

    def __init__(self, device: Any) -> None:
        self.index = in_use().index_of(device)

    def __enter__(self) -> None:
        self.before, in_use().device = in_use().device, self.index

    def __exit__(self, *_: object) -> None:
        in_use().device = self.before


def _index(device: Any = None) -> int:
    return in_use().index_of(device)


class _NewStream(Stream):
    """``torch.cuda.Stream``: one that waits for no other by itself."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__(in_use(), _index(device), in_use().new_handle())


def _set_device(device: Any) -> None:
    in_use().device = _index(device)


@contextmanager
def _graph(graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global") -> Any:
    with in_use().record(graph, stream or _NewStream(), pool, capture_error_mode):
        yield


def _host_register(address: int, size: int, flags: int) -> int:
    in_use().pinned.append((address, address + size))
    return 0


def _host_unregister(address: int) -> int:
    in_use().pinned[:] = [one for one in in_use().pinned if one[0] != address]
    return 0


def _device_memory(device: Any = None) -> Any:
    return memory_of(in_use(), _index(device))


def _properties(device: Any = None) -> types.SimpleNamespace:
    machine = in_use()
    return types.SimpleNamespace(
        name="virtual GPU", total_memory=machine.memory_bytes, multi_processor_count=machine.num_sms,
        major=machine.capability[0], minor=machine.capability[1],
    )


def _reset_peak(device: Any = None) -> None:
    memory = _device_memory(device)
    memory.peak = memory.allocated


_NAMES: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: in_use().num_devices,
    "current_device": lambda: in_use().device,
    "set_device": _set_device,
    "device": _Current,
    "current_stream": lambda device=None: in_use().stream(_index(device)),
    "default_stream": lambda device=None: in_use().default_stream(_index(device)),
    "set_stream": lambda stream: in_use().set_stream(stream),
    "Stream": _NewStream,
    "Event": Event,
    "stream": lambda stream: nullcontext() if stream is None else stream,
    "CUDAGraph": Graph,
    "graph": _graph,
    "graph_pool_handle": object,
    "synchronize": lambda device=None: in_use().synchronize(_index(device)),
    "is_current_stream_capturing": lambda: in_use().stream().capture is not None,
    "mem_get_info": lambda device=None: (
        in_use().memory_bytes - _device_memory(device).reserved, in_use().memory_bytes),
    "memory_allocated": lambda device=None: _device_memory(device).allocated,
    "memory_reserved": lambda device=None: _device_memory(device).reserved,
    "max_memory_allocated": lambda device=None: _device_memory(device).peak,
    "reset_peak_memory_stats": _reset_peak,
    "empty_cache": lambda: _device_memory().empty_cache(),
    "get_device_name": lambda device=None: "virtual GPU",
    "get_device_capability": lambda device=None: in_use().capability,
    "get_device_properties": _properties,
    "cudart": lambda: types.SimpleNamespace(cudaHostRegister=_host_register, cudaHostUnregister=_host_unregister),
}

_plain_empty, _plain_tensor, _plain_as_tensor = torch.empty, torch.tensor, torch.as_tensor


def _empty(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
    made = _plain_empty(*size, **more)
    return pin(made) if pin_memory else made


def _made_on_host(make: Any) -> Any:
    """Python numbers become a tensor of the host first; C++ copies a wrapper without what it wraps."""

    def made(data: Any, *args: Any, device: Any = None, **more: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda" or isinstance(data, DeviceTensor):
            return make(data, *args, device=device, **more)
        return make(data, *args, **more).to(device)

    return made


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if isinstance(self, DeviceTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    made = pin(_plain_empty(self.shape, dtype=self.dtype))
    return made.copy_(self)


@contextmanager
def virtual_gpus(machine: Machine | None = None) -> Iterator[Machine]:
    """Let ``torch.cuda`` be a machine of virtual GPUs, in all threads."""
    machine = machine or Machine()
    register()
    # Why before: torch keeps what it finds when a default device is first set, by which transformers makes modules.
    _device_constructors()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        for name, value in _NAMES.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch.version, "cuda", "13.0"), (torch, "empty", _empty), (torch, "tensor", _made_on_host(_plain_tensor)),
            (torch, "as_tensor", _made_on_host(_plain_as_tensor)), (torch.Tensor, "pin_memory", _pin_memory),
            (torch.Tensor, "is_pinned", lambda self, device=None: is_pinned(self)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        # Why: a parameter is of the wrapper's class, where hardware has torch's own.
        stack.enter_context(patch.object(fused_match, "KNOWN_WEIGHTS", fused_match.KNOWN_WEIGHTS | {DeviceTensor}))
        # Why: a parameter's ``data`` cannot become a wrapper, so that modules get new parameters.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        MACHINES.append(machine)
        try:
            yield machine
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
            MACHINES.remove(machine)


@contextmanager
def _device_guard() -> Iterator[None]:
    """Give torch's C++ a guard of CUDA devices, which asks Python for the current one: the guard of "meta", which does
    nothing, with other functions in the first places of its table of virtual functions.
    """
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    functions = ctypes.POINTER(ctypes.c_void_p * _FUNCTIONS).from_address(guards[_META])
    table = (ctypes.c_void_p * _FUNCTIONS)(*functions.contents)
    kept = [_TYPE(lambda _: _CUDA), _EXCHANGE(lambda _, device: _packed()), _GET(lambda _: _packed())]
    table[: len(kept)] = [ctypes.cast(function, ctypes.c_void_p).value for function in kept]
    guard = ctypes.c_void_p(ctypes.addressof(table))
    before, guards[_CUDA] = guards[_CUDA], ctypes.addressof(guard)
    try:
        yield
    finally:
        guards[_CUDA] = before


def _packed() -> int:
    """The current device as C++ has it: a byte for its type and one for its number."""
    return _CUDA | in_use().device << 8

"""``cuda.bindings.driver`` over a machine of virtual GPUs: contexts, modules, launches, and their errors by number.

Owns what a driver checks: that a thread has a context, that a function, a stream and an address are of it, that shared
memory was asked for. A module is PTX, which the interpreter executes when the launch's turn in its stream has come.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedcore_kernels.cuda.build.variants import parameters_of
from pagedcore_ptxsim import launch
from pagedcore_ptxsim.errors import PtxFault
from virtual_gpu.machine import Item, Machine
from virtual_gpu.tensors import memory_of

INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, ILLEGAL_ADDRESS = 1, 101, 201, 400, 500, 700
_DEFAULT_SHARED = 48 * 1024
_LETTERS: dict[str, Any] = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32, "i": ctypes.c_int32, "f": ctypes.c_float}


class IllegalAddress(Exception):
    """A kernel touched what is no memory of its GPU."""

    cuda_error = "an illegal memory access was encountered"


@dataclass(frozen=True)
class Context:
    """A GPU's primary context; a thread without one has that of number -1."""

    index: int

    def __int__(self) -> int:
        return self.index + 1


@dataclass
class Module:
    """A loaded kernel; its name is the one it has in ``variants.py``."""

    context: Context
    name: str
    ptx: str
    is_loaded: bool = True


@dataclass
class Function:
    """A kernel of a module."""

    module: Module
    most_shared: int = _DEFAULT_SHARED


class _Attribute:
    """Names that stand for themselves."""

    def __getattr__(self, name: str) -> str:
        return name


class DriverApi:
    """The module ``cuda.bindings.driver``; every function returns its status first.

    Args:
        machine: the GPUs.
        version: of the driver, 1000 times the major and 10 times the minor number.
    """

    CUdevice_attribute = CUfunction_attribute = CUmemcpySrcAccessOrder = _Attribute()
    CUmemcpyFlags = SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1)
    CUmemcpyAttributes = SimpleNamespace
    CUstream = CUdeviceptr = int

    def __init__(self, machine: Machine, version: int = 13000) -> None:
        self._machine, self.version = machine, version
        self.calls: Counter[str] = Counter()
        self.last_launch: tuple[Any, ...] = ()
        self.launched: Counter[str] = Counter()
        self.retained: Counter[int] = Counter()
        self.modules: list[Module] = []
        self.launch_status = 0
        """What the next launches return instead of being made; 700 and above end the context."""
        self.copy_status = 0
        """What the next batches of copies return instead of being made."""

    @property
    def _context(self) -> Context:
        return Context(self._machine.device if self._machine.has_context else -1)

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return (0, index) if 0 <= index < self._machine.num_devices else (INVALID_DEVICE, 0)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int, int]:
        machine = self._machine
        for ending, value in {
            "CAPABILITY_MAJOR": machine.capability[0], "CAPABILITY_MINOR": machine.capability[1],
            "MULTIPROCESSOR_COUNT": machine.num_sms, "SHARED_MEMORY_PER_BLOCK_OPTIN": machine.shared_bytes,
        }.items():
            if attribute.endswith(ending):
                return 0, value
        return INVALID_VALUE, 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, Context]:
        self.retained[device] += 1
        return 0, Context(device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        self.retained[device] -= 1
        return (0,)

    def cuCtxSetCurrent(self, context: Context) -> tuple[int]:
        self._machine.device = context.index
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, Context]:
        return 0, self._context

    def cuCtxPushCurrent(self, context: Context) -> tuple[int]:
        self._machine.push(context.index)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, Context]:
        before = self._context
        self._machine.pop()
        return 0, before

    def cuModuleLoadData(self, image: bytes) -> tuple[int, Module | None]:
        self.calls["cuModuleLoadData"] += 1
        if not int(self._context):
            return INVALID_CONTEXT, None
        name, _, ptx = image.decode().partition("\n")
        self.modules.append(Module(self._context, name, ptx))
        return 0, self.modules[-1]

    def cuModuleUnload(self, module: Module) -> tuple[int]:
        module.is_loaded = False
        return (0,)

    def cuModuleGetFunction(self, module: Module, entry: bytes) -> tuple[int, Function | None]:
        return (0, Function(module)) if entry.decode() == module.name else (NOT_FOUND, None)

    def cuFuncSetAttribute(self, function: Function, attribute: str, value: int) -> tuple[int]:
        if value > self._machine.shared_bytes:
            return (INVALID_VALUE,)
        function.most_shared = value
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: Function, threads: int, shared: int
    ) -> tuple[int, int]:
        if not int(self._context) or function.module.context != self._context:
            return INVALID_CONTEXT, 0
        return 0, min(2048 // threads, self._machine.shared_bytes // (shared + 1024))

    def cuLaunchKernel(
        self, function: Function, x: int, y: int, z: int, bx: int, by: int, bz: int, shared: int, stream: int,
        pointers: int, extra: int,
    ) -> tuple[int]:
        machine, context, name = self._machine, self._context, function.module.name
        self.calls["cuLaunchKernel"] += 1
        if self.launch_status:
            if self.launch_status >= ILLEGAL_ADDRESS:
                machine.failure = f"CUDA error: status {self.launch_status}"
            return (self.launch_status,)
        if machine.failure is not None:
            return (ILLEGAL_ADDRESS,)
        if not int(context):
            return (INVALID_CONTEXT,)
        queue = machine.stream_of_handle(stream, context.index)
        if function.module.context != context or queue is None or not function.module.is_loaded:
            return (INVALID_HANDLE,)
        if min(x, y, z, bx, by, bz) < 1 or shared > function.most_shared:
            return (INVALID_VALUE,)
        self.launched[name] += 1
        machine.counts["kernel launches"] += 1
        # Why now: a driver has copied the parameters when the call returns.
        values = _read(pointers, parameters_of(name))
        self.last_launch = x, bx, shared, stream, *values
        order = np.random.default_rng(self.launched.total()).permutation(x).tolist()

        def run() -> None:
            memory, arrays = memory_of(machine, context.index), []
            for letter, value in zip(parameters_of(name), values, strict=True):
                arrays.append(_resolved(machine, memory, value, name) if letter == "Q" else value)
            try:
                launch(function.module.ptx, None, x, bx, arrays, dynamic_shared_bytes=shared, block_order=order,
                       check_races=False)
            except PtxFault as fault:
                raise IllegalAddress(str(fault)) from fault

        queue.enqueue(Item(run, name))
        return (0,)


    def cuMemcpyBatchAsync(
        self, destinations: list[int], sources: list[int], sizes: list[int], count: int, attributes: list[Any],
        starts: list[int], num_attributes: int, stream: int,
    ) -> tuple[int]:
        machine, context = self._machine, self._context
        self.calls["cuMemcpyBatchAsync"] += 1
        if self.copy_status or not int(context):
            return (self.copy_status or INVALID_CONTEXT,)
        queue = machine.stream_of_handle(stream, context.index)
        if queue is None or stream == 0:
            return (INVALID_HANDLE,)
        order = [one.srcAccessOrder for one in attributes]
        if starts != [0] or num_attributes != 1 or {len(destinations), len(sources), len(sizes)} != {count} or (
                order not in (["CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"], [1])):
            return (INVALID_VALUE,)
        machine.counts["batches of copies"] += 1
        memory = memory_of(machine, context.index)
        try:
            pieces = [(_resolved(machine, memory, int(to), "copy"), _resolved(machine, memory, int(of), "copy"), size)
                      for to, of, size in zip(destinations, sources, sizes, strict=True)]
        except IllegalAddress:
            return (INVALID_VALUE,)
        if any(size > min(len(to), len(of)) for to, of, size in pieces):
            return (INVALID_VALUE,)
        shuffled = np.random.default_rng(count).permutation(count).tolist()

        def run() -> None:
            for to, of, size in map(pieces.__getitem__, shuffled):
                to[:size] = of[:size]

        queue.enqueue(Item(run, "copies"))
        return (0,)


def _read(pointers: int, letters: str) -> list[Any]:
    """The parameters of a launch through its array of addresses."""
    addresses = (ctypes.c_void_p * len(letters)).from_address(pointers)
    return [_LETTERS[letter].from_address(address).value for letter, address in zip(letters, addresses, strict=True)]


def _resolved(machine: Machine, memory: Any, address: int, name: str) -> Any:
    """The bytes at an address of a GPU or of pinned memory; small numbers are no addresses but counts."""
    if address < 1 << 32:
        return address
    if (found := memory.bytes_at(address)) is not None:
        return found
    for low, high in machine.pinned:
        if low <= address < high:
            return np.ctypeslib.as_array((ctypes.c_uint8 * (high - address)).from_address(address))
    raise IllegalAddress(f"{name}: {address:#x} is no address of this GPU")

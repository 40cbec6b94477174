"""A ``libcuda.so.1`` over virtual GPUs, below the real cuda-bindings, and what is tried on it, in a process of its own.

The functions of the library are those of ``DriverApi``, called by C; kernels are the cubins that ship, and a launch
comes back to the interpreter. Run it as a program; it prints what happened as one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kernels.cuda import simulated_driver
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.errors import PagedcoreError
from pagedcore.execution.cuda_kv_pool import CudaKVPool
from pagedcore.execution.cuda_streams import EngineStream
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.cuda.build.compiler import entry_of, link
from pagedcore_kernels.cuda.build.images import KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.build.toolchain import compiler_versions
from pagedcore_kernels.layout import LayerShape, TokenMajorLayout
from virtual_gpu.driver_api import Context, DriverApi
from virtual_gpu.machine import Machine
from virtual_gpu.torch_cuda import virtual_gpus

SOURCE = Path(__file__).with_name("driver_library.c")
STATUSES = (2, 201, 209, 700, 719)
_ATTRIBUTES = {75: "CAPABILITY_MAJOR", 76: "CAPABILITY_MINOR", 16: "MULTIPROCESSOR_COUNT",
               97: "SHARED_MEMORY_PER_BLOCK_OPTIN"}
_NO_IMAGE = 200
_ADDRESS, _NUMBER = POINTER(c_void_p), POINTER(c_int)
_OUT = {_ADDRESS, _NUMBER}
_TYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,), "cuDriverGetVersion": (_NUMBER,), "cuDeviceGet": (_NUMBER, c_int),
    "cuDeviceGetAttribute": (_NUMBER, c_int, c_int), "cuDevicePrimaryCtxRetain": (_ADDRESS, c_int),
    "cuDevicePrimaryCtxRelease": (c_int,), "cuCtxGetCurrent": (_ADDRESS,), "cuCtxPushCurrent": (c_void_p,),
    "cuCtxPopCurrent": (_ADDRESS,), "cuModuleLoadData": (_ADDRESS, c_void_p), "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (_ADDRESS, c_void_p, c_char_p), "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_NUMBER, c_void_p, c_int, c_size_t),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuMemcpyBatchAsync": (*[c_void_p] * 3, c_size_t, *[c_void_p] * 2, c_size_t, c_void_p),
}
"""The types of the driver's functions, what they return by address first."""


class DriverLibrary:
    """The library of this process, over one machine after the other."""

    def __init__(self, path: Path) -> None:
        # Why global: whoever opens a library of this name then gets this one.
        self._library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.api: Any = None
        self.asked: list[str] = []
        self.cubins: dict[bytes, tuple[str, str]] = {}
        """Names and PTX of the cubins that were linked here."""
        self._objects: list[Any] = [None]
        self._functions = {name: ctypes.CFUNCTYPE(c_int, *types)(self._called(name, types))
                           for name, types in _TYPES.items()}
        self._find = ctypes.CFUNCTYPE(c_void_p, c_char_p)(self._address_of)
        self._library.find_with(self._find)

    def _address_of(self, name: bytes) -> int | None:
        function = self._functions.get(name.decode())
        return None if function is None else ctypes.cast(function, c_void_p).value

    def _called(self, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.asked.append(name)
            out, values = (given[0], given[1:]) if types[0] in _OUT else (None, given)
            status, *found = getattr(self, name, getattr(self.api, name))(*(one or 0 for one in values))
            if out is not None and not status:
                out[0] = found[0] if isinstance(found[0], int) else self._handle(found[0])
            return int(status)

        return call

    def _handle(self, thing: Any) -> int:
        """What names an object in C."""
        if isinstance(thing, Context):
            return int(thing)
        self._objects.append(thing)
        return len(self._objects) - 1

    # What C says with numbers and addresses.

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        return self.api.cuDeviceGetAttribute(_ATTRIBUTES[attribute], device)

    def cuCtxPushCurrent(self, context: int) -> Any:
        return self.api.cuCtxPushCurrent(Context(context - 1))

    def cuModuleLoadData(self, address: int) -> Any:
        for cubin, (name, ptx) in self.cubins.items():
            if ctypes.string_at(address, 64) == cubin[:64] and ctypes.string_at(address, len(cubin)) == cubin:
                return self.api.cuModuleLoadData(f"{name}\n{ptx}".encode())
        return _NO_IMAGE, None

    def cuModuleUnload(self, module: int) -> Any:
        return self.api.cuModuleUnload(self._objects[module])

    def cuModuleGetFunction(self, module: int, entry: bytes) -> Any:
        loaded = self._objects[module]
        return self.api.cuModuleGetFunction(
            loaded, loaded.name.encode() if entry.decode() == entry_of(loaded.ptx) else entry)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> Any:
        return self.api.cuFuncSetAttribute(self._objects[function], str(attribute), value)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> Any:
        return self.api.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._objects[function], threads, shared)

    def cuLaunchKernel(self, function: int, *more: Any) -> Any:
        return self.api.cuLaunchKernel(self._objects[function], *more)

    def cuMemcpyBatchAsync(self, to: int, of: int, sizes: int, count: int, attributes: int, starts: int,
                           num_attributes: int, stream: int) -> Any:
        numbers = [(c_size_t * count).from_address(one)[:] for one in (to, of, sizes)]
        order = SimpleNamespace(srcAccessOrder=c_int.from_address(attributes).value)
        firsts = (c_size_t * num_attributes).from_address(starts)[:]
        return self.api.cuMemcpyBatchAsync(*numbers, count, [order], firsts, num_attributes, stream)


@contextmanager
def gpus_below(library: DriverLibrary, version: int = 13000) -> Iterator[DriverApi]:
    """Virtual GPUs whose driver is the library; kernels are linked from PTX that other tests have compiled too."""

    @cache
    def image(name: str, arch: str) -> KernelImage:
        source, ptx = simulated_driver.compiled(name, arch)
        cubin, resources = link(ptx, arch)
        library.cubins[cubin] = name, ptx
        return KernelImage(name, arch, entry_of(ptx), source.threads, source.shared_bytes, resources.registers,
                           compiler_versions(), cubin)

    with virtual_gpus(Machine()) as machine, patch.object(KernelLibrary, "find", lambda _, *what: image(*what)):
        library.api = DriverApi(machine, version)
        yield library.api
    gc.collect()


def demo_engine() -> Engine:
    return Engine.from_pretrained("demo", device="cuda", max_num_batched_tokens=24, max_num_seqs=4, block_size=16,
                                  num_kv_blocks=40)


def answered(engine: Engine, count: int) -> list[bool]:
    """Whether the answers to so many questions are right."""
    questions = demo_questions(count, seed=5)
    outputs = engine.generate([one.prompt for one in questions], SamplingParams(max_tokens=32), show_progress=False)
    return [is_correct(question, output.outputs[0].text) for question, output in zip(questions, outputs, strict=True)]


def after_status(library: DriverLibrary, status: int) -> list[str]:
    """What a request gets whose launches return a status, and what the next one gets when they do no more."""
    with gpus_below(library) as api, demo_engine() as engine:
        said = []
        for one in (status, 0):
            api.launch_status = one
            try:
                said.append(engine.generate(["What is 2 + 3?"], show_progress=False)[0].outputs[0].finish_reason or "")
            except PagedcoreError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def moved(api: DriverApi) -> list[list[int]]:
    """The first bytes of blocks that went to the host and back, scattered, and how many calls that took."""
    pool = CudaKVPool(
        TokenMajorLayout(4, torch.bfloat16, (LayerShape(1, 16, 16),)), 6, EngineStream(torch.device("cuda", 0)))
    pool.allocate_host(6)
    pool.pool.copy_(torch.arange(6, dtype=torch.uint8)[:, None].expand_as(pool.pool))
    pool.start_swap_out(0, [(5, 0), (1, 3), (2, 4)])
    pool.start_swap_in(1, [(0, 1), (3, 0), (4, 5)])
    while len(pool.poll_transfers(wait=True)) < 2:
        pass
    return [pool.read_blocks(range(6))[:, -1].tolist(), [api.calls["cuMemcpyBatchAsync"]]]


def main(path: str, ptx_cache: str) -> None:
    """Build the library at a path, and try everything."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", path, str(SOURCE)], check=True)
    library, found = DriverLibrary(Path(path)), dict[str, Any]()
    simulated_driver.CACHE.append(Path(ptx_cache))
    with gpus_below(library) as api, demo_engine() as engine:
        found["right"], found["launched"] = answered(engine, 3), sorted(api.launched)
        found["graphs"] = api._machine.counts["graph launches"]
    with gpus_below(library) as api:
        found["moved"] = moved(api)
    found["statuses"] = {status: after_status(library, status) for status in STATUSES}
    with gpus_below(library, 12040):
        try:
            demo_engine().close()
        except PagedcoreError as error:
            found["old"] = str(error)
    found["asked"] = sorted(set(library.asked))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

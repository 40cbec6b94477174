"""The GPU, as the backend sees it: load a kernel once, launch it many times. Nothing here computes attention.

Owns the contact with the driver's API. A launch fills a parameter block that was made at load and makes one call: no
allocation on the device, no synchronisation, nothing that cannot be captured in a CUDA graph. Tests put another
``Driver`` in its place: one that records, or one that executes the compiled PTX on the CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.build.toolchain import compiler_versions, missing_compiler_parts, require_bindings
from pagedcore_kernels.cuda.build.variants import parameters_of
from pagedcore_kernels.cuda.build.wheel import installed_kernels
from pagedcore_kernels.errors import InternalError, InvalidConfig

Argument = torch.Tensor | int | float | None
"""A kernel's argument: a tensor stands for its address, ``None`` for address 0."""

_OPT_IN_ABOVE: Final = 48 * 1024
"""Dynamic shared memory beyond this has to be asked for when a kernel is loaded."""


class Driver(Protocol):
    """What the backend needs of a GPU."""

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU."""
        ...

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory that a CTA can have there."""
        ...

    def prepare(self, name: str) -> None:
        """Load a named kernel; compiling it, if need be, takes seconds."""
        ...

    def num_ctas(self, name: str) -> int:
        """Return how many CTAs of a prepared kernel the GPU runs at once."""
        ...

    def begin_step(self) -> None:
        """Note the stream that torch works on; launches until the next call go there."""
        ...

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Argument]) -> None:
        """Launch a prepared kernel on the noted stream."""
        ...


def _bindings() -> Any:
    require_bindings()
    from cuda.bindings import driver

    return driver


class ParameterBlock:
    """The arguments of one kernel in the memory that the driver reads them from.

    Invariant: the block never moves; ``pointers`` is the address of an array of the arguments' addresses.
    """

    def __init__(self, letters: str) -> None:
        self._format = struct.Struct("@" + letters)
        self._bytes = ctypes.create_string_buffer(self._format.size)
        base = ctypes.addressof(self._bytes)
        ends = [struct.calcsize("@" + letters[: i + 1]) for i in range(len(letters))]
        offsets = [end - struct.calcsize(letter) for end, letter in zip(ends, letters, strict=True)]
        self._addresses = (ctypes.c_void_p * len(letters))(*(base + offset for offset in offsets))
        self.pointers = ctypes.addressof(self._addresses)

    def fill(self, arguments: Sequence[Argument]) -> None:
        """Set all arguments; the driver copies them at the launch.

        Raises:
            InternalError: they are not what the kernel takes.
        """
        try:
            self._format.pack_into(self._bytes, 0, *[
                a.data_ptr() if isinstance(a, torch.Tensor) else 0 if a is None else a for a in arguments
            ])
        except struct.error as error:
            raise InternalError(f"CUDA launch: arguments do not fit the kernel: {error}.") from None


def why_driver_too_old(prebuilt: Path | None = None) -> str | None:
    """Return why kernels do not load on this machine's GPUs; ``None`` if they do, or cannot be asked. They are those of
    a directory, or of an installed wheel, or are compiled here.

    A driver loads what was compiled for its own major version of CUDA and for older ones.

    Raises:
        MissingDependency: cuda-bindings is not installed.
        InvalidConfig: the directory has no kernels of these sources, or is not to be trusted.
    """
    directory = prebuilt or installed_kernels()
    image = None if directory is None else ImageStore(directory).any_image()
    if image is None and prebuilt is None:
        return None if missing_compiler_parts() else _too_old(_bindings(), compiler_versions())
    if image is None:
        raise InvalidConfig(
            "cuda_kernels: got a directory without kernels of this version of pagedcore, needed is what `pagedcore "
            "kernels build --arch ... --out DIR` of the same version has written."
        )
    return _too_old(_bindings(), image.toolchain)


def _too_old(api: Any, compiled_by: dict[str, str]) -> str | None:
    made, version = compiled_by.get("nvidia-nvjitlink", ""), int(_checked(api.cuDriverGetVersion()))
    major = made.partition(".")[0]
    if not major.isdigit() or version // 1000 >= int(major):
        return None
    return (
        f"CUDA driver: this one is for CUDA {version // 1000}.{version % 1000 // 10}, allowed is {major}.0 or newer, "
        f"as kernels are compiled with CUDA {made}. Update the NVIDIA driver."
    )


class _Module:
    """A kernel in the memory of a GPU, unloaded when no driver has it any more."""

    def __init__(self, api: Any, context: Any, image: KernelImage) -> None:
        self.module = _checked(api.cuModuleLoadData(image.cubin))
        # Why not at exit: then the context is gone, and with it all modules.
        weakref.finalize(self, _unload, api, context, self.module).atexit = False
        self.function = _checked(api.cuModuleGetFunction(self.module, image.entry.encode()))
        if image.shared_bytes > _OPT_IN_ABOVE:
            limit = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(api.cuFuncSetAttribute(self.function, limit, image.shared_bytes))


def _unload(api: Any, context: Any, module: Any) -> None:
    api.cuCtxPushCurrent(context)
    api.cuModuleUnload(module)
    api.cuCtxPopCurrent()


_MODULES: weakref.WeakValueDictionary[tuple[Any, ...], _Module] = weakref.WeakValueDictionary()
"""What is loaded, by the driver's API, the GPU and the cubin."""
_LOADING: Final = threading.Lock()


class _LoadedKernel:
    """A kernel on the GPU with parameters of one driver's own; keeps its module alive."""

    __slots__ = ("block", "module", "shared_bytes", "threads")

    def __init__(self, module: _Module, image: KernelImage) -> None:
        self.module = module
        self.threads = image.threads
        self.shared_bytes = image.shared_bytes
        self.block = ParameterBlock(parameters_of(image.name))


class CudaDriver:
    """The real GPU, through cuda-bindings, in the context that torch uses.

    Invariant: the calling thread's current GPU is the same after a call as before, and no call needs one.
    Invariant: drivers of one GPU share what is loaded there, and no arguments.

    Args:
        device: a CUDA device of torch.
        library: where kernels come from.
        api: the module ``cuda.bindings.driver``, or what stands for it.
        current_stream: returns the handle of the stream that torch works on.

    Raises:
        MissingDependency: cuda-bindings is not installed.
    """

    def __init__(
        self, device: torch.device, library: KernelLibrary, api: Any = None,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self._api = api = api or _bindings()
        self.device = device
        self._library = library
        self._current_stream = current_stream or (lambda: int(torch.cuda.current_stream(device).cuda_stream))
        self._kernels: dict[str, _LoadedKernel] = {}
        _checked(api.cuInit(0))
        number = _checked(api.cuDeviceGet(device.index or 0))
        # Why: torch's context is the primary one; holding it keeps it alive.
        self._context = _checked(api.cuDevicePrimaryCtxRetain(number))
        weakref.finalize(self, api.cuDevicePrimaryCtxRelease, number).atexit = False
        what = api.CUdevice_attribute
        major, minor, self.num_sms, self.most_shared_bytes = (
            int(_checked(api.cuDeviceGetAttribute(attribute, number))) for attribute in (
                what.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                what.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                what.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                what.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        self.capability = major, minor
        self.arch = f"sm_{major}{minor}"
        self._stream: Any = api.CUstream(0)
        self._is_current = False

    def prepare(self, name: str) -> None:
        """Load a kernel; see ``Driver``.

        Raises:
            InvalidConfig: the GPU has too little shared memory for it, or its driver is older than what compiled it.
        """
        if name in self._kernels:
            return
        image = self._library.find(name, self.arch)
        if image.shared_bytes > self.most_shared_bytes:
            raise InvalidConfig(
                f"CUDA kernel {name}: it takes {image.shared_bytes} bytes of shared memory, this GPU gives a kernel "
                f"{self.most_shared_bytes}. Choose another KV dtype or attention backend."
            )
        if (reason := _too_old(self._api, image.toolchain)) is not None:
            raise InvalidConfig(f"{reason.removesuffix('.')}, or build kernels with an older compiler ({name}).")
        key = self._api, self.device.index or 0, image.entry, hashlib.sha256(image.cubin).digest()
        with _LOADING, self._in_context():
            module = _MODULES.get(key)
            if module is None:
                module = _MODULES[key] = _Module(self._api, self._context, image)
        self._kernels[name] = _LoadedKernel(module, image)

    def num_ctas(self, name: str) -> int:
        """Ask the driver, which knows registers and shared memory of both; see ``Driver``."""
        kernel = self._kernels[name]
        with self._in_context():
            of_sm = _checked(self._api.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                kernel.module.function, kernel.threads, kernel.shared_bytes))
        return self.num_sms * max(1, int(of_sm))

    def begin_step(self) -> None:
        """Note torch's current stream; see ``Driver``."""
        self._is_current = int(_checked(self._api.cuCtxGetCurrent())) == int(self._context)
        self._stream = self._api.CUstream(self._current_stream())

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Argument]) -> None:
        """Launch a prepared kernel; see ``Driver``.

        Raises:
            InternalError: the driver refused the launch, or something before it has failed; the message names both.
        """
        kernel = self._kernels[name]
        kernel.block.fill(arguments)
        if self._is_current:
            self._launch(kernel, name, num_ctas)
        else:
            with self._in_context():
                self._launch(kernel, name, num_ctas)

    def _launch(self, kernel: _LoadedKernel, name: str, num_ctas: int) -> None:
        (status,) = self._api.cuLaunchKernel(
            kernel.module.function, num_ctas, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, self._stream,
            kernel.block.pointers, 0,
        )
        if int(status) != 0:
            raise InternalError(f"CUDA kernel {name}: its launch failed with status {_named(status)}.")

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        _checked(self._api.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _checked(self._api.cuCtxPopCurrent())


def _named(status: Any) -> str:
    return f"{int(status)} ({getattr(status, 'name', 'unnamed')})"


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver's API returned besides its status."""
    if int(result[0]) != 0:
        raise InternalError(f"CUDA driver: a call failed with status {_named(result[0])}.")
    return result[1] if len(result) > 1 else None

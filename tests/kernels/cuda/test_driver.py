"""The launch path against a stub of the driver's API: what is called, in which order, and what never is."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.build.variants import COPY_NAME
from pagedcore_kernels.cuda.driver import CudaDriver, ParameterBlock

ATTRIBUTES = {"major": 9, "minor": 0, "sms": 132, "shared": 232448}


class StubApi:
    """Answers every call with success, notes its name, and at a launch reads the parameters as a GPU would."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    CUstream = staticmethod(lambda handle: ("stream", handle))

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.parameters: list[tuple[int, ...]] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name == "cuDeviceGetAttribute":
                return 0, ATTRIBUTES[arguments[0]]
            if name == "cuLaunchKernel":
                self.parameters.append(read_parameters(arguments[9]))
                return (self.status,)
            return 0, name

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def read_parameters(pointers: int) -> tuple[int, ...]:
    """The arguments of the copy kernel, four addresses and one uint32, through the array that the launch got."""
    addresses = (ctypes.c_void_p * 5).from_address(pointers)
    return (*(ctypes.c_uint64.from_address(a).value for a in addresses[:4]),
            ctypes.c_uint32.from_address(addresses[4]).value)


def image(shared_bytes: int = 0) -> KernelImage:
    return KernelImage(COPY_NAME, "sm_90", "entry", 256, shared_bytes, 32, {}, b"cubin")


def driver(tmp_path: Path, shared_bytes: int = 0) -> tuple[CudaDriver, StubApi]:
    """A driver over a stub, with one prebuilt kernel."""
    ImageStore(tmp_path).write(image(shared_bytes))
    api, streams = StubApi(), iter([7, 8, 9])
    made = CudaDriver(torch.device("cuda", 0), KernelLibrary([tmp_path], tmp_path / "none"), api, lambda: next(streams))
    return made, api


def test_a_kernel_is_loaded_once_and_before_it_is_launched(tmp_path: Path) -> None:
    """Preparing twice loads one module; nothing is loaded by a launch."""
    made, api = driver(tmp_path)
    made.prepare(COPY_NAME)
    made.prepare(COPY_NAME)
    assert api.names()[-2:] == ["cuModuleLoadData", "cuModuleGetFunction"]
    assert api.names().count("cuModuleLoadData") == 1


def test_a_launch_is_one_call(tmp_path: Path) -> None:
    """A launch calls the driver once: no allocation, no copy, no synchronisation, no module."""
    made, api = driver(tmp_path)
    made.prepare(COPY_NAME)
    made.begin_step()
    api.calls.clear()
    for _ in range(3):
        made.launch(COPY_NAME, 5, (1, 2, 3, 4, 5))
    assert api.names() == ["cuLaunchKernel"] * 3


def test_a_launch_passes_grid_threads_stream_and_arguments(tmp_path: Path) -> None:
    """What a GPU reads through the launch's pointers is what was given; tensors are their addresses, None is 0."""
    made, api = driver(tmp_path)
    made.prepare(COPY_NAME)
    made.begin_step()
    tensor = torch.zeros(4)
    made.launch(COPY_NAME, 5, (tensor, None, 2**63, 4, 2**32 - 1))
    assert api.calls[-1][1][:9] == ("cuModuleGetFunction", 5, 1, 1, 256, 1, 1, 0, ("stream", 7))
    assert api.parameters == [(tensor.data_ptr(), 0, 2**63, 4, 2**32 - 1)]


def test_the_stream_is_torchs_of_this_step(tmp_path: Path) -> None:
    """The current stream is asked for once a step, not at every launch."""
    made, api = driver(tmp_path)
    made.prepare(COPY_NAME)
    for stream in (7, 8):
        made.begin_step()
        for _ in range(2):
            made.launch(COPY_NAME, 1, (0, 0, 0, 0, 0))
            assert api.calls[-1][1][8] == ("stream", stream)


def test_large_shared_memory_is_asked_for_when_loading(tmp_path: Path) -> None:
    """Beyond 48 KiB the function's limit is raised at load, where a launch would fail without it."""
    made, api = driver(tmp_path, shared_bytes=100_000)
    made.prepare(COPY_NAME)
    assert api.calls[-1] == ("cuFuncSetAttribute", ("cuModuleGetFunction", "dynamic", 100_000))


def test_a_kernel_too_large_for_the_gpu_is_refused(tmp_path: Path) -> None:
    """More shared memory than the GPU has is an InvalidConfig with both numbers, before anything is loaded."""
    made, api = driver(tmp_path, shared_bytes=300_000)
    with pytest.raises(InvalidConfig, match=r"300000 .* 232448"):
        made.prepare(COPY_NAME)
    assert "cuModuleLoadData" not in api.names()


def test_a_failing_launch_is_an_error(tmp_path: Path) -> None:
    """A status other than success is raised with its number."""
    made, api = driver(tmp_path)
    made.prepare(COPY_NAME)
    api.status = 700
    with pytest.raises(InternalError, match="700"):
        made.launch(COPY_NAME, 1, (0, 0, 0, 0, 0))


@pytest.mark.parametrize("arguments", [(0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (-1, 0, 0, 0, 0), (0, 0, 0, 0, 2**32)])
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[int, ...]) -> None:
    """Too few, too many or too large arguments never reach a GPU."""
    with pytest.raises(InternalError, match="arguments do not fit"):
        ParameterBlock("QQQQI").fill(arguments)

"""The launch path on virtual GPUs: what is loaded, in which context, what a launch says, and what it never does."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from pagedcore.errors import InternalError, InvalidConfig
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.library import KernelLibrary
from pagedcore_kernels.cuda.driver import CudaDriver, ParameterBlock
from virtual_gpu.driver_api import DriverApi
from virtual_gpu.machine import Machine
from virtual_gpu.torch_cuda import virtual_gpus

NAME = "norm-bf16-1"
NOTHING = """.version 8.0
.target sm_80
.address_size 64
.visible .entry nothing(
    .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .s32 e, .param .s32 f, .param .f32 g) {
    ret;
}
"""


def driver(
    tmp_path: Path, api: DriverApi, shared_bytes: int = 0, index: int = 0, made_by: str = "13.0.88"
) -> CudaDriver:
    """A driver with one prebuilt kernel, which does nothing."""
    cubin = f"{NAME}\n{NOTHING}".encode()
    ImageStore(tmp_path).write(
        KernelImage(NAME, "sm_90", NAME, 256, shared_bytes, 32, {"nvidia-nvjitlink": made_by}, cubin))
    return CudaDriver(torch.device("cuda", index), KernelLibrary([tmp_path], tmp_path / "none"), api)


def test_drivers_of_a_gpu_share_what_is_loaded(tmp_path: Path) -> None:
    """A module is loaded once for each GPU, before a launch, and unloaded when nobody has it; so is the context."""
    with virtual_gpus() as gpus:
        api = DriverApi(gpus)
        made = [driver(tmp_path, api, index=index) for index in (0, 0, 1)]
        for one in made:
            one.prepare(NAME)
            one.prepare(NAME)
        assert [module.context.index for module in api.modules] == [0, 1]
        assert api.retained == {0: 2, 1: 1}
        for _ in range(3):
            made[0].launch(NAME, 5, (1, 2, 3, 4, 5, 0, 0.5))
        assert api.calls == {"cuModuleLoadData": 2, "cuLaunchKernel": 3}
        del made[0], one
        gc.collect()
        assert [module.is_loaded for module in api.modules] == [True, True]
        made.clear()
        gc.collect()
        assert [module.is_loaded for module in api.modules] == [False, False]
        assert api.retained.total() == 0


@pytest.mark.parametrize("has_context", [True, False])
def test_a_driver_works_from_any_thread_and_changes_no_current_gpu(has_context: bool, tmp_path: Path) -> None:
    """Kernels of the second GPU are loaded and launched while the first is current, and where none is."""
    with virtual_gpus() as gpus:
        api, found = DriverApi(gpus), []

        def work() -> None:
            if has_context:
                torch.ones(1, device="cuda:0")
                torch.cuda.set_device(0)
            made = driver(tmp_path, api, index=1)
            made.prepare(NAME)
            made.begin_step()
            assert made.num_ctas(NAME) == 8 * gpus.num_sms
            made.launch(NAME, 1, (0, 0, 0, 0, 0, 0, 0.0))
            found.extend([gpus.has_context, gpus.device, gpus.default_stream(1).put])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [has_context, 0, 1]


def test_a_launch_passes_grid_threads_stream_and_arguments(tmp_path: Path) -> None:
    """What a GPU reads through the launch's pointers is what was given; tensors are their addresses, None is 0. The
    stream is torch's at the beginning of the step."""
    with virtual_gpus() as gpus:
        api = DriverApi(gpus)
        made, tensor, side = driver(tmp_path, api), torch.zeros(4, device="cuda"), torch.cuda.Stream()
        made.prepare(NAME)
        with torch.cuda.stream(side):
            made.begin_step()
        made.launch(NAME, 5, (tensor, None, 2**63, 4, -1, 1, 0.5))
        assert api.last_launch == (5, 256, 0, side.cuda_stream, tensor.data_ptr(), 0, 2**63, 4, -1, 1, 0.5)
        assert side.put == 1


def test_large_shared_memory_is_asked_for_when_loading(tmp_path: Path) -> None:
    """Beyond 48 KiB the function's limit is raised at load, without which a launch fails; more than the GPU has is an
    InvalidConfig with both numbers, before anything is loaded."""
    with virtual_gpus() as gpus:
        api = DriverApi(gpus)
        made = driver(tmp_path, api, shared_bytes=100_000)
        made.prepare(NAME)
        made.launch(NAME, 1, (0, 0, 0, 0, 0, 0, 0.0))
        assert made.num_ctas(NAME) == 2 * gpus.num_sms
        with pytest.raises(InvalidConfig, match=r"300000 .* 232448"):
            driver(tmp_path, api, shared_bytes=300_000).prepare(NAME)
        assert len(api.modules) == 1


@pytest.mark.parametrize(("version", "is_allowed"), [(12080, False), (13000, True), (14020, True)])
def test_a_driver_older_than_the_compiler_is_refused(version: int, is_allowed: bool, tmp_path: Path) -> None:
    """It would refuse the cubin without saying why; newer ones load what older compilers made."""
    with virtual_gpus() as gpus:
        api = DriverApi(gpus, version)
        made = driver(tmp_path, api, made_by="13.4.92")
        if is_allowed:
            made.prepare(NAME)
        else:
            with pytest.raises(InvalidConfig, match=r"for CUDA 12\.8, allowed is 13\.0 or newer.*CUDA 13\.4\.92"):
                made.prepare(NAME)
        assert len(api.modules) == is_allowed


def test_a_failing_launch_is_an_error(tmp_path: Path) -> None:
    """A status other than success is raised with its number and the kernel's name; a kernel that touches what is not
    the GPU's shows when somebody waits."""
    with virtual_gpus(Machine()) as gpus:
        api = DriverApi(gpus)
        made = driver(tmp_path, api)
        made.prepare(NAME)
        made.launch(NAME, 1, (2**40, 0, 0, 0, 0, 0, 0.0))
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            torch.cuda.synchronize()
        with pytest.raises(InternalError, match=r"norm-bf16-1: .* 700"):
            made.launch(NAME, 1, (0, 0, 0, 0, 0, 0, 0.0))


@pytest.mark.parametrize("arguments", [(0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (-1, 0, 0, 0, 0), (0, 0, 0, 0, 2**32)])
def test_arguments_that_do_not_fit_are_refused(arguments: tuple[int, ...]) -> None:
    """Too few, too many or too large arguments never reach a GPU."""
    with pytest.raises(InternalError, match="arguments do not fit"):
        ParameterBlock("QQQQI").fill(arguments)

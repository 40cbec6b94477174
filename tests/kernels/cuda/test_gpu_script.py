"""The script for a GPU, without one: every stage on the PTX interpreter, and its calls against the driver's names."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.cuda.simulated_gpu import SimulatedGpu
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.build.variants import SAMPLE_NAME

needs_compiler = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")
ATTRIBUTES = {"major": 9, "minor": 0, "sms": 132, "shared": 232448}
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; what it adds to the path is taken back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(gpu: ModuleType, out: Path, *stages: str, make_gpu: Any = SimulatedGpu) -> tuple[int, dict[str, Any]]:
    """The script's status and what it wrote of the last stage."""
    status = gpu.main([*stages, "--here", "--small", "--out", str(out)], make_gpu)
    return status, json.loads((out / f"{stages[-1]}.json").read_text())


@needs_compiler
@pytest.mark.parametrize("stage", [
    "stress", "decode", "prefill", "gaps", pytest.param("sweeps", marks=pytest.mark.kernels),
    pytest.param("correctness", marks=pytest.mark.kernels),
])
def test_a_stage_comes_to_its_end(gpu: ModuleType, stage: str, tmp_path: Path) -> None:
    """On a GPU that computes right every stage ends, writes rows, and finds nothing wrong with results."""
    status, result = run(gpu, tmp_path, stage)
    assert (status, result["failure"], result["gpu"]) == (0, "", "simulated")
    assert result["rows"]
    if stage in ("stress", "correctness"):
        assert all(row["ok"] for row in result["rows"])
    assert f"## {stage}" in (tmp_path / "summary.md").read_text()


@needs_compiler
def test_wrong_bits_are_counted(gpu: ModuleType, tmp_path: Path) -> None:
    """A GPU that returns another bit once in a while does not pass the stress of the merge."""

    class Flaky(SimulatedGpu):
        def download(self, buffer: Any) -> Any:
            found = super().download(buffer)
            if self.num_launches == 5 and len(found) > 1000:  # the results of the second burst
                found[5] ^= 1
            return found

    _, result = run(gpu, tmp_path, "stress", make_gpu=Flaky)
    assert not result["rows"][-1]["ok"]


def test_a_fault_is_written_down_and_the_next_stage_runs(gpu: ModuleType, tmp_path: Path) -> None:
    """A stage whose GPU fails leaves the reason, with a status that says so, and the others run."""

    def no_gpu(kernels: Any) -> Any:
        raise RuntimeError("CUDA driver: status 100")

    status, result = run(gpu, tmp_path, "decode", "gaps", make_gpu=no_gpu)
    assert status == 1
    assert "status 100" in result["failure"]
    assert (tmp_path / "decode.md").is_file()


@pytest.mark.parametrize(("says", "is_clean"), [("ERROR SUMMARY: 0 errors", True), ("ERROR SUMMARY: 3 errors", False)])
def test_the_sanitizers_verdict_is_read(
    gpu: ModuleType, says: str, is_clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool's summary decides; a tool that is not there is a remark and no failure."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '========= {says}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu.stages.shutil, "which", lambda _: str(tool))
    _, result = run(gpu, tmp_path, "sanitizer")
    assert [row["ok"] for row in result["rows"] if row["tool"] == "memcheck"] == [is_clean]
    monkeypatch.setattr(gpu.stages.shutil, "which", lambda _: str(tmp_path / "none"))
    status, result = run(gpu, tmp_path, "sanitizer")
    assert (status, result["rows"]) == (0, [])
    assert "not installed" in result["notes"][0]


class HostApi:
    """Answers the driver's calls on host memory; a name that cuda-bindings does not have is an error."""

    def __init__(self) -> None:
        self.real = pytest.importorskip("cuda.bindings.driver")
        self.memory: dict[int, Any] = {}
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        if not name.startswith("cu") or isinstance(real, type):
            return real

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.called.add(name)
            answer = getattr(self, f"_{name}", lambda *_: (0, 7))(*arguments)
            return answer if isinstance(answer, tuple) else (0, answer)

        return call

    def _cuDeviceGetAttribute(self, attribute: Any, _: Any) -> int:
        names = {"CAPABILITY_MAJOR": "major", "CAPABILITY_MINOR": "minor", "MULTIPROCESSOR": "sms"}
        return ATTRIBUTES[next((key for text, key in names.items() if text in attribute.name), "shared")]

    def _cuDeviceGetName(self, length: int, _: Any) -> bytes:
        return b"stub GPU\0".ljust(length, b"\0")

    def _cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, 1, 2

    def _cuMemAlloc(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def _cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def _move(self, target: int, source: int, nbytes: int, *_: Any) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return (0,)

    _cuMemcpyHtoD = _cuMemcpyDtoH = _cuMemcpyDtoDAsync = _move

    def _cuMemsetD8Async(self, address: int, byte: int, nbytes: int, _: Any) -> tuple[int]:
        ctypes.memset(address, byte, nbytes)
        return (0,)

    def _cuLaunchKernel(self, *_: Any) -> tuple[int]:
        return (0,)

    def _cuEventElapsedTime(self, *_: Any) -> float:
        return 0.5


def test_the_gpus_calls_are_the_drivers(gpu: ModuleType, tmp_path: Path) -> None:
    """Memory, copies, events, launches and graphs use names that cuda-bindings has, and free what they took."""
    api = HostApi()
    ImageStore(tmp_path).write(KernelImage(SAMPLE_NAME, "sm_90", "entry", 256, 0, 32, {}, b"cubin"))
    device = gpu.CudaDevice([tmp_path], api)
    assert device.describe()["gpu"] == "stub GPU"
    with device.memory():
        numbers = np.arange(100, dtype=np.int32)
        buffer, other = device.upload(numbers, align_as=300), device.alloc(400)
        assert np.array_equal(device.download(buffer).view(np.int32), numbers)
        device.copy(other, buffer.at(4), 396)
        device.zero(buffer)
        assert not device.download(buffer).any()
        assert np.array_equal(device.download(other)[:396].view(np.int32), numbers[1:])
        device.prepare(SAMPLE_NAME)
        work = lambda: device.launch(SAMPLE_NAME, 1, (buffer, other, None, other, 1))  # noqa: E731
        assert device.time_ms(work, 3) == [0.5] * 3
        device.graph_of(work)()
    assert not api.memory
    assert {"cuLaunchKernel", "cuGraphLaunch", "cuStreamEndCapture", "cuEventDestroy"} <= api.called


def test_tensors_travel_with_their_surroundings(gpu: ModuleType) -> None:
    """A launch sees a tensor where it lies in its storage, and brings the whole storage back."""
    import torch

    class Doubling(SimulatedGpu):
        def launch(self, name: str, num_ctas: int, arguments: Any) -> None:
            view, again, scalar = arguments
            view.array[:4] = 2 * again.array[:4] + scalar

    whole = torch.arange(32, dtype=torch.uint8)
    driver = sys.modules["gpu_device"].HardwareDriver(Doubling([]))
    driver.launch("any", 1, (whole[8:12], whole[2:], 1))
    assert whole[8:12].tolist() == [5, 7, 9, 11]
    assert whole[:8].tolist() == list(range(8))
    assert driver.launched == [("any", 1)]


def test_unknown_stages_are_refused(gpu: ModuleType) -> None:
    """A wrong name is said before anything runs."""
    with pytest.raises(SystemExit):
        gpu.main(["decoding"], SimpleNamespace)


@needs_compiler
def test_what_the_stages_launch_can_be_built(gpu: ModuleType) -> None:
    """The names that `build` compiles are names of kernels, deeper rings among them, with more shared memory."""
    from pagedcore_kernels.cuda.build.variants import make_source

    names = gpu.stages.gate_kernels(gpu.stages.FULL)
    assert "prefill-f16-f16-16-48" in names
    name = gpu.stages.SMALL.layer.kernel("decode")
    assert name in names
    shipped = make_source(name).shared_bytes
    with gpu.stages.ring_of(4):
        assert make_source(name).shared_bytes > shipped
    assert make_source(name).shared_bytes == shipped

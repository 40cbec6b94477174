"""Engines over the real cuda-bindings, on a driver's library of our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from kernels.cuda import simulated_driver
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make a library"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``driver_library`` has tried in a process of its own, which keeps the library that it opens."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    done = subprocess.run([sys.executable, "-m", "virtual_gpu.driver_library", path, simulated_driver.CACHE[-1]],
                          stdout=subprocess.PIPE, check=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_demo_model_answers_over_real_bindings(found: dict[str, Any]) -> None:
    """Cubins, parameters and streams get through cuda-bindings as they are, in recorded steps too."""
    assert found["right"] == [True] * 3
    assert {name.partition("-")[0] for name in found["launched"]} == {
        "norm", "rotate", "decode", "prefill", "gated", "sample"}
    assert found["graphs"] > 3


def test_blocks_move_by_batches_of_copies(found: dict[str, Any]) -> None:
    """Scattered blocks go to the host and back, each way by one call of the real bindings."""
    assert found["moved"] == [[1, 5, 2, 3, 4, 2], [2]]


@pytest.mark.parametrize("status", [2, 201, 209])
def test_what_a_launch_cannot_do_ends_its_requests(status: int, found: dict[str, Any]) -> None:
    """No memory, no context, no image for this GPU: the next request, whose launches are made, is answered."""
    assert found["statuses"][str(status)] == ["error", "stop"]


@pytest.mark.parametrize(("status", "name"), [(700, "ILLEGAL_ADDRESS"), (719, "LAUNCH_FAILED")])
def test_what_no_context_survives_ends_its_engine(status: int, name: str, found: dict[str, Any]) -> None:
    """The driver's name of it is said, and what to do."""
    for said in found["statuses"][str(status)]:
        assert said.startswith("EngineClosed")
        assert f"status {status} (CUDA_ERROR_{name})" in said
        assert "restart the process" in said


def test_an_old_driver_is_refused(found: dict[str, Any]) -> None:
    """By both versions, before anything is launched."""
    assert "CUDA 12.4, allowed is 13.0" in found["old"]
    assert {"cuLaunchKernel", "cuModuleUnload", "cuOccupancyMaxActiveBlocksPerMultiprocessor"} <= set(found["asked"])

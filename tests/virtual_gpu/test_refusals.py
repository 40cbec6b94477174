"""What a GPU cannot do is refused before a model is looked for, and ``pagedcore doctor`` says it too; what was compiled
ahead is taken as it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pagedcore.cli.doctor import machine_facts
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.execution.machine import this_machine
from pagedcore_kernels.cuda.attention.backend import NumbaCudaAttention
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.layout import LayerShape, TokenMajorLayout
from support.families import tiny_model
from virtual_gpu.backends import shipped_kernels
from virtual_gpu.driver_api import DriverApi
from virtual_gpu.machine import Machine

needs_compiler = pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")


@needs_compiler
def test_a_driver_older_than_the_compiler_is_refused_before_anything_is_read(gpus: Machine) -> None:
    """The message has both versions, here and in ``doctor``; a newer driver is accepted."""
    with shipped_kernels(gpus, version=12040):
        said = r"for CUDA 12\.4, allowed is 13\.0 or newer, as kernels are compiled with CUDA 13\."
        with pytest.raises(InvalidConfig, match=said):
            Engine.from_pretrained("no such model", device="cuda")
        assert "CUDA 12.4, allowed is 13.0" in machine_facts(this_machine())['device="cuda"']
    with shipped_kernels(gpus, version=14000):
        assert machine_facts(this_machine())['device="cuda"'].startswith("available")


@needs_compiler
@pytest.mark.parametrize(("model", "settings"), [("no such model", {"dtype": "float32"}), ("llama", {})])
def test_float32_is_refused_before_anything_is_moved(model: str, settings: dict[str, Any], gpus: Machine) -> None:
    """Kernels have no such format: a model that was loaded in it stays where it is, and one by name is not loaded."""
    given = tiny_model(model) if model == "llama" else model
    with shipped_kernels(gpus), pytest.raises(InvalidConfig, match="dtype: got float32, allowed for numba-cuda are"):
        Engine.from_pretrained(given, device="cuda", **settings)
    assert gpus.counts["copies to the device"] == 0


def prebuilt(directory: Path, *names: str, made_by: str = "13.0.88") -> Path:
    """A directory of kernels that do nothing."""
    for name in names:
        image = f"{name}\n.version 8.0".encode()
        ImageStore(directory).write(
            KernelImage(name, "sm_90", name, 128, 1024, 32, {"nvidia-nvjitlink": made_by}, image))
    return directory


@pytest.mark.parametrize(("made_by", "version", "message"), [
    ("14.1.0", 13000, r"for CUDA 13\.0, allowed is 14\.0 or newer, as kernels are compiled with CUDA 14\.1\.0"),
    ("", 13000, "cuda_kernels: got a directory without kernels of this version"),
    ("13.0.88", 14000, "no directory"),
], ids=["old-driver", "empty", "fits"])
def test_kernels_that_do_not_load_are_refused_before_anything_is_read(
    made_by: str, version: int, message: str, tmp_path: Path, gpus: Machine
) -> None:
    """What a directory was compiled by decides, and not the compiler that is installed; where it fits, the model is
    looked for."""
    prebuilt(tmp_path, *["norm-bf16-1"] * bool(made_by), made_by=made_by)
    api = DriverApi(gpus, version)
    with patch("pagedcore_kernels.cuda.driver._bindings", lambda: api), pytest.raises(InvalidConfig, match=message):
        Engine.from_pretrained("no such model", device="cuda", cuda_kernels=str(tmp_path))


def test_other_attention_takes_no_kernels() -> None:
    """A setting that would mean nothing is refused."""
    with pytest.raises(InvalidConfig, match="cuda_kernels: got a directory, and attention_backend 'numba-cpu' takes"):
        Engine.from_pretrained("no such model", cuda_kernels="kernels")


def test_kernels_that_were_compiled_ahead_are_taken(
    tmp_path: Path, gpus: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the directory has, without a compiler; what it lacks is compiled, and the log says so."""
    names = ["decode-bf16-bf16-64-64", "prefill-bf16-bf16-64-64"]
    api, layout = DriverApi(gpus), TokenMajorLayout(16, torch.bfloat16, (LayerShape(1, 64, 64),))
    factory, built = NumbaCudaAttention.with_kernels(prebuilt(tmp_path / "ahead", *names)), list[str]()

    def build(name: str, arch: str) -> KernelImage:
        built.append(name)
        found = ImageStore(prebuilt(tmp_path / "late", name)).read(name, arch)
        assert found is not None
        return found

    with (
        patch("pagedcore_kernels.cuda.driver._bindings", lambda: api), caplog.at_level(logging.INFO, "pagedcore"),
        patch("pagedcore_kernels.cuda.build.library.build_image", build),
        patch("pagedcore_kernels.cuda.build.library.missing_compiler_parts", list),
        patch("pagedcore_kernels.cuda.build.library.default_cache_directory", lambda: tmp_path / "cache"),
    ):
        factory(layout, layout.allocate(2, "cuda"))
    assert sorted(module.name for module in api.modules) == [*names, "rotate-bf16-bf16-halves"]
    assert built == ["rotate-bf16-bf16-halves"]
    assert "compiling CUDA kernel rotate-bf16-bf16-halves for sm_90" in caplog.text
    assert factory.devices == ("cuda",)

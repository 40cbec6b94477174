"""What a GPU cannot do is refused before a model is looked for, and ``pagedcore doctor`` says it too."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.cli.doctor import machine_facts
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.execution.machine import this_machine
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from support.families import tiny_model
from virtual_gpu.backends import shipped_kernels
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

"""The script that measures engines on a GPU, without one: every part of it on virtual GPUs, at the smallest size."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from virtual_gpu.backends import VirtualBackends
from virtual_gpu.machine import Machine

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_engine.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, whose engines have attention for virtual GPUs; what it adds to the path is taken back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_engine_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    # Why: what modules make on a virtual GPU is of its class and cannot be copied, where hardware has torch's own.
    model_of = module.model_of
    monkeypatch.setattr(module, "model_of", lambda kind, sizes, device: model_of(kind, sizes, "cpu"))
    monkeypatch.setattr(module, "ENGINE", {
        "attention_backend": "framed", "plugins": [VirtualBackends()], "max_num_seqs": 2, "max_num_batched_tokens": 16,
        "num_kv_blocks": 40, "block_size": 16})
    return module


def run(script: ModuleType, out: Path, *parts: str, where: str = "--here") -> tuple[int, dict[str, Any]]:
    """The script's status and what it wrote."""
    status = script.main([*parts, where, "--small", "--out", str(out / "engine.json")])
    return status, json.loads((out / "engine.json").read_text())


STEPS = "steps: llama, 1 rows, fused"
QUICK = ["against transformers: llama", "same bits: (32, 64)", "GPU", STEPS,
         "steps: llama, 1 rows, modules, launched one by one", f"{STEPS}, weights in e4m3"]
OTHERS = ["demo", "against transformers: llama, weights in e4m3", f"{STEPS}, one step after the other",
          f"{STEPS}, launched one by one", "steps: llama, 1 rows, modules", "completions: llama"]
REFUSED = [f"{STEPS}, KV in int8", f"{STEPS}, KV in e4m3"]
"""What the reference does not store."""


@pytest.mark.parametrize("parts", [QUICK, pytest.param(OTHERS, marks=pytest.mark.kernels)])
def test_every_part_comes_to_its_end(script: ModuleType, gpus: Machine, parts: list[str], tmp_path: Path) -> None:
    """Each part finds something, completions are the same in every way of making them, and steps are recorded."""
    status, found = run(script, tmp_path, *parts)
    assert [name for name in parts if "failure" in found[name]] == []
    assert status == 0
    for compared in (found[name] for name in parts if name.startswith(("against", "demo"))):
        assert [value for name, value in compared.items() if name.startswith("same ")
                and value != compared["of"]] == []
    if STEPS in found:
        assert found[STEPS]["s of recording at the start"] > 0
        assert found[STEPS]["weights, ms"] > 0
    if "completions: llama" in found:
        assert {"generate, padded", "continuous batching", "engine"} <= set(found["completions: llama"])


def test_the_parts_are_these(script: ModuleType) -> None:
    """No part is left out above, and on a GPU there are the same ones, of more models."""
    assert sorted(script.parts_of(script.SMALL, "cuda")) == sorted([*QUICK, *OTHERS, *REFUSED])
    assert {name.partition(":")[0] for name in script.parts_of(script.FULL, "cuda")} == {
        "demo", "against transformers", "same bits", "GPU", "steps", "completions"}


def test_a_part_that_fails_is_written_down(script: ModuleType, gpus: Machine, tmp_path: Path) -> None:
    """What it raised is its result, the status says so, and the next part runs."""
    status, found = run(script, tmp_path, *REFUSED, "GPU")
    assert status == 1
    assert all("this attention backend does not store" in found[name]["failure"] for name in REFUSED)
    assert found["GPU"]["name"] == "virtual GPU"


def test_a_process_that_dies_or_hangs_is_written_down(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part runs in a process of its own, whose end without a result is the result."""
    ends = iter([subprocess.CompletedProcess([], -11, "", "fault"), subprocess.TimeoutExpired([], 1)])

    def end(*_: Any, **__: Any) -> Any:
        if isinstance(how := next(ends), Exception):
            raise how
        return how

    monkeypatch.setattr(script.subprocess, "run", end)
    status, found = run(script, tmp_path, "demo", "GPU", where="--device=cuda")
    assert status == 1
    assert found["demo"] == {"failure": "ended with status -11", "at": "fault"}
    assert found["GPU"] == {"failure": "not done within 300 s"}

"""What an engine's device decides, and the refusals where there is no GPU; `tests/virtual_gpu` has the whole path."""

from __future__ import annotations

import pytest
import torch

from pagedcore.engine.engine import Engine
from pagedcore.errors import DeviceUnavailable, InvalidConfig
from pagedcore.execution.devices import find_device
from pagedcore.models.decoders.plain import PlainDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.layout import TokenMajorLayout
from support.doubles import ToyBackend
from support.families import tiny_model
from virtual_gpu.backends import QueuedReference
from virtual_gpu.torch_cuda import virtual_gpus


def test_the_attention_backend_names_its_layout() -> None:
    """Pool and sums are of the layout that the backend's class names, and modules are left as they came."""
    with virtual_gpus():
        model, gpu = tiny_model("llama"), find_device("cuda")
        backend = TransformersModel(model, QueuedReference, device=gpu, runs_self_test=False)
        assert backend.free_kv_bytes() > 2**32
    assert isinstance(backend.layout(16), TokenMajorLayout)
    assert isinstance(backend._decoder, PlainDecoder)
    assert {type(module) for module in model.modules() if type(module).__name__ == "Linear"} == {torch.nn.Linear}


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA in torch, or without a GPU, the error says which, and the model is not even looked for."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailable, match=r"built without CUDA.*pagedcore\[cuda\].*pagedcore doctor"):
        Engine.from_pretrained("no such model", device="cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="finds no NVIDIA GPU"):
        Engine.from_pretrained("no such model", device="cuda:1")


def test_a_gpu_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how many GPUs there are."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceUnavailable, match="cuda:0 to cuda:1"):
        Engine.from_pretrained("no such model", device="cuda:2")


def test_device_and_attention_backend_must_fit() -> None:
    """Kernels of the CPU are never given addresses of a GPU, and the other way round."""
    with virtual_gpus(), pytest.raises(InvalidConfig, match="'numba-cpu' computes on cpu, the model on cuda"):
        Engine.from_pretrained("demo", device="cuda", attention_backend="numba-cpu")
    with virtual_gpus(), pytest.raises(InvalidConfig, match="device"):
        Engine.from_pretrained(ToyBackend(), device="cuda")


def test_kernels_for_cuda_need_a_gpu() -> None:
    """The CUDA backend on the CPU is refused by name, before weights are loaded."""
    pytest.importorskip("cuda.bindings")
    with pytest.raises(InvalidConfig, match="'numba-cuda' computes on cuda, the model on cpu"):
        Engine.from_pretrained("no such model", attention_backend="numba-cuda")

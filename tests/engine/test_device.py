"""Engines on a GPU: the whole path on a stand-in made of the CPU, and the refusals where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedcore.engine.engine import Engine
from pagedcore.errors import DeviceUnavailable, InvalidConfig
from pagedcore.execution import devices
from pagedcore.models.decoders.plain import PlainDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.layout import TokenMajorLayout
from support.device_stand_in import StandInBackends, TokenMajorReference, use_stand_in
from support.doubles import ToyBackend
from support.engine_builders import assert_all_free, run
from support.families import tiny_model
from support.generate_oracle import NUM_TOKENS, generate_alone, make_prompts

SETTINGS: dict[str, Any] = {
    "device": "cuda", "max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 12, "block_size": 4,
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4_text"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_tokens_on_a_device_are_those_of_generate(
    family: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked, in company and preempted, with blocks that arrive late from the host, tokens are ``generate``'s."""
    use_stand_in(monkeypatch)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    prompts = make_prompts()
    expected = [generate_alone(model, prompt) for prompt in prompts]
    with Engine.from_pretrained(
        model, plugins=[StandInBackends()], preemption=preemption, host_kv_memory="1MiB", **SETTINGS
    ) as engine:
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in prompts]
        run(engine)
        assert [list(request.output().outputs[0].token_ids) for request in requests] == expected
        stats = engine.stats()
        assert stats.attention_backend == "stand-in"
        assert not stats.is_schedule_invariant
        assert stats.num_preemptions > 0 or any(len(answer) < NUM_TOKENS for answer in expected)
        for _ in range(3):  # asks after the transfers that were still on their way when the last answer ended
            engine.step()
        assert_all_free(engine)


def test_the_attention_backend_names_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and sums are of the layout that the backend's class names, and modules are left as they came."""
    use_stand_in(monkeypatch)
    model = tiny_model("llama")
    backend = TransformersModel(model, TokenMajorReference, device=devices.find_device("cuda"), runs_self_test=False)
    assert isinstance(backend.layout(16), TokenMajorLayout)
    assert isinstance(backend._decoder, PlainDecoder)
    assert {type(module) for module in model.modules() if type(module).__name__ == "Linear"} == {torch.nn.Linear}
    assert backend.free_kv_bytes() == 2**30


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


def test_device_and_attention_backend_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the CPU are never given addresses of a GPU, and the other way round."""
    use_stand_in(monkeypatch)
    with pytest.raises(InvalidConfig, match="'numba-cpu' computes on cpu, the model on cuda"):
        Engine.from_pretrained("demo", device="cuda", attention_backend="numba-cpu")
    with pytest.raises(InvalidConfig, match="device"):
        Engine.from_pretrained(ToyBackend(), device="cuda")


def test_kernels_for_cuda_need_a_gpu() -> None:
    """The CUDA backend on the CPU is refused by name, before weights are loaded."""
    pytest.importorskip("cuda.bindings")
    with pytest.raises(InvalidConfig, match="'numba-cuda' computes on cuda, the model on cpu"):
        Engine.from_pretrained("no such model", attention_backend="numba-cuda")

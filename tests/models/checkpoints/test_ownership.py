"""A loaded model that an engine has taken over is the engine's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.errors import InvalidConfig, ModelNotSupported, ModelTakenOver
from support.families import config_of, tiny_model

SMALL: dict[str, Any] = {"num_kv_blocks": 8, "block_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32}
TOKENS = torch.tensor([[3, 4, 5]])


def taken_over(family: str, **settings: Any) -> tuple[Any, Engine]:
    model = tiny_model(family)
    return model, Engine.from_pretrained(model, **SMALL, **settings)


def error_of_a_request(engine: Engine) -> Exception | None:
    return engine.generate([[3, 4, 5]], SamplingParams(max_tokens=2))[0].outputs[0].error


@torch.no_grad()
def in_place(model: Any) -> None:
    model.model.norm.weight.mul_(2)


@torch.no_grad()
def by_copying(model: Any) -> None:
    model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.clone())


def by_data(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def by_an_optimizer(model: Any) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()


def by_conversion(model: Any) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "stablelm"])
@pytest.mark.parametrize("change", [in_place, by_copying, by_data, by_an_optimizer, by_conversion])
def test_changed_weights_stop_the_engine(family: str, change: Callable[[Any], None]) -> None:
    """No token is computed with weights of which some were changed and others were packed before."""
    model, engine = taken_over(family)
    with engine:
        assert error_of_a_request(engine) is None
        change(model)
        error = error_of_a_request(engine)
        assert isinstance(error, Exception)
        assert isinstance(error.__cause__, ModelTakenOver)
        assert "cannot be changed" in str(error.__cause__)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("part", ["", "model", "model.norm", "model.layers.0.self_attn.q_proj"])
def test_loading_weights_is_refused_and_changes_nothing(part: str, strict: bool) -> None:
    """Neither the model nor a part of it takes weights, those that are left least of all; the engine serves on."""
    weights = {name: tensor + 1 for name, tensor in tiny_model("llama").get_submodule(part).state_dict().items()}
    model, engine = taken_over("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with engine:
        with pytest.raises(ModelTakenOver, match="cannot be changed"):
            model.get_submodule(part).load_state_dict(weights, strict=strict)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert error_of_a_request(engine) is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("call", [
    lambda model: model(TOKENS), lambda model: model.base_model(TOKENS),
    lambda model: model.generate(TOKENS, max_new_tokens=2, pad_token_id=0),
], ids=["forward", "body", "generate"])
def test_a_direct_forward_is_refused(family: str, call: Callable[[Any], object]) -> None:
    """A call from outside of the engine says why it fails; the engine serves on."""
    model, engine = taken_over(family)
    with engine:
        with pytest.raises(ModelTakenOver, match="attention goes to the engine's KV pool"):
            call(model)
        assert error_of_a_request(engine) is None


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_second_engine_is_refused(dtype: str) -> None:
    """A model belongs to the engine that took it, also when that one is closed; the first engine is not disturbed,
    not even by a conversion of its weights."""
    model, first = taken_over("llama")
    with first:
        with pytest.raises(ModelTakenOver, match="Load the model once more, or share that engine"):
            Engine.from_pretrained(model, dtype=dtype, **SMALL)
        assert error_of_a_request(first) is None
    with pytest.raises(ModelTakenOver, match="Load the model once more, or share that engine"):
        Engine.from_pretrained(model, **SMALL)


def test_a_model_that_was_refused_unchanged_is_free() -> None:
    """A setting that is wrong takes nothing: the same model makes an engine afterwards."""
    model = tiny_model("llama")
    with pytest.raises(InvalidConfig, match="attention: 'none' is not registered"):
        Engine.from_pretrained(model, attention_backend="none", **SMALL)
    with Engine.from_pretrained(model, **SMALL) as engine:
        assert error_of_a_request(engine) is None


@pytest.mark.parametrize("loader", ["AutoModel", "AutoModelForTokenClassification"])
def test_models_without_a_language_model_head_are_refused(loader: str) -> None:
    """A body alone, or one with another head, computes no logits of tokens; the message names the class to load."""
    import transformers

    model = getattr(transformers, loader).from_config(config_of("qwen3"))
    with pytest.raises(ModelNotSupported, match=rf"'qwen3'.*{type(model).__name__} is no causal.*AutoModelForCausalLM"):
        Engine.from_pretrained(model, **SMALL)


@pytest.mark.parametrize("layers", [torch.nn.Linear, torch.nn.Embedding], ids=lambda kind: kind.__name__)
def test_models_quantized_by_torch_are_refused(layers: type[torch.nn.Module]) -> None:
    """Modules that torch has quantized are named with the reason."""
    from torch.ao.quantization import float_qparams_weight_only_qconfig, quantize_dynamic

    spec = {torch.nn.Embedding: float_qparams_weight_only_qconfig} if layers is torch.nn.Embedding else {layers}
    model = quantize_dynamic(tiny_model("qwen2"), spec)
    with pytest.raises(ModelNotSupported, match=rf"'qwen2'.*quantized in a format of another.*{layers.__name__}"):
        Engine.from_pretrained(model, **SMALL)


@pytest.mark.parametrize("weight", [
    torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False),
    type("Packed", (torch.nn.Parameter,), {})(torch.zeros(64, 64)),
], ids=["integers", "subclass"])
def test_weights_of_other_kinds_are_refused(weight: torch.nn.Parameter) -> None:
    """Integers, and tensors that compute in their own way, are not taken for plain weights."""
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.weight = weight
    with pytest.raises(ModelNotSupported, match=r"quantized in a format of another.*Linear"):
        Engine.from_pretrained(model, **SMALL)

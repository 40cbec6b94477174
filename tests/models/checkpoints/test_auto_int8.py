"""``quantization="auto-int8"``: what is chosen for planted outliers, that files keep it, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.models.checkpoints import auto_int8
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import VOCAB, tiny_model

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64,
                         "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [(7 * i) % VOCAB for i in range(40)]


def planted(family: str = "llama", **changes: Any) -> Any:
    """A model with three outliers: a channel of a norm, one of values, and a weight in each output of a layer."""
    model: Any = tiny_model(family, **SIZES, **changes)
    first, second = model.model.layers
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(len(parameter)))
        first.input_layernorm.weight[3] = 30.0
        second.self_attn.v_proj.weight[7] *= 40.0
        second.mlp.down_proj.weight[:, 11] = 1.2
    return model


def plan(model: Any) -> dict[str, str]:
    return auto_int8.choose(model)


def test_outliers_decide() -> None:
    """Rows keep their format where a channel is larger than others, and weights where one of an output is."""
    chosen = plan(planted())
    layer = "model.layers.{}.{}".format
    rows = {layer(0, f"self_attn.{name}_proj") for name in "qkv"} | {layer(1, "self_attn.o_proj")}
    assert {name for name, scheme in chosen.items() if scheme == "w8a16"} == rows
    others = {name for name, module in planted().named_modules() if type(module) is torch.nn.Linear}
    assert others - chosen.keys() == {layer(1, "mlp.down_proj")}
    assert plan(planted()) == chosen
    assert plan(planted().bfloat16()) == chosen


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3_text", "olmo2", "stablelm"])
def test_layers_of_one_product_are_alike(family: str) -> None:
    """In every family, products without outliers are w8a8."""
    model = tiny_model(family)
    names = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plan(model) == dict.fromkeys(names, "w8a8")


@torch.no_grad()
def plant_in_gpt2(model: Any) -> None:
    """A channel of a layer norm thirty times the others, one of a shift as large, and a weight in each output."""
    first, second = model.transformer.h
    first.ln_1.weight[3] = 30.0
    second.ln_2.bias[5] = 30.0
    second.mlp.c_proj.weight[11] = 9.0


@torch.no_grad()
def plant_in_experts(model: Any) -> None:
    """An output of one expert's up forty times the others, a weight in each output of another's down in the next layer,
    and a channel of the norm before the last."""
    first, second, third = model.model.layers
    first.mlp.experts.gate_up_proj[2, -1] *= 40.0
    second.mlp.experts.down_proj[1, :, 7] = 9.0
    third.post_attention_layernorm.weight[3] = 30.0


def test_gpt2_is_chosen_for() -> None:
    """Transposed matrices are chosen for one by one; a layer norm's weight and its bias both make channels large."""
    model = tiny_model("gpt2", n_embd=256, n_layer=2)
    layers = [name for name, module in model.named_modules() if type(module).__name__ in ("Conv1D", "Linear")]
    assert plan(model) == dict.fromkeys(layers, "w8a8")
    plant_in_gpt2(model)
    changed = {"transformer.h.0.attn.c_attn": "w8a16", "transformer.h.1.mlp.c_fc": "w8a16"}
    expected = {**dict.fromkeys(layers, "w8a8"), **changed}
    del expected["transformer.h.1.mlp.c_proj"]
    assert plan(model) == expected


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_of_a_layer_are_alike(family: str) -> None:
    """Gates and ups of all experts follow one choice, downs another; one expert's outlier decides for all of its layer,
    and the router is in no choice."""
    model = tiny_model(family, hidden_size=256, intermediate_size=512, moe_intermediate_size=512)
    layers = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    experts = [{f"model.layers.{n}.mlp.experts.{e}.{part}" for part in ("gate_proj", "up_proj") for e in range(4)}
               for n in range(3)]
    downs = [{f"model.layers.{n}.mlp.experts.{e}.down_proj" for e in range(4)} for n in range(3)]
    assert plan(model) == dict.fromkeys(layers.union(*experts, *downs), "w8a8")
    plant_in_experts(model)
    chosen = plan(model)
    assert {name for name, scheme in chosen.items() if scheme == "w8a16"} >= downs[0] | experts[2]
    assert {name for name, scheme in chosen.items() if scheme == "w8a8"} >= layers | experts[0] | experts[1]
    assert layers.union(*experts, *downs) - chosen.keys() == downs[1]


@pytest.mark.parametrize("family", [
    "gpt2", "gpt_oss", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_moe", "qwen3_moe")),
])
def test_the_choice_is_what_is_computed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all layers are chosen to be of one scheme, log-probabilities are those of that scheme, to the bit: matrices
    that are transposed, experts with biases and interleaved gates included."""
    model, choose = tiny_model(family), auto_int8.choose
    chosen = choose(model)
    kept = scores_of(tiny_model(family))[0]
    for scheme in ("w8a8", "w8a16"):
        everywhere = dict.fromkeys(chosen, scheme)
        monkeypatch.setattr(auto_int8, "choose", lambda model, chosen=everywhere: chosen)
        scores = scores_of(tiny_model(family), quantization="auto-int8")[0]
        assert scores == scores_of(tiny_model(family), quantization=scheme)[0]
        assert scores != kept


def scores_of(source: Any, **settings: Any) -> tuple[list[Any], Any]:
    """Log-probabilities of a prompt, and the fingerprint."""
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    with Engine.from_pretrained(source, dtype="float32", num_kv_blocks=64, num_threads=1, **settings) as engine:
        output = engine.generate([PROMPT], params, show_progress=False)[0]
        fingerprint = engine._runner.backend.fingerprint  # type: ignore[attr-defined]
    prompt = [one.logprob for one in (output.prompt_logprobs or ())[1:]]
    return [*prompt, *[one.logprob for one in output.outputs[0].logprobs or ()]], fingerprint


def test_a_choice_is_kept_in_files_and_fingerprints(tmp_path: Path) -> None:
    """A converted directory computes the same bits, its layers in groups by scheme; another choice is another model."""
    planted(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    source, out = str(tmp_path / "model"), tmp_path / "out"
    convert(source, out, quantization="auto-int8", dtype="float32")
    groups = json.loads((out / "config.json").read_text())["quantization_config"]
    assert groups["format"] == "mixed-precision"
    assert {one["format"] for one in groups["config_groups"].values()} == {"int-quantized", "pack-quantized"}
    assert groups["ignore"] == ["model.layers.1.mlp.down_proj"]
    exact, _ = scores_of(source)
    auto, chosen = scores_of(source, quantization="auto-int8")
    assert scores_of(out)[0] == auto
    assert scores_of(out, quantization="auto-int8")[0] == auto
    errors, fingerprints = {}, {chosen}
    for scheme in ("w8a8", "w8a16"):
        scores, fingerprint = scores_of(source, quantization=scheme)
        errors[scheme] = np.abs(np.subtract(scores, exact)).mean()
        fingerprints.add(fingerprint)
    assert np.abs(np.subtract(auto, exact)).mean() < 0.7 * errors["w8a8"]
    assert len(fingerprints) == 3


@pytest.mark.parametrize(("family", "router", "down"), [
    ("mixtral", "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w2"),
    ("qwen3_moe", "mlp.gate", "mlp.experts.{}.down_proj"),
])
def test_a_choice_for_experts_is_kept_in_files(family: str, router: str, down: str, tmp_path: Path) -> None:
    """A converted mixture with products of all three kinds computes the bits of the one that is quantised at load; what
    is not quantised is named as files name it."""
    model = tiny_model(family, hidden_size=256, intermediate_size=512, moe_intermediate_size=512)
    plant_in_experts(model)
    model.save_pretrained(tmp_path / "model")
    source, out = str(tmp_path / "model"), tmp_path / "out"
    convert(source, out, quantization="auto-int8", dtype="float32")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {one["format"] for one in config["config_groups"].values()} == {"int-quantized", "pack-quantized"}
    expected = {f"model.layers.{number}.{router}" for number in range(3)}
    assert {*config["ignore"]} == expected | {f"model.layers.1.{down.format(number)}" for number in range(4)}
    auto = scores_of(source, quantization="auto-int8")[0]
    assert scores_of(out)[0] == auto
    assert auto != scores_of(source, quantization="w8a8")[0]


@pytest.mark.parametrize(("family", "layer"), [
    ("llama", "mlp.down_proj"), ("mixtral", "mlp.experts.0.gate_proj"), ("mixtral", "mlp.experts.0.down_proj"),
])
def test_the_scheme_of_a_layer_counts_in_the_fingerprint(
    family: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one layer chosen otherwise, and the same weights, a session of the first choice is another model's."""
    found, chosen = [], dict.fromkeys(plan(tiny_model(family)), "w8a8")
    for scheme in ("w8a8", "w8a16"):
        other = {**chosen, f"model.layers.0.{layer}": scheme}
        monkeypatch.setattr(auto_int8, "choose", lambda model, chosen=other: chosen)
        found.append(scores_of(tiny_model(family), quantization="auto-int8")[1])
    assert found[0] != found[1]

"""``quantization="auto-int8"``: what is chosen for planted outliers, that files keep it, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.errors import ModelNotSupported
from pagedcore.models.quantization import auto_int8
from pagedcore.models.quantization.convert import convert
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
    return auto_int8.choose(model, model.get_parameter)


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


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_other_matrices_are_refused(family: str) -> None:
    """Experts, and layers that are not of torch, are named."""
    with pytest.raises(ModelNotSupported, match="chooses for these only"):
        Engine.from_pretrained(tiny_model(family), quantization="auto-int8", num_kv_blocks=16)


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


def test_the_scheme_of_a_layer_counts_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer chosen otherwise, and the same weights, a session of the first choice is another model's."""
    found = []
    for scheme in ("w8a8", "w8a16"):
        choose = {"model.layers.0.mlp.down_proj": scheme}
        monkeypatch.setattr(auto_int8, "choose", lambda model, read, choose=choose: choose)
        found.append(scores_of(tiny_model("llama"), quantization="auto-int8")[1])
    assert found[0] != found[1]

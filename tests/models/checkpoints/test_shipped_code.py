"""Directories that name code of their own: transformers' class runs them where it is shown to be theirs."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.errors import ModelNotSupported, PagedcoreError
from pagedcore.models.checkpoints.pretrained import load_pretrained
from pagedcore.models.diagnosis import diagnose
from support.families import tiny_model
from support.generate_oracle import NUM_TOKENS, generate_alone, make_prompts
from support.quantized_checkpoints import change_config, change_tensors, write_checkpoint
from support.wrappers import PROMPTS, generated, randomise, tiny_wrapper

AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def name_code(directory: Path, **changes: Any) -> Path:
    """Make a saved model one that ships code, which ends the process if it runs."""
    (directory / "evil.py").write_text("raise SystemExit('this ran')")
    change_config(directory, auto_map=AUTO_MAP, **changes)
    return directory


def save(directory: Path, family: str = "llama", **changes: Any) -> Any:
    model = randomise(tiny_model(family, **changes))
    model.save_pretrained(directory)
    name_code(directory)
    return model


def tokens_of(directory: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    with Engine.from_pretrained(directory, dtype="float32", max_num_batched_tokens=48) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=num_tokens))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("family", "is_quick"), [
    ("llama", True), ("helium", False), ("mixtral", True), ("deepseek_v3", False),
])
def test_transformers_own_class_runs_a_model_that_ships_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, is_quick: bool
) -> None:
    """Where all tensors fit the class that the configuration names, tokens are those of that class, and one line says
    so."""
    model = save(tmp_path, family)
    facts = diagnose(tmp_path)
    assert "does not run" in facts["code"]
    assert facts["files"].startswith("read without transformers") == is_quick
    with caplog.at_level(logging.INFO, "pagedcore"):
        found = tokens_of(tmp_path, make_prompts())
    assert sum("auto_map" in message for message in caplog.messages) == 1
    assert found == [generate_alone(model, prompt) for prompt in make_prompts()]


def test_tensors_that_no_class_computes_with(tmp_path: Path) -> None:
    """Angles that older files have, and layers that predict tokens further on, are no tensors of another class."""
    model = save(tmp_path)
    name_code(tmp_path, num_nextn_predict_layers=1)
    more = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "layers.3.eh_proj.weight": torch.ones(64, 128)}
    change_tensors(tmp_path, {f"model.{name}": tensor for name, tensor in more.items()})
    assert tokens_of(tmp_path, make_prompts()) == [generate_alone(model, prompt) for prompt in make_prompts()]


def test_a_language_model_in_a_wrapper_that_ships_code(tmp_path: Path) -> None:
    """The wrapper's class is the one that the configuration names; the language model's tensors are compared."""
    model = tiny_wrapper("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    expected = generated(model)
    assert tokens_of(name_code(tmp_path), PROMPTS, 12) == expected
    change_tensors(tmp_path, {"model.language_model.layers.0.self_attn.gate.weight": torch.ones(4, 64)})
    with pytest.raises(ModelNotSupported, match=r"model\.layers\.0\.self_attn\.gate\.weight of shape \[4, 64\]"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(("family", "kind"), [
    ("mixtral", "ct-w4a16"), ("llama", "ct-w8a8"), ("llama", "gptq"), ("llama", "bnb-nf4-nested"),
])
def test_a_quantised_model_that_ships_code(tmp_path: Path, family: str, kind: str) -> None:
    """Layers of every format are tensors of the class, and one layer more, or a norm, is not."""
    write_checkpoint(tmp_path / "plain", kind, family)
    shutil.copytree(tmp_path / "plain", tmp_path / "code")
    name_code(tmp_path / "code")
    assert tokens_of(tmp_path / "code", make_prompts()) == tokens_of(tmp_path / "plain", make_prompts())
    change_tensors(tmp_path / "code", {"model.layers.1.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(ModelNotSupported, match=r"q_norm.weight of shape \[16\].*none of that name"):
        Engine.from_pretrained(tmp_path / "code")


@pytest.mark.parametrize("changes", [
    {"model.layers.2.self_attn.q_norm.weight": torch.ones(16)},
    {"model.layers.2.self_attn.q_proj.bias": torch.ones(64)},
    {"model.layers.2.mlp.experts.0.gate_proj.weight": torch.ones(96, 64)},
    {"model.layers.3.mlp.up_proj.weight": torch.ones(96, 64)},
    {"model.norm.weight": torch.ones(32)},
], ids=lambda changes: next(iter(changes)))
@pytest.mark.parametrize("family", ["llama", "helium"])
def test_a_tensor_that_does_not_fit_is_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Code of the model's own may compute with it; the message names it and what the class has."""
    save(tmp_path, family)
    change_tensors(tmp_path, changes)
    (name, tensor), = changes.items()
    for look in (load_pretrained, Engine.from_pretrained, diagnose):
        with pytest.raises(ModelNotSupported, match="auto_map") as caught:
            look(tmp_path)
        assert f"{name} of shape {list(tensor.shape)}" in str(caught.value)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("changes", [
    {"model_type": "x"}, {"architectures": ["EvilForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]},
    {"architectures": None}, {"architectures": "LlamaForCausalLM"}, {"model_type": ["llama"]},
    {"architectures": ["LlamaForCausalLM", "EvilForCausalLM"]}, {"num_hidden_layers": 10**6},
    {"architectures": ["LlamaForSequenceClassification"]}, {"text_config": {"auto_map": AUTO_MAP}},
], ids=str)
def test_code_for_an_architecture_of_its_own_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Without trust the class has to be transformers' own, for that architecture; nothing of the model is run."""
    save(tmp_path)
    change_config(tmp_path, **changes)
    for look in (load_pretrained, diagnose):
        with pytest.raises(PagedcoreError):
            look(tmp_path)


def test_code_that_is_trusted_runs(tmp_path: Path) -> None:
    """With trust it is the model's own code that runs, whatever fits."""
    save(tmp_path)
    for is_quick in (False, True):
        with pytest.raises(BaseException, match="this ran"):
            load_pretrained(tmp_path, trust_remote_code=True, is_quick=is_quick)


def test_a_converted_model_ships_no_code(tmp_path: Path) -> None:
    """The class that was shown to fit is the one that the new directory is for; of others nothing is written."""
    save(tmp_path / "old")
    convert(str(tmp_path / "old"), tmp_path / "new", quantization="w8a8", dtype="float32")
    assert "auto_map" not in json.loads((tmp_path / "new" / "config.json").read_text())
    with Engine.from_pretrained(tmp_path / "old", dtype="float32", quantization="w8a8") as engine:
        expected = engine.generate(make_prompts(), SamplingParams(max_tokens=8))
    with Engine.from_pretrained(tmp_path / "new", dtype="float32") as engine:
        found = engine.generate(make_prompts(), SamplingParams(max_tokens=8))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    change_tensors(tmp_path / "old", {"model.layers.0.extra": torch.ones(3)})
    with pytest.raises(ModelNotSupported, match=r"model\.layers\.0\.extra"):
        convert(str(tmp_path / "old"), tmp_path / "other", quantization="w8a8", dtype="float32")
    assert not (tmp_path / "other").exists()

"""Models of text and images as models of text: the language model in them, with whatever is beside it left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.cli.doctor import diagnosis
from pagedcore.cli.size import size_model
from pagedcore.convert.conversion import convert
from pagedcore.convert.packing import pack
from pagedcore.errors import InvalidConfig, InvalidToken, ModelNotSupported, ModelTakenOver, PagedcoreError
from pagedcore.models.checkpoints.pretrained import load_pretrained
from pagedcore.models.checkpoints.quick_start import why_not_quick
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import VOCAB
from support.quantized_checkpoints import change_config, change_tensors
from support.wrappers import PROMPTS, WRAPPERS, generated, tiny_wrapper, write_gemma3n

needs_products = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")

QUICK = {"gemma3", "got_ocr2", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "mllama",
         "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "vipllava"}  # fmt: skip
FAST = {"gemma3", "llama4", "mistral3", "qwen2_5_vl"}


def tokens_of(model: Any, **settings: Any) -> list[list[int]]:
    settings = {"dtype": "float32", **settings}
    with Engine.from_pretrained(model, max_num_batched_tokens=48, num_kv_blocks=64, **settings) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
    return [list(output.outputs[0].token_ids) for output in outputs]


def saved(directory: Path, kind: str, **changes: Any) -> Any:
    model = tiny_wrapper(kind, **changes)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in WRAPPERS
])
def test_a_wrapper_generates_what_its_own_class_does(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From its directory, by transformers too, and loaded; whether the output layer is the embedding, the wrapper's
    configuration says."""
    caplog.set_level(logging.INFO, "pagedcore")
    for is_tied in ([True] if kind.startswith("gemma") else [True, False]):
        directory = tmp_path / str(is_tied)
        expected = generated(model := saved(directory, kind, tie_word_embeddings=is_tied))
        assert tokens_of(directory) == expected
        assert [kind in one.message and "model of text" in one.message for one in caplog.records].count(True) == 1
        assert (why_not_quick(directory) == "") == (kind in QUICK)
        slow, quick = (load_pretrained(directory, dtype="float32", is_quick=one).state_dict() for one in (False, True))
        assert slow.keys() == quick.keys()
        assert all(torch.equal(slow[name], quick[name]) for name in slow)
        assert tokens_of(model, dtype="auto") == expected
        caplog.clear()


def test_gemma_3n_runs_without_its_towers(tmp_path: Path) -> None:
    """Its image tower needs a library that is not here, and nothing of it is looked at."""
    expected = generated(write_gemma3n(tmp_path))
    assert tokens_of(tmp_path) == expected


def test_an_old_configuration_says_all_in_one_place(tmp_path: Path) -> None:
    """Qwen2.5-VL as it was published has no text_config, and a rotary embedding of type mrope."""
    expected = generated(saved(tmp_path, "qwen2_5_vl", tie_word_embeddings=True))
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "model_type": "qwen2_5_vl", "dtype": "float32",
             "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    assert tokens_of(tmp_path) == expected


def test_tensors_of_other_parts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may even be of a format that cannot be computed with."""
    saved(tmp_path, "qwen3_vl")
    change_tensors(tmp_path, {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(3, dtype=torch.int8)})
    read: list[str] = []

    class Watched:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._file = safe_open(*arguments, **settings)

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, name: str) -> Any:
            read.append(name)
            return self._file.get_slice(name)

    monkeypatch.setattr("safetensors.safe_open", Watched)
    load_pretrained(tmp_path, dtype="float32")
    assert read
    assert not [name for name in read if "visual" in name]
    assert not [name for name in TensorFiles(tmp_path).unread() if "visual" in name]


def experts_turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the published files have them: what a row is multiplied with from the right."""
    return {name: one.mT.contiguous() if ".mlp.experts." in name else one for name, one in tensors.items()}


def experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As quantised files have them: each expert's layers."""
    found = {}
    for name, one in tensors.items():
        module, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        for number, expert in enumerate(one) if parts else ():
            for part, layer in zip(parts or (), expert.chunk(len(parts or ())), strict=True):
                found[f"{module}.{number}.{part}.weight"] = layer.clone()
        if not parts:
            found[name] = one
    return found


@pytest.mark.parametrize("inner", [32, 64])
def test_experts_of_a_layer_lie_either_way_round(inner: int, tmp_path: Path) -> None:
    """The inner sizes make one of a layer's two tensors of the same shape both ways; shares of experts sum to one
    whatever the configuration says, also where the files are read without transformers."""
    text = WRAPPERS["qwen3_vl_moe"]["text_config"] | {"moe_intermediate_size": inner, "norm_topk_prob": False}
    expected = generated(saved(tmp_path, "qwen3_vl_moe", text_config=text, tie_word_embeddings=True))
    own = load_file(tmp_path / "model.safetensors")
    for written, is_quick in ((own, False), (experts_turned(own), False), (experts_apart(own), True)):
        save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
        assert tokens_of(tmp_path) == expected
        assert (why_not_quick(tmp_path) == "") == is_quick


@needs_products
def test_experts_of_a_layer_are_converted_expert_by_expert(tmp_path: Path) -> None:
    """Whichever way round they lie; a quantised model has the same bits."""
    saved(tmp_path / "whole", "qwen3_vl_moe", tie_word_embeddings=False)
    expected = tokens_of(tmp_path / "whole", quantization="w4a16")
    file = tmp_path / "whole" / "model.safetensors"
    save_file(experts_turned(load_file(file)), file, {"format": "pt"})
    convert(str(tmp_path / "whole"), tmp_path / "out", quantization="w4a16", dtype="float32")
    assert tokens_of(tmp_path / "out") == expected == tokens_of(tmp_path / "whole", quantization="w4a16")


@pytest.mark.parametrize(("gate_up", "down", "reason"), [
    ((4, 96, 64), (4, 48, 64), "do not fit each other"),
    ((4, 64, 64), None, "needed are both"),
    ((4, 64, 64), (3, 32, 64), "do not fit each other"),
    ((5000, 2, 2), (5000, 1, 2), "5000 experts, allowed are 4096"),
    ((4, 0, 64), (4, 64, 0), "do not fit each other"),
])
def test_experts_of_other_shapes_are_refused(
    gate_up: tuple[int, ...], down: tuple[int, ...] | None, reason: str, tmp_path: Path
) -> None:
    """One of each way round, one alone, different numbers, too many, and nothing at all."""
    saved(tmp_path, "qwen3_vl_moe")
    experts = "model.language_model.layers.1.mlp.experts"
    change_tensors(tmp_path, {
        f"{experts}.gate_up_proj": torch.zeros(gate_up),
        f"{experts}.down_proj": None if down is None else torch.zeros(down),
    })
    with pytest.raises(ModelNotSupported, match=reason):
        Engine.from_pretrained(tmp_path, dtype="float32")


def test_logits_of_cohere_are_scaled_as_in_its_own_class(tmp_path: Path) -> None:
    """The wrapper in transformers leaves the scale out, which temperatures and log-probabilities would feel."""
    model = saved(tmp_path, "aya_vision")
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[2]])).logits[0, -1] * 0.25).log_softmax(-1).max()
    with Engine.from_pretrained(tmp_path, dtype="float32", num_kv_blocks=8) as engine:
        found = engine.generate([PROMPTS[2]], SamplingParams(max_tokens=1, temperature=0, logprobs=1))[0].outputs[0]
    assert found.logprobs is not None
    assert found.logprobs[0].logprob == pytest.approx(float(expected), abs=1e-5)


@needs_products
@pytest.mark.parametrize("kind", ["mistral3", "llama4"])
def test_a_wrapper_is_quantised_and_converted(kind: str, tmp_path: Path) -> None:
    """A converted directory is that of the language model alone, and computes what quantising at load does."""
    saved(tmp_path / "whole", kind, tie_word_embeddings=False)
    if kind == "llama4":
        with pytest.raises(ModelNotSupported, match="not converted"):
            convert(str(tmp_path / "whole"), tmp_path / "out", quantization="w4a16", dtype="float32")
        return
    convert(str(tmp_path / "whole"), tmp_path / "out", quantization="w4a16", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert "_part_of" not in config
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "whole", quantization="w4a16")


@needs_products
def test_layers_for_images_are_left_out(tmp_path: Path) -> None:
    """However it is stored, Mllama is a Llama that has the other layers only. A token for images is none of the
    vocabulary, and where the configuration does not say which layers these are, its class does."""
    text = WRAPPERS["mllama"]["text_config"] | {"num_hidden_layers": 5, "cross_attention_layers": [3, 8]}
    expected = generated(model := saved(tmp_path / "whole", "mllama", text_config=text))
    tensors = {}
    for name, one in load_file(tmp_path / "whole" / "model.safetensors").items():
        own = name.removeprefix("language_model.").replace("layers.4.", "layers.3.")
        if name.startswith("language_model.") and "layers.3." not in name:
            tensors[own] = one[:VOCAB].clone() if "embed" in own else one
    (tmp_path / "llama").mkdir()
    save_file(tensors, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    config = {**text, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4,
              "rope_theta": 5e5, "rms_norm_eps": 1e-5}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    assert tokens_of(tmp_path / "llama") == expected == tokens_of(tmp_path / "whole")
    for scheme in ("w8a8", "w4a16"):
        quantised = tokens_of(tmp_path / "llama", quantization=scheme)
        assert tokens_of(tmp_path / "whole", quantization=scheme) == quantised
    convert(str(tmp_path / "whole"), tmp_path / "out", quantization="w4a16", dtype="float32")
    assert tokens_of(tmp_path / "out") == quantised
    change_config(tmp_path / "whole", text_config={**text, "model_type": "mllama_text_model",
                                                   "cross_attention_layers": None})
    pack(str(tmp_path / "whole"), None, create_plugin_manager().registry.load, dtype="float32")
    (tmp_path / "whole" / "model.safetensors").unlink()
    with Engine.from_pretrained(tmp_path / "whole", dtype="float32", num_kv_blocks=8) as engine:
        output = engine.generate([PROMPTS[2]], SamplingParams(max_tokens=12, temperature=0))[0]
        assert list(output.outputs[0].token_ids) == expected[2]
        with pytest.raises(InvalidToken, match="198"):
            engine.generate([[5, VOCAB]], SamplingParams(max_tokens=1))
    assert tokens_of(model, dtype="auto") == expected


def test_size_and_doctor_are_about_the_language_model(tmp_path: Path) -> None:
    """Neither counts or asks for the other parts."""
    model = saved(tmp_path, "qwen2_5_vl", tie_word_embeddings=True)
    expected = sum(parameter.numel() for parameter in model.model.language_model.parameters())
    assert size_model(tmp_path).num_parameters == expected
    facts = diagnosis(str(tmp_path))
    assert facts["runs here"] == "yes"
    assert facts["architecture"] == "qwen2, the language model in qwen2_5_vl; images and audio are left out"
    assert facts["files"] == "read without transformers"


def test_a_loaded_wrapper_is_taken_over_with_its_language_model() -> None:
    """They share parameters, so that the engine has both."""
    model = tiny_wrapper("llava")
    with Engine.from_pretrained(model, num_kv_blocks=8) as engine:
        with pytest.raises(ModelTakenOver):
            Engine.from_pretrained(model)
        with pytest.raises(ModelTakenOver, match="cannot be changed"):
            model.load_state_dict(model.state_dict())
        assert engine.generate([[3, 4]], SamplingParams(max_tokens=2))[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("kind", "changes", "error", "reason"), [
    ("llava", {"text_config": {"model_type": "cohere2"}}, ModelNotSupported, "'cohere2', allowed are llama"),
    ("llava", {"model_type": "paligemma"}, ModelNotSupported, "'paligemma'.*none of those whose language model"),
    ("llava", {"text_config": "text"}, PagedcoreError, "model"),
    ("llava", {"text_config": None, "model_type": ["llava"]}, PagedcoreError, "model"),
    ("llava", {"text_config": {"model_type": "llama", "num_hidden_layers": 10**9}}, PagedcoreError, "model"),
])
def test_what_cannot_run_says_why(
    kind: str, changes: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    """A wrapper of another kind, another language model in it, and a damaged configuration."""
    saved(tmp_path, kind)
    change_config(tmp_path, **changes)
    with pytest.raises(error, match=reason):
        Engine.from_pretrained(tmp_path)


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path: Path) -> None:
    """What is left out is not missed, what is needed is."""
    saved(tmp_path, "llava")
    change_tensors(tmp_path, {"language_model.model.norm.weight": None})
    with pytest.raises(InvalidConfig, match=r"1 weights are missing from its files, model.norm.weight"):
        Engine.from_pretrained(tmp_path)

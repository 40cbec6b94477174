"""Quantised checkpoints whose modules are built without transformers: the same bits as with its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore.convert.conversion import convert
from pagedcore.errors import ModelNotSupported, PagedcoreError
from pagedcore.models.checkpoints import quick_start
from pagedcore.models.checkpoints.quantized import load_stored, stored_format, why_not_quick
from pagedcore.models.diagnosis import diagnose
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.fingerprint import model_fingerprint
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import tiny_model
from support.quantized_checkpoints import KINDS, change_config, write_checkpoint
from support.scores import scores_of

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
#: Of the dense families, what each has of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "eos_token_id": [2, 5]}, "mistral": {},
    "qwen2": {"use_sliding_window": False}, "qwen3": {"use_sliding_window": False}, "phi3": {},
    "granite": {"attention_bias": True}, "smollm3": {}, "olmo2": {}, "olmo3": {}, "gemma2": {},
    "gemma3_text": {"final_logit_softcapping": 20.0},
}


def load(directory: Path, is_quick: bool) -> Any:
    stored = stored_format(str(directory))
    assert stored is not None
    model = load_stored(str(directory), stored, torch.float32, trust_remote_code=False, is_quick=is_quick)
    assert isinstance(model, ForCausalLM) is is_quick
    return model, model_fingerprint(model, stored.scheme)


def require_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprint, special tokens and log-probabilities are those of the modules of transformers."""
    (quick, quick_print), (general, general_print) = load(directory, True), load(directory, False)
    assert quick_print == general_print
    assert quick.generation_config.eos_token_id == general.generation_config.eos_token_id
    scores = scores_of(directory, must_fuse=True)
    monkeypatch.setattr(quick_start, "FAMILIES", {})
    assert np.array_equal(scores, scores_of(directory, must_fuse=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_computes_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats of others, by layers that files hold quantised and some that they hold as numbers."""
    write_checkpoint(tmp_path, kind)
    require_same(tmp_path, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, norms, soft caps, multipliers and windows are those of the architecture, in what ``convert`` writes."""
    tiny_model(family, **FAMILIES[family]).save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", dtype="float32")
    require_same(tmp_path / "out", monkeypatch)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a16", "auto-int8"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_scheme_computes_the_same(
    scheme: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an int8 embedding of its own, and with one that the output layer shares."""
    tiny_model("llama", tie_word_embeddings=is_tied).save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization=scheme, dtype="float32")
    require_same(tmp_path / "out", monkeypatch)


def test_a_converted_model_starts_without_transformers(tmp_path: Path) -> None:
    """Neither it nor what its models bring is imported, and doctor says so."""
    convert("demo", tmp_path / "out", quantization="w8a8")
    code = """
import sys
from pagedcore import Engine, SamplingParams
with Engine.from_pretrained(sys.argv[1], num_kv_blocks=64) as engine:
    print(engine.generate(["What is 2 + 3?"], SamplingParams(max_tokens=16))[0].outputs[0].text)
print(sorted({"transformers", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)))
"""
    line = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.stdout.split("\n")[-2] == "[]"
    assert "5" in done.stdout
    found = diagnose(tmp_path / "out")
    assert (found["files"], found["decoder"]) == ("read without transformers", "fused kernels")


@pytest.mark.parametrize(("family", "changes", "why"), [
    ("mixtral", {}, "it is a quantised mixture of experts"),
    ("llama", {"num_hidden_layers": 10**6}, "its files lack tensors"),
    ("llama", {"an_unknown_field": 1}, "an_unknown_field in its configuration is not known to be harmless"),
])
def test_others_are_left_to_transformers(family: str, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Nothing of the size that a configuration claims is made."""
    write_checkpoint(tmp_path, "ct-w8a8", family)
    change_config(tmp_path, **changes)
    stored = stored_format(str(tmp_path))
    assert stored is not None
    assert why_not_quick(str(tmp_path), stored) == why


@pytest.mark.parametrize("is_quantised", [False, True])
def test_more_layers_than_tensors_are_refused(is_quantised: bool, tmp_path: Path) -> None:
    """By the general path too, which would make as many modules."""
    if is_quantised:
        write_checkpoint(tmp_path, "ct-w8a8", "granite")
    else:
        tiny_model("granite").save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=10**9)
    with pytest.raises(ModelNotSupported, match=r"num_hidden_layers is 1000000000, and its files have \d+ tensors"):
        scores_of(tmp_path)


def test_damaged_files_are_left_to_transformers(tmp_path: Path) -> None:
    """Which says what is wrong with them."""
    write_checkpoint(tmp_path, "ct-w8a8")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    stored = stored_format(str(tmp_path))
    assert stored is not None
    assert why_not_quick(str(tmp_path), stored).startswith("its weights could not be read (")


def outcome(directory: Path) -> Any:
    """Return the scores of a model, or what it is refused with."""
    try:
        return scores_of(directory)
    except PagedcoreError as error:
        return repr(error)


@pytest.mark.parametrize("changes", [
    {"embedding_quantization": 5}, {"embedding_quantization": ["x"]}, {"embedding_quantization": "lm_head"},
    {"embedding_quantization": "int8"}, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}, {"vocab_size": 7},
    {"head_dim": 3}, {"eos_token_id": "x"}, {"num_hidden_layers": 10**9}, {"rms_norm_eps": -1}, {"rope_theta": 0},
], ids=str)
def test_odd_configurations_end_alike(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same scores or in the same refusal, whoever builds the modules."""
    write_checkpoint(tmp_path, "gptq", "qwen2")
    change_config(tmp_path, **changes)
    quick = outcome(tmp_path)
    monkeypatch.setattr(quick_start, "FAMILIES", {})
    assert np.array_equal(quick, outcome(tmp_path))


@pytest.mark.parametrize("change", ["gone", "of integers", "of another shape", "in float16", "in float64"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_odd_tensors_end_alike(
    name: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm and a bias that are not what the architecture has."""
    write_checkpoint(tmp_path, "gptq", "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(name)
    kinds = {"of integers": tensor.long(), "of another shape": torch.ones(7), "in float16": tensor.half(),
             "in float64": tensor.double()}
    others = {} if change == "gone" else {name: kinds[change]}
    save_file({**tensors, **others}, tmp_path / "model.safetensors", {"format": "pt"})
    quick = outcome(tmp_path)
    monkeypatch.setattr(quick_start, "FAMILIES", {})
    assert np.array_equal(quick, outcome(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": [1, "x"]}'])
def test_odd_generation_settings_end_alike(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused with a typed error."""
    write_checkpoint(tmp_path, "gptq", "qwen2")
    (tmp_path / "generation_config.json").write_text(text)
    quick = outcome(tmp_path)
    assert isinstance(quick, str)
    monkeypatch.setattr(quick_start, "FAMILIES", {})
    assert quick == outcome(tmp_path)

"""Experts in MXFP4 as gpt-oss is published, against NumPy's reading of the format and transformers' of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore_kernels.cpu.matmul.packed_grouped import form_of_grouped_product
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import change_config, change_tensors
from support.scores import scores_of, scores_of_transformers

pytestmark = pytest.mark.skipif(form_of_grouped_product(torch.float32) is None, reason="no such vectors")
#: OCP "Microscaling Formats", E2M1: a sign, two bits of an exponent with a bias of 1, and one of a mantissa.
E2M1 = np.array([sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FIRST = "model.layers.0.mlp.experts.gate_up_proj"


def write_mxfp4(directory: Path) -> Any:
    """Write a tiny gpt-oss with random parameters and packed experts; return transformers' model of these numbers."""
    generator, model = np.random.default_rng(7), tiny_model("gpt_oss", hidden_size=64, intermediate_size=96)
    for parameter in model.parameters():
        if parameter.ndim <= 2:
            parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [one for one in tensors if one.endswith((".gate_up_proj", ".down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        values = generator.integers(0, 16, (num_experts, num_outputs, num_inputs // 32, 32)).astype(np.uint8)
        exponents = generator.integers(119, 126, values.shape[:3]).astype(np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(values[..., ::2] | values[..., 1::2] << 4)
        tensors[f"{name}_scales"] = torch.from_numpy(exponents)
        numbers = E2M1[values] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        matrices = torch.from_numpy(numbers.reshape(num_experts, num_outputs, num_inputs))
        model.get_parameter(name).data = matrices.transpose(1, 2).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, quantization_config=CONFIG)
    return model.float().eval()


def test_packed_experts_compute_the_numbers_of_the_format(tmp_path: Path) -> None:
    """Every expert's weight is NumPy's to the last bit, and so are log-probabilities to float32's rounding."""
    model = write_mxfp4(tmp_path)
    stored = stored_format(str(tmp_path))
    assert stored is not None
    experts = load_stored(str(tmp_path), stored, torch.float32, trust_remote_code=False).model.layers[1].mlp.experts
    wanted = model.model.layers[1].mlp.experts
    for kind in ("gate_up_proj", "down_proj"):
        read = torch.stack([one.read().numbers() for one in getattr(experts, kind)])
        assert torch.equal(read, getattr(wanted, kind).transpose(1, 2))
    assert np.abs(scores_of(tmp_path) - scores_of_transformers(model)).max() < 2e-3


def test_a_directory_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """transformers decodes the same files by itself; greedy completions are its own."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    write_mxfp4(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True))
    prompt = [(5 * place + 3) % VOCAB for place in range(9)]
    wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with Engine.from_pretrained(tmp_path, dtype="float32", num_kv_blocks=64, num_threads=1) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (output,) = engine.generate([prompt], params, show_progress=False)
    assert list(output.outputs[0].token_ids) == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("changes", "found"), [
    ({f"{FIRST}_scales": torch.full((4, 192, 2), 255, dtype=torch.uint8)}, "above 252"),
    ({f"{FIRST}_scales": None}, "scales is missing"),
    ({f"{FIRST}_blocks": torch.zeros(3, 192, 2, 16, dtype=torch.uint8)}, r"blocks is U8 of shape \[3, 192, 2, 16\]"),
    ({f"{FIRST}_bias": None}, "bias is missing"),
])
def test_files_that_are_not_the_format_are_refused(changes: Any, found: str, tmp_path: Path) -> None:
    """A scale without a finite weight, and tensors of other shapes or none, are named before any weight is decoded."""
    write_mxfp4(tmp_path)
    change_tensors(tmp_path, changes)
    with pytest.raises(ModelNotSupported, match=found):
        Engine.from_pretrained(tmp_path, dtype="float32", num_kv_blocks=64)


def test_a_configuration_with_other_words_is_refused(tmp_path: Path) -> None:
    """What is not understood may change what the weights are."""
    write_mxfp4(tmp_path)
    change_config(tmp_path, quantization_config={**CONFIG, "block_size": 16})
    with pytest.raises(ModelNotSupported, match="block_size=16"):
        Engine.from_pretrained(tmp_path, dtype="float32", num_kv_blocks=64)

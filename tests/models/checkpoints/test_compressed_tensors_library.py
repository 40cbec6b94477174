"""Checkpoints of compressed-tensors against its own library, both ways; run by ``make formats``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import change_config, linear_names, numbers_of

pytestmark = pytest.mark.formats
SCHEMES = [
    ("w8a8", 8, True, None), ("w4a16", 4, True, 32), ("w4a16", 4, False, 32), ("w4a16", 4, True, None),
    ("w4a16", 4, False, None), ("w4a8", 4, True, 32), ("w4a8", 4, False, None),
    ("w8a16", 8, True, 16), ("w8a16", 8, False, 32), ("w8a16", 8, True, None),
]


def scheme_of(scheme: str, bits: int, is_symmetric: bool, group_size: int | None) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=is_symmetric, strategy="group" if group_size else "channel",
        group_size=group_size,
    )
    size = group_size if scheme == "w4a8" else None
    rows = QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy="group" if size else "token", group_size=size, dynamic=True
    )
    return QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=rows if scheme in ("w8a8", "w4a8") else None
    )


def compressor_of(scheme: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry("int-quantized" if scheme == "w8a8" else "pack-quantized")


@pytest.mark.parametrize("shape", [(64, 96), (48, 160), (40, 64)])
@pytest.mark.parametrize(("scheme", "bits", "is_symmetric", "group_size"), SCHEMES)
def test_what_the_library_writes_is_read(
    scheme: str, bits: int, is_symmetric: bool, group_size: int | None, shape: tuple[int, int], tmp_path: Path
) -> None:
    """A layer that the library compressed, with its configuration, has the numbers that the library decompresses."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    described, compressor = scheme_of(scheme, bits, is_symmetric, group_size), compressor_of(scheme)
    weight = torch.randn(shape) * 0.1 + 0.03
    groups = weight.view(shape[0], -1, group_size or shape[1])
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), described.weights)
    state = compressor.compress(
        {"weight": weight, "weight_scale": scales.float(), "weight_zero_point": zeros.to(torch.int8)}, described
    )
    tensors = {f"layer.{name}": tensor.contiguous() for name, tensor in state.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    layout = "int-quantized" if scheme == "w8a8" else "pack-quantized"
    config = QuantizationConfig(config_groups={"group_0": described}, format=layout, ignore=[])
    text = json.dumps({"quantization_config": json.loads(config.model_dump_json())})
    (tmp_path / "config.json").write_text(text)
    stored = stored_format(str(tmp_path))
    assert stored is not None
    assert stored.scheme == scheme
    read = stored.weight(TensorFiles(tmp_path), "layer", shape, torch.float32)
    assert read is not None
    assert torch.equal(numbers_of(read.read()), compressor.decompress(dict(state), described)["weight"])


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a16", "w4a8"])
def test_the_library_reads_what_convert_writes(scheme: str, tmp_path: Path) -> None:
    """The configuration is one to the library, and every layer that it decompresses has our numbers."""
    from compressed_tensors.quantization import QuantizationConfig

    tiny_model("llama", intermediate_size=160).save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization=scheme, dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config, compressor = QuantizationConfig(**written), compressor_of(scheme)
    tensors, stored = load_file(tmp_path / "out" / "model.safetensors"), stored_format(str(tmp_path / "out"))
    assert stored is not None
    for name, shape in linear_names(tiny_model("llama", intermediate_size=160)):
        state = {key.removeprefix(f"{name}."): one for key, one in tensors.items() if key.startswith(f"{name}.")}
        group = next(one for one in config.config_groups.values() if {"Linear", name} & set(one.targets))
        read = stored.weight(TensorFiles(tmp_path / "out"), name, shape, torch.float32)
        assert read is not None
        assert torch.equal(numbers_of(read.read()), compressor.decompress(state, group)["weight"])


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a16", "w4a8"])
def test_transformers_loads_what_convert_writes(scheme: str, tmp_path: Path) -> None:
    """transformers, which decompresses by the library, computes nearly the same log-probabilities of a prompt.

    All layers have groups of one size here: transformers takes the first size of a configuration for all. It takes the
    embedding as numbers, and so do we where no field says otherwise.
    """
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny_model("llama", tie_word_embeddings=True, **sizes).save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization=scheme, dtype="float32")
    prompt = [(7 * i) % VOCAB for i in range(40)]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["embedding_quantization"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with Engine.from_pretrained(tmp_path / "out", dtype="float32", num_kv_blocks=64) as engine:
        output = engine.generate([prompt], params, show_progress=False)[0]
    actual = torch.tensor([one.logprob for one in (output.prompt_logprobs or ())[1:]])
    expected = wanted[range(39), prompt[1:]]
    assert (actual - expected).abs().mean() < (0.06 if scheme in ("w8a8", "w4a8") else 2e-3) * expected.std()


def test_activations_that_are_ordered_by_weight_are_read(tmp_path: Path) -> None:
    """"actorder": "weight" changes how scales were found, and not what the file holds."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    convert(str(tmp_path / "model"), tmp_path / "out", quantization="w4a16", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    for group in config["config_groups"].values():
        group["weights"]["actorder"] = "weight"
    change_config(tmp_path / "out", quantization_config=config)
    Engine.from_pretrained(tmp_path / "out", dtype="float32", num_kv_blocks=64).close()

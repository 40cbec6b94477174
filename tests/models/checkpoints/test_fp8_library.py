"""FP8 checkpoints against other implementations, compressed-tensors and transformers' own; run by ``make formats``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.test_fp8 import KINDS, write_pair
from pagedcore import Engine, SamplingParams
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.float8_linear import quantize_rows
from support.quantized_checkpoints import change_config, linear_names

pytestmark = pytest.mark.formats
SIZES = {"hidden_size": 256, "intermediate_size": 384}
"""Multiples of blocks: transformers takes an equal part of a matrix for a block."""
E4M3 = torch.float8_e4m3fn


def decoded(directory: Path, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a layer as they are read here."""
    stored = stored_format(str(directory))
    assert isinstance(stored, FP8)
    weight = stored.weight(TensorFiles(directory), name, shape, dtype)
    assert weight is not None
    assert weight.decode is not None
    return weight.decode()


def scheme_of(strategy: str, block: list[int] | None, rows: str) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, block_structure=block)
    inputs = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=rows, dynamic=rows == "token")
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


@pytest.mark.parametrize("shape", [(64, 96), (200, 320)])
@pytest.mark.parametrize(("strategy", "block", "rows"), [
    ("channel", None, "token"), ("tensor", None, "tensor"), ("tensor", None, "token"), ("block", [128, 128], "token"),
    ("block", [64, 32], "token"),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_library_writes_is_read(
    strategy: str, block: list[int] | None, rows: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """A layer that compressed-tensors has compressed, with its configuration, has the numbers that it decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    described = scheme_of(strategy, block, rows)
    compressor: Any = BaseCompressor.get_value_from_registry("float-quantized")
    weight = torch.randn(shape) * 0.1 + 0.03
    height, width = block or {"channel": (1, shape[1]), "tensor": shape}[strategy]
    padded = torch.nn.functional.pad(weight, (0, -shape[1] % width, 0, -shape[0] % height))
    parts = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales, _ = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), described.weights)
    scales = scales.float().view(1) if strategy == "tensor" else scales.float()
    state = compressor.compress({"weight": weight, "weight_scale": scales}, described)
    assert state["weight"].dtype == E4M3
    save_file({f"layer.{name}": tensor.contiguous() for name, tensor in state.items() if tensor is not None},
              tmp_path / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": described}, format="float-quantized", ignore=[])
    text = json.dumps({"quantization_config": json.loads(config.model_dump_json())})
    (tmp_path / "config.json").write_text(text)
    wanted = compressor.decompress(dict(state), described)["weight"].to(dtype)
    assert torch.equal(decoded(tmp_path, "layer", shape, dtype), wanted)


@pytest.mark.parametrize("given", [0.0, 0.01])
def test_rows_are_those_of_the_library(given: float) -> None:
    """Rows with a scale of their own, or a given one, have the scales that compressed-tensors computes, and its codes
    but where a number is halfway between two to the last bits of float32."""
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    rows = torch.randn(500, 256) * torch.randn(500, 1).exp()
    args = scheme_of("channel", None, "tensor" if given else "token").input_activations
    scales = torch.tensor([given])
    if not given:
        scales, _ = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), args)
    wanted = quantize(rows, scales, None, args, dtype=E4M3)
    codes, found = quantize_rows(rows, given)
    torch.testing.assert_close(found, scales.float().expand(500, 1).contiguous(), rtol=2**-23, atol=0)
    differing = codes.view(torch.uint8) != wanted.view(torch.uint8)
    assert differing.float().mean() < 1e-4
    assert ((codes.view(torch.int8) - wanted.view(torch.int8)).abs() <= 1).all()


@pytest.mark.parametrize("kind", ["blocks", "whole"])
def test_transformers_dequantises_to_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """Every layer, to the last bit; log-probabilities are nearly the same, and so are the numbers that it writes in FP8
    again."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    fp8, _ = write_pair(tmp_path, kind, **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(
        fp8, dtype=torch.float32, quantization_config=FineGrainedFP8Config(
            weight_block_size=KINDS[kind][0]["weight_block_size"], dequantize=True))
    names = [*linear_names(model)]
    assert names
    for name, shape in names:
        assert torch.equal(decoded(fp8, name, shape, torch.float32), model.get_submodule(name).weight)
    prompt = [(7 * i) % model.config.vocab_size for i in range(40)]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[range(39), prompt[1:]]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with Engine.from_pretrained(fp8, dtype="float32", num_kv_blocks=64) as engine:
        output = engine.generate([prompt], params, show_progress=False)[0]
    found = torch.tensor([one.logprob for one in (output.prompt_logprobs or ())[1:]])
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()
    model.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written[f"{names[0][0]}.weight"].dtype == E4M3
    # Why: a model that was dequantised is written in FP8 without the configuration that says so.
    change_config(tmp_path / "again", quantization_config=KINDS[kind][0])
    for name, shape in names:
        again = decoded(tmp_path / "again", name, shape, torch.float32)
        torch.testing.assert_close(again, model.get_submodule(name).weight, rtol=2**-3, atol=1e-4)

"""Checkpoints of bitsandbytes against its own CPU dequantiser, and models that transformers saved; run by
``make formats``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedcore import Engine, SamplingParams
from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.stored_weight import QuantizedWeight
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import numbers_of

pytestmark = pytest.mark.formats


def dequantised(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """What the library computes of a weight of 4 bits, as one row.

    Why: its loop for AVX-512 takes wrong scales for rows that are no multiple of a block; its quantiser and its other
    loops count blocks through the flat weight.
    """
    from bitsandbytes import functional

    shape, state.shape = state.shape, torch.Size([state.shape.numel()])
    numbers: torch.Tensor = functional.dequantize_4bit(packed, state)
    return numbers.view(shape)


def read_back(
    directory: Path, config: Any, tensors: dict[str, torch.Tensor], shape: tuple[int, int]
) -> QuantizedWeight:
    """Write a layer as the library names it, and read it."""
    named = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config.to_dict()}))
    stored = stored_format(str(directory))
    assert stored is not None
    weight = stored.weight(TensorFiles(directory), "layer", shape, torch.float32)
    assert weight is not None
    product = weight.product(None)(torch.eye(shape[1]))
    assert torch.allclose(product, numbers_of(weight.read()).T, atol=1e-6)
    return weight.read()


@pytest.mark.parametrize("shape", [(64, 128), (24, 192), (40, 96), (3, 24)])
@pytest.mark.parametrize("block_size", [64, 128, 4096])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_the_library_dequantises_is_read(
    kind: str, is_nested: bool, block_size: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Every number of a layer that the library quantised is the one that its dequantiser computes, to the last bit."""
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    torch.manual_seed(0)
    packed, state = functional.quantize_4bit(
        torch.randn(shape) * 0.1 + 0.01, blocksize=block_size, compress_statistics=is_nested, quant_type=kind
    )
    tensors = {"weight": packed, **{f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_nested
    )
    weight = read_back(tmp_path, config, tensors, shape)
    assert torch.equal(numbers_of(weight), dequantised(packed, state))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_words_of_other_formats_are_bytes(storage: torch.dtype, tmp_path: Path) -> None:
    """Files may say that 4 bits are bfloat16, which some trainers need; the numbers are the same."""
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    torch.manual_seed(0)
    packed, state = functional.quantize_4bit(torch.randn(32, 64), quant_type="nf4", quant_storage=storage)
    tensors = {"weight": packed, **{f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage)
    assert packed.dtype == storage
    weight = read_back(tmp_path, config, tensors, (32, 64))
    assert torch.equal(numbers_of(weight), dequantised(packed, state))


def test_int8_is_read(tmp_path: Path) -> None:
    """Every number is the library's to one rounding: it multiplies by a rounded 127th, and here 127 divides."""
    from bitsandbytes import functional, nn
    from transformers import BitsAndBytesConfig

    torch.manual_seed(0)
    layer = nn.Linear8bitLt(96, 64, bias=False, has_fp16_weights=False)
    layer.weight = nn.Int8Params(torch.randn(64, 96), requires_grad=False, has_fp16_weights=False)
    tensors = layer.to("cpu").state_dict()
    weight = read_back(tmp_path, BitsAndBytesConfig(load_in_8bit=True), tensors, (64, 96))
    wanted = functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    assert torch.allclose(numbers_of(weight), wanted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("settings", [
    {"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, {"load_in_4bit": True},
], ids=["int8", "nf4", "nested nf4", "fp4"])
def test_a_model_that_transformers_saved_computes_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    """Log-probabilities of a prompt are those of the model of floats that transformers makes of the same file.

    Why not those of the quantised modules: on a CPU they round rows to bfloat16 or int8.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_model("qwen2", intermediate_size=128).save_pretrained(tmp_path / "model")
    config = BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantised")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu").dequantize().float()
    prompt = [(7 * i) % VOCAB for i in range(40)]
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[range(39), prompt[1:]]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with Engine.from_pretrained(tmp_path / "quantised", dtype="float32", num_kv_blocks=64) as engine:
        output = engine.generate([prompt], params, show_progress=False)[0]
    actual = torch.tensor([one.logprob for one in (output.prompt_logprobs or ())[1:]])
    assert (actual - wanted).abs().mean() < 2e-3 * wanted.std()

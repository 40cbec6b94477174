"""FP8 checkpoints against NumPy's reading of e4m3, and engines of them against engines of the decoded numbers."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.diagnosis import diagnose
from support.families import tiny_model
from support.quantized_checkpoints import change_config, change_tensors, ct_config, linear_names
from support.runner import try_invoke

#: Sizes that blocks of 128 do not divide.
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
#: Heads of 16, whose kernels other tests take too.
HEADS: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 6}
_FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
_ROWS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def _float8(strategy: str, rows: Any = None, **more: Any) -> dict[str, Any]:
    return ct_config("float-quantized", {**_FLOAT8, "strategy": strategy, **more}, rows)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
#: A configuration, the name of its scales, and the outputs and inputs that share one; 0: all.
KINDS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "blocks": (BLOCKS, "weight_scale_inv", (128, 128)),
    "whole": ({**BLOCKS, "activation_scheme": "static", "weight_block_size": None}, "weight_scale_inv", (0, 0)),
    "ct-channel": (_float8("channel", _ROWS), "weight_scale", (1, 0)),
    "ct-tensor": (_float8("tensor", {**_ROWS, "strategy": "tensor", "dynamic": False}), "weight_scale", (0, 0)),
    "ct-block": (_float8("block", _ROWS, block_structure=[128, 128]), "weight_scale", (128, 128)),
}


def e4m3(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers of octets: a sign, four bits of an exponent from -7 on, and three of a fraction."""
    sign = np.where(octets >> 7, -1.0, 1.0)
    exponent, fraction = (octets >> 3 & 15).astype(int), (octets & 7) / 8
    numbers = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    return (sign * numbers).astype(np.float32)


def rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Numbers rounded to bfloat16, ties to even."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def fp8_layer(seed: int, shape: tuple[int, int], kind: str) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.float32]]:
    """Random tensors of one layer, and its float32 numbers."""
    generator, (_, scale_name, block) = np.random.default_rng(seed), KINDS[kind]
    octets = generator.integers(0, 256, shape, dtype=np.uint8)
    octets[octets & 127 == 127] = 0  # what is no number
    height, width = (size or length for size, length in zip(block, shape, strict=True))
    scales = generator.uniform(0.5, 1.5, (-(-shape[0] // height), -(-shape[1] // width))).astype(np.float32) / 800
    if kind == "ct-channel":
        scales = rounded(scales)
    by_input = scales[np.arange(shape[0]) // height][:, np.arange(shape[1]) // width]
    stored = torch.from_numpy(scales).bfloat16() if kind == "ct-channel" else torch.from_numpy(scales)
    if kind in ("whole", "ct-tensor"):
        stored = stored.view(() if kind == "whole" else 1)
    weight = torch.from_numpy(octets).view(torch.float8_e4m3fn)
    return {"weight": weight, scale_name: stored.clone()}, e4m3(octets) * by_input


def write_pair(directory: Path, kind: str, family: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """Save a tiny model in FP8, and one of the decoded numbers rounded to bfloat16; return both directories."""
    heads = {} if family == "deepseek_v3" else HEADS
    model, config = tiny_model(family, **{**SIZES, **heads, **changes}), KINDS[kind][0]
    model.save_pretrained(directory / "fp8")
    tensors = load_file(directory / "fp8" / "model.safetensors")
    names = {name for name, _ in linear_names(model)} | {name.removesuffix(".weight") for name in tensors
                                                        if ".experts." in name}
    plain = dict(tensors)
    for number, name in enumerate(sorted(one for one in names if f"{one}.weight" in tensors)):
        shape = tensors.pop(f"{name}.weight").shape
        made, numbers = fp8_layer(number, (shape[0], shape[1]), kind)
        tensors |= {f"{name}.{last}": tensor for last, tensor in made.items()}
        plain[f"{name}.weight"] = torch.from_numpy(rounded(numbers))
    save_file(tensors, directory / "fp8" / "model.safetensors", {"format": "pt"})
    model.save_pretrained(directory / "plain")
    save_file(plain, directory / "plain" / "model.safetensors", {"format": "pt"})
    change_config(directory / "fp8", quantization_config=config)
    return directory / "fp8", directory / "plain"


def answers(directory: Path, **settings: Any) -> Any:
    """Tokens and their log-probabilities for prompts of several lengths, in bfloat16."""
    prompts = [[5, 6, 7], list(range(20, 70)), [9]]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    settings = {"dtype": "bfloat16", "kv_cache_memory": "16MiB", **settings}
    with Engine.from_pretrained(directory, **settings) as engine:
        results = [one.outputs[0] for one in engine.generate(prompts, sampling)]
        return [(list(one.token_ids), one.logprobs) for one in results]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_numbers_of_the_format(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each number is e4m3's times its scale, rounded once, to the last bit."""
    made, numbers = fp8_layer(3, (200, 320), kind)
    save_file({f"layer.{name}": tensor for name, tensor in made.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    change_config(tmp_path, quantization_config=KINDS[kind][0])
    stored = stored_format(str(tmp_path))
    assert isinstance(stored, FP8)
    weight = stored.weight(TensorFiles(tmp_path), "layer", (200, 320), dtype)
    assert weight is not None
    assert weight.decode is not None
    expected = torch.from_numpy(numbers if dtype == torch.float32 else rounded(numbers)).to(dtype)
    assert torch.equal(weight.decode(), expected)


@pytest.mark.parametrize(("kind", "family", "quantization"), [
    *((kind, "llama", "none") for kind in KINDS), ("blocks", "llama", "w8a16"), ("blocks", "qwen3_moe", "none"),
    ("blocks", "qwen3_moe", "auto-int8"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("blocks", "qwen2", "auto-int8"), ("blocks", "deepseek_v3", "w8a16"), ("ct-channel", "starcoder2", "w4a16"),
    )),
])
def test_an_engine_has_the_bits_of_the_decoded_numbers(
    kind: str, family: str, quantization: str, tmp_path: Path
) -> None:
    """Fused and plain decoders, experts, and every way to quantise say what they do of the numbers in bfloat16."""
    fp8, plain = write_pair(tmp_path, kind, family)
    assert answers(fp8, quantization=quantization) == answers(plain, quantization=quantization)


@pytest.mark.parametrize("kind", ["blocks", "ct-channel"])
def test_numbers_under_the_name_of_fp8_have_no_scales(kind: str, tmp_path: Path) -> None:
    """Weights that were decoded, and whose configuration was left, are numbers; with a scale they would be others, and
    are refused, when they are converted too."""
    _, plain = write_pair(tmp_path, kind)
    expected = answers(plain)
    change_config(plain, quantization_config=KINDS[kind][0])
    assert answers(plain) == expected
    layer = "model.layers.0.self_attn.q_proj"
    change_tensors(plain, {f"{layer}.{KINDS[kind][1]}": torch.ones(2, 2)})
    with pytest.raises(ModelNotSupported, match=rf"{layer}.weight is F32 and has a scale"):
        answers(plain)
    with pytest.raises(ModelNotSupported, match=rf"{layer}.weight is F32 and has a scale"):
        convert(str(plain), tmp_path / "out", quantization="w8a16", dtype="bfloat16")


def test_the_command_says_that_fp8_is_rounded_twice(tmp_path: Path) -> None:
    """As of the blocks of a GGUF file."""
    fp8, _ = write_pair(tmp_path, "blocks")
    result = try_invoke("convert", str(fp8), "--quantization", "w8a16", "--out", str(tmp_path / "out"))
    assert (result.exit_code, "they are rounded a second time" in result.output) == (0, True)


@pytest.mark.parametrize(("kind", "family", "quantization"), [
    ("blocks", "llama", "w8a16"), ("ct-channel", "qwen3_moe", "w4a16"), ("whole", "qwen2", "auto-int8"),
])
def test_a_converted_model_has_the_bits_of_the_decoded_numbers(
    kind: str, family: str, quantization: str, tmp_path: Path
) -> None:
    """What is written, experts too, is what quantising at load computes; with a calibration set nothing is."""
    fp8, _ = write_pair(tmp_path, kind, family)
    convert(str(fp8), tmp_path / "out", quantization=quantization, dtype="bfloat16")
    assert answers(tmp_path / "out") == answers(fp8, quantization=quantization)
    with pytest.raises(ModelNotSupported, match="calibration: got a checkpoint in FP8"):
        convert(str(fp8), tmp_path / "more", quantization="w8a8", calibration=tmp_path / "prompts.txt")
    assert not (tmp_path / "more").exists()


def test_products_of_others_are_made_of_tensors(tmp_path: Path) -> None:
    """Where another factory makes the products, layers, experts' too, are decoded from the start."""
    fp8, plain = write_pair(tmp_path, "blocks", "qwen3_moe")
    assert answers(fp8, linear_backend="packed") == answers(plain, linear_backend="packed")


def test_one_product_is_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is decoded, those of no other product are in memory any more."""
    fp8, _ = write_pair(tmp_path, "blocks", num_hidden_layers=6)
    alive, most, decode = list[weakref.ref[torch.Tensor]](), [0], FP8.decode

    def watched(self: FP8, *arguments: Any) -> torch.Tensor:
        numbers = decode(self, *arguments)
        alive.append(weakref.ref(numbers))
        most[0] = max(most[0], sum(tensor.numel() for one in alive if (tensor := one()) is not None))
        return numbers

    monkeypatch.setattr(FP8, "decode", watched)
    answers(fp8, quantization="w8a16")
    assert len(alive) == 7 * 6
    assert most[0] <= 2 * SIZES["hidden_size"] * SIZES["intermediate_size"]


def test_a_diagnosis_says_that_numbers_are_decoded(tmp_path: Path) -> None:
    """If there are any, whatever the configuration says; no weight is read to know it."""
    fp8, plain = write_pair(tmp_path, "blocks")
    assert diagnose(fp8)["quantisation"] == "none: FP8 in the files, decoded to the number format"
    change_config(plain, quantization_config=KINDS["blocks"][0])
    assert diagnose(plain)["quantisation"] == "none: the configuration names FP8, and no weight in the files is"


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("name", "tensor", "found"), [
    ("weight_scale_inv", None, "weight_scale_inv is missing"),
    ("weight_scale_inv", torch.ones(2, 3), r"shape \[2, 3\]"),
    ("weight_scale_inv", torch.full((2, 2), torch.nan), "not finite"),
    ("weight_scale_inv", torch.ones(2, 2, dtype=torch.int8), "is I8"),
    ("weight", torch.ones(64, 192).to(torch.float8_e5m2), "F8_E5M2"),
    ("weight", torch.ones(191, 192).to(torch.float8_e4m3fn), r"shape \[191, 192\]"),
])
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: Any, found: str, tmp_path: Path) -> None:
    """Missing and other scales, another kind of FP8, and other shapes: the message names the tensor."""
    fp8, _ = write_pair(tmp_path, "blocks")
    change_tensors(fp8, {f"{Q}.{name}": tensor})
    with pytest.raises(ModelNotSupported, match=found) as caught:
        answers(fp8)
    assert Q in str(caught.value)


@pytest.mark.parametrize(("codes", "scale", "found"), [
    ({(3, 5): 0x7F, (190, 191): 0xFF}, 1.0, "has 2 codes of e4m3 that are no number, the first is 0x7f at [3, 5]"),
    ({(191, 191): 0xFF}, 1.0, "has 1 codes of e4m3 that are no number, the first is 0xff at [191, 191]"),
    ({(7, 9): 0xC0}, 3e38, "has -2.0 at [7, 9], which is not finite in torch.bfloat16 times its scale"),
    ({(7, 9): 0x38}, 3e38, ""),
])
@pytest.mark.parametrize("is_late", [True, False])
def test_codes_that_are_no_finite_numbers_are_refused(
    codes: dict[tuple[int, int], int], scale: float, found: str, is_late: bool, tmp_path: Path
) -> None:
    """When the files are read, whether a layer is decoded later or at once: the message names tensor, file, and value;
    what is finite is read."""
    fp8, _ = write_pair(tmp_path, "blocks")
    octets = np.zeros((192, 192), np.uint8)
    for place, code in codes.items():
        octets[place] = code
    change_tensors(fp8, {f"{Q}.weight": torch.from_numpy(octets).view(torch.float8_e4m3fn),
                         f"{Q}.weight_scale_inv": torch.full((2, 2), scale)})
    stored = stored_format(str(fp8))
    assert isinstance(stored, FP8)
    load = partial(load_stored, str(fp8), replace(stored, is_late=is_late), torch.bfloat16, trust_remote_code=False)
    if not found:
        load()
        return
    with pytest.raises(ModelNotSupported, match=re.escape(f"{Q}.weight (in model.safetensors) {found}")) as caught:
        load()
    assert scale == 1 or f"{Q}.weight_scale_inv (in model.safetensors) is 3e+38" in str(caught.value)


@pytest.mark.parametrize(("config", "found"), [
    ({**BLOCKS, "expert_dtype": "fp4"}, "'fp4'"), ({**BLOCKS, "fmt": "e5m2"}, "'e5m2'"),
    ({**BLOCKS, "weight_block_size": [128]}, r"\[128\]"), ({**BLOCKS, "weight_block_size": [0, 128]}, r"\[0, 128\]"),
    ({**BLOCKS, "weight_block_size": "128"}, "'128'"),
    ({**BLOCKS, "activation_scheme": ["static"]}, r"activation_scheme \['static"),
    (_float8("group", group_size=128), "'group'"), (_float8("block"), "blocks of None"),
    (_float8("channel", num_bits=4), "'num_bits': 4"), (_float8("channel", symmetric=False), "'symmetric': False"),
    (ct_config("nvfp4-pack-quantized", {**_FLOAT8, "num_bits": 4, "strategy": "tensor_group"}, None), "'nvfp4-pack"),
    ({**_float8("channel"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({**_float8("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
])
def test_other_variants_are_refused(config: Any, found: str, tmp_path: Path) -> None:
    """NVFP4, 2:4 and what else is not decoded here is refused by name before a file is opened."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelNotSupported, match=found):
        stored_format(str(tmp_path))

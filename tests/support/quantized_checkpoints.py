"""Tiny quantised checkpoints of every format, written with NumPy from the formats' descriptions, and their numbers.

Nothing of ``pagedcore`` is used, so that what it reads can be compared with what was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from support.families import tiny_model

Tensors = dict[str, torch.Tensor]
GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Levels that a normal distribution takes equally often, as "QLoRA" defines them: eight negative ones, zero, and seven.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
#: A sign, two bits of an exponent and one of a mantissa, in parts of the largest one.
FP4 = np.array([sign * one / 12 for sign in (1, -1) for one in (0, 0.0625, 8, 12, 4, 6, 2, 3)], np.float32)
_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                            "dynamic": False}
_ROWS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass
class Layer:
    """One quantised layer: unsigned values [out, in], zero points and scales [out, groups], the group of each input."""

    values: npt.NDArray[Any]
    zeros: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    groups: npt.NDArray[Any]
    codebook: npt.NDArray[np.float32] | None = None

    @property
    def numbers(self) -> npt.NDArray[np.float32]:
        """float32 [out, in]: (value - zero point) * scale, or what a codebook says of the value, times scale."""
        if self.codebook is not None:
            return self.codebook[self.values] * self.scales[:, self.groups]
        difference = self.values.astype(np.int32) - self.zeros.astype(np.int32)[:, self.groups]
        return difference.astype(np.float32) * self.scales.astype(np.float32)[:, self.groups]


def pack(values: npt.NDArray[Any], bits: int, axis: int) -> torch.Tensor:
    """Pack unsigned integers along an axis, the first in the lowest bits; the last word is filled up with zeros."""
    count = 32 // bits
    moved = np.moveaxis(values.astype(np.uint32), axis, -1)
    padded = np.pad(moved, ((0, 0), (0, -moved.shape[-1] % count))).reshape(len(moved), -1, count)
    words = np.zeros(padded.shape[:2], np.uint32)
    for place in range(count):
        words |= padded[..., place] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def random_layer(
    generator: np.random.Generator, shape: tuple[int, int], *, bits: int = 4, group_size: int = GROUP,
    is_symmetric: bool = True, is_reordered: bool = False, least_zero: int = 1,
) -> Layer:
    """Make a layer whose numbers have about the size of a trained model's."""
    num_outputs, num_inputs = shape
    num_groups, middle = num_inputs // group_size, 2 ** (bits - 1)
    values = generator.integers(0, 2 * middle, shape)
    zeros = np.full((num_outputs, num_groups), middle)
    if not is_symmetric:
        zeros = generator.integers(least_zero, 2 * middle, zeros.shape)
    scales = (generator.uniform(0.5, 1.5, zeros.shape) * 0.26 / middle).astype(np.float16)
    groups = np.arange(num_inputs) // group_size
    return Layer(values, zeros, scales, generator.permutation(groups) if is_reordered else groups)


def ct_w8a8(layer: Layer) -> Tensors:
    """compressed-tensors "int-quantized": signed values as they are, one scale for each output."""
    values = (layer.values - 128).astype(np.int8)
    return {"weight": torch.from_numpy(values), "weight_scale": torch.from_numpy(layer.scales).bfloat16()}


def ct_packed(layer: Layer, bits: int, has_zeros: bool, has_order: bool = False) -> Tensors:
    """compressed-tensors "pack-quantized": values along the inputs, zero points along the outputs."""
    tensors = {
        "weight_packed": pack(layer.values, bits, 1), "weight_scale": torch.from_numpy(layer.scales),
        "weight_shape": torch.tensor(layer.values.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = pack(layer.zeros, bits, 0)
    if has_order:
        tensors["weight_g_idx"] = torch.from_numpy(layer.groups.astype(np.int32))
    return tensors


def gptq(layer: Layer, bits: int, version: int, has_order: bool = True) -> Tensors:
    """GPTQ: values along the inputs, zero points along the outputs, both transposed; v1 stores zero points less 1."""
    tensors = {
        "qweight": pack(layer.values.T, bits, 0), "scales": torch.from_numpy(layer.scales.T.copy()),
        "qzeros": pack(layer.zeros.T - (version == 1), bits, 1),
    }
    return {**tensors, "g_idx": torch.from_numpy(layer.groups.astype(np.int32))} if has_order else tensors


def awq(layer: Layer) -> Tensors:
    """AWQ: values and zero points along the outputs, eight to a word in an order of their own."""

    def by_word(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.reshape(len(values), -1, 8)[:, :, _AWQ_ORDER].reshape(values.shape)

    return {"qweight": pack(by_word(layer.values.T), 4, 1), "qzeros": pack(by_word(layer.zeros.T), 4, 1),
            "scales": torch.from_numpy(layer.scales.T.copy())}


def bnb_int8(layer: Layer) -> Tensors:
    """bitsandbytes, 8 bits: signed values as they are, and the largest magnitude of each output."""
    return {"weight": torch.from_numpy((layer.values - 128).astype(np.int8)), "weight_format": torch.tensor(0).byte(),
            "SCB": torch.from_numpy(layer.scales[:, 0].astype(np.float32) * 127)}  # fmt: skip


def bnb_nf4(layer: Layer, is_nested: bool) -> Tensors:
    """bitsandbytes, 4 bits: two values a byte, the first one in its upper half, and a scale for each 64 values, also
    where these are of two outputs; nested scales are bytes that count another codebook. Changes the layer's scales."""
    shape, block, generator = layer.values.shape, 64, np.random.default_rng(layer.values.size)
    count, state = -(-layer.values.size // block), {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
    scales = generator.uniform(0.1, 0.3, count).astype(np.float32)
    named: dict[str, npt.NDArray[Any]] = {"absmax": scales}
    if is_nested:
        numbers = np.sort(generator.uniform(-1, 1, 256)).astype(np.float32)
        codes, largest = generator.integers(0, 256, count), generator.uniform(0.05, 0.1, -(-count // 256))
        offset = np.float32(0.2)
        scales = numbers[codes] * np.repeat(largest.astype(np.float32), 256)[:count] + offset
        named = {"absmax": codes.astype(np.uint8), "nested_absmax": largest.astype(np.float32),
                 "nested_quant_map": numbers}  # fmt: skip
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    layer.codebook = NF4
    layer.scales = scales[np.arange(0, layer.values.size, GROUP).reshape(shape[0], -1) // block]
    octets, text = layer.values.reshape(-1, 2), json.dumps({**state, "shape": shape}).encode()
    named |= {"quant_map": NF4.copy(), "quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8).copy()}
    weight = (octets[:, :1] << 4 | octets[:, 1:]).astype(np.uint8)
    return {"weight": torch.from_numpy(weight),
            **{f"weight.{name}": torch.from_numpy(array) for name, array in named.items()}}  # fmt: skip


def ct_config(layout: str, weights: dict[str, Any], rows: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors as its library writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", **more,
    }


@dataclass
class Kind:
    """A format: its configuration, how its layers are made, and how they are written."""

    config: dict[str, Any]
    write: Any
    scheme: str = "w4a16"
    layer: dict[str, Any] = field(default_factory=dict)


def _gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, **changes}


_CHANNEL = {**_WEIGHTS, "num_bits": 8, "strategy": "channel", "group_size": None}
_ASYMMETRIC = {**_WEIGHTS, "symmetric": False}
_BNB_NF4 = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}  # fmt: skip
KINDS: dict[str, Kind] = {
    "ct-w8a8": Kind(ct_config("int-quantized", _CHANNEL, _ROWS), ct_w8a8, "w8a8", {"bits": 8, "group_size": 0}),
    "ct-w4a16": Kind(ct_config("pack-quantized", _WEIGHTS, None), lambda one: ct_packed(one, 4, False)),
    "ct-w4a16-zeros": Kind(
        ct_config("pack-quantized", _ASYMMETRIC, None), lambda one: ct_packed(one, 4, True),
        layer={"is_symmetric": False, "least_zero": 0},
    ),
    "ct-w4a16-order": Kind(
        ct_config("pack-quantized", {**_WEIGHTS, "actorder": "group"}, None),
        lambda one: ct_packed(one, 4, False, has_order=True), layer={"is_reordered": True},
    ),
    "ct-w4a16-channel": Kind(
        ct_config("pack-quantized", {**_WEIGHTS, "strategy": "channel", "group_size": None}, None),
        lambda one: ct_packed(one, 4, False), layer={"group_size": 0},
    ),
    "ct-w8a16": Kind(
        ct_config("pack-quantized", {**_WEIGHTS, "num_bits": 8}, None), lambda one: ct_packed(one, 8, False), "w8a16",
        {"bits": 8},
    ),
    "gptq": Kind(_gptq_config(), lambda one: gptq(one, 4, 1)),
    "gptq-zeros": Kind(
        _gptq_config(sym=False, checkpoint_format="gptq"), lambda one: gptq(one, 4, 1, has_order=False),
        layer={"is_symmetric": False},
    ),
    "gptq-order": Kind(
        _gptq_config(desc_act=True), lambda one: gptq(one, 4, 1), layer={"is_reordered": True}
    ),
    "gptq-v2": Kind(
        _gptq_config(sym=False, checkpoint_format="gptq_v2"), lambda one: gptq(one, 4, 2),
        layer={"is_symmetric": False, "least_zero": 0},
    ),
    "gptq-called-v1": Kind(_gptq_config(checkpoint_format="gptq"), lambda one: gptq(one, 4, 2)),
    "gptq-whole": Kind(_gptq_config(group_size=-1), lambda one: gptq(one, 4, 1), layer={"group_size": 0}),
    "gptq-8": Kind(
        _gptq_config(bits=8, sym=False), lambda one: gptq(one, 8, 1), "w8a16", {"bits": 8, "is_symmetric": False}
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq,
        layer={"is_symmetric": False, "least_zero": 0},
    ),
    "bnb-int8": Kind(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0},
        bnb_int8, "w8a16", {"bits": 8, "group_size": 0},
    ),
    "bnb-nf4": Kind(_BNB_NF4, lambda one: bnb_nf4(one, False)),
    "bnb-nf4-nested": Kind({**_BNB_NF4, "bnb_4bit_use_double_quant": True}, lambda one: bnb_nf4(one, True)),
}


def linear_names(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape of every linear layer but the output layer."""
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            yield name, (module.out_features, module.in_features)


def write_checkpoint(directory: Path, kind_name: str, family: str = "llama", **changes: Any) -> Any:
    """Write a tiny model quantised in one of ``KINDS``; return transformers' float32 model of the same numbers.

    Layers that see the same rows have the same order of inputs, as GPTQ makes it.
    """
    kind, model = KINDS[kind_name], tiny_model(family, **changes)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    orders: dict[int, Any] = {}
    for number, (name, shape) in enumerate(linear_names(model)):
        settings = {**kind.layer, "group_size": kind.layer.get("group_size", GROUP) or shape[1]}
        layer = random_layer(np.random.default_rng(number), shape, **settings)
        layer.groups = orders.setdefault(shape[1], layer.groups)
        if kind.scheme == "w8a8":
            layer.scales = torch.from_numpy(layer.scales).bfloat16().float().numpy()
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{last}": tensor for last, tensor in kind.write(layer).items()}
        model.get_submodule(name).weight.data = torch.from_numpy(layer.numbers)
    tensors |= _quantize_experts(model, tensors, kind)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, quantization_config=kind.config)
    return model.float().eval()


def _quantize_experts(model: Any, tensors: Tensors, kind: Kind) -> Tensors:
    """Take the experts out of a model's tensors, change the model's to random layers, and return these by name."""
    written: Tensors = {}
    for name in [one for one in tensors if ".experts." in one]:
        part = name.removesuffix(".weight").rpartition(".")[2]
        path, number = name.replace("block_sparse_moe", "mlp").split(".experts.")
        experts, expert = model.get_submodule(f"{path}.experts"), int(number.split(".")[0])
        weight = (experts.down_proj if part in ("down_proj", "w2") else experts.gate_up_proj).data[expert]
        if part not in ("down_proj", "w2"):
            weight = weight.chunk(2)[part in ("up_proj", "w3")]
        settings = {**kind.layer, "group_size": kind.layer.get("group_size", GROUP) or weight.shape[1]}
        layer = random_layer(np.random.default_rng(len(written)), tuple(weight.shape), **settings)
        if kind.layer.get("is_reordered"):
            layer.groups = np.random.default_rng(weight.shape[1]).permutation(np.sort(layer.groups))
        del tensors[name]
        written |= {f"{name.removesuffix('.weight')}.{last}": tensor for last, tensor in kind.write(layer).items()}
        if kind.scheme == "w8a8":
            layer.scales = torch.from_numpy(layer.scales).bfloat16().float().numpy()
        weight.copy_(torch.from_numpy(layer.numbers))
    return written


def change_config(directory: Path, **changes: Any) -> None:
    """Change fields of a saved model's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change or remove (``None``) tensors of a saved model."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def numbers_of(weight: Any) -> torch.Tensor:
    """The numbers float32 [out, in] that a ``QuantizedWeight`` stands for."""
    (num_outputs, num_inputs), num_groups = weight.values.shape, weight.scales.shape[1]
    codebook = {"nf4": NF4, "fp4": FP4}.get(weight.codebook)
    numbers = weight.values.float() if codebook is None else torch.from_numpy(codebook)[weight.values.long() % 16]
    difference = numbers.view(num_outputs, num_groups, -1)
    if weight.zeros is not None:
        difference -= weight.zeros[..., None]
    return (difference * weight.scales[..., None]).view(num_outputs, num_inputs)

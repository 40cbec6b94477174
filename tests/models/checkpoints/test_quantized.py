"""Quantised checkpoints against NumPy's reading of their formats, and models of them against transformers'."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pagedcore import SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig, InvalidSessionFile, ModelMismatch, ModelNotSupported
from pagedcore.models.checkpoints.packed_integers import pack, unpack
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.fingerprint import model_fingerprint
from pagedcore.models.linears.stored_weight import rows_of
from pagedcore_kernels.cpu.matmul.packed_int8 import fewest_tile_rows, form_of_int8_product
from support.families import VOCAB, tiny_model
from support.largest_floats import LargestFloats
from support.quantized_checkpoints import (
    KINDS,
    change_config,
    change_tensors,
    linear_names,
    numbers_of,
    write_checkpoint,
)
from support.scores import PROMPTS, engine_of, scores_of, scores_of_transformers

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [16, 13])
def test_integers_are_packed_and_unpacked(bits: int, count: int) -> None:
    """Every value comes back from its place in the words, also where the last word is not full."""
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, count), dtype=torch.int8)
    words = pack(values, bits)
    assert (words.dtype, words.shape) == (torch.int32, (6, -(-count * bits // 32)))
    assert torch.equal(unpack(words, bits)[:, :count], values)
    first = [int(word) & (2**bits - 1) for word in words[:, 0]]
    assert first == (values[:, 0].int() + 2 ** (bits - 1)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_numbers_of_the_format(kind: str, tmp_path: Path) -> None:
    """Values, scales, zero points and order of every layer, read back, give NumPy's numbers to the last bit."""
    model = write_checkpoint(tmp_path, kind)
    stored, files = stored_format(str(tmp_path)), TensorFiles(tmp_path)
    assert stored is not None
    assert stored.scheme == KINDS[kind].scheme
    for name, shape in linear_names(model):
        weight = stored.weight(files, name, shape, torch.float32)
        assert weight is not None
        numbers = numbers_of(weight.read())
        order = torch.arange(shape[1]) if weight.order is None else weight.order
        assert (weight.order is not None) == kind.endswith("-order")
        assert torch.equal(numbers, model.get_submodule(name).weight[:, order])
        chosen = rows_of(weight, [7, 0])
        assert chosen is not None
        assert torch.equal(chosen, model.get_submodule(name).weight[[7, 0]])
        if weight.scheme != "w8a8":
            product = weight.product(None)(torch.eye(shape[1]))
            assert torch.allclose(product, model.get_submodule(name).weight.T, atol=1e-6)
    assert stored.weight(files, "lm_head", (VOCAB, 64), torch.float32) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_computes_its_numbers(kind: str, tmp_path: Path) -> None:
    """A directory is loaded by its name alone, into the fused decoder; log-probabilities are those of transformers with
    the format's numbers, to float32's rounding, or to that of int8 rows."""
    wanted = scores_of_transformers(write_checkpoint(tmp_path, kind, tie_word_embeddings=True))
    actual = scores_of(tmp_path)
    if KINDS[kind].scheme == "w8a8":
        assert np.abs(actual - wanted).mean() < 0.05 * wanted.std()
    else:
        assert np.abs(actual - wanted).max() < 2e-3


def changed(kind: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a kind with other fields."""
    return {**KINDS[kind].config, **changes}


def _as_transformers_writes_them() -> dict[str, tuple[str, dict[str, Any]]]:
    from transformers.utils import quantization_config as written

    of_awq = written.AwqConfig.from_dict(KINDS["awq"].config)
    return {
        "awq": ("awq", of_awq.to_dict()), "awq, by 5": ("awq", written.AwqConfig(bits=4, group_size=32).to_dict()),
        "gptq": ("gptq", written.GPTQConfig(bits=4, group_size=32).to_dict()),
        "gptq, without routers": ("gptq", changed("gptq", dynamic={"-:.*.mlp.gate.*": {}, "-:lm_head": {}})),
        "bnb-nf4": ("bnb-nf4", written.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()),
        "bnb-int8": ("bnb-int8", written.BitsAndBytesConfig(load_in_8bit=True).to_dict()),
    }


@pytest.mark.parametrize("case", _as_transformers_writes_them())
def test_a_description_that_transformers_writes_is_read(case: str, tmp_path: Path) -> None:
    """A checkpoint that transformers has saved again is the same model, and so is one whose rules leave layers out."""
    kind, config = _as_transformers_writes_them()[case]
    wanted = scores_of_transformers(write_checkpoint(tmp_path, kind))
    change_config(tmp_path, quantization_config=json.loads(json.dumps(config)))
    assert np.abs(scores_of(tmp_path) - wanted).max() < 2e-3


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3", "qwen3"])
def test_families_compute_their_numbers(family: str, tmp_path: Path) -> None:
    """Biases, buffers that no file holds, other names of projections, and norms of heads are taken along."""
    wanted = scores_of_transformers(write_checkpoint(tmp_path, "gptq", family))
    assert np.abs(scores_of(tmp_path) - wanted).max() < 2e-3


@pytest.mark.parametrize(("family", "kind"), [
    ("mixtral", "gptq-order"), ("qwen3_moe", "awq"), ("olmoe", "ct-w8a8"), ("qwen2_moe", "ct-w4a16"),
    ("mixtral", "bnb-nf4"),
])
def test_mixtures_of_experts_compute_their_numbers(family: str, kind: str, tmp_path: Path) -> None:
    """Each expert's layers are read by their own names, in the names of Mixtral's files too; results do not depend on
    the schedule."""
    wanted = scores_of_transformers(write_checkpoint(tmp_path, kind, family))
    actual = scores_of(tmp_path)
    if KINDS[kind].scheme == "w8a8":
        assert np.abs(actual - wanted).mean() < 0.05 * wanted.std()
    else:
        assert np.abs(actual - wanted).max() < 2e-3


def test_experts_that_differ_are_refused(tmp_path: Path) -> None:
    """Experts of one layer are all quantised; what is missing of one, and an order that its halves do not share, is
    named."""
    name = "model.layers.0.block_sparse_moe.experts.2"
    cases: list[tuple[str, Any, str]] = [
        ("w3.qweight", None, "2.up_proj is not quantised"), ("w2.scales", None, "scales is missing"),
        ("w1.g_idx", lambda one: one.flip(0), "different orders"),
        ("w2.qweight", lambda one: one[:4], "qweight is I32"),
    ]
    for part, change, found in cases:
        write_checkpoint(tmp_path, "gptq-order", "mixtral")
        tensor = None if change is None else change(like(tmp_path, f"{name}.{part}")).contiguous()
        change_tensors(tmp_path, {f"{name}.{part}": tensor})
        assert found in refused(tmp_path)
    write_checkpoint(tmp_path, "gptq", "mixtral")
    change_config(tmp_path, num_local_experts=2**40)
    assert "experts.4" in refused(tmp_path)


def test_experts_may_be_numbers(tmp_path: Path) -> None:
    """A file whose attention is quantised and whose experts are not, as transformers writes bitsandbytes', is read."""
    model = write_checkpoint(tmp_path, "bnb-nf4", "mixtral")
    quantised = [name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name]
    numbers = {}
    for number, layer in enumerate(model.model.layers):
        for expert in range(4):
            path = f"model.layers.{number}.block_sparse_moe.experts.{expert}"
            gate, up = layer.mlp.experts.gate_up_proj.data[expert].chunk(2)
            parts = {"w1": gate, "w3": up, "w2": layer.mlp.experts.down_proj.data[expert]}
            numbers |= {f"{path}.{part}.weight": one.clone() for part, one in parts.items()}
    change_tensors(tmp_path, {**dict.fromkeys(quantised), **numbers})
    assert np.abs(scores_of(tmp_path) - scores_of_transformers(model)).max() < 2e-3


@pytest.mark.parametrize("kind", [
    "ct-w8a8", "gptq-order", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "bnb-nf4", "bnb-int8")),
])
def test_bfloat16_is_near(kind: str, tmp_path: Path) -> None:
    """Rows in bfloat16 give nearly the same; the number format does not change the quantised weights."""
    wanted = scores_of_transformers(write_checkpoint(tmp_path, kind))
    assert np.abs(scores_of(tmp_path, dtype="bfloat16") - wanted).mean() < 0.1 * wanted.std()


def test_layers_of_one_product_are_stored_alike(tmp_path: Path) -> None:
    """Projections that the file holds as numbers, beside quantised ones, are not fused with them."""
    model = write_checkpoint(tmp_path, "gptq")
    name = "model.layers.1.self_attn.k_proj"
    quantised = {f"{name}.{last}": None for last in ("qweight", "qzeros", "scales", "g_idx")}
    change_tensors(tmp_path, {**quantised, f"{name}.weight": model.get_submodule(name).weight.data})
    with engine_of(tmp_path) as engine:
        assert not isinstance(engine._runner.backend._decoder, FusedDecoder)  # type: ignore[attr-defined]
    assert np.abs(scores_of(tmp_path) - scores_of_transformers(model)).max() < 2e-3


@pytest.mark.parametrize("kind", ["ct-w8a8", "ct-w4a16-zeros", "gptq-order", "awq", "bnb-nf4-nested"])
def test_no_dequantised_weight_is_made(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint becomes an engine's model, no operation makes a float tensor larger than the embedding, which
    is smaller than every quantised product."""
    # Why: it computes 256 outputs of a product again.
    monkeypatch.setattr("pagedcore.models.linears.packed_linear._NUM_CHECKED_OUTPUTS", 16)
    # Why: it multiplies 512 rows.
    monkeypatch.setattr("pagedcore.models.transformers_model.probe_invariance", lambda products: ())
    # Why: it compares matrix units with vectors, once in a process, where there are such units.
    fewest_tile_rows(torch.float32)
    write_checkpoint(tmp_path, kind, hidden_size=128, intermediate_size=512, num_hidden_layers=2)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with LargestFloats() as counted, engine_of(tmp_path, num_kv_blocks=4, block_size=4) as engine:
        products = engine._runner.backend._decoder.products  # type: ignore[attr-defined]
        assert max(one.in_features * one.out_features for one in products) == 1024 * 128
    assert counted.largest < 2 * VOCAB * 128


def refused(directory: Path, **settings: Any) -> str:
    """The message with which a checkpoint is refused: it names what was found and what is supported, and no path."""
    with pytest.raises(ModelNotSupported, match=r"Supported are, .*compressed-tensors") as caught:
        engine_of(directory, **settings).close()
    assert str(directory) not in str(caught.value)
    return str(caught.value)


def with_scheme(kind: str, **changes: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors whose one group has other fields; dictionaries are merged."""
    group = KINDS[kind].config["config_groups"]["group_0"]
    merged = {name: {**(group[name] or {}), **value} if isinstance(value, dict) else value
              for name, value in changes.items()}
    return changed(kind, config_groups={"group_0": {**group, **merged}})


W8A8, W4A16 = KINDS["ct-w8a8"].config, KINDS["ct-w4a16"].config
TWO_SCHEMES = {"a": W4A16["config_groups"]["group_0"],
               "b": with_scheme("ct-w4a16", weights={"num_bits": 8})["config_groups"]["group_0"]}


@pytest.mark.parametrize(("config", "found"), [
    (changed("bnb-nf4", bnb_4bit_quant_type="af4"), "'af4'"),
    (changed("bnb-nf4", bnb_4bit_quant_type=["nf4"]), "'nf4'"), (changed("bnb-nf4", _load_in_8bit=True), "8bit=True"),
    (changed("bnb-nf4", _load_in_4bit=None), "4bit=False"), (changed("bnb-int8", load_in_8bit="yes"), "8bit='yes'"),
    (changed("bnb-nf4", bnb_4bit_quant_storage="float64"), "'float64'"),
    ({"quant_method": "nvfp4"}, "'nvfp4'"), ({}, "None"), ("gptq", "'gptq'"), ({"quant_method": ["awq"]}, r"\['awq'\]"),
    (changed("gptq", bits=3), "3 bits"), (changed("gptq", group_size=0), "groups of 0"),
    (changed("gptq", group_size=True), "groups of True"), (changed("gptq", group_size="128"), "groups of '128'"),
    (changed("gptq", checkpoint_format="marlin"), "'marlin'"), (changed("gptq", is_marlin_format=True), "marlin"),
    (changed("gptq", dynamic={"-:lm_head": {}, r"+:.*\.q_proj": {"bits": 8}}), "dynamic"),
    (changed("gptq", dynamic=["-:lm_head"]), "dynamic"), (changed("gptq", pack_dtype="int16"), "'int16'"),
    (changed("awq", bits=8), "8 bits"), (changed("awq", version="gemv"), "'gemv'"),
    (changed("awq", format="llm-awq"), "version 'llm-awq'"), (changed("awq", backend="gemv"), "the backend 'gemv'"),
    (changed("awq", backend=["auto"]), "the backend"), (changed("awq", zero_point=False), "zero_point False"),
    (changed("awq", group_size=None), "groups of None"),
    (changed("ct-w8a8", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (changed("ct-w8a8", transform_config={"config_groups": {"u": {}}}), "transform_config"),
    (changed("ct-w8a8", sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    (changed("ct-w8a8", format="float-quantized"), "'float-quantized'"),
    (changed("ct-w4a16", format="marlin-24"), "'marlin-24'"),
    (changed("ct-w4a16", config_groups={"W4A16": ["Linear"]}), "no schemes by name"),
    (changed("ct-w4a16", config_groups=[]), "no schemes by name"),
    (changed("ct-w4a16", config_groups=TWO_SCHEMES), "2 schemes"),
    (with_scheme("ct-w8a8", weights={"type": "float"}), "'type': 'float'"),
    (with_scheme("ct-w8a8", weights={"symmetric": False}), "'symmetric': False"),
    (with_scheme("ct-w8a8", weights={"strategy": "tensor"}), "'tensor'"),
    (with_scheme("ct-w8a8", input_activations={"dynamic": False}), "'dynamic': False"),
    (with_scheme("ct-w8a8", input_activations={"strategy": "tensor"}), "'tensor'"),
    (with_scheme("ct-w8a8", output_activations={"num_bits": 8}), "output_activations"),
    (with_scheme("ct-w4a16", weights={"num_bits": 3}), "'num_bits': 3"),
    (with_scheme("ct-w4a16", weights=None), "None"),
    (with_scheme("ct-w4a16", weights={"strategy": "block", "block_structure": [2, 2]}), "'block'"),
    (with_scheme("ct-w4a16", weights={"group_size": -5}), "-5"),
    (with_scheme("ct-w4a16", input_activations={"num_bits": 8, "dynamic": True, "strategy": "token"}), "'pack-quant"),
    (with_scheme("ct-w4a16", input_activations={"dynamic": True, "strategy": "group", "group_size": 8}), "'pack-quant"),
])
def test_other_variants_are_refused(config: Any, found: str, tmp_path: Path) -> None:
    """A configuration that says something else than what is computed here is refused before a file is opened."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelNotSupported, match=found):
        stored_format(str(tmp_path))
    refused(tmp_path)


Q = "model.layers.1.self_attn.q_proj"


def like(directory: Path, name: str) -> torch.Tensor:
    files = TensorFiles(directory)
    return files.expect(name, files.shape_of(name), files.format_of(name)).clone()


@pytest.mark.parametrize(("kind", "name", "change", "found"), [
    ("gptq", "qzeros", None, "qzeros is missing"), ("gptq", "scales", None, "scales is missing"),
    ("gptq", "qweight", None, "weight is missing"), ("gptq", "qweight", lambda t: t[:4], r"I32 of shape \[4, 64\]"),
    ("gptq", "qweight", lambda t: t.float(), "is F32"), ("gptq", "scales", lambda t: t * torch.inf, "not finite"),
    ("gptq", "scales", lambda t: t * torch.nan, "not finite"), ("gptq", "scales", lambda t: t.int(), "is I32"),
    ("gptq", "g_idx", lambda t: t * 0, "g_idx"), ("gptq", "g_idx", lambda t: t - 1, "g_idx"),
    ("gptq", "g_idx", lambda t: t + 2**30, "g_idx"), ("gptq-zeros", "qzeros", lambda t: t * 0 - 1, "libraries read"),
    ("gptq", "qzeros", lambda t: t + 1, "not half of the range"),
    ("gptq", "bias", lambda _: torch.ones(64), "bias is not zero"), ("awq", "qzeros", lambda t: t[:1], r"\[1, 8\]"),
    ("awq", "scales", lambda t: t[:, :8], r"\[2, 8\]"), ("ct-w4a16", "weight_scale", None, "q_proj.weight is missing"),
    ("ct-w4a16", "weight_packed", lambda t: t.repeat(2, 1), r"\[128, 8\]"),
    ("ct-w4a16", "weight_shape", lambda t: t * 2**40, "weight_shape"),
    ("ct-w4a16", "weight_shape", None, "weight_shape is missing"),
    ("ct-w4a16-zeros", "weight_zero_point", None, "zero_point is missing"),
    ("ct-w4a16-zeros", "weight_zero_point", lambda t: t.to(torch.int8), "is I8"),
    ("ct-w8a8", "weight", lambda t: t.float(), "is F32"), ("ct-w8a8", "weight_scale", lambda t: t[:, 0], r"\[64\]"),
    ("ct-w8a8", "weight_scale", None, "weight is I8"),
    ("bnb-int8", "SCB", None, "weight is I8"), ("bnb-int8", "SCB", lambda t: t * torch.nan, "not finite"),
    ("bnb-int8", "weight", lambda t: t.float(), "is F32"), ("bnb-int8", "weight_format", lambda t: t + 2, "for a GPU"),
    ("bnb-nf4", "weight.absmax", None, r"weight is U8"), ("bnb-nf4", "weight.absmax", lambda t: t[1:], r"\[63\]"),
    ("bnb-nf4", "weight.absmax", lambda t: t * torch.inf, "not finite"),
    ("bnb-nf4", "weight.quant_map", lambda t: t.flip(0), "quant_map"),
    ("bnb-nf4", "weight.quant_map", lambda t: t * torch.nan, "quant_map"),
    ("bnb-nf4", "weight", lambda t: t[1:], "2047"), ("bnb-nf4", "weight.quant_map", lambda t: t[:8], r"\[8\]"),
    ("bnb-nf4-nested", "weight.nested_absmax", None, "is U8"),
    ("bnb-nf4-nested", "weight.nested_absmax", lambda t: t * torch.inf, "not finite"),
    ("bnb-nf4-nested", "weight.nested_absmax", lambda t: t.repeat(2), r"\[2\]"),
    ("bnb-nf4-nested", "weight.nested_quant_map", lambda t: t[:16], r"\[16\]"),
    ("bnb-nf4-nested", "weight.nested_quant_map", lambda t: t * 1e38 * t.sign() * 1e38, "not finite"),
])
def test_tensors_that_do_not_fit_are_refused(
    kind: str, name: str, change: Any, found: str, tmp_path: Path
) -> None:
    """Missing tensors, other shapes and types, and numbers that are none: the message names the tensor."""
    write_checkpoint(tmp_path, kind)
    full = f"{Q}.{name}"
    before = like(tmp_path, full) if full in TensorFiles(tmp_path) else torch.empty(0)
    change_tensors(tmp_path, {full: None if change is None else change(before).contiguous()})
    message = refused(tmp_path)
    assert Q in message
    assert re.search(found, message)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(("changes", "found"), [
    ({"shape": [64, 63]}, r"\[64, 63\]"), ({"shape": [2**60, 2**60]}, "of shape"), ({"shape": None}, "None"),
    ({"quant_type": "fp4"}, "'fp4'"), ({"blocksize": 0}, "blocks of 0"), ({"blocksize": -64}, "blocks of -64"),
    ({"blocksize": 2**70}, "blocks of"), ({"blocksize": True}, "blocks of True"),
    ({"blocksize": 64.0}, "blocks of 64.0"),
    ({"blocksize": 128}, r"absmax is U8 of shape \[64\]"), ({"blocksize": 4}, r"absmax is U8 of shape \[64\]"),
    ({"nested_offset": 10**400}, "offset"), ({"nested_offset": float("nan")}, "not finite"),
    ({"nested_offset": -float("inf")}, "not finite"), ({"nested_offset": "0.5"}, "offset of '0.5'"),
    ({"nested_offset": None}, "offset of None"), ({"nested_blocksize": 10**30}, "blocks of"),
    ({"nested_blocksize": None}, "blocks of None"), ({"nested_blocksize": 1}, "nested_absmax is F32"),
    (b"", "no JSON"), (b"[]", "no JSON"), (b"\xff{}", "no JSON"), (b"[" * 4000, "no JSON"), (b"9" * 4000, "no JSON"),
    (b" " * 5000 + b"{}", "5002 bytes"), (None, "missing"),
], ids=lambda one: repr(one)[:30])
def test_a_hostile_description_of_a_layer_is_refused(changes: Any, found: str, tmp_path: Path) -> None:
    """What bitsandbytes says of a layer in JSON counts only where it fits the tensors; else there is a typed error."""
    write_checkpoint(tmp_path, "bnb-nf4-nested", num_hidden_layers=2)
    if isinstance(changes, dict):
        said = json.loads(bytes(like(tmp_path, f"{Q}.{STATE}").tolist()))
        changes = json.dumps({**said, **changes}).encode()
    change_tensors(tmp_path, {f"{Q}.{STATE}": None if changes is None else torch.tensor(list(changes)).byte()})
    with LargestFloats() as counted:
        message = refused(tmp_path)
    assert Q in message
    assert re.search(found, message)
    assert counted.largest < 2**20


@pytest.mark.parametrize(("kind", "changes"), [
    ("gptq", {"hidden_size": 2**20}), ("awq", {"intermediate_size": 2**40}), ("ct-w8a8", {"vocab_size": 2**40}),
    ("ct-w4a16", {"num_key_value_heads": 4}),
])
def test_a_configuration_of_other_sizes_is_refused_before_anything_is_allocated(
    kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    """Modules have no memory until the shape of every tensor was compared with theirs."""
    write_checkpoint(tmp_path, kind)
    change_config(tmp_path, **changes)
    with LargestFloats() as counted:
        assert "needed is" in refused(tmp_path)
    assert counted.largest < 2**20


@pytest.mark.parametrize("kind", ["gptq", "ct-w4a16"])
def test_groups_that_do_not_divide_are_refused(kind: str, tmp_path: Path) -> None:
    """A group size that no layer can have, or one that no product here reads."""
    write_checkpoint(tmp_path, kind)
    for size in (60, 128, 4):
        config = changed(kind, group_size=size) if kind == "gptq" else with_scheme(kind, weights={"group_size": size})
        change_config(tmp_path, quantization_config=config)
        assert "q_proj" in refused(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file that ends early, and one whose header claims more than it has: a typed error without the path."""
    write_checkpoint(tmp_path, "gptq")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"", (2**60).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidConfig) as caught:
            engine_of(tmp_path)
        assert str(tmp_path) not in str(caught.value)


def test_a_bias_of_zeros_is_no_bias(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every layer, of zeros where the architecture has none."""
    wanted = scores_of_transformers(write_checkpoint(tmp_path, "gptq"))
    change_tensors(tmp_path, {f"{Q}.bias": torch.zeros(64)})
    assert np.abs(scores_of(tmp_path) - wanted).max() < 2e-3


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """A checkpoint has its scheme: another one and other products are refused, the same one is accepted."""
    write_checkpoint(tmp_path, "ct-w8a8")
    with pytest.raises(InvalidConfig, match="linear_backend: got 'packed', allowed with quantization='w8a8'"):
        engine_of(tmp_path, linear_backend="packed")
    engine_of(tmp_path, quantization="w8a8").close()
    change_config(tmp_path, quantization_config=KINDS["gptq"].config)
    with pytest.raises(InvalidConfig, match="quantization: got 'w8a8' for a w4a16 checkpoint"):
        engine_of(tmp_path, quantization="w8a8")


def test_float16_is_computed_in_float32(tmp_path: Path) -> None:
    """As in any other model; the quantised weights are the same."""
    write_checkpoint(tmp_path, "awq")
    assert np.array_equal(scores_of(tmp_path, dtype="float16"), scores_of(tmp_path))


def test_files_may_change_after_loading(tmp_path: Path) -> None:
    """An engine keeps nothing of a mapped file: writing over it changes no completion."""
    write_checkpoint(tmp_path, "ct-w4a16")
    path = tmp_path / "model.safetensors"
    with engine_of(tmp_path) as engine:
        before = engine.generate(PROMPTS, GREEDY, show_progress=False)
        with path.open("r+b") as file:
            file.seek(8 + int.from_bytes(path.read_bytes()[:8], "little"))
            file.write(bytes(path.stat().st_size - file.tell()))
        after = engine.generate([prompt[1:] + prompt[:1] for prompt in PROMPTS], GREEDY, show_progress=False)
        again = engine.generate(PROMPTS, GREEDY, show_progress=False)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in before]
    assert all(not one.outputs[0].error for one in after)


@pytest.mark.parametrize(("kind", "name"), [
    ("gptq-order", "g_idx"), ("gptq-order", "qweight"), ("gptq-zeros", "qzeros"), ("gptq", "scales"), ("awq", "qzeros"),
    ("ct-w4a16-order", "weight_g_idx"), ("ct-w4a16-zeros", "weight_zero_point"), ("ct-w8a8", "weight_scale"),
    ("ct-w8a8", "weight"), ("ct-w4a16", "weight_packed"), ("bnb-int8", "SCB"),
    ("bnb-nf4-nested", "weight.nested_quant_map"), ("bnb-nf4", "weight.absmax"),
])
def test_every_tensor_counts_in_the_fingerprint(kind: str, name: str, tmp_path: Path) -> None:
    """A file that differs in one tensor of one layer is another model; the same file is the same one."""
    write_checkpoint(tmp_path, kind)
    stored, found = stored_format(str(tmp_path)), []
    assert stored is not None
    for change in (False, False, True):
        if change:
            change_tensors(tmp_path, {f"{Q}.{name}": like(tmp_path, f"{Q}.{name}").flip(0).contiguous()})
        model = load_stored(str(tmp_path), stored, torch.float32, trust_remote_code=False)
        found.append(model_fingerprint(model, stored.scheme))
    assert found[0] == found[1] != found[2]


def test_every_expert_counts_in_the_fingerprint(tmp_path: Path) -> None:
    """So is a file that differs in one expert."""
    write_checkpoint(tmp_path, "awq", "mixtral")
    stored, found = stored_format(str(tmp_path)), set()
    assert stored is not None
    for _ in range(2):
        model = load_stored(str(tmp_path), stored, torch.float32, trust_remote_code=False)
        found.add(model_fingerprint(model, stored.scheme))
        name = "model.layers.1.block_sparse_moe.experts.3.w2.scales"
        change_tensors(tmp_path, {name: like(tmp_path, name) * 2})
    assert len(found) == 2


def test_a_session_belongs_to_one_checkpoint(tmp_path: Path) -> None:
    """The float original, the same numbers in another format, and other scales are other models: exports are refused,
    and signed KV of one is not used by another."""
    float_dir, paths = tmp_path / "float", {}
    for kind in ("gptq", "ct-w4a16"):
        model = write_checkpoint(tmp_path / kind, kind)
    model.save_pretrained(float_dir)
    changed_dir = tmp_path / "changed"
    write_checkpoint(changed_dir, "gptq")
    change_tensors(changed_dir, {f"{Q}.scales": like(changed_dir, f"{Q}.scales") * 2})
    directories = [float_dir, tmp_path / "gptq", tmp_path / "ct-w4a16", changed_dir]
    fingerprints = set()
    for directory in directories:
        with engine_of(directory, session_key=b"a secret of 16 bytes") as engine, engine.session() as session:
            session.ask(PROMPTS[2], GREEDY)
            paths[directory] = tmp_path / f"{directory.name}.json"
            session.export(paths[directory])
            fingerprints.add(hashlib.sha256(repr(engine._runner.backend.fingerprint).encode()).digest())
    assert len(fingerprints) == 4
    with engine_of(directories[1], session_key=b"a secret of 16 bytes") as engine:
        engine.import_session(paths[directories[1]]).close()
        for other in (directories[0], *directories[2:]):
            with pytest.raises((ModelMismatch, InvalidSessionFile)):
                engine.import_session(paths[other])


@pytest.mark.parametrize(("kind", "file", "config"), [
    ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True,
                                      "true_sequential": True, "model_file_base_name": "gptq_model-4bit-32g"}),
    ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ("bnb-int8", "config.json", {"load_in_8bit": True, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None}),
])
def test_descriptions_of_earlier_versions_are_read(
    kind: str, file: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """AutoGPTQ and AutoAWQ wrote a file of their own once, and bitsandbytes no name; the model is the same."""
    write_checkpoint(tmp_path, kind)
    wanted = scores_of(tmp_path)
    if file == "config.json":
        change_config(tmp_path, quantization_config=config)
    else:
        change_config(tmp_path, quantization_config=None)
        (tmp_path / file).write_text(json.dumps(config))
        (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    assert np.array_equal(scores_of(tmp_path), wanted)


@pytest.mark.parametrize(("text", "found"), [
    ('{"bits": 3, "group_size": 32}', "3 bits"), ("[1]", r"in \[1\]"), ('{"quant_method": "nvfp4"}', "'nvfp4'"),
])
def test_a_hostile_file_beside_is_refused(text: str, found: str, tmp_path: Path) -> None:
    """What is refused in config.json is refused in a file of its own."""
    write_checkpoint(tmp_path, "gptq")
    change_config(tmp_path, quantization_config=None)
    (tmp_path / "quantize_config.json").write_text(text)
    with pytest.raises(ModelNotSupported, match=found):
        stored_format(str(tmp_path))
    (tmp_path / "quantize_config.json").write_text("[" * 100_000)
    assert stored_format(str(tmp_path)) is None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of "owner/name" in a cache of the hub, which itself cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--owner--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    return snapshot


@pytest.mark.parametrize("kind", ["gptq", "bnb-nf4"])
def test_a_name_on_the_hub_is_its_snapshot(kind: str, hub: Path) -> None:
    """A quantised checkpoint in the hub's cache is found by its name, without a network, and is the same model."""
    write_checkpoint(hub, kind)
    for path in DEMO_MODEL_DIR.glob("tokenizer*"):  # Why: a name has to have a tokenizer.
        shutil.copyfile(path, hub / path.name)
    assert np.array_equal(scores_of("owner/name"), scores_of(hub))


def test_an_incomplete_snapshot_is_refused(hub: Path) -> None:
    """A cache that has a configuration and no weights gives a typed error, and so does a name that it does not have."""
    write_checkpoint(hub, "gptq")
    (hub / "model.safetensors").unlink()
    assert "0 safetensors files" in refused_by_name("owner/name", hub)
    with pytest.raises(InvalidConfig, match=r"could not be reached .* Did you mean owner/name\?"):
        engine_of("owner/other")


def refused_by_name(name: str, hub: Path) -> str:
    """The message with which a name is refused; it holds no path."""
    with pytest.raises(ModelNotSupported) as caught:
        engine_of(name)
    assert str(hub.parents[2]) not in str(caught.value)
    return str(caught.value)

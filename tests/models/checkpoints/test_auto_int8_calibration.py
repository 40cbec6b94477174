"""``--calibration`` with auto-int8: which rows are kept, and that they decide in the place of those made up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.convert.activations import NUM_KEPT, load_model, rows_seen
from pagedcore.convert.conversion import convert
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints import auto_int8
from pagedcore.models.checkpoints.product_rows import find_products, weights_of
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import VOCAB, tiny_model
from support.runner import invoke
from support.scores import scores_of

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
PROMPTS = [[(7 * i + n) % VOCAB for i in range(n)] for n in (5, 100, 33)]
SIZES = {"hidden_size": 512, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}


def calibration_of(path: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return path


@torch.no_grad()
def save(directory: Path, family: str, *, is_large: bool) -> str:
    """Write a model whose residual has a channel thirty times the others, which no norm shows; or one whose norm has
    such a weight for a channel in which the residual is zero."""
    model = tiny_model(family, tie_word_embeddings=False, **SIZES)
    if is_large:
        model.model.embed_tokens.weight[:, 5] *= 30
        model.model.layers[0].self_attn.o_proj.weight *= 0.01
    for layer in [] if is_large else model.model.layers:
        layer.input_layernorm.weight[5] = layer.post_attention_layernorm.weight[5] = 30.0
        layer.self_attn.o_proj.weight[5] = 0.0
        model.model.embed_tokens.weight[:, 5] = 0.0
        last = layer.mlp.experts.down_proj if hasattr(layer.mlp, "experts") else layer.mlp.down_proj.weight
        last[..., 5, :] = 0.0
    model.save_pretrained(directory)
    return str(directory)


def schemes_in(out: Path) -> dict[str, str]:
    """The scheme of each layer that a converted directory names."""
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values()
    return {name: "w8a8" if group["input_activations"] else "w8a16" for group in groups for name in group["targets"]}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mixtral", "stablelm"])
def test_rows_are_those_of_tokens_spread_over_the_prompts(family: str, tmp_path: Path) -> None:
    """Of all tokens, one in each of 64 equal parts gives its row, as transformers computes it over whole prompts; the
    output layer gives the same."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    names = ["model.layers.1.self_attn.q_proj", "lm_head",
             "model.layers.2.mlp.experts" if family == "mixtral" else "model.layers.2.mlp.down_proj"]
    progress: list[tuple[int, int]] = []
    rows = rows_seen(load_model(str(tmp_path)), names, PROMPTS, lambda *done: progress.append(done))
    seen: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: seen[name].append(given[0].flatten(0, -2)))
    for prompt in PROMPTS:
        model(torch.tensor([prompt]))
    total = sum(map(len, PROMPTS))
    places = [int((number + 0.5) * total / NUM_KEPT) for number in range(NUM_KEPT)]
    for name in names:
        assert torch.allclose(rows[name], torch.cat(seen[name])[places], atol=1e-5), name
    assert progress == [(number, 3) for number in (1, 2, 3)]


@torch.inference_mode()
def test_last_layers_of_experts_see_their_own_gates_and_ups() -> None:
    """The rows of an expert's down are made of all rows that its layer was given, by its own gate and up."""
    model, name = tiny_model("mixtral"), "model.layers.1.mlp.experts"
    seen = {name: torch.randn(9, 64, generator=torch.Generator().manual_seed(0))}
    downs = next(one for one in find_products(model, weights_of(model), seen) if one.layers[0] == f"{name}.0.down_proj")
    rows, experts = seen[name].numpy().astype(np.float64), model.get_submodule(name)
    for number, (weights, make_rows) in enumerate(downs.inputs):
        gate, up = np.split(experts.gate_up_proj[number].numpy().astype(np.float64), 2)
        of_gate = rows @ gate.T
        assert weights == [f"{name}.down_proj.{number}"]
        assert np.allclose(make_rows().numpy(), of_gate / (1 + np.exp(-of_gate)) * (rows @ up.T), atol=1e-4)
    assert number == 3


def test_a_large_set_costs_no_more_than_64_prompts(tmp_path: Path) -> None:
    """Of two hundred prompts 64 are computed, and 64 rows are kept; of few tokens all are."""
    tiny_model("llama").save_pretrained(tmp_path)
    model, name, progress = load_model(str(tmp_path)), "model.layers.0.mlp.gate_proj", list[tuple[int, int]]()
    prompts = [[number % VOCAB, 3, 4] for number in range(200)]
    assert len(rows_seen(model, [name], prompts, lambda *done: progress.append(done))[name]) == NUM_KEPT
    assert progress[-1] == (NUM_KEPT, NUM_KEPT)
    assert len(rows_seen(model, [name], [[1, 2], [3]], lambda *done: None)[name]) == 3


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe"])
def test_activations_decide(family: str, tmp_path: Path) -> None:
    """A channel of the residual that no weight shows makes the rows of the layers that read it keep their format; a
    large weight of a norm for a channel that is zero does not."""
    found = {}
    for is_large in (True, False):
        source = save(tmp_path / f"model{is_large}", family, is_large=is_large)
        for calibration in (None, calibration_of(tmp_path / "set.jsonl")):
            out = tmp_path / f"out {is_large} {calibration is None}"
            assert convert(source, out, quantization="auto-int8", dtype="float32", calibration=calibration) == ()
            chosen = schemes_in(out) if "Linear" not in schemes_in(out) else {}
            found[is_large, calibration is not None] = {
                name for name, scheme in chosen.items() if scheme == "w8a16" and ".layers.0." in name}
    readers = {name for name in found[True, True] if "o_proj" not in name and "down" not in name and ".w2" not in name}
    # Shape: query, key and value; gate and up, of 4 experts where there are such.
    assert len(readers) >= {"llama": 5, "mixtral": 11, "qwen2_moe": 11}[family]
    assert not found[True, False]
    assert not found[False, True]
    assert (found[False, False] >= readers) == (family != "qwen2_moe")


def test_the_choice_is_what_a_directory_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a converted mixture have the bits of the same choice made at load; the same set makes the same
    file."""
    source, outs = save(tmp_path / "model", "mixtral", is_large=True), [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        convert(source, out, quantization="auto-int8", dtype="float32",
                calibration=calibration_of(tmp_path / "set.jsonl"))
    assert len({(out / "model.safetensors").read_bytes() for out in outs}) == 1
    model = load_model(source)
    chosen = auto_int8.choose(model, seen=rows_seen(model, auto_int8.modules_read(model), PROMPTS, lambda *done: None))
    assert {*chosen.values()} == {"w8a8", "w8a16"}
    with_made_up = scores_of(source, quantization="auto-int8")
    monkeypatch.setattr(auto_int8, "choose", lambda model: chosen)
    actual = scores_of(outs[0], must_fuse=True)
    assert np.array_equal(actual, scores_of(source, quantization="auto-int8"))
    assert not np.array_equal(actual, with_made_up)


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    """Sets that are not as they should be, activations that are not finite, GGUF files; nothing is written."""
    source = save(tmp_path / "model", "llama", is_large=False)
    bad = calibration_of(tmp_path / "bad.jsonl", [[VOCAB]])
    good = calibration_of(tmp_path / "set.jsonl")
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[:, 3, 4] = torch.inf
    model.save_pretrained(tmp_path / "damaged")
    before = sorted(os.listdir(tmp_path))
    for given, calibration, found in (
        (source, bad, f"the token id {VOCAB} in line 1, allowed is 0 to {VOCAB - 1}"),
        (str(tmp_path / "damaged"), good, r"the activations before .* are not finite"),
    ):
        with pytest.raises(InvalidConfig, match=found):
            convert(given, tmp_path / "out", quantization="auto-int8", calibration=calibration)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotSupported, match="calibration: got a GGUF file"):
        convert(str(tmp_path / "model.gguf"), tmp_path / "out", quantization="auto-int8", calibration=good)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "model.gguf"])


def test_the_command_chooses_by_texts(tmp_path: Path) -> None:
    """It takes texts, and says nothing of smoothing."""
    (tmp_path / "set.txt").write_text("What is 2 + 3?\nCapital of Norway?\n")
    printed = invoke("convert", "demo", "--quantization", "auto-int8", "--calibration", str(tmp_path / "set.txt"),
                     "--out", str(tmp_path / "out"))
    assert "auto-int8," in printed
    assert "smoothed" not in printed

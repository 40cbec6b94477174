"""Scales from a calibration set: the folded model against the one before, and what int8 rows lose with and without."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from pagedcore.convert.calibration_set import MAX_FILE_BYTES, MAX_PROMPT_TOKENS, MAX_TOKENS
from pagedcore.convert.conversion import convert
from pagedcore.convert.smoothing import Smoothing, find_smoothing
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.fingerprint import model_fingerprint
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import VOCAB, tiny_model
from support.runner import invoke
from support.scores import PROMPTS, scores_of, scores_of_transformers

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
#: Products that read a residual without a norm.
WITHOUT_NORM = {"olmo2": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}}
WITHOUT_NORM["olmo3"] = WITHOUT_NORM["olmo2"]
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3", "olmo2", "olmo3", "gemma2", "gemma3_text")
CHOOSING = [*PROMPTS, [(5 * i + 3) % VOCAB for i in range(150)]]
SPARSE = ("mixtral", "qwen3_moe", "olmoe")
Planted = Callable[[Any], None]


@torch.no_grad()
def plant_outliers(model: Any) -> None:
    """Make a few channels of norms, values and gated rows fifty times as large; what reads them undoes it."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(mlp, "experts"):
            # Shape: [experts, gates and ups, in] and [experts, out, in]
            between, down = [mlp.gate.weight, mlp.experts.gate_up_proj], mlp.experts.down_proj
        else:
            between, down = [mlp.gate_proj.weight, mlp.up_proj.weight], mlp.down_proj.weight
        for norm, readers in ((layer.input_layernorm, [getattr(attention, f"{name}_proj").weight for name in "qkv"]),
                              (layer.post_attention_layernorm, between)):
            norm.weight[[3, 17]] *= 50
            for reader in readers:
                reader[..., [3, 17]] /= 50
        between[-1][..., [-3, -20], :] *= 50
        down[..., [-3, -20]] /= 50
        attention.v_proj.weight[[1, 20]] *= 50
        # Shape: 2 heads of values with 16 channels each are read by 2 heads of queries each.
        attention.o_proj.weight[:, [1, 17, 36, 52]] /= 50


@torch.no_grad()
def save(directory: Path, family: str = "llama", change: Planted = lambda model: None, **changes: Any) -> Any:
    """Write a tiny model whose norms differ from channel to channel, and return it."""
    model = tiny_model(family, **{"tie_word_embeddings": False, **changes})
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter += torch.rand_like(parameter) * (3 if "norm" in name else 0.1)
    change(model)
    model.save_pretrained(directory)
    return model


def calibration_of(path: Path, prompts: list[list[int]] = PROMPTS) -> Path:
    """Write prompts as token ids."""
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return path


def linears_of(model: Any) -> list[str]:
    """Names of linear layers, those of experts as files have them."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)] + [
        f"{name}.{number}.{part}" for name, module in model.named_modules() if name.endswith(".experts")
        for number in range(len(module.down_proj)) for part in ("gate_proj", "up_proj", "down_proj")
    ]


def scaled(smoothing: Smoothing, name: str, old: torch.Tensor) -> torch.Tensor:
    """A parameter of the smoothed model; of experts' matrices one by one."""
    if old.ndim < 3:
        return smoothing.scaled(name, old)
    experts, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return torch.stack([
        torch.cat([smoothing.scaled(f"{experts}.{number}.{part}.weight", half)
                   for part, half in zip(parts, matrix.chunk(len(parts)), strict=True)])
        for number, matrix in enumerate(old)
    ])


@pytest.mark.parametrize("family", DENSE + SPARSE)
def test_the_folded_model_is_the_model(family: str, tmp_path: Path) -> None:
    """In numbers of double width logits differ by the rounding of norms alone, and every product that reads a norm,
    values or gated rows is smoothed; so are experts and the routers that read their norm."""
    model = save(tmp_path, family)
    smoothing = find_smoothing(str(tmp_path), PROMPTS, linears_of(model), torch.float32)
    assert {name.rpartition(".")[2] for name in smoothing.unsmoothed} == WITHOUT_NORM.get(family, set())
    smoothed = {*smoothing.columns, *smoothing.unsmoothed}
    routers = [f"model.layers.{number}.mlp.gate" for number in range(3)] if family in SPARSE else []
    assert smoothed == {*linears_of(model), *routers}
    folded, tokens = copy.deepcopy(model).double(), torch.tensor([PROMPTS[-1]])
    for name, parameter in folded.named_parameters():
        parameter.data = scaled(smoothing, name, parameter.data)
    new = folded.state_dict()
    changed = [name for name, one in model.named_parameters() if not torch.equal(one.double(), new[name])]
    of_experts = {name for name, one in model.named_parameters() if one.ndim == 3}
    others = {f"{name}.weight" for name in (*smoothing.norms, *smoothing.columns) if ".experts." not in name}
    assert {*changed} >= others | of_experts
    with torch.inference_mode():
        for one in (model, folded):
            one.config._experts_implementation = "eager"  # the other takes no numbers of double width
        before, after = (one(tokens).logits for one in (model.double(), folded))
    assert before.std() > 0.1
    assert (before - after).abs().max() < 1e-4 * before.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms_that_add_one_are_folded_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """A weight near -1 has few digits left of what it adds up to; scales are what its rounding makes of them."""
    model = save(tmp_path, "gemma2")
    smoothing = find_smoothing(str(tmp_path), PROMPTS, linears_of(model), dtype)
    for number in range(3):
        name = f"model.layers.{number}.input_layernorm"
        old = model.get_submodule(name).weight.detach().to(dtype).double()
        new, columns = smoothing.norms[name], smoothing.columns[f"model.layers.{number}.self_attn.q_proj"]
        assert new.dtype == dtype
        assert torch.allclose((1 + new.double()) * columns, 1 + old, rtol=1e-12, atol=0)
        assert columns.std() > 0.01


def paper_scales(inputs: npt.NDArray[Any], *weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Equation 4 of SmoothQuant with alpha 0.5, divided by the geometric mean."""
    largest = np.abs(inputs.reshape(-1, inputs.shape[-1])).max(axis=0).astype(np.float64)
    scales = np.sqrt(largest) / np.sqrt(np.abs(np.concatenate(weights)).max(axis=0).astype(np.float64))
    return np.asarray(scales / np.exp(np.log(scales).mean()))


@torch.inference_mode()
def test_scales_are_those_of_the_paper(tmp_path: Path) -> None:
    """A norm, a product's weight and the rows of another in the written file are NumPy's, from the maxima of all
    prompts that transformers' modules see."""
    model, seen = save(tmp_path / "model", change=plant_outliers), dict[str, list[torch.Tensor]]()
    names = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj")
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, given, name=name: seen.setdefault(name, []).append(given[0][0]))
    for prompt in PROMPTS:
        model(torch.tensor([prompt]))
    convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", dtype="float32",
            calibration=calibration_of(tmp_path / "set.jsonl"))
    old, new = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "out"))
    before = {name: old[f"{name}.weight"].numpy() for name in (*names, "model.layers.1.mlp.up_proj")}
    gate, down, up = before.values()
    between, inside = (torch.cat(seen[name]).numpy() for name in names)
    columns, rows = paper_scales(between, gate, up), paper_scales(inside, down)
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert np.allclose(new[norm].numpy(), old[norm].numpy() / columns, rtol=1e-4)
    for (name, weight), wanted in zip(before.items(), (gate * columns, down * rows, up * columns / rows[:, None]),
                                      strict=True):
        scales = new[f"{name}.weight_scale"].numpy()
        stored = new[f"{name}.weight"].numpy() * scales
        assert np.all(np.abs(stored - wanted) <= 0.51 * scales), name
        assert not np.allclose(weight, wanted, rtol=0.1)


@pytest.mark.parametrize(("quantization", "gain"), [("w8a8", 4), ("w4a8", 1)])
def test_outliers_cost_less(quantization: str, gain: int, tmp_path: Path) -> None:
    """With channels fifty times as large as others, log-probabilities are several times nearer to the model's, and
    nearer where weights of 4 bits make most of the error."""
    model = save(tmp_path / "model", change=plant_outliers)
    exact, errors = scores_of_transformers(model), []
    for calibration in (None, calibration_of(tmp_path / "set.jsonl")):
        source, out = str(tmp_path / "model"), tmp_path / f"out{len(errors)}"
        assert convert(source, out, quantization=quantization, dtype="float32", calibration=calibration) == ()
        errors.append(float(np.std(scores_of(out, must_fuse=True) - exact)))
    assert errors[1] < errors[0] / gain, errors


@pytest.mark.parametrize("family", SPARSE)
def test_outliers_cost_less_in_mixtures(family: str, tmp_path: Path) -> None:
    """The same with channels before experts, values, and outputs of all experts' ups that are fifty times as large."""
    model = save(tmp_path / "model", family, change=plant_outliers)
    exact, errors = scores_of_transformers(model), []
    for calibration in (None, calibration_of(tmp_path / "set.jsonl", CHOOSING)):
        source, out = str(tmp_path / "model"), tmp_path / f"out{len(errors)}"
        assert convert(source, out, quantization="w8a8", dtype="float32", calibration=calibration) == ()
        errors.append(float(np.std(scores_of(out, must_fuse=True) - exact)))
    assert errors[1] < errors[0] / 2, errors


@torch.inference_mode()
def test_scales_of_experts_are_those_of_the_paper(tmp_path: Path) -> None:
    """Gates and ups of all experts have the scales of all their weights together, and the router's columns are
    multiplied by them; those of a down are made of the rows that chose its expert."""
    model, seen = save(tmp_path / "model", "mixtral", change=plant_outliers), []
    mlp = model.model.layers[1].mlp
    mlp.experts.register_forward_pre_hook(lambda _, given: seen.append(given))
    for prompt in PROMPTS:
        model(torch.tensor([prompt]))
    convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", dtype="float32",
            calibration=calibration_of(tmp_path / "set.jsonl"))
    new = load_file(tmp_path / "out" / "model.safetensors")
    rows, chosen = (torch.cat([given[place] for given in seen]).numpy() for place in (0, 1))
    gate_up, down = mlp.experts.gate_up_proj.detach().numpy(), mlp.experts.down_proj.detach().numpy()
    columns, path = paper_scales(rows, *gate_up), "model.layers.1.block_sparse_moe"
    assert np.allclose(new[f"{path}.gate.weight"].numpy(), mlp.gate.weight.detach().numpy() * columns, rtol=1e-5)
    for number in range(4):
        gate, up = np.split(gate_up[number].astype(np.float64), 2)
        given = rows[(chosen == number).any(axis=1)].astype(np.float64)
        of_gate = given @ gate.T
        inside = of_gate / (1 + np.exp(-of_gate)) * (given @ up.T)
        scales = paper_scales(inside, down[number])
        expected = {"w1": gate * columns, "w2": down[number] * scales, "w3": up * columns / scales[:, None]}
        for part, wanted in expected.items():
            steps = new[f"{path}.experts.{number}.{part}.weight_scale"].numpy()
            stored = new[f"{path}.experts.{number}.{part}.weight"].numpy() * steps
            assert np.all(np.abs(stored - wanted) <= 0.51 * steps), (number, part)


def test_an_expert_that_no_row_chooses_keeps_its_last_layer(tmp_path: Path) -> None:
    """Its down and the rows of its up have the scale 1; its gate and up are divided with all others, and the result
    names it."""
    model = save(tmp_path, "mixtral")
    smoothing = find_smoothing(str(tmp_path), [[5]], linears_of(model), torch.float32)
    mlp = "model.layers.0.mlp.experts."
    downs = {f"{mlp}{number}.down_proj" for number in range(4)}
    unreached = downs & {*smoothing.unsmoothed}
    assert len(unreached) == 2
    assert {*smoothing.columns} & downs == downs - unreached
    for name in unreached:
        expert = name.rpartition(".")[0]
        assert f"{expert}.up_proj" in smoothing.columns
        assert f"{expert}.up_proj" not in smoothing.rows


def test_an_embedding_is_not_scaled_with_the_output_layer_that_shares_it(tmp_path: Path) -> None:
    """The output layer reads a norm whose channels differ, so its columns change; tokens are looked up as before."""
    model = save(tmp_path / "model", tie_word_embeddings=True)
    exact, errors = scores_of_transformers(model), []
    for calibration, kind in ((None, "lm_head"), (calibration_of(tmp_path / "set.jsonl"), "int8")):
        out = tmp_path / f"out of {kind}"
        convert(str(tmp_path / "model"), out, quantization="w8a8", dtype="float32", calibration=calibration)
        assert json.loads((out / "config.json").read_text())["embedding_quantization"] == kind
        errors.append(float(np.std(scores_of(out, must_fuse=True) - exact)))
    assert errors[1] < 1.5 * errors[0], errors


def test_a_smoothed_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Its fingerprint is that of no other calibration set, and of no model without one."""
    save(tmp_path / "model")
    prompts, found = [PROMPTS, PROMPTS, [[1, 2, 3]]], []
    sets = [None, *(calibration_of(tmp_path / f"{n}.jsonl", given) for n, given in enumerate(prompts))]
    for number, calibration in enumerate(sets):
        out = str(tmp_path / f"out{number}")
        convert(str(tmp_path / "model"), out, quantization="w8a8", dtype="float32", calibration=calibration)
        stored = stored_format(out)
        assert stored is not None
        loaded = load_stored(out, stored, torch.float32, trust_remote_code=False)
        found.append(model_fingerprint(loaded, "w8a8"))
    assert found[1] == found[2]
    assert len({*found}) == 3


@pytest.mark.parametrize(("name", "text", "found"), [
    ("set.txt", "", "no prompt"),
    ("set.txt", b"\xff\xfe", "no UTF-8 text"),
    ("set.jsonl", "\n\n", "no prompt"),
    ("set.jsonl", "[1, 2]\n", "a value of type list in line 1"),
    ("set.jsonl", '"fine"\nfine\n', "no JSON in line 2|tokenizer"),
    ("set.jsonl", "[" * 100_000, "no JSON in line 1"),
    ("set.jsonl", '{"prompt": 3}', "in line 1"),
    ("set.jsonl", '{"prompt": "a", "prompt_token_ids": [1]}', "in line 1"),
    ("set.jsonl", '{"prompt_token_ids": [1, true]}', "in line 1"),
    ("set.jsonl", '{"prompt_token_ids": []}', "0 tokens in line 1"),
    ("set.jsonl", '{"prompt_token_ids": [-1]}', "the token id -1 in line 1, allowed is 0 to 198"),
    ("set.jsonl", f'{{"prompt_token_ids": [{10 ** 50}]}}', "an integer of 167 bits"),
    ("set.jsonl", json.dumps({"prompt_token_ids": [1] * 257}), "257 tokens in line 1, allowed is 1 to 256"),
    ("set.jsonl", (json.dumps({"prompt_token_ids": [1] * 256}) + "\n") * (MAX_TOKENS // 256 + 1),
     f"more tokens in lines 1 to 1025, allowed is up to {MAX_TOKENS}"),
    ("set.jsonl", b" " * (MAX_FILE_BYTES + 1), f"{MAX_FILE_BYTES + 1} bytes"),
    ("gone.txt", None, "FileNotFoundError"),
    ("", None, "a directory"),
    ("\0", None, "ValueError"),
])
def test_sets_are_refused(name: str, text: str | bytes | None, found: str, tmp_path: Path) -> None:
    """With the line, what is there and what is allowed, before anything is written."""
    save(tmp_path / "model")
    path = tmp_path / "sets" / name
    (tmp_path / "sets").mkdir()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidConfig, match=found):
        convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", calibration=path)
    assert sorted(os.listdir(tmp_path)) == ["model", "sets"]


def test_long_prompts_are_refused(tmp_path: Path) -> None:
    """Attention over one is computed in one piece, whatever the model would take."""
    save(tmp_path / "model", max_position_embeddings=2**20)
    path = calibration_of(tmp_path / "set.jsonl", [[1] * (MAX_PROMPT_TOKENS + 1)])
    with pytest.raises(InvalidConfig, match=rf"allowed is 1 to {MAX_PROMPT_TOKENS} tokens"):
        convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", calibration=path)


def test_what_cannot_be_smoothed_is_refused(tmp_path: Path) -> None:
    """Schemes that keep activations, families whose products are not known, and activations that are not finite."""
    path = calibration_of(tmp_path / "set.jsonl", [[1, 2, VOCAB - 1]])
    save(tmp_path / "model")
    with pytest.raises(InvalidConfig, match="quantization 'w4a16', allowed are w8a8, w4a8 or auto-int8"):
        convert(str(tmp_path / "model"), tmp_path / "out", quantization="w4a16", calibration=path)
    save(tmp_path / "other", "stablelm")
    with pytest.raises(ModelNotSupported, match="calibration: only models of the fused decoder"):
        convert(str(tmp_path / "other"), tmp_path / "out", quantization="w8a8", calibration=path)

    def damage(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf

    save(tmp_path / "damaged", change=damage)
    with pytest.raises(InvalidConfig, match=r"the activations before .* are not finite"):
        convert(str(tmp_path / "damaged"), tmp_path / "out", quantization="w8a8", calibration=path)
    assert not (tmp_path / "out").exists()


def test_the_command_smooths_by_texts(tmp_path: Path) -> None:
    """It takes texts with the model's own tokenizer, in both forms of a file alike, and says what stays as it was."""
    (tmp_path / "set.txt").write_text("What is 2 + 3?\n\nCapital of Norway?\n")
    (tmp_path / "set.jsonl").write_text('"What is 2 + 3?"\n{"prompt": "Capital of Norway?", "other": 1}\n')
    written = []
    for name in ("set.txt", "set.jsonl"):
        out = tmp_path / f"{name}.out"
        printed = invoke("convert", "demo", "--quantization", "w8a8", "--calibration", str(tmp_path / name), "--out",
                         str(out))
        assert "all products smoothed" in printed
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    save(tmp_path / "olmo", "olmo2")
    printed = invoke("convert", str(tmp_path / "olmo"), "--quantization", "w8a8", "--calibration",
                     str(calibration_of(tmp_path / "ids.jsonl")), "--out", str(tmp_path / "out"))
    assert "not smoothed, without a norm right before them: q_proj, k_proj, v_proj, gate_proj, up_proj" in printed
    save(tmp_path / "mixtral", "mixtral")
    printed = invoke("convert", str(tmp_path / "mixtral"), "--quantization", "w8a8", "--calibration",
                     str(calibration_of(tmp_path / "one.jsonl", [[5]])), "--out", str(tmp_path / "sparse"))
    # Shape: a token chooses 2 of 4 experts in each of 3 layers.
    assert "not smoothed, as no token of the prompts chose their expert: 6 down_proj" in printed

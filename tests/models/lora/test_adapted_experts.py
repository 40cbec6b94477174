"""Adapters of the experts of mixtures, against PEFT with the same two files, unmerged and merged."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.lora.test_adapted_models import LENGTHS, MAX_RANK, Adapted, error
from pagedcore.errors import InvalidAdapter
from support.families import tiny_model

peft = pytest.importorskip("peft", reason="the oracle of adapters")

FUSED = ["experts.gate_up_proj", "experts.down_proj"]
#: Fused with attention before, transformers' modules with experts that all rows share, and transposed with gates that
#: alternate; others like these.
FAMILIES = ["mixtral", "qwen2_moe", "gpt_oss", *[
    pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_moe", "olmoe", "deepseek_v3", "granitemoe")]]


def save(model: Any, folder: Path, seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Let PEFT make an adapter of random numbers, and save it; return its model."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    made = peft.get_peft_model(copy.deepcopy(model), config).eval()
    for name, one in made.named_parameters():
        if "lora_" in name:
            # Why scaled: PEFT's own numbers hardly change what experts compute.
            one.data = (torch.randn(one.shape) * (one.shape[1] if "lora_A" in name else 4) ** -0.5).to(dtype)
    made.save_pretrained(folder)
    return made


class AdaptedExperts(Adapted):
    """A backend whose three slots have adapters of experts: of both parameters, with other layers, and of one."""

    def __init__(self, family: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype, self.options = tiny_model(family, dtype=dtype), dtype, {}
        self.backend = self.without()
        self.backend.use_adapters(3, MAX_RANK)
        self.peft_models = {
            1: save(self.model, folder / "1", 1, r=3, target_modules=["q_proj", "o_proj"], target_parameters=FUSED),
            2: save(self.model, folder / "2", 2, r=4, target_modules=[], target_parameters=FUSED, use_rslora=True,
                    rank_pattern={"experts.gate_up_proj": 8}, alpha_pattern={"down_proj": 2}),
            3: save(self.model, folder / "3", 3, r=5, target_modules=["v_proj"], target_parameters=FUSED[1:]),
        }  # fmt: skip
        for slot in (1, 2, 3):
            self.backend.put_adapter(slot, self.backend.read_adapter(str(folder / str(slot))))
        self.begin()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_what_peft_computes(family: str, tmp_path: Path) -> None:
    """Every row with its own adapter or none, in chunks and in company with the bits that it has alone."""
    adapted = AdaptedExperts(family, tmp_path)
    found = adapted.in_company()
    bare = adapted.without()
    for number, slot in enumerate(adapted.slots):
        assert torch.equal(adapted.whole(number), found[number])
        with torch.inference_mode():
            model = adapted.peft_models[slot] if slot else adapted.model
            expected = model(adapted.sequences[number][None]).logits[0]
            assert error([found[number]], [expected]) < 1e-4, (LENGTHS[number], slot)
            if slot:
                base = adapted.model(adapted.sequences[number][None]).logits[0]
                assert error([found[number]], [base]) > 0.01, "its adapter changes nothing"
                merged = copy.deepcopy(model).merge_and_unload()(adapted.sequences[number][None]).logits[0]
                assert error([found[number]], [merged]) < 1e-4
            else:
                adapted.backend, kept = bare, adapted.backend
                assert torch.equal(adapted.whole(number), found[number])
                adapted.backend = kept


def test_experts_in_bfloat16_have_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Of the base and of the adapters, by transformers' modules and fused."""
    for family in ("qwen3_moe", "qwen2_moe"):
        adapted = AdaptedExperts(family, tmp_path / family, torch.bfloat16)
        for seed in (3, 4):
            for number, one in enumerate(adapted.in_company(seed)):
                assert torch.equal(adapted.whole(number), one)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_that_were_layers_are_read(family: str, tmp_path: Path) -> None:
    """Files from before experts were parameters, by the names that their layers had, as PEFT converts them; and what
    PEFT makes of such settings itself."""
    adapted = AdaptedExperts(family, tmp_path)
    names = ["w1", "w3", "w2"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    made = save(adapted.model, tmp_path / "new", 7, r=2, target_modules=["q_proj", *names])
    older = tmp_path / "older"
    older.mkdir()
    write_as_layers(tmp_path / "new", older, names, "block_sparse_moe" if family == "mixtral" else "mlp")
    for folder, oracle in ((tmp_path / "new", made),
                           (older, peft.PeftModel.from_pretrained(copy.deepcopy(adapted.model), older))):
        adapted.backend.drop_adapter(1)
        adapted.backend.put_adapter(1, adapted.backend.read_adapter(str(folder)))
        with torch.inference_mode():
            assert error([adapted.whole(1)], [oracle(adapted.sequences[1][None]).logits[0]]) < 1e-4
        assert adapted.backend.adapter_bytes(str(folder)) == adapted.backend.read_adapter(str(folder)).num_bytes


def write_as_layers(folder: Path, older: Path, names: list[str], block: str) -> None:
    """Write an adapter of experts as one of single experts' layers."""
    from safetensors.torch import load_file, save_file

    tensors, found = load_file(folder / "adapter_model.safetensors"), dict[str, torch.Tensor]()
    for name, one in tensors.items():
        if ".experts." not in name:
            found[name] = one
            continue
        is_inner, is_first = ".base_layer." in name, name.endswith("lora_A.weight")
        before = name.split(".mlp.experts.")[0]
        parts = names[:2] if is_inner else names[2:]
        count = 4
        rank = (one.shape[0] if is_first else one.shape[1]) // count // len(parts)
        for expert in range(count):
            if is_first:
                own = one.view(count, len(parts), rank, -1)[expert]
            else:
                whole = one.view(len(parts), -1, len(parts), rank, count)[..., expert]
                own = torch.stack([whole[part, :, part] for part in range(len(parts))])
            for part, matrix in zip(parts, own, strict=True):
                found[f"{before}.{block}.experts.{expert}.{part}.lora_{'A' if is_first else 'B'}.weight"] = (
                    matrix.contiguous())
    save_file(found, older / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"target_modules": ["q_proj", *names], "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}
    (older / "adapter_config.json").write_text(json.dumps(config))


def spoil(folder: Path, how: str) -> None:
    """Make an adapter of experts one that says two things."""
    from safetensors.torch import load_file, save_file

    tensors, path = load_file(folder / "adapter_model.safetensors"), folder / "adapter_config.json"
    config = json.loads(path.read_text())
    outer = "base_model.model.model.layers.0.mlp.experts.lora_"
    if how == "one parameter is not named":
        config["target_parameters"] = FUSED[1:]
    elif how == "a parameter has no matrices":
        for kind in "AB":
            del tensors[f"{outer}{kind}.weight"]
    elif how == "another rank":
        config["r"] = 4
    elif how == "another number of experts":
        tensors[f"{outer}A.weight"] = tensors[f"{outer}A.weight"][:-3]
    elif how == "experts have both":
        config["target_modules"] = ["q_proj", "down_proj"]
        for layer, expert in itertools.product(range(3), range(4)):
            for kind, shape in (("A", (3, 96)), ("B", (64, 3))):
                name = f"{outer[:-5]}{expert}.down_proj.lora_{kind}.weight".replace("layers.0", f"layers.{layer}")
                tensors[name] = torch.ones(shape)
    elif how == "an expert too many":
        for kind, shape in (("A", (3, 96)), ("B", (64, 3))):
            tensors[f"{outer[:-5]}4.down_proj.lora_{kind}.weight"] = torch.ones(shape)
    elif how == "a router":
        for kind, shape in (("A", (3, 64)), ("B", (4, 3))):
            tensors[f"base_model.model.model.layers.0.mlp.gate.lora_{kind}.weight"] = torch.ones(shape)
    elif how == "no names":
        config["target_parameters"] = "experts.*"
    save_file(tensors, folder / "adapter_model.safetensors")
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("how", "said"), [
    ("one parameter is not named", "parameters that its settings name"), ("a parameter has no matrices", "no matrices"),
    ("another rank", "matrices of shapes"), ("another number of experts", "matrices of shapes"),
    ("experts have both", "outputs that others are of too"), ("an expert too many", "none there"),
    ("a router", "none there"), ("no names", "target_parameters"),
])
def test_what_says_two_things_is_refused(how: str, said: str, tmp_path: Path) -> None:
    """By name, before memory is taken; an adapter of whom parts are missing is none."""
    model = tiny_model("mixtral")
    backend = Adapted.without(SimpleNamespace(model=model, options={}))  # type: ignore[arg-type]
    backend.use_adapters(1, MAX_RANK)
    save(model, tmp_path, 1, r=3, target_modules=["q_proj"], target_parameters=FUSED)
    assert backend.adapter_bytes(str(tmp_path)) > 0
    spoil(tmp_path, how)
    for read in (backend.adapter_bytes, backend.read_adapter):
        with pytest.raises(InvalidAdapter, match=said):
            read(str(tmp_path))

"""Directories of PEFT are read as PEFT reads them, and damaged or hostile ones are refused before memory is taken."""

from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore.errors import InvalidAdapter
from pagedcore.models.lora.adapter import AdaptedLayer, AdaptedModel, LoraAdapter, adapter_bytes, read_adapter
from pagedcore.models.lora.adapter_config import AdapterConfig
from pagedcore_kernels.cpu.matmul.low_rank import pair_bytes
from support.lora_directories import random_matrices, write_adapter

LAYERS = [f"model.layers.{number}" for number in range(3)]
SIZES = {**{f"{layer}.self_attn.{name}": (32, outputs) for layer in LAYERS
            for name, outputs in (("q_proj", 32), ("v_proj", 16))},
         **{f"{layer}.mlp.down_proj": (48, 32) for layer in LAYERS}}  # fmt: skip
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def model() -> AdaptedModel:
    """Return a model of three layers, whose queries and values are outputs of one product."""
    begin = {"q_proj": 0, "v_proj": 32, "down_proj": 0}
    layers = {
        name: AdaptedLayer(2 * int(name.split(".")[2]) + name.endswith("down_proj"), inputs,
                           begin[name.split(".")[-1]], begin[name.split(".")[-1]] + outputs)
        for name, (inputs, outputs) in SIZES.items()
    }  # fmt: skip
    return AdaptedModel(
        layers, {}, lambda name: "The output layer takes none here." if name == "lm_head" else "No layer.",
        lambda name: name)


def read(directory: Path) -> LoraAdapter:
    """Read a directory; what was said of its memory is what it takes."""
    adapter = read_adapter(directory, model(), 256)
    assert adapter.num_bytes == adapter_bytes(directory, model(), 256)
    return adapter


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return an adapter of all layers."""
    return write_adapter(tmp_path / "adapter", random_matrices(SIZES, 8, seed=1))


def test_a_digest_is_of_what_is_computed(directory: Path, tmp_path: Path) -> None:
    """It is the same in another directory, under other settings without effect and for a copy, and another one for one
    other bit, scale or rank."""
    matrices, first = random_matrices(SIZES, 8, seed=1), read(directory)
    same = write_adapter(tmp_path / "b", matrices, lora_dropout=0.5, base_model_name_or_path="x/y", peft_version="9",
                         target_modules="all-linear", lora_alpha=16.0)  # fmt: skip
    assert len(first.digest) == 32
    assert read(same).digest == first.digest
    assert (first.max_rank, set(first.pairs)) == (8, set(range(6)))
    matrices[Q][0][3, 5] *= 1 + 2**-20
    others = [write_adapter(tmp_path / "c", matrices), write_adapter(tmp_path / "d", random_matrices(SIZES, 8, seed=1),
              lora_alpha=17), write_adapter(tmp_path / "e", random_matrices(SIZES, 8, 1, torch.bfloat16))]  # fmt: skip
    assert len({first.digest, *(read(one).digest for one in others)}) == 4


@pytest.mark.parametrize(("settings", "name", "rank", "scale"), [
    ({"r": 8, "lora_alpha": 4}, Q, 8, 0.5),
    ({"r": 4, "lora_alpha": 4, "use_rslora": True}, Q, 4, 2.0),
    ({"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 3}, "lora_alpha": 6}, DOWN, 3, 2.0),
    ({"rank_pattern": {"proj": 3}, "alpha_pattern": {"^model.layers.1.mlp.down_proj": 16}}, DOWN, 8, 2.0),
    ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 1}, "use_rslora": True}, Q, 2,
     1 / math.sqrt(2)),
])  # fmt: skip
def test_ranks_and_scales(settings: dict[str, Any], name: str, rank: int, scale: float) -> None:
    """Patterns mean whole names from a dot on, the first that means a layer counts, and scales follow the rank."""
    config = AdapterConfig(json.dumps({"peft_type": "LORA", "target_modules": "all-linear", **settings}).encode())
    assert (config.rank_of(name), config.scale_of(name)) == (rank, scale)


@pytest.mark.parametrize(("settings", "targeted"), [
    ({"target_modules": ["q_proj", DOWN]}, {f"{layer}.self_attn.q_proj" for layer in LAYERS} | {DOWN}),
    ({"target_modules": "All-Linear", "exclude_modules": ["mlp.down_proj"]},
     {name for name in SIZES if not name.endswith("down_proj")}),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {Q}),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, {Q}),
    ({"target_modules": ["proj", "q_pro"]}, set()),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks"]}, set()),
])  # fmt: skip
def test_which_layers_have_matrices(settings: dict[str, Any], targeted: set[str]) -> None:
    """As PEFT says, by names."""
    config = AdapterConfig(json.dumps({"peft_type": "LORA", **settings}).encode())
    assert {name for name in SIZES if config.targets(name, is_linear=True)} == targeted


def test_an_expression_is_not_evaluated() -> None:
    """It may take for ever; the files say which layers it means."""
    config = AdapterConfig(json.dumps({"peft_type": "LORA", "target_modules": "(a*)*(a|a)*b" * 9}).encode())
    assert config.targets("a" * 200, is_linear=True) is None


@pytest.mark.parametrize(("settings", "what"), [
    ({"peft_type": "IA3"}, "peft_type"), ({"peft_type": None}, "peft_type"), ({"task_type": "SEQ_CLS"}, "task_type"),
    ({"bias": "all"}, "bias"), ({"use_dora": True}, "use_dora"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"), ({"lora_bias": True}, "lora_bias"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters"), ({"a_new_method": 1}, "a_new_method"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"), ({"init_lora_weights": "pissa_niter_4"}, "init_lora"),
    ({"init_lora_weights": ["eva"]}, "init_lora"), ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"r": 0}, "r: got 0"), ({"r": 257}, "r: got 257"), ({"r": True}, "r: got True"), ({"r": 2.0}, "r: got 2.0"),
    ({"r": 10**400}, "r: got an integer"), ({"lora_alpha": "16"}, "lora_alpha"), ({"lora_alpha": math.nan}, "lora_al"),
    ({"lora_alpha": 1e30}, "lora_alpha"), ({"use_rslora": "yes"}, "use_rslora"), ({"rank_pattern": [1]}, "rank_patt"),
    ({"rank_pattern": {"(a*)*b": 2}}, "rank_pattern"), ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ({"rank_pattern": {"q_proj": 300}}, "rank_pattern"), ({"target_modules": None}, "target_modules"),
    ({"target_modules": {"a": 1}}, "target_modules"), ({"target_modules": ["q"] * 5000}, "target_modules"),
    ({"target_modules": [3]}, "target_modules"), ({"layers_to_transform": "all"}, "layers_to_transform"),
    ({"layers_pattern": ["(a*)*b"]}, "layers_pattern"), ({"layers_to_transform": [1.5]}, "layers_to_transform"),
])  # fmt: skip
def test_settings_that_are_not_computed_are_refused_by_name(directory: Path, settings: Any, what: str) -> None:
    """Whatever changes what an adapter computes and is not computed here, and what is no setting at all."""
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**config, **settings}))
    for door in (adapter_bytes, read_adapter):
        with pytest.raises(InvalidAdapter, match=what):
            door(directory, model(), 256)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of an adapter."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / WEIGHTS)


def tensor(name: str, kind: str = "A") -> str:
    return f"base_model.model.{name}.lora_{kind}.weight"


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "NaN": (lambda t: t[tensor(Q)].fill_(math.nan), "q_proj.*not finite"),
    "infinite": (lambda t: t[tensor(Q, "B")].view(-1)[-1:].fill_(math.inf), "q_proj.*not finite"),
    "another rank": (lambda t: t.update({tensor(Q): torch.zeros(4, 32)}), r"\[4, 32\]"),
    "other inputs": (lambda t: t.update({tensor(Q): torch.zeros(8, 33)}), r"\[8, 33\]"),
    "turned": (lambda t: t.update({tensor(Q, "B"): torch.zeros(8, 32)}), r"\[8, 32\]"),
    "a vector": (lambda t: t.update({tensor(Q): torch.zeros(8)}), "a matrix"),
    "none of inputs": (lambda t: t.update({tensor(Q): torch.zeros(0, 32)}), "a matrix"),
    "integers": (lambda t: t.update({tensor(Q): torch.zeros(8, 32, dtype=torch.int32)}), "q_proj"),
    "float64": (lambda t: t.update({tensor(Q): torch.zeros(8, 32, dtype=torch.float64)}), "q_proj"),
    "one half": (lambda t: t.pop(tensor(Q)), "one matrix"),
    "a layer less": (lambda t: [t.pop(tensor(Q, kind)) for kind in "AB"], "q_proj.*no matrices"),
    "no layer at all": (lambda t: t.clear(), "no matrices"),
    "the output layer": (lambda t: t.update({tensor("lm_head"): torch.zeros(8, 32), tensor("lm_head", "B"):
                                             torch.zeros(9, 8)}), "lm_head.*output layer"),
    "an embedding": (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 9)}),
                     "embed_tokens.*Embeddings"),
    "DoRA": (lambda t: t.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.zeros(8, 9)}), "DoRA"),
    "a saved module": (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(8, 9)}), "whole modules"),
    "no prefix": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(8, 32)}), "another kind"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_are_not_the_adapters_are_refused(directory: Path, case: str) -> None:
    """All but numbers by the head alone, where ``adapter_bytes`` looks too."""
    change, message = BAD_TENSORS[case]
    rewrite(directory, change)
    with pytest.raises(InvalidAdapter, match=message):
        read_adapter(directory, model(), 256)
    if "not finite" not in message:
        with pytest.raises(InvalidAdapter, match=message):
            adapter_bytes(directory, model(), 256)


def with_head(directory: Path, change: Callable[[dict[str, Any]], object] | bytes, size: int | None = None) -> None:
    """Change the head of the file, and what it says of its size."""
    contents = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(contents[:8], "little")
    head, body = json.loads(contents[8 : 8 + length]), contents[8 + length :]
    if isinstance(change, bytes):
        packed = change
    else:
        change(head)
        packed = json.dumps(head).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(packed) if size is None else size) + packed + body)


def share_last_place(head: dict[str, Any]) -> None:
    """Let the last tensor lie where another of its size does, so that all sizes together are right still."""
    *others, last = sorted((one["data_offsets"][0], one["data_offsets"][1], name) for name, one in head.items()
                           if name != "__metadata__")  # fmt: skip
    begin, end, _ = next(one for one in others if one[1] - one[0] == last[1] - last[0])
    head[last[2]]["data_offsets"] = [begin, end]


ONE = b'"a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'
TWICE = b"{" + ONE + b"," + ONE.replace(b"[0,4]", b"[4,8]") + b"}"
BAD_HEADS: dict[str, tuple[Callable[[dict[str, Any]], object] | bytes, int | None]] = {
    "a size that lies": (lambda head: None, 2**62),
    "a size within it": (lambda head: None, 20),
    "no JSON": (b"\xff{", None),
    "a list": (b"[[1]]", None),
    "deep": (b"[" * 200_000, None),
    "names twice": (TWICE, None),
    "an endless number": (b'{"a":' + b"9" * 5000 + b"}", None),
    "a shape that lies": (lambda head: head[tensor(Q)].update(shape=[8, 2**40]), None),
    "a negative shape": (lambda head: head[tensor(Q)].update(shape=[-8, -32]), None),
    "true as a number": (lambda head: head[tensor(Q)].update(shape=[True, 32]), None),
    "a place before": (lambda head: head[tensor(Q)].update(data_offsets=[-1024, 0]), None),
    "a place behind": (lambda head: head[tensor(Q)].update(data_offsets=[2**39, 2**39 + 1024]), None),
    "the place of another": (lambda head: share_last_place(head), None),
    "a format that is a list": (lambda head: head[tensor(Q)].update(dtype=["F32"]), None),
    "half as wide": (lambda head: head[tensor(Q)].update(dtype="F16"), None),
    "a tensor that is none": (lambda head: head.update({tensor(Q): 3}), None),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADS)
def test_a_damaged_head_is_refused(directory: Path, case: str) -> None:
    """Whatever it says of sizes and places; nothing of that is allocated."""
    with_head(directory, *BAD_HEADS[case])
    for door in (adapter_bytes, read_adapter):
        with pytest.raises(InvalidAdapter):
            door(directory, model(), 256)


@pytest.mark.parametrize("values", ["{},", "[],", "0,", '"":[0],'])
def test_a_head_of_too_many_values_is_counted_before_it_is_parsed(directory: Path, values: str) -> None:
    """Its values would take thirty times the bytes of the file."""
    with_head(directory, b"[" + values.encode() * (2**24 // len(values)) + b"0]")
    tracemalloc.start()
    with pytest.raises(InvalidAdapter, match=r"its head: got [0-9]+, allowed is at most"):
        adapter_bytes(directory, model(), 256)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24 + 2**20


def test_patterns_are_compared_with_few_layers(directory: Path) -> None:
    """Each with each would take hours for the largest of both."""
    config = AdapterConfig(json.dumps({
        "peft_type": "LORA", "target_modules": "all-linear",
        "rank_pattern": {f"layers.{number}.q_proj": 4 for number in range(300)}}).encode())
    config.require_few_patterns(13_000)
    with pytest.raises(InvalidAdapter, match="300 patterns for 14000 layers, allowed is at most 299"):
        config.require_few_patterns(14_000)


def test_an_adapter_may_have_matrices_of_each_expert_of_a_large_mixture(directory: Path) -> None:
    """48 layers of 128 experts, as Qwen3-30B-A3B has them, and PEFT's names: 36,864 tensors."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{one}" for layer in range(48) for expert in range(128)
             for one in ("gate_proj", "up_proj", "down_proj")]
    layers = {name: AdaptedLayer(number, 1, 0, 1) for number, name in enumerate(names)}
    mixture = AdaptedModel(layers, {}, lambda name: "No layer.", lambda name: name)
    tensors = [tensor(name, kind) for name in names for kind in "AB"]
    head = json.dumps({name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * place, 4 * place + 4]}
                       for place, name in enumerate(tensors)}).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + bytes(4 * len(tensors)))
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 1, "target_modules": "all-linear"}))
    assert len(head) > 2**22
    assert adapter_bytes(directory, mixture, 256) == 18_432 * pair_bytes(1, [(1, 1)], 4)


def test_files_that_are_none_are_refused(directory: Path, tmp_path: Path) -> None:
    """No file, a shortened one, a pipe, a directory, a link elsewhere or to itself, a pickle, a long configuration."""
    def refuses(message: str) -> None:
        with pytest.raises(InvalidAdapter, match=message):
            adapter_bytes(directory, model(), 256)

    weights = directory / WEIGHTS
    contents = weights.read_bytes()
    for size in (0, 7, 8, 100, len(contents) - 1):
        weights.write_bytes(contents[:size])
        refuses("allowed")
    weights.unlink()
    refuses("directory: got none with adapter_model.safetensors")
    weights.symlink_to(WEIGHTS)
    with pytest.raises(OSError, match="symbolic links"):
        adapter_bytes(directory, model(), 256)
    weights.unlink()
    (directory / "adapter_model.bin").write_bytes(b"")
    refuses("adapter_model.bin.*run code")
    os.mkfifo(weights)
    refuses("a file of at most")
    weights.unlink()
    weights.mkdir()
    refuses("a file of at most")
    weights.rmdir()
    (tmp_path / "elsewhere").write_bytes(contents)
    weights.symlink_to(tmp_path / "elsewhere")
    refuses("a link out of its directory")
    weights.unlink()
    (directory / "inside").write_bytes(contents)
    weights.symlink_to("inside")
    assert adapter_bytes(directory, model(), 256) > 0
    (directory / CONFIG).write_text('{"a": "' + "a" * 2**18 + '"}')
    refuses("adapter_config.json")
    (directory / CONFIG).write_text("[" * 100_000)
    refuses("no JSON object")


def test_the_hubs_cache_is_made_of_links(directory: Path, tmp_path: Path) -> None:
    """From a snapshot to the blobs of its repository, and no further."""
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "1", tmp_path / "repo" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, name in enumerate((WEIGHTS, CONFIG)):
        (directory / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert read(snapshot).max_rank == 8


def test_a_rank_above_what_there_is_room_for_is_refused(directory: Path) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidAdapter, match="a rank of 8, allowed is a rank of at most 7"):
        adapter_bytes(directory, model(), 7)


def test_float16_is_read_exactly(tmp_path: Path) -> None:
    """In float32, which has all of its numbers, the smallest too."""
    matrices = random_matrices(SIZES, 8, 1, torch.float16)
    matrices[Q][0].view(-1)[0] = 2.0**-24
    wide = {name: (first.float(), second.float()) for name, (first, second) in matrices.items()}
    half, whole = (read(write_adapter(tmp_path / str(number), one)) for number, one in enumerate((matrices, wide)))
    assert torch.equal(half.memory, whole.memory)

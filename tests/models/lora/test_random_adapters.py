"""Adapters with damage that nobody thought of: a directory is read whole and exactly, or refused by the one error."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch

from pagedcore.errors import InvalidAdapter
from pagedcore.models.lora.adapter import AdaptedExperts, AdaptedLayer, AdaptedModel, adapter_bytes, read_adapter
from support.lora_directories import random_matrices, write_adapter

EXPERTS = "model.layers.1.mlp.experts"
NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj")
MODEL = AdaptedModel(
    {NAMES[0]: AdaptedLayer(0, 8, 0, 8), NAMES[1]: AdaptedLayer(0, 8, 8, 12), NAMES[2]: AdaptedLayer(1, 8, 0, 8)},
    {EXPERTS: AdaptedExperts(2, {"gate_up_proj": AdaptedLayer(2, 8, 0, 8), "down_proj": AdaptedLayer(4, 4, 0, 8)})},
    lambda _: "None.", lambda name: name)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.1": 3}, "use_rslora": True,
    "layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["k_proj"], "init_lora_weights": True,
    "modules_to_save": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}  # fmt: skip
#: What stands where something else was, in settings and in heads.
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 255, 257, 2**31, 2**63, -(2**63), 2**64, 10**300, 1e308, -0.5, float("nan"),
    float("inf"), "", "a", "F32", "BF16", "I8", "all-linear", "(", ".*", "\ud800", "\0", "q_proj", [], [0], [[]],
    [1, 2], [-8, 0], [8, 2**62], ["q_proj"], {}, {"": 0}, {"q_proj": 2}, {"a": {"b": []}}, "x" * 5000,
]  # fmt: skip


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value of JSON, with each key that it has."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places_in(value[key]))]


def with_strange_values(contents: bytes, rng: random.Random) -> bytes:
    """Return JSON some values of which, or all of it, are others, or gone, or there under another name."""
    root = [json.loads(contents)]
    for _ in range(rng.randint(1, 2)):
        where, key = rng.choice(places_in(root) or [([0], 0)])
        what = rng.random()
        if what < 0.7:
            where[key] = copy.deepcopy(rng.choice(STRANGE))
        elif what < 0.85:
            where.pop(key)
        elif isinstance(where, dict):
            where[rng.choice([one for one in STRANGE if isinstance(one, str)])] = where.pop(key)
    return json.dumps(root)[1:-1].encode()


def with_other_bytes(contents: bytes, rng: random.Random) -> bytes:
    """Return bytes some of which are others, gone, there twice, or swapped; most of them near the beginning."""
    found = bytearray(contents)
    for _ in range(rng.choice((1, 1, 2, 8))):
        end = min(len(found), rng.choice((12, 600, len(found))))
        first = rng.randrange(end + 1)
        last = min(len(found), first + rng.choice((1, 1, 2, 8, 64)))
        what = rng.randrange(4)
        if what == 0:
            found[first:last] = rng.randbytes(last - first)
        elif what == 1:
            del found[first:last]
        elif what == 2:
            found[first:first] = found[first:last]
        else:
            for place in range(first, last):
                found[place] ^= 1 << rng.randrange(8)
    return bytes(found)


def damaged(weights: bytes, config: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    """Return the two files of an adapter with damage to one."""
    kind = rng.randrange(5)
    if kind == 0:
        return weights, with_strange_values(config, rng)
    if kind == 1:
        return weights, with_other_bytes(config, rng)
    if kind == 2:
        size = 8 + int.from_bytes(weights[:8], "little")
        head = with_strange_values(weights[8:size], rng)
        return len(head).to_bytes(8, "little") + head + weights[size:], config
    if kind == 3:
        return with_other_bytes(weights, rng), config
    return rng.randbytes(rng.randrange(64)) + weights[rng.randrange(len(weights)):], config


def test_any_bytes_are_an_adapter_or_refused(tmp_path: Path) -> None:
    """Both ways to look at it agree, on what it takes too, and nothing in it is infinite."""
    rng, numbers = random.Random(5), {"read": 0, "refused": 0}
    longest = 0
    sizes = {name: (one.num_inputs, one.end - one.begin) for name, one in MODEL.layers.items()}
    sizes |= {f"{EXPERTS}.base_layer": (8, 8), EXPERTS: (4, 8)}
    matrices = random_matrices(sizes, 4, 1, ranks={"v_proj": 2, "experts.base_layer": 8, "experts": 8})
    directory = write_adapter(tmp_path, matrices, 4, **SETTINGS)
    files = [directory / name for name in ("adapter_model.safetensors", "adapter_config.json")]
    weights, config = (one.read_bytes() for one in files)
    assert read_adapter(directory, MODEL, 8).max_rank == 4
    for _ in range(1500):
        for file, contents in zip(files, damaged(weights, config, rng), strict=True):
            file.write_bytes(contents)
        try:
            adapter = read_adapter(directory, MODEL, 8)
        except InvalidAdapter as error:
            longest = max(longest, len(str(error)))
            numbers["refused"] += 1
            continue
        assert adapter.num_bytes == adapter_bytes(directory, MODEL, 8) < 16384
        assert adapter.max_rank <= 8
        assert torch.isfinite(adapter.memory.view(torch.float32)).all()
        numbers["read"] += 1
    assert min(numbers.values()) > 50
    assert longest < 1000, "an error shows what it was given"

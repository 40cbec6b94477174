"""The demo model with adapters in PEFT's format: names, slots and company change nothing of what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidAdapter, InvalidConfig
from support.changed_demo import changed_weights, write_demo
from support.lora_directories import random_matrices, write_adapter
from support.runner import invoke, try_invoke

PROMPTS = ["What is 2 + 3?", "What is 11 + 4?"]
TEN = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Four adapters of the demo model."""
    width = json.loads((Path(DEMO_MODEL_DIR) / "config.json").read_text())["hidden_size"]
    sizes = {f"model.layers.{layer}.self_attn.o_proj": (width, width) for layer in range(4)}
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(folder / name, random_matrices(sizes, 4, seed), rank=4))
            for seed, name in enumerate("abcd", 1)}


def told(output: Any) -> Any:
    """Tokens and every bit of their log-probabilities."""
    completion = output.outputs[0]
    return completion.token_ids, [(one.logprob.hex(), one.top) for one in completion.logprobs]


@pytest.mark.parametrize("way", ["staged", "in_place"])
def test_adapters_stay_where_weights_change(way: Any, places: dict[str, str], tmp_path: Path) -> None:
    """With other weights under them, in slots and read later, they say what they say in an engine made of those."""
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "adapters": places, "max_adapters": 2}
    directory = write_demo(tmp_path, changed_weights())
    with Engine.from_pretrained(directory, **settings) as engine:
        expected = [told(engine.generate(PROMPTS[:1], TEN, lora=name)[0]) for name in (None, *places)]
    with Engine.from_pretrained("demo", **settings) as engine:
        before = [told(engine.generate(PROMPTS[:1], TEN, lora=name)[0]) for name in (None, *places)]
        with engine.new_weights(way=way) as weights:
            weights.load(directory)
        assert [told(engine.generate(PROMPTS[:1], TEN, lora=name)[0]) for name in (None, *places)] == expected
    assert all(old != new for old, new in zip(before, expected, strict=True))


def test_what_is_no_adapter_of_the_model_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    """Another width, and a directory of something else."""
    other = write_adapter(tmp_path / "other", {"model.layers.0.self_attn.o_proj": (torch.ones(2, 8), torch.ones(8, 2))})
    with Engine.from_pretrained("demo", num_kv_blocks=64, max_adapters=1) as engine:
        for place in (other, tmp_path, DEMO_MODEL_DIR):
            with pytest.raises(InvalidAdapter):
                engine.load_adapter("x", place)
        assert not engine.adapters()
        assert engine.stats().adapter_bytes == 0


def test_commands_compute_with_an_adapter(places: dict[str, str]) -> None:
    """The text is that adapter's; two of them, half of a pair, or one for two models are refused; sizes count them."""
    texts = {invoke("generate", PROMPTS[0], "--max-tokens", "8", *words)
             for words in ([], *(["--adapter", f"{name}={places[name]}"] for name in "ab"))}
    assert len(texts) == 3
    first = f"a={places['a']}"
    for words in (["generate", "x", "--adapter", "a"], ["generate", "x", "--adapter", first, "--adapter", "b=b"],
                  ["serve", "-m", "x=demo", "-m", "y=demo", "--adapter", first]):
        with pytest.raises(InvalidConfig, match="--adapter"):
            try_invoke(*words)
    with_room, without = (json.loads(invoke("size", "demo", "--memory", "64MiB", "--json", *words))
                          for words in (["--adapter-memory", "1MiB"], []))
    assert without["num_blocks_that_fit"] - with_room["num_blocks_that_fit"] == pytest.approx(
        2**20 / with_room["block_bytes"], abs=1)

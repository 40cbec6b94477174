"""The page of guarantees says of each kind of model what such models say of themselves, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers

from docs.pages import ROOT
from pagedcore import Engine
from pagedcore.errors import PagedcoreError
from pagedcore.models.decoders.fused import best_decoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import FAMILIES, tiny_model
from virtual_gpu.backends import shipped_kernels
from virtual_gpu.torch_cuda import virtual_gpus

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
_WHICH = "dense decoders|mixtures of experts|models with recurrent layers"
KINDS = re.findall(rf"^\| (?:{_WHICH})\b([^|]*)\| (made|none)", PAGE, flags=re.MULTILINE)
EXAMPLES = [(family, promise) for words, promise in KINDS for family in re.findall(r"`(\w+)`", words)
            if family in FAMILIES]
NOT_YET = re.findall(r"^\| ([^|`]+) \| `(.+?)` \| `(.+?)` \|$",
                     PAGE.partition("<!-- not yet: begin -->")[2].partition("<!-- not yet: end -->")[0], re.MULTILINE)
_SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
_HEADS: dict[str, Any] = {**_SMALL, "intermediate_size": 32, "num_attention_heads": 2}


def vision_model() -> transformers.PreTrainedModel:
    """Two tiny models behind one another: pictures, then text, of which a prompt is read in both directions."""
    sees = transformers.SiglipVisionConfig(**_HEADS, image_size=30, patch_size=15)
    writes = transformers.GemmaConfig(**_HEADS)
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(vision_config=sees.to_dict(), text_config=writes.to_dict()))


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "vision_model": vision_model,
    "encoder_decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
    "both_sides": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**_HEADS, num_key_value_heads=2, is_causal=False)),
    "rwkv": lambda: transformers.RwkvForCausalLM(
        transformers.RwkvConfig(**{**_SMALL, "num_hidden_layers": 2}, attention_hidden_size=32)),
}
"""Models that the page names, each of a kind that is refused."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model."""
    with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
        yield engine


@pytest.mark.parametrize(("what", "call", "message"), NOT_YET, ids=[what for what, _, _ in NOT_YET])
def test_what_is_not_there_yet_is_refused_as_the_page_says(
    what: str, call: str, message: str, engine: Engine
) -> None:
    """Each call of the page raises a typed error with the page's words: nothing that is asked for is ignored."""
    models = {name: make() for name, make in MODELS.items() if name in call}
    with virtual_gpus() as gpus, shipped_kernels(gpus), pytest.raises(PagedcoreError, match=re.escape(message)):
        eval(call, {"Engine": Engine, "engine": engine, **models})


def test_no_row_of_what_is_not_there_yet_is_left_out() -> None:
    """Every row of the table has a call and a refusal, and what ships is not in it."""
    rows = PAGE.partition("<!-- not yet: begin -->")[2].partition("<!-- not yet: end -->")[0].strip().splitlines()
    assert len(NOT_YET) == len(rows) - 2 >= 10


@pytest.mark.parametrize(("family", "promise"), EXAMPLES)
def test_a_named_architecture_promises_what_the_page_says(family: str, promise: str) -> None:
    """A model of each architecture that is named declares itself schedule invariant or not, as the page says."""
    model = TransformersModel(tiny_model(family), NumbaCpuAttention, block_size=16, decoder_factory=best_decoder)
    assert model.is_schedule_invariant == (promise == "made")


def test_every_architecture_is_counted() -> None:
    """The page's numbers add up to the architectures that are tried, and both kinds have examples."""
    counts = re.findall(rf"^\| (?:{_WHICH})[^:]*: (?:the )?(\d+) (?:of|others)", PAGE, flags=re.MULTILINE)
    numbers = [int(number) for number in counts]
    assert sum(numbers) == len(FAMILIES) == int(re.findall(r"of the (\d+) architectures", PAGE)[0])
    assert {promise for _, promise in EXAMPLES} == {"made", "none"}


def test_the_place_for_the_figures_is_there() -> None:
    """The table of ``benchmarks/fixed_order.py`` has its place between two marks."""
    between = PAGE.partition("<!-- fixed-order figures: begin -->")[2].partition("<!-- fixed-order figures: end -->")[0]
    assert between.strip()

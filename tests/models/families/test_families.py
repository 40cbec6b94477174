from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import ModelNotSupported
from pagedcore.models.blueprint import read_blueprint
from pagedcore.models.decoders.fused import best_decoder
from pagedcore.models.decoders.plain import ModuleDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.reference import ReferenceAttention
from support.families import FAMILIES, VOCAB, config_of, tiny_model
from support.ragged_schedules import random_schedule, random_sequences, random_tables, run_schedule

LENGTHS = (33, 21, 5)
NUM_BLOCKS = 80
#: Architectures whose head sizes need kernels of their own; compiling those takes too long for every test run.
COMPILED_ELSEWHERE = {"gemma4_text"}
#: Kernels of their own, seconds each; deepseek_v3 and mamba2 are compared by other tests.
COMPILED_FOR_ITSELF = {"deepseek_v2", "zamba2"}
DEPENDS_ON_WEIGHTS = {"jetmoe"}
#: One of each kind; `make slow` takes all, and so does `make families`.
KINDS = {
    "cohere2", "dbrx", "deepseek_v3", "exaone4", "gemma2", "gemma3n_text", "gemma4_text", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_oss", "granite", "jetmoe", "llama", "llama4_text", "modernbert-decoder", "nanochat", "olmo2",
    "opt", "persimmon", "phi3", "qwen2_moe", "qwen3", "smollm3",
}


def plain_logits(model: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence alone, by transformers' own eager attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return [model(tokens[None], use_cache=False).logits[0].float() for tokens in sequences]


def paged_logits(backend: TransformersModel, sequences: list[torch.Tensor], seed: str) -> list[torch.Tensor]:
    """Logits of all sequences through one random schedule and random blocks."""
    rng = random.Random(seed)
    backend.allocate_kv(NUM_BLOCKS, backend.block_size)
    tables = random_tables(rng, LENGTHS, backend.block_size, NUM_BLOCKS)
    return run_schedule(backend, sequences, random_schedule(rng, LENGTHS), tables, backend.block_size)


def assert_equal_up_to_rounding(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 1e-4
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


class Loaded(NamedTuple):
    """An architecture's small model, and what it computes alone by transformers' own means."""

    family: str
    backend: TransformersModel
    expected: list[torch.Tensor]


def load(family: str, attention: Any, block_size: int, decoder: Any) -> Loaded:
    model = tiny_model(family)
    expected = plain_logits(model, random_sequences(LENGTHS, VOCAB))
    return Loaded(family, TransformersModel(model, attention, block_size=block_size, decoder_factory=decoder), expected)


def check_logits(loaded: Loaded) -> None:
    actual = paged_logits(loaded.backend, random_sequences(LENGTHS, VOCAB), loaded.family)
    assert_equal_up_to_rounding(actual, loaded.expected)


@pytest.fixture(scope="module", params=[
    pytest.param(family, marks=[] if family in KINDS else [pytest.mark.slow]) for family in FAMILIES
])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """An architecture on the plain attention."""
    family = request.param
    return load(family, ReferenceAttention, random.Random(family).choice([1, 4, 16]), ModuleDecoder)


def test_paged_logits_are_those_of_transformers(loaded: Loaded) -> None:
    """Chunked, in company and in scattered blocks, logits are within 1e-4 of plain eager ones, argmax equal."""
    check_logits(loaded)


def test_every_architecture_has_the_layout_that_its_configuration_tells(loaded: Loaded, tmp_path: Path) -> None:
    """Shapes of K and V, shared layers, padding and context are those that the model shows when it runs. Where they
    depend on weights, the configuration is refused."""
    config_of(loaded.family).save_pretrained(tmp_path)
    if loaded.family in DEPENDS_ON_WEIGHTS:
        with pytest.raises(ModelNotSupported, match="depends on its weights"):
            read_blueprint(tmp_path, ReferenceAttention, EngineConfig(dtype="float32", block_size=16))
        return
    plan = read_blueprint(tmp_path, ReferenceAttention, EngineConfig(dtype="float32", block_size=16))
    assert plan.layout == loaded.backend.layout(16)
    assert plan.state_bytes == loaded.backend.state_bytes
    assert plan.max_model_len == loaded.backend.max_model_len


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.slow] if place % 3 != 1 or family in COMPILED_FOR_ITSELF else [])
    for place, family in enumerate(FAMILIES) if family not in COMPILED_ELSEWHERE
])
def test_compiled_attention_gives_the_logits_of_transformers(family: str) -> None:
    """The same law with the kernels compiled for this CPU and the decoder that is chosen by default; `make slow` takes
    the other two thirds of the architectures."""
    check_logits(load(family, NumbaCpuAttention, 16, best_decoder))

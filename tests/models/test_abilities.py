"""What a model backend, a tokenizer and an attention factory may offer beyond their protocols."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.engine.builder import build_components
from pagedcore.errors import InvalidConfig
from pagedcore.models.layouts import requirements_of
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.protocols import (
    AttentionRequirements,
    DecodesGreedily,
    DecodesTokens,
    DescribesItself,
    HasFingerprint,
    HostsKVPool,
    MeasuresSteps,
    ModelBackend,
    ModelFingerprint,
    MovesKVBlocks,
    NamesTokens,
    NamesVariablePart,
    ShowsKVPool,
    UsesTorchThreads,
)
from pagedcore.tokenizer.tokenizer import HFTokenizer
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.layout import KVLayout, TokenMajorLayout
from pagedcore_kernels.reference import ReferenceAttention
from support.doubles import ToyBackend
from support.engine_builders import make_engine
from support.families import tiny_model
from virtual_gpu.backends import QueuedReference

OF_BACKENDS = (MovesKVBlocks, HostsKVPool, HasFingerprint, DescribesItself, UsesTorchThreads, NamesVariablePart,
               DecodesGreedily, MeasuresSteps)


class AbleBackend(ToyBackend):
    """A backend with every ability, which counts how often they are used."""

    fingerprint = ModelFingerprint("able", "0" * 64, "1" * 64)
    dtype = "int64"
    attention_name, linear_name = "hash", "none"
    device_name = "abacus"
    computes_in_torch = True
    variable_part = "the order of its beads"

    def __init__(self) -> None:
        super().__init__()
        self.num_released = 0

    def layout(self, block_size: int) -> str:
        return f"{block_size} tokens"

    def free_kv_bytes(self) -> int:
        return 1000

    def kv_block_bytes(self, block_size: int) -> int:
        return 100

    def release_kv(self) -> None:
        self.num_released += 1


class BareBackend:
    """A backend with the members of ``ModelBackend`` and no other."""

    def __init__(self) -> None:
        self._toy = ToyBackend()

    vocab_size = ToyBackend.vocab_size
    max_model_len = ToyBackend.max_model_len
    eos_token_ids = ToyBackend.eos_token_ids
    block_size = ToyBackend.block_size
    kv_bytes_per_token = ToyBackend.kv_bytes_per_token
    is_schedule_invariant = True

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._toy.allocate_kv(num_blocks, block_size)

    def forward(self, batch: Any) -> Any:
        return self._toy.forward(batch)


def test_what_comes_with_pagedcore_has_every_ability() -> None:
    """Models of transformers, tokenizers and attention backends pass the checks that those of third parties face."""
    model = TransformersModel(tiny_model("llama"), NumbaCpuAttention)
    model.allocate_kv(1, 16)
    assert all(isinstance(model, ability) for ability in (ModelBackend, *OF_BACKENDS))
    tokenizer = HFTokenizer.from_directory(DEMO_MODEL_DIR)
    assert isinstance(tokenizer, DecodesTokens)
    assert isinstance(tokenizer, NamesTokens)
    assert all(isinstance(factory, AttentionRequirements) for factory in (NumbaCpuAttention, ReferenceAttention))
    assert isinstance(NumbaCpuAttention(model.layout(16), model.layout(16).allocate(1)), ShowsKVPool)
    assert not isinstance(ReferenceAttention(model.layout(16), model.layout(16).allocate(1)), ShowsKVPool)


def test_abilities_of_a_backend_are_used() -> None:
    """What a backend says of its pool, its computation and itself is what the engine goes by."""
    backend = AbleBackend()
    with make_engine(backend, num_kv_blocks=None) as engine:
        stats = engine.stats()
        assert (stats.num_blocks, stats.kv_bytes) == (3, 300)  # 30 % of 1000 bytes
        assert (stats.dtype, stats.attention_backend) == ("int64", "hash")
        assert backend.num_released == 0
    assert backend.num_released == 1
    assert build_components(AbleBackend(), num_kv_blocks=4).fingerprint == AbleBackend.fingerprint


def test_a_backend_without_abilities_runs() -> None:
    """The members of ``ModelBackend`` are enough."""
    backend = BareBackend()
    assert isinstance(backend, ModelBackend)
    assert not any(isinstance(backend, ability) for ability in OF_BACKENDS)
    with make_engine(backend) as engine:
        assert len(engine.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0
        assert (engine.stats().dtype, engine.stats().attention_backend) == ("unknown", "unknown")


def test_an_attention_factory_may_say_what_it_needs() -> None:
    """A class that says it gets its own layout; a plain function gets what every backend of the CPU can do with."""
    assert requirements_of(QueuedReference).layout_type is TokenMajorLayout
    plain = requirements_of(lambda layout, pool: ReferenceAttention(layout, pool))
    assert (plain.devices, plain.layout_type, plain.preferred_block_size(None)) == (("cpu",), KVLayout, 16)  # type: ignore[arg-type]


def test_a_tokenizer_that_decodes_nothing_is_refused() -> None:
    """What is neither a tokenizer of transformers nor has the members that every engine needs is no tokenizer."""
    with pytest.raises(InvalidConfig, match="allowed is a tokenizer of transformers"):
        make_engine(tokenizer=object())

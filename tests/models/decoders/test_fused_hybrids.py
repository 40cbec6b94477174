"""The fused decoder of models with layers that keep states: gated delta rules, or short convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import VOCAB, tiny_model
from support.ragged_schedules import random_sequences, run_schedule

BLOCK_SIZE, LENGTHS = 8, (70, 41, 9)
TABLES = [np.arange(10, dtype=np.int32) * 3 + place for place in range(3)]
#: Prompts whole, in chunks, and beside decoding, until each sequence decodes; then all, two and one at a time.
STEPS = [
    [(0, 0, 30), (1, 0, 31)], [(1, 31, 32), (0, 30, 31), (2, 0, 5)], [(0, 31, 60), (1, 32, 33), (2, 5, 6)],
    *[[(0, 60 + place, 61 + place), (1, 33 + place, 34 + place)] for place in range(8)],
    *[[(0, 68 + place, 69 + place)] for place in range(2)], [(2, 6, 9)],
]


#: Architectures and changes of their configurations.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "lfm2": ("lfm2", {"tie_word_embeddings": True}),
    "lfm2, ends with attention": ("lfm2", {
        "layer_types": ["conv", "conv", "full_attention"], "conv_bias": False, "block_auto_adjust_ff_dim": True,
        "intermediate_size": 144, "block_multiple_of": 32}),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm3": ("lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 8}),
}
NOT_RECORDED = ("qwen3_5_moe", "qwen3_next", "lfm2_moe")


def model_of(name: str, dtype: torch.dtype) -> Any:
    """Return a model in float32 whose weights are numbers of a format, with random norms and gates."""
    family, changes = MODELS[name]
    model = tiny_model(family, dtype=torch.float32, **changes)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape) * 0.3
            parameter.copy_(parameter.to(dtype))
    return model


def take_over(name: str, dtype: torch.dtype, **options: Any) -> TransformersModel:
    """Return a backend with pools."""
    backend = TransformersModel(model_of(name, dtype).to(dtype), NumbaCpuAttention, block_size=BLOCK_SIZE, **options)
    assert isinstance(backend._decoder, FusedDecoder)
    assert (backend._decoder._steps is None) == (name in NOT_RECORDED)
    assert backend.is_schedule_invariant
    backend.allocate_kv(30, BLOCK_SIZE)
    backend.allocate_states(6)
    return backend


def logits_of(backend: TransformersModel) -> list[torch.Tensor]:
    """Return the logits of all tokens, computed as ``STEPS`` says."""
    return run_schedule(backend, random_sequences(LENGTHS, VOCAB), STEPS, TABLES, BLOCK_SIZE)


@torch.inference_mode()
def own_logits(model: Any) -> list[torch.Tensor]:
    """Return what transformers computes for each sequence by itself."""
    model.set_attn_implementation("eager")
    return [model(tokens[None], use_cache=False).logits[0].float() for tokens in random_sequences(LENGTHS, VOCAB)]


def errors_of(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """Return how far the logits of each token are from those expected, by the spread of these."""
    pairs = [(torch.cat(one) if isinstance(one, list) else one).float() for one in (actual, expected)]
    return (pairs[0] - pairs[1]).norm(dim=-1) / (pairs[1] - pairs[1].mean(-1, keepdim=True)).norm(dim=-1)


# Why without it each time: other kernels for its windows; bfloat16 and the cuts below take it.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name == "lfm3" else []) for name in MODELS
])
def test_logits_are_those_of_transformers(name: str) -> None:
    """Whole prompts, chunks and decode steps have the logits of the model's own forward."""
    assert errors_of(logits_of(take_over(name, torch.float32)), own_logits(model_of(name, torch.float32))).max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_rounds_as_transformers_does(name: str) -> None:
    """In bfloat16, logits are as close to those of float32 as the model's own forward is."""
    exact = own_logits(model_of(name, torch.bfloat16))
    theirs = errors_of(own_logits(model_of(name, torch.bfloat16).to(torch.bfloat16)), exact)
    ours = errors_of(logits_of(take_over(name, torch.bfloat16)), exact)
    # Why not the mean: a near tie of two experts sends a token elsewhere.
    assert ours.median() < 1.1 * theirs.median()


@pytest.mark.parametrize("name", MODELS)
def test_cuts_and_company_change_no_bit(name: str) -> None:
    """A token's logits are the same bits in whole prompts alone as in chunks and decode steps beside others."""
    backend, sequences = take_over(name, torch.bfloat16), random_sequences(LENGTHS, VOCAB)
    alone = [[(one, 0, length)] for one, length in enumerate(LENGTHS)]
    whole = run_schedule(backend, sequences, alone, TABLES, BLOCK_SIZE)
    assert all(map(torch.equal, logits_of(backend), whole))


@pytest.mark.parametrize(("name", "dtype", "scheme"), [
    ("qwen3_5", torch.float32, "none"), ("qwen3_5", torch.bfloat16, "none"), ("lfm2", torch.bfloat16, "none"),
    ("lfm2", torch.bfloat16, "w8a16"),
    *(pytest.param(name, torch.bfloat16, "w8a8", marks=pytest.mark.slow) for name in ("qwen3_5", "lfm2")),
])
def test_recorded_steps_give_the_same_bits(name: str, dtype: torch.dtype, scheme: str) -> None:
    """Steps that are recorded and repeated are those of a decoder that records nothing, states included, also once
    other memory has taken the place of the states.
    """
    options = {} if scheme == "none" else {"quantization": scheme, "linears": QUANTIZERS[scheme]}
    recording, plain = take_over(name, dtype, **options), take_over(name, dtype, **options)
    plain._decoder._steps = None  # type: ignore[attr-defined]
    expected = logits_of(plain)
    for again in (False, True):
        if again:
            recording.suspend_kv()
            recording.resume_kv()
        assert all(map(torch.equal, logits_of(recording), expected))
    assert recording.state_store is not None
    assert plain.state_store is not None
    assert np.array_equal(recording.state_store.read_states([0, 1, 2]), plain.state_store.read_states([0, 1, 2]))

"""Routers and gates of every family that takes a sigmoid, or the like, of rows that fill no whole vectors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagedcore.models.decoders.plain import ModuleDecoder
from pagedcore.models.decoders.whole_vectors import in_whole_vectors
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.families import VOCAB, tiny_model
from support.ragged_schedules import random_sequences, random_tables, run_schedule

LENGTHS = (45, 17, 1, 70, 3, 9, 33)
BLOCK_SIZE = 16
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 16, "num_experts": 9, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {**_SMALL, "n_routed_experts": 9, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
                           "n_shared_experts": 1}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
           "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8}
_LOCAL = {**_SMALL, "num_local_experts": 9}
#: Family -> its configuration with nine experts.
ROUTERS: dict[str, dict[str, Any]] = {
    "afmoe": {**_SMALL, "sliding_window": 8, "num_dense_layers": 0},
    "beam": {**_SMALL},
    "cohere2_moe": {**_SMALL},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "dots1": _ROUTED,
    "exaone_moe": {**_SMALL, "layer_types": ["full_attention"] * 2},
    "flint": {**_SMALL},
    "glm4_moe": _ROUTED,
    "hy_v3": {**_SMALL},
    "kolibri1": {**_SMALL, "sliding_window": 8},
    "laguna": {**_SMALL},
    "llama4_text": {
        **_LOCAL, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8,
    },
    "mimo_v2_flash": {**_ROUTED},
    "minimax_m2": _LOCAL,
    "qwen2_moe": {**_SMALL, "shared_expert_intermediate_size": 30},
    "solar_open": _ROUTED,
}


def differing(family: str, dtype: torch.dtype, top_k: int, **changes: Any) -> tuple[int, bool]:
    """Return how many sequences have other logits in company than alone, and whether the model promises none."""
    settings = ROUTERS.get(family, {}) | changes
    torch.set_num_threads(1)
    hf = tiny_model(family, dtype=dtype, num_experts_per_tok=top_k, **settings)
    model = TransformersModel(hf, NumbaCpuAttention, block_size=BLOCK_SIZE, decoder_factory=ModuleDecoder)
    model.allocate_kv(64, BLOCK_SIZE)
    sequences, tables = random_sequences(LENGTHS, VOCAB), random_tables(random.Random(1), LENGTHS, BLOCK_SIZE, 64)
    together = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    alone = run_schedule(model, sequences, [[row] for row in together], tables, BLOCK_SIZE)
    company = run_schedule(model, sequences, [together], tables, BLOCK_SIZE)
    return sum(not torch.equal(*pair) for pair in zip(alone, company, strict=True)), model.is_schedule_invariant


#: What differed, was promised by luck, or was not promised, and one of each kind of call.
SOME: list[tuple[str, int, dict[str, Any]]] = [
    ("kolibri1", 1, {}), ("kolibri1", 3, {}), ("kolibri1", 6, {}), ("minimax_m2", 6, {}),
    ("llama", 1, {"intermediate_size": 100}), ("gemma", 1, {"intermediate_size": 100}),
]


@pytest.mark.parametrize(("family", "top_k", "changes"), SOME, ids=str)
def test_company_changes_no_bit_behind_a_router_or_gate(family: str, top_k: int, changes: dict[str, Any]) -> None:
    """Prompts of odd lengths have the logits that they have alone, and the model promises it."""
    assert differing(family, torch.float32, top_k, **changes) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("family", ROUTERS)
def test_company_changes_no_bit_behind_any_router(family: str, top_k: int, dtype: torch.dtype) -> None:
    """The same for every family whose router or gate takes a sigmoid, with one, three and six experts a row."""
    num_differing, promises = differing(family, dtype, top_k)
    # Why one exception: torch multiplies its experts, so it promises nothing.
    assert (num_differing, promises) == (0, family != "llama4_text")


def test_norms_of_heads_are_no_matrices() -> None:
    """A model whose norms have factors for each head promises the same bits, and keeps the promise."""
    assert differing("cohere", torch.float32, 1, use_qk_norm=True) == (0, True)


@pytest.mark.parametrize("function", [
    torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus, torch.nn.functional.mish,
    lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"),
])  # fmt: skip
@pytest.mark.parametrize("width", [3, 100])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(function: Any, width: int) -> None:
    """Whole rows, rows with gaps between them and transposed ones have no last elements of other bits."""
    torch.set_num_threads(3)
    wide = torch.randn(1 + 70000 // width, width + 2, generator=torch.Generator().manual_seed(0))
    for rows in (wide[:, :-2], wide[:, :-2].contiguous(), wide[:, :-2].T.contiguous().T):
        whole = in_whole_vectors(function, rows)
        assert torch.allclose(whole, function(rows), rtol=1e-5, atol=1e-7)
        for count in (*range(1, 60), *range(len(rows) - 9, len(rows))):
            assert torch.equal(in_whole_vectors(function, rows[:count]), whole[:count])

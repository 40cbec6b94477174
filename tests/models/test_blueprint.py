"""What a configuration alone tells about a model.

That every architecture's layout is the one of its loaded model is in ``families/test_families``, where all are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.blueprint import Blueprint, read_blueprint, read_tree
from pagedcore.models.checkpoints import quick_start
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed import can_multiply
from pagedcore_kernels.reference import ReferenceAttention
from support.families import config_of, tiny_model

GIB = 2**30


def blueprint_of(directory: Path, family: str, dtype: str = "float32", **changes: Any) -> Blueprint:
    """Write a configuration, and nothing else, to a directory and read it back, with blocks of 16 tokens."""
    config_of(family, **changes).save_pretrained(directory)
    return read_blueprint(directory, ReferenceAttention, EngineConfig(dtype=dtype, block_size=16))


@pytest.mark.parametrize(("family", "changes", "per_token", "of_state", "weights"), [
    ("llama", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
               "intermediate_size": 14336, "vocab_size": 128256}, 131072, 0, 8_030_261_248),
    ("qwen2", {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896,
               "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}, 12288, 0, 494_032_768),
    # LFM2-1.2B: 6 layers of attention with K and V of 8 heads, 10 of convolutions with two inputs.
    ("lfm2", {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048,
              "intermediate_size": 12288, "vocab_size": 65536, "tie_word_embeddings": True, "conv_bias": False,
              "block_auto_adjust_ff_dim": True, "layer_types": [
                  "full_attention" if place in (2, 5, 8, 10, 12, 14) else "conv" for place in range(16)]},
     6 * 2048, 10 * 2 * 4096, 1_170_340_608),
])
def test_worked_examples(
    family: str, changes: dict[str, Any], per_token: int, of_state: int, weights: int, tmp_path: Path
) -> None:
    """Llama 3 8B takes 128 KiB a token and Qwen2.5 0.5B 12 KiB, and their parameters are as many as published; the
    state of a convolution of three taps is two rows of the hidden size.
    """
    plan = blueprint_of(tmp_path, family, dtype="bfloat16", **changes)
    assert plan.state_bytes == of_state
    assert plan.layout.bytes_per_token == per_token
    assert plan.layout.block_bytes == 16 * per_token
    assert plan.num_parameters == weights


@pytest.mark.parametrize(("family", "is_shared"), [("llama", True), ("gpt2", False)])
def test_a_matrix_in_two_places_is_held_once_by_the_fused_decoder(
    family: str, is_shared: bool, tmp_path: Path
) -> None:
    """The embedding reads the product's rows there; other decoders keep the matrix, and rearrange a copy of it."""
    tied = blueprint_of(tmp_path, family, tie_word_embeddings=True)
    free = blueprint_of(tmp_path, family, tie_word_embeddings=False)
    assert free.num_parameters - tied.num_parameters == 199 * 64
    assert free.weight_bytes == 4 * free.num_parameters
    saved = 4 * 199 * 64 if is_shared and can_multiply(torch.float32, 64) else 0
    assert free.weight_bytes - tied.weight_bytes == saved


def test_no_memory_is_taken_for_weights(tmp_path: Path) -> None:
    """A model larger than any machine is sized from its configuration."""
    plan = blueprint_of(tmp_path, "llama", num_hidden_layers=4, hidden_size=2**16, intermediate_size=2**20)
    assert plan.weight_bytes > 2000 * GIB


def test_the_backend_chooses_the_block_size(tmp_path: Path) -> None:
    """Without a block size it is the one that an engine with this backend and number format would take."""
    config_of("llama").save_pretrained(tmp_path)
    for name in ("float32", "bfloat16"):
        plan = read_blueprint(tmp_path, NumbaCpuAttention, EngineConfig(dtype=name))
        assert plan.layout.block_size == NumbaCpuAttention.preferred_block_size(getattr(torch, name))


@pytest.mark.parametrize(("text", "error", "message"), [
    ('{"model_type": "rwkv"}', ModelNotSupported, "state"),
    ('{"model_type": "llama", "auto_map": {"AutoConfig": "code.Config"}}', ModelNotSupported, "auto_map"),
    ('{"model_type": "nothing_like_it"}', InvalidConfig, "could not be loaded"),
    ("{", InvalidConfig, "could not be read"),
    (None, InvalidConfig, "no config.json"),
])
def test_what_an_engine_refuses_is_refused(
    text: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """The same refusals as for loading, before anything is loaded."""
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        read_blueprint(tmp_path, ReferenceAttention, EngineConfig())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "phi3", "granite", "olmo3", "smollm3"])
def test_a_model_is_as_large_with_modules_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files are read without transformers, so is what they will take, and it is the same."""
    tiny_model(family).save_pretrained(tmp_path)
    plans = []
    for is_quick in (True, False):
        if not is_quick:
            monkeypatch.setattr(quick_start, "FAMILIES", {})
        tree = read_tree(str(tmp_path), None, torch.bfloat16, False)[0]
        assert isinstance(tree, ForCausalLM) == is_quick
        plans.append(read_blueprint(tmp_path, ReferenceAttention, EngineConfig(dtype="bfloat16", block_size=16)))
    assert plans[0] == plans[1]

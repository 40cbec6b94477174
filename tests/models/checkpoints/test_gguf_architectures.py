"""Every architecture of GGUF files that is known against transformers' class with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import SamplingParams
from pagedcore.cli.doctor import diagnosis
from pagedcore.cli.size import size_model
from pagedcore.convert.packing import pack
from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore_kernels.cpu.matmul.packed_grouped import form_of_grouped_product
from support.gguf_files import MIXED, Tensor, floats, write_model
from support.scores import engine_of, scores_of, scores_of_transformers

pytestmark = pytest.mark.skipif(form_of_grouped_product(torch.float32) is None, reason="no such vectors")
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
SHORT_CONTEXT: dict[str, Any] = {"max_position_embeddings": 64}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
#: Angles of Gemma 3: those of layers with a window have a base of their own and are not scaled.
GEMMA: dict[str, Any] = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
#: As E2B is: embeddings of each layer, the last layers read the keys of others and are wider, and heads of two sizes.
GEMMA_4_E: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "global_head_dim": 32, "sliding_window": 8,
    "final_logit_softcapping": 30.0,
}
#: As 31B is: layers that see all have fewer heads of keys, which are values too.
GEMMA_4_DENSE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "num_global_key_value_heads": 4, "global_head_dim": 32, "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
}
#: Qwen3.5 with two value heads for each key head, whose groups are parts of a block.
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}
FACTORS = {"short_factor": [1.0 + number / 50 for number in range(4)], "long_factor": [2.0] * 4}
#: Angles of Phi-4-mini, which turn a part of a head; one of the prompts is longer than the original context.
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **FACTORS,
                        "original_max_position_embeddings": 24, "attention_factor": 1.3}
LONG_TENSORS = {f"rope_factors_{name}.weight": floats("f32", np.array(FACTORS[f"{name}_factor"]))
                for name in ("long", "short")}
MINISTRAL: dict[str, Any] = {**YARN, "beta_fast": 0.5, "beta_slow": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "llama_4_scaling_beta": 0.3}
#: Angles of gpt-oss, which no file calls untruncated.
OSS: dict[str, Any] = {**YARN, "beta_fast": 0.5, "beta_slow": 0.1, "truncate": False}


@pytest.mark.parametrize(("family", "kinds", "more", "changes"), [
    ("gemma3_text", ("q4_k", "iq4_xs"), {"metadata": {"gemma3.attention.sliding_window_pattern": 2}}, {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
        "rope_parameters": GEMMA}),
    ("gemma4_text", ("q4_k", "iq4_xs", "q5_0"), {}, GEMMA_4_E),
    ("gemma4_text", ("q8_0", "bf16"), {}, GEMMA_4_DENSE),
    ("qwen3_moe", ("q4_k", "q3_k", "q6_k"), {}, {}),
    ("qwen3_moe", ("f16",), {}, {"tie_word_embeddings": True}),
    ("phi3", ("q8_0", "q4_0"), {"more_tensors": LONG_TENSORS}, {
        "sliding_window": 8, "max_position_embeddings": 256, "original_max_position_embeddings": 24,
        "rope_parameters": LONG}),
    ("granite", ("q2_k",), {}, {"tie_word_embeddings": True}),
    ("ministral3", ("q8_0",), {}, {"rope_parameters": MINISTRAL, **SHORT_CONTEXT}),
    ("gpt_oss", ("mxfp4", "q8_0"), {}, {
        "sliding_window": 8, "rope_parameters": OSS, **SHORT_CONTEXT}),
    ("glm4", ("q5_0", "mxfp4"), {}, {"attention_bias": True}),
    ("lfm2", ("q4_k", "q6_k"), {}, {"layer_types": ["conv", "full_attention"], "conv_bias": False}),
    ("lfm2", ("q8_0", "q5_0"), {}, {
        "layer_types": ["full_attention", "conv"], "conv_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_text", ("q4_k", "q6_k", "q8_0"), {}, DELTA),
    ("qwen3_5_text", ("q5_0", "q4_1"), {}, {**DELTA, "linear_num_value_heads": 6, "tie_word_embeddings": True}),
    ("qwen3_5_moe_text", ("q4_k", "q5_k", "q8_0"), {}, DELTA),
    ("qwen3_5_text", ("bf16",), {}, {**DELTA, "linear_num_key_heads": 4}),
    ("qwen3", ("q4_k",), {}, {"rope_parameters": YARN, **SHORT_CONTEXT}),
])  # fmt: skip
def test_a_model_computes_its_numbers(
    family: str, kinds: tuple[str, ...], more: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Log-probabilities are those of transformers with the format's numbers, to float32's rounding, by the fused
    decoder where it knows the architecture."""
    model = write_model(tmp_path / "model.gguf", family, kinds, **more, **{**SMALL, **changes})
    actual = scores_of(tmp_path, must_fuse=family not in (
        "gemma4_text", "ministral3", "glm4", "gpt_oss"))
    assert np.abs(actual - scores_of_transformers(model)).max() < 1e-4


@pytest.mark.parametrize(("family", "kinds"), [
    ("qwen3_moe", ("q4_k", "q6_k")), ("qwen3_moe", ("q8_0", "q4_0")), ("gpt_oss", ("mxfp4", "q8_0")),
])
def test_gates_of_experts_may_be_of_another_type(family: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    """Each half is a product of its own type, and counts what that takes; outputs of those of gpt-oss take turns, with
    their biases, from packed weights too."""
    path = tmp_path / "model.gguf"
    model = write_model(path, family, ("q8_0",), kinds_of_experts=kinds, num_hidden_layers=2)
    scores = scores_of(path)
    assert np.abs(scores - scores_of_transformers(model)).max() < 2e-3
    assert pack(str(path), None, create_plugin_manager().registry.load, dtype="float32").is_file()
    assert (scores_of(path) == scores).all()
    sizes = {}
    for some in (kinds, kinds[:1] * 2, kinds[1:] * 2):
        write_model(path, family, ("q8_0",), kinds_of_experts=some, num_hidden_layers=2)
        sizes[some] = size_model(path).weight_bytes
    # Why twice: matrices of the way down are of the first type too.
    assert 3 * sizes[kinds] == pytest.approx(2 * sizes[kinds[:1] * 2] + sizes[kinds[1:] * 2], rel=0.01)
    assert len({*sizes.values()}) == 3


def fields_of(path: Path, family: str, **changes: Any) -> dict[str, Any]:
    """What the configuration says of a file of numbers."""
    write_model(path, family, ("f16",), hidden_size=32, intermediate_size=32, num_attention_heads=4,
                num_key_value_heads=2, **changes)
    return GGUF(str(path)).config().to_dict()


def test_what_files_of_gemma_do_not_say(tmp_path: Path) -> None:
    """Every sixth layer sees all, whose angles alone are scaled; of 62 layers scores are divided by another root; and a
    file without a window has none."""
    metadata = {"gemma3.rope.freq_base_swa": None}
    fields = fields_of(tmp_path / "a.gguf", "gemma3_text", num_hidden_layers=62, metadata=metadata)
    assert [kind == "full_attention" for kind in fields["layer_types"]] == [n % 6 == 5 for n in range(62)]
    assert (fields["query_pre_attn_scalar"], fields["sliding_window"]) == (8, 8)
    assert fields["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0
    fields = fields_of(tmp_path / "b.gguf", "gemma3_text", **SMALL, metadata={"gemma3.attention.sliding_window": 0})
    assert fields["layer_types"] == ["full_attention"] * 2
    assert fields["query_pre_attn_scalar"] == 16


def test_files_of_gemma_4_say_more_than_they_need(tmp_path: Path) -> None:
    """Layers that read the keys of others have keys in files all the same, which nobody reads; and tokens that must not
    be said are in none."""
    path, unused = tmp_path / "model.gguf", floats("f32", np.full((256, 256), np.nan))
    more = {f"blk.3.{name}.weight": unused for name in ("attn_k", "attn_v", "attn_k_norm")}
    model = write_model(path, "gemma4_text", ("f16",), more_tensors=more, **GEMMA_4_E)
    with torch.inference_mode():
        said = int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
    metadata = {"tokenizer.ggml.suppress_tokens": [said, 300]}
    write_model(path, "gemma4_text", ("f16",), metadata, more, **GEMMA_4_E)
    with engine_of(path) as engine:
        assert engine.generation_defaults == {"suppress_tokens": (said,)}
        (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0), show_progress=False)
    assert output.outputs[0].token_ids[0] != said
    assert diagnosis(str(path))["sampling"].endswith(f": suppress_tokens ({said},)")


def test_layers_that_guess_are_not_read(tmp_path: Path) -> None:
    """Files of Qwen3.5 have a last layer that guesses tokens further on, and may say which layers are recurrent."""
    metadata = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1, "qwen35.full_attention_interval": 2**31 - 1,
                "qwen35.attention.recurrent_layers": [True, False, False]}
    more = {"blk.2.nextn.eh_proj.weight": floats("f32", np.full((8, 16), np.nan)),
            "blk.2.attn_norm.weight": floats("f32", np.full(256, np.nan))}
    model = write_model(tmp_path / "model.gguf", "qwen3_5_text", ("q8_0",), metadata, more, **SMALL, **DELTA)
    assert np.abs(scores_of(tmp_path) - scores_of_transformers(model)).max() < 1e-4
    metadata["qwen35.nextn_predict_layers"] = 0
    write_model(tmp_path / "model.gguf", "qwen3_5_text", ("q8_0",), metadata, more, **SMALL, **DELTA)
    with pytest.raises(ModelNotSupported, match=r"blk\.2\."):
        scores_of(tmp_path)


def test_heads_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    """Inputs of the output matrix lie in another order in files, and a scale of theirs is one of 32."""
    path = str(tmp_path / "model.gguf")
    heads = {**DELTA, "linear_value_head_dim": 16}
    write_model(tmp_path / "model.gguf", "qwen3_5_text", ("q8_0",), **SMALL, **heads)
    with pytest.raises(ModelNotSupported, match=r"is of the type q8_0, and its heads are no whole groups of 32"):
        load_stored(path, stored_format(path), torch.float32, trust_remote_code=False)  # type: ignore[arg-type]


def test_mistral_without_a_temperature_is_mistral(tmp_path: Path) -> None:
    """Files of models before Ministral 3 have the same name of an architecture."""
    metadata = {"mistral3.attention.temperature_scale": None}
    fields = fields_of(tmp_path / "a.gguf", "ministral3", metadata=metadata, rope_parameters=MINISTRAL, **SMALL)
    assert (fields["model_type"], fields["sliding_window"]) == ("mistral", None)
    assert fields["rope_parameters"]["beta_fast"] == 0.5


@pytest.mark.parametrize(("family", "metadata", "tensors", "message"), [
    ("granite", {"granite.rope.scaling.finetuned": False}, {}, "finetuned is False, needed is True"),
    ("granite", {"granite.attention.scale": -1.0}, {}, "attention.scale is -1.0, needed is a number above 0"),
    ("qwen3_moe", {"qwen3moe.expert_used_count": 5}, {}, "expert_used_count is 5, needed is at most 4"),
    ("qwen3_moe", {"qwen3moe.expert_count": 2**31 - 1}, {}, r"ffn_gate_exps.weight is of shape \[4, "),
    ("qwen3_moe", {"qwen3moe.expert_count": None}, {}, "expert_count is None, needed is a size"),
    ("gpt_oss", {"gpt-oss.expert_count": 3}, {}, r"is of shape \[4, .*needed is \[3, "),
    ("gemma3_text", {}, {"rope_freqs.weight": floats("f32", np.ones(8))}, "rope_freqs.weight is no tensor"),
    ("gemma4_text", {"gemma4.expert_count": 128}, {}, "its expert_count is 128"),
    ("gemma4_text", {"gemma4.attention.sliding_window_pattern": [False, True]}, {}, "needed is false for the last"),
    ("gemma4_text", {"gemma4.attention.sliding_window_pattern": 2}, {}, "needed is true or false for each of 2"),
    ("gemma4_text", {"gemma4.attention.shared_kv_layers": 1}, {}, "no kind of layers that only reads"),
    ("gemma4_text", {"gemma4.attention.shared_kv_layers": 2}, {}, "shared_kv_layers is 2, needed is at most 1"),
    ("gemma4_text", {"gemma4.attention.head_count_kv": [2, 3]}, {}, "one number for each kind of layers, and divisors"),
    ("gemma4_text", {"gemma4.attention.head_count_kv": [2, 2, 2]}, {}, "or one for each of 2 layers"),
    ("gemma4_text", {"gemma4.feed_forward_length": [512, 1024]}, {}, "needed is one size, and one or twice that"),
    ("gemma4_text", {"gemma4.rope.dimension_count_swa": 32}, {}, "dimension_count_swa is 32, needed is 16"),
    ("gemma4_text", {"gemma4.rope.scaling.type": "linear", "gemma4.rope.scaling.factor": 2.0}, {}, "needed is none"),
    ("gemma4_text", {}, {"rope_freqs.weight": floats("f32", np.full(256, 8.0))}, "has other values than 1"),
    ("gemma4_text", {"tokenizer.ggml.suppress_tokens": ["a"]}, {}, "needed are ids of tokens"),
    ("lfm2", {"lfm2.attention.head_count_kv": [0, 0]}, {}, "needed is a size, or one for each of 2 layers"),
    ("lfm2", {"lfm2.attention.head_count_kv": [2, 1]}, {}, "one number for all layers that attend, and 0 for the oth"),
    ("lfm2", {"lfm2.shortconv.l_cache": 10**6}, {}, "l_cache is 1000000, needed is at most 64"),
    ("qwen3_5_text", {"qwen35.ssm.time_step_rank": 3}, {}, "rank is 3, needed is a multiple of its ssm.group_count, 2"),
    ("qwen3_5_text", {"qwen35.ssm.time_step_rank": 2**30}, {}, "needed is a multiple of its ssm.time_step_rank"),
    ("qwen3_5_text", {"qwen35.ssm.inner_size": 2**30}, {}, r"ssm_out.weight is of shape .*, needed is .256, 10737"),
    ("qwen3_5_text", {"qwen35.ssm.group_count": 4}, {}, r"attn_qkv.weight is of shape \[512, 256\], needed is \[768"),
    ("qwen3_5_text", {"qwen35.ssm.state_size": None}, {}, "ssm.state_size is None, needed is a size"),
    ("qwen3_5_text", {"qwen35.ssm.conv_kernel": 10**6}, {}, "conv_kernel is 1000000, needed is at most 8"),
    ("qwen3_5_text", {"qwen35.nextn_predict_layers": 2}, {}, "nextn_predict_layers is 2, needed is at most 1"),
    ("qwen3_5_text", {"qwen35.attention.recurrent_layers": [1, 0]}, {}, "needed is true or false for each of 2 layers"),
    ("qwen3_5_text", {"qwen35.full_attention_interval": 1}, {}, "attn_gate.weight is no tensor of the architecture"),
    ("qwen3_5_text", {}, {"blk.0.ssm_a": floats("f32", np.zeros(4))}, "ssm_a has a number that is not below 0"),
    ("qwen3_5_text", {}, {"blk.0.ssm_conv1d.weight": floats("f32", np.zeros((512, 3)))}, r"conv1d.*\[512, 3\], needed"),
    ("qwen3_5_text", {}, {"blk.0.ssm_dt.bias": floats("f32", np.zeros(3))}, r"ssm_dt.bias is of shape \[3\], needed"),
    ("llama", {"llama.feed_forward_length": [512, 512]}, {}, "needed is a size"),
    ("gemma3_text", {"gemma3.attention.sliding_window_pattern": [1, 0]}, {}, r"pattern is \[1, 0\], needed is a size"),
    ("phi3", {"phi3.rope.dimension_count": 15}, {}, "rope.dimension_count is 15, and its heads are of 16"),
    ("phi3", {"phi3.rope.scaling.type": "longrope"}, {}, "needed are rope_factors_long.weight and rope_factors_short"),
    ("ministral3", {"mistral3.rope.scaling.type": "none"}, {}, "temperature_scale is 0.3.*, needed is none without"),
    ("qwen3", {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}, {}, "context_length is None"),
    ("qwen3", {"qwen3.attention.sliding_window": 8}, {}, "its attention.sliding_window is 8"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(
    family: str, metadata: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    """It is named before a tensor is read."""
    changes: dict[str, Any] = {
        "ministral3": {"rope_parameters": MINISTRAL},
        "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0},
        "lfm2": {"layer_types": ["conv", "full_attention"]}, "qwen3_5_text": DELTA,
    }.get(family, {})
    path = str(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", family, MIXED, metadata, tensors, **SMALL, **changes)
    with pytest.raises(ModelNotSupported, match=message):
        load_stored(path, stored_format(path), torch.float32, trust_remote_code=False)  # type: ignore[arg-type]


def test_experts_of_gpt_oss_are_blocks(tmp_path: Path) -> None:
    """Files with their experts as numbers, which nobody publishes, are refused."""
    path = str(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", "gpt_oss", ("f16",), num_hidden_layers=1)
    with pytest.raises(ModelNotSupported, match=r"ffn_gate_exps.weight is of the type f16, needed is one of blocks"):
        load_stored(path, stored_format(path), torch.float32, trust_remote_code=False)  # type: ignore[arg-type]

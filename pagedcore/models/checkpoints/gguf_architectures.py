"""What llama.cpp's architectures are of transformers': classes, names of tensors, and what metadata become, as data.

Owns the one table of them. What all have in common, and how a file is read, is ``gguf.py``'s matter; angles are
``gguf_angles.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pagedcore.models.checkpoints.gguf_gemma4 import fields_of_gemma4
from pagedcore.models.checkpoints.gguf_metadata import Metadata
from pagedcore.models.checkpoints.gguf_qwen35 import (
    GUESSING,
    columns_of_qwen35,
    fields_of_qwen35,
    numbers_of_qwen35,
    rows_of_qwen35,
)

_EVERYWHERE: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
_AROUND: Final = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED: Final = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_GPT_OSS: Final = {
    "self_attn.sinks": ("attn_sinks.weight",), GATE_UP: ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    f"{GATE_UP}_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"), _DOWN: ("ffn_down_exps.weight",),
    f"{_DOWN}_bias": ("ffn_down_exps.bias",),
}
_IS_ROTATED: Final = re.compile(r"\.[qk]_proj\.")
_OF_EXPERTS: Final = {
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_ENTRIES_OF_EXPERTS: Final = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_QWEN35: Final[dict[str, Any]] = {
    "names": {
        **_EVERYWHERE, "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    },
    "tensors": {"linear_attn.A_log": ("ssm_a",), "linear_attn.dt_bias": ("ssm_dt.bias",)},
    "rows": rows_of_qwen35, "columns": columns_of_qwen35, "numbers": numbers_of_qwen35, "has_bias_field": False,
    "may_turn_parts": True, "metadata": frozenset({
        "attention.recurrent_layers", "full_attention_interval", "rope.dimension_sections", "ssm.conv_kernel",
        "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", GUESSING,
    }),
}
_LOCAL_BASE: Final = 10000.0
_PATTERN: Final = 6
_MOST_TAPS: Final = 64
"""More inputs than a short convolution has."""
_LAYERS_OF_27B: Final = 62
"""Of Gemma 3; the file of that model does not say that it divides scores by another root, and llama.cpp counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One of them."""

    model_type: str
    """Of transformers."""
    names: Mapping[str, str] = field(default_factory=lambda: _EVERYWHERE)
    """Of a layer's modules, by transformers' names."""
    metadata: frozenset[str] = frozenset()
    """Entries besides those of all architectures."""
    fields: Callable[[Metadata, dict[str, Any]], dict[str, Any]] = lambda given, fields: {}
    """``(metadata, fields of all) -> more fields, or others``."""
    rows: Callable[[Mapping[str, Any], str, int], torch.Tensor | None] = lambda fields, name, count: None
    """``(fields, name, number of rows) -> the file's row of each of a tensor's``; ``None``: they are in its order."""
    columns: Callable[[Mapping[str, Any], str], torch.Tensor | None] = lambda fields, name: None
    """``(fields, name) -> the file's column of each of a matrix's``; ``None``: as of rows."""
    numbers: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, numbers: numbers
    """``(name, what the file has) -> what the tensor has``, of those that are no blocks."""
    has_bias_field: bool = True
    """Whether the configuration says that queries, keys and values have biases."""
    may_turn_parts: bool = False
    """Whether angles may turn a part of a head only."""
    turns_by_factors: bool = False
    """Whether the file's factors of angles say which numbers of a head are turned, and are no factors otherwise."""
    by_layer: frozenset[str] = frozenset()
    """Entries that may be a list, with a number for each layer."""
    skips_attention: bool = False
    """Whether some layers have no heads, which such lists say by 0."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Of modules that are in no layer, where files call them otherwise than those of other architectures."""
    has_experts: bool = False
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a layer's tensors that are no module's weight or bias: the file's; outputs of two alternate in one."""

    @property
    def alternates_experts(self) -> bool:
        """Whether gates of experts alternate with what they open, so that their rows are put together."""
        return GATE_UP in self.tensors


def _alternating_halves(fields: Mapping[str, Any], name: str, count: int) -> torch.Tensor | None:
    """Rows of query and key alternate between the halves of a head in files."""
    if not _IS_ROTATED.search(name):
        return None
    return torch.arange(count).view(-1, fields["head_dim"] // 2, 2).transpose(1, 2).flatten()


def _norms_without_one(name: str, numbers: torch.Tensor) -> torch.Tensor:
    return numbers.float() - 1.0 if name.endswith("norm.weight") else numbers


def _qwen3moe(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = given.size("expert_count"), given.size("expert_used_count")
    inner = fields["intermediate_size"]
    return {
        "num_experts": count, "num_experts_per_tok": given.at_most("expert_used_count", used, count),
        "moe_intermediate_size": given.size("expert_feed_forward_length", max(1, inner // used)),
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }


def _qwen35moe(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = given.size("expert_count"), given.size("expert_used_count")
    inner = given.size("expert_feed_forward_length")
    return {
        "num_experts": count, "num_experts_per_tok": given.at_most("expert_used_count", used, count),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": given.size("expert_shared_feed_forward_length", inner),
        **fields_of_qwen35(given, fields),
    }


def _gemma3(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    window = given.size_or_none("attention.sliding_window")
    pattern = given.size("attention.sliding_window_pattern", _PATTERN)
    is_local = [window is not None and (number + 1) % pattern > 0 for number in range(count)]
    is_27b = count == _LAYERS_OF_27B
    local = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", _LOCAL_BASE)}
    cap = given.get("final_logit_softcapping")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # Why also without windows: transformers computes the mask of both types of layers.
        "sliding_window": fields["max_position_embeddings"] if window is None else window,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in is_local],
        "query_pre_attn_scalar": fields["hidden_size"] // heads if is_27b else fields["head_dim"],
        "final_logit_softcapping": given.number("final_logit_softcapping") if cap else None,
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
        "rope_frequency_factors": None,
    }


def _phi3(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    original = given.size("rope.scaling.original_context_length", fields["max_position_embeddings"])
    return {"sliding_window": given.size_or_none("attention.sliding_window"),
            "original_max_position_embeddings": original}


def _gpt_oss(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = given.size("expert_count"), given.size("expert_used_count")
    rope = fields["rope_parameters"]
    return {
        "num_local_experts": count, "num_experts_per_tok": given.at_most("expert_used_count", used, count),
        "intermediate_size": given.size("expert_feed_forward_length", fields["intermediate_size"]),
        "sliding_window": given.size("attention.sliding_window"),
        # Why: the model's angles are not rounded to whole dimensions, which files do not say.
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _granite(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    given.require("rope.scaling.finetuned", True)
    return {
        "attention_multiplier": given.number("attention.scale", fields["head_dim"] ** -0.5),
        "embedding_multiplier": given.number("embedding_scale", 1.0),
        "residual_multiplier": given.number("residual_scale", 1.0), "logits_scaling": given.number("logit_scale", 1.0),
    }


def _mistral3(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Without a temperature that grows with the position it is Mistral, whose class has no other difference."""
    beta = given.get("attention.temperature_scale")
    if not beta:
        return {"model_type": "mistral", "sliding_window": None}
    rope = fields["rope_parameters"]
    if rope["rope_type"] != "yarn":
        given.refuse("attention.temperature_scale", "none without YaRN")
    return {"sliding_window": None,
            "rope_parameters": {**rope, "llama_4_scaling_beta": given.number("attention.temperature_scale")}}


def _lfm2(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, heads = fields["num_hidden_layers"], fields["num_key_value_heads"]
    of_layers = given.sizes("attention.head_count_kv", count, heads, least=0)
    if {*of_layers} - {0, heads}:
        given.refuse("attention.head_count_kv", "one number for all layers that attend, and 0 for the others")
    return {
        "layer_types": ["full_attention" if one else "conv" for one in of_layers],
        "conv_L_cache": given.at_most("shortconv.l_cache", given.size("shortconv.l_cache"), _MOST_TAPS),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in given.tensors),
        "norm_eps": fields["rms_norm_eps"], "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(model_type="llama", rows=_alternating_halves),
    "qwen2": Architecture(model_type="qwen2", has_bias_field=False),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", names={
            **_EVERYWHERE, **_OF_EXPERTS,
        }, fields=_qwen3moe, has_experts=True, metadata=_ENTRIES_OF_EXPERTS,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", names={**_EVERYWHERE, **_AROUND}, fields=_gemma3, numbers=_norms_without_one,
        has_bias_field=False,
        metadata=frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
                            "final_logit_softcapping"}),
    ),
    "gemma4": Architecture(
        model_type="gemma4_text", names={
            **_EVERYWHERE, **_AROUND, "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
        }, fields=fields_of_gemma4, has_bias_field=False, turns_by_factors=True,
        tensors={"layer_scalar": ("layer_output_scale.weight",)},
        by_layer=frozenset({"feed_forward_length", "attention.head_count_kv"}),
        metadata=frozenset({"attention.key_length_swa", "attention.shared_kv_layers", "attention.sliding_window",
                            "attention.sliding_window_pattern", "attention.value_length_swa",
                            "embedding_length_per_layer_input", "final_logit_softcapping", "rope.dimension_count_swa",
                            "rope.freq_base_swa"}),
    ),
    "phi3": Architecture(
        model_type="phi3", names={**_EVERYWHERE, **_FUSED}, fields=_phi3, has_bias_field=False, may_turn_parts=True,
        metadata=frozenset({"attention.sliding_window", "rope.scaling.attn_factor",
                            "rope.scaling.original_context_length"}),
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss", fields=_gpt_oss, tensors=_GPT_OSS, names={
            **_EVERYWHERE, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
        }, metadata=frozenset({"attention.sliding_window", "expert_count", "expert_used_count",
                               "expert_feed_forward_length"}),
    ),
    "granite": Architecture(
        model_type="granite", fields=_granite, rows=_alternating_halves,
        metadata=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "mistral3": Architecture(
        model_type="ministral3", fields=_mistral3, rows=_alternating_halves, has_bias_field=False,
        metadata=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    ),
    "lfm2": Architecture(
        model_type="lfm2", names={
            "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
            "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
            "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "conv.conv": "shortconv.conv",
        }, others={"model.embedding_norm": "token_embd_norm"}, fields=_lfm2, has_bias_field=False,
        by_layer=frozenset({"attention.head_count_kv"}), skips_attention=True,
        metadata=frozenset({"shortconv.l_cache"}),
    ),
    "qwen35": Architecture(model_type="qwen3_5_text", fields=fields_of_qwen35, **_QWEN35),
    "qwen35moe": Architecture(model_type="qwen3_5_moe_text", fields=_qwen35moe, has_experts=True, **{
        **_QWEN35, "names": {
            **_QWEN35["names"], **_OF_EXPERTS, "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
            "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        }, "metadata": _QWEN35["metadata"] | _ENTRIES_OF_EXPERTS | {"expert_shared_feed_forward_length"},
    }),
    "glm4": Architecture(
        model_type="glm4", names={
            **_EVERYWHERE, **_FUSED, "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        }, may_turn_parts=True,
    ),
}
"""By llama.cpp's name."""

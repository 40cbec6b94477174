"""What distinguishes each known architecture from Llama, as data: the one table of them.

Owns the descriptions that ``decoders/fused_match.py`` compares a model's modules with, that ``decoders/fused.py``
computes by, that ``llama_modules.py`` builds modules by, and that ``checkpoints/quick_start.py`` reads directories by.
What an architecture's modules or configuration say themselves, such as windows, shapes and angles, is not repeated
here. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagedcore.models.families.field_checks import (
    Check,
    are_flags,
    are_integers,
    are_layer_types,
    is_anything,
    is_bool,
    is_cap,
    is_flag,
    is_gelu,
    is_number,
    is_off,
    is_one,
    is_positive,
    is_size,
    is_window,
)

_BEFORE: Final = ("input_layernorm", "", "post_attention_layernorm", "")
_AFTER: Final = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_AROUND: Final = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    classes: str
    """How the names of transformers' classes begin."""
    fields: Mapping[str, Check]
    """What the fields of ``config.json`` that not all architectures have must be. Any other field is unknown."""
    replaced_fields: frozenset[str] = frozenset()
    """Those of which transformers has other values than the file; layers are of full attention if they are replaced."""
    special_tokens: frozenset[str] = frozenset({"bos_token_id", "eos_token_id"})
    """Fields that a configuration must have, because the class names a token otherwise."""
    has_rope_by_type: bool = False
    """Whether each type of layers has angles of its own."""
    may_turn_parts: bool = False
    """Whether angles may turn a part of a head only."""
    attention: str = "sdpa"
    """What transformers attends with when it may choose."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """What files call parts of names, by what modules call them; each between dots."""
    norms: tuple[str, str, str, str] = _BEFORE
    """A layer's norms before and after the attention, before and after the rest; "" for none."""
    norm_offset: float | None = None
    """``None``: norms round before they multiply by their weight; a number is added to it, and the product rounded."""
    has_head_norms: bool = False
    """Whether queries and keys are normed: each head, or all heads of a row together."""
    norms_whole_rows: bool = False
    """Whether those norms are of all heads of a row together."""
    has_qkv_bias: bool = False
    """Whether queries, keys and values have biases, whatever the configuration says."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    """The module that computes it; "": a function does, which is silu."""
    has_multipliers: bool = False
    """Whether the configuration has multipliers of embeddings and of what a layer adds, and a divisor of logits."""
    is_gemma: bool = False
    """Whether embeddings are multiplied by the root of their size, and logits may have a soft cap."""
    has_experts: bool = False
    """Whether layers may be mixtures of experts."""
    has_wide_shares: bool = False
    """Whether the shares of a row's experts always sum to one, and stay in float32."""
    has_wide_angles: bool = False
    """Whether cosines and sines stay in float32."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules by path whose classes are not called as Llama's: ends of the names."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the architecture calls modules, by what Llama calls them, where it does not call them so."""
    convolution: str = ""
    """What it calls the short convolution that some layers have instead of attention; "": none has."""
    delta_rule: str = ""
    """What it calls the gated delta rule that some layers have instead of attention; "": none has."""
    delta_inputs: tuple[tuple[str, ...], ...] = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
    """Linear layers of a gated delta rule that become one product each: what is mixed, and rates."""
    has_gates: bool = False
    """Whether what a layer attends is gated: each head of its queries is followed by a gate."""
    head_gate: str = ""
    """The linear layer that computes one gate for each head of what a layer attends; "": there is none."""
    has_shared_expert: bool = False
    """Whether mixtures have an expert for all rows, behind a gate."""

    @property
    def recurrence(self) -> str:
        """What it calls what some layers have instead of attention; "": none has."""
        return self.convolution or self.delta_rule

    def name_of(self, module: str) -> str:
        """Return what the architecture calls a module that Llama calls ``module``."""
        return self.names.get(module, module)


_GEMMA_MODULES: Final = {"model.embed_tokens": "TextScaledWordEmbedding"}
_GEMMA: Final[Mapping[str, Check]] = {
    "attention_bias": is_flag, "attn_logit_softcapping": is_cap, "final_logit_softcapping": is_cap,
    "head_dim": is_size, "hidden_act": is_off, "hidden_activation": is_gelu, "layer_types": are_layer_types,
    "query_pre_attn_scalar": is_positive, "sliding_window": is_window, "tie_word_embeddings": is_bool,
    "use_bidirectional_attention": is_off,
}
_QWEN: Final[Mapping[str, Check]] = {
    "layer_types": is_anything, "max_window_layers": is_anything, "sliding_window": is_anything, "use_mrope": is_off,
    "use_sliding_window": is_off,
}
_EXPERTS: Final[Mapping[str, Check]] = {
    "num_experts_per_tok": is_size, "output_router_logits": is_off, "router_aux_loss_coef": is_anything,
}
# Why no fields: transformers loads these.
_LFM2: Final[Mapping[str, Any]] = {
    "fields": {}, "norms": ("operator_norm", "", "ffn_norm", ""), "has_head_norms": True, "gate_up": ("w1", "w3"),
    "activation": "", "convolution": "conv",
    "names": {"mlp": "feed_forward", "o_proj": "out_proj", "down_proj": "w2", "q_norm": "q_layernorm",
              "k_norm": "k_layernorm", "norm": "embedding_norm"},
}
_QWEN3_5: Final[Mapping[str, Any]] = {
    "fields": {}, "norm_offset": 1.0, "has_head_norms": True, "has_gates": True, "delta_rule": "linear_attn",
    "modules": {"model": "TextModel", "model.rotary_emb": "TextRotaryEmbedding"},
}
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(classes="Llama", fields={
        "attention_bias": is_flag, "head_dim": is_anything, "mlp_bias": is_flag, "pretraining_tp": is_one,
    }),
    "mistral": Family(classes="Mistral", fields={"head_dim": is_anything, "sliding_window": is_window}),
    "qwen2": Family(classes="Qwen2", has_qkv_bias=True, fields=_QWEN, replaced_fields=frozenset(_QWEN)),
    "qwen3": Family(
        classes="Qwen3", has_head_norms=True, replaced_fields=frozenset(_QWEN),
        fields={**_QWEN, "attention_bias": is_flag, "head_dim": is_size},
    ),
    "phi3": Family(
        classes="Phi3", qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn", may_turn_parts=True,
        fields={"embd_pdrop": is_number, "original_max_position_embeddings": is_size, "resid_pdrop": is_number,
                "sliding_window": is_window},
    ),
    "granite": Family(classes="Granite", has_multipliers=True, fields={
        "attention_bias": is_flag, "mlp_bias": is_flag, "attention_multiplier": is_positive,
        "embedding_multiplier": is_positive, "logits_scaling": is_positive, "residual_multiplier": is_positive,
    }),
    "smollm3": Family(classes="SmolLM3", fields={
        "attention_bias": is_flag, "layer_types": are_layer_types, "max_window_layers": is_anything,
        "mlp_bias": is_flag, "no_rope_layer_interval": is_size, "no_rope_layers": are_flags,
        "sliding_window": is_window, "tie_word_embeddings": is_bool, "use_sliding_window": is_flag,
    }),
    "olmo2": Family(
        classes="Olmo2", norms=_AFTER, norm_offset=0.0, has_head_norms=True, norms_whole_rows=True,
        has_wide_angles=True, fields={"attention_bias": is_flag},
    ),
    "olmo3": Family(
        classes="Olmo3", norms=_AFTER, norm_offset=0.0, has_head_norms=True, norms_whole_rows=True,
        has_wide_angles=True, has_rope_by_type=True,
        fields={"attention_bias": is_flag, "layer_types": are_layer_types, "sliding_window": is_window},
    ),
    # Why no fields: transformers loads these.
    "gemma": Family(classes="Gemma", norm_offset=1.0, is_gemma=True, modules=_GEMMA_MODULES, fields={}),
    "gemma2": Family(
        classes="Gemma2", norms=_AROUND, norm_offset=1.0, is_gemma=True, modules=_GEMMA_MODULES, fields=_GEMMA,
        attention="eager",  # because transformers' other attention knows no soft cap
    ),
    "gemma3_text": Family(
        classes="Gemma3", norms=_AROUND, norm_offset=1.0, has_head_norms=True, is_gemma=True, has_rope_by_type=True,
        modules={**_GEMMA_MODULES, "model": "TextModel"},
        fields={**_GEMMA, "_sliding_window_pattern": is_anything},
    ),
    "mixtral": Family(
        classes="Mixtral", has_experts=True, has_wide_shares=True,
        file_names={"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        fields={**_EXPERTS, "head_dim": is_anything, "num_local_experts": is_size, "router_jitter_noise": is_anything,
                "sliding_window": is_window},
    ),
    "qwen3_moe": Family(classes="Qwen3Moe", has_head_norms=True, has_experts=True, fields={
        **_EXPERTS, "attention_bias": is_flag, "decoder_sparse_step": is_size, "head_dim": is_size,
        "max_window_layers": is_anything, "mlp_only_layers": are_integers, "moe_intermediate_size": is_size,
        "norm_topk_prob": is_bool, "num_local_experts": is_size, "sliding_window": is_off,
        "use_sliding_window": is_off,
    }),
    "lfm2": Family(classes="Lfm2", **_LFM2),
    "lfm2_moe": Family(
        classes="Lfm2Moe", has_experts=True, **{**_LFM2, "names": {**_LFM2["names"], "rotary_emb": "pos_emb"}}
    ),
    "lfm3": Family(
        classes="Lfm3", has_wide_angles=True, has_rope_by_type=True, head_gate="g_proj",
        **{**_LFM2, "norms": ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"), "names": {
            name: other for name, other in _LFM2["names"].items() if not name.endswith(("o_proj", "_norm"))}},
    ),
    "qwen3_5_text": Family(classes="Qwen3_5", **_QWEN3_5),
    "qwen3_5_moe_text": Family(classes="Qwen3_5Moe", has_experts=True, has_shared_expert=True, **_QWEN3_5),
    "qwen3_next": Family(
        classes="Qwen3Next", has_experts=True, has_shared_expert=True,
        **{**_QWEN3_5, "modules": {}, "delta_inputs": (("in_proj_qkvz",), ("in_proj_ba",))},
    ),
    "olmoe": Family(
        classes="Olmoe", has_head_norms=True, norms_whole_rows=True, has_experts=True,
        special_tokens=frozenset({"eos_token_id"}),  # because its class names no first one
        fields={**_EXPERTS, "attention_bias": is_flag, "clip_qkv": is_off, "norm_topk_prob": is_bool,
                "num_experts": is_size},
    ),
}
"""By ``model_type``."""

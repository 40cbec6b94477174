"""One tiny random configuration per architecture; heads are 4 x 16 with 2 KV heads wherever that is possible."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 199
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "n_shared_experts": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "head_dim": 8, **_ROUTED,
}
_ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, **_SLIDING,
}
_MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA: dict[str, Any] = {
    **_MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_KIMI: dict[str, Any] = {
    **_MIXED, **_LOCAL_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "linear_head_dim": 16, "linear_num_heads": 4, "moe_intermediate_size": 32,
}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
}
# Why half of a head: a quarter of so small a one is less than the fused kernels turn.
_HALF_TURNED: dict[str, Any] = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_CONVOLVING: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}

#: Architecture -> what differs from the common configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEAD, **_SLIDING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {**_KIMI, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "bitnet": {},
    "cohere": {},
    "cohere2": {**_ALTERNATING},
    "cwm": {**_HEAD, **_ALTERNATING},
    "dbrx": {
        "vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {**_LATENT},
    "deepseek_v3": {**_LATENT},
    "dots1": {**_HEAD, **_ROUTED},
    "ernie4_5": {**_HEAD},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": {**_ALTERNATING},
    "exaone_moe": {**_ALTERNATING, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_n_groups": 1},
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**_HEAD},
    "gemma2": {
        **_HEAD, **_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {**_HEAD, **_ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        **_HEAD, **_SLIDING, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {**_SLIDING, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
    "glm": {**_HEAD},
    "glm4": {**_HEAD},
    "glm4_moe": {**_HEAD, **_ROUTED},
    "gpt2": _GPT2,
    "gpt_bigcode": {**_GPT2, "multi_query": True},
    "gpt_neox": {},
    "gpt_oss": {**_HEAD, **_SLIDING, **_LOCAL_EXPERTS, "num_hidden_layers": 4},
    "granite": {
        "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0,
    },
    "granite_swa": {**_SLIDING},
    "granitemoe": {**_LOCAL_EXPERTS},
    "granitemoehybrid": {
        **_MAMBA_2, **_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 64, "position_embedding_type": "nope",
    },
    "granitemoeshared": {**_LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "helium": {**_HEAD},
    "hunyuan_v1_dense": {**_HEAD},
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {},
    "internlm3": {**_HEAD},
    "jais2": {},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "jetmoe": {"kv_channels": 16, **_LOCAL_EXPERTS},
    "kimi_linear": _KIMI,
    "lfm2": {**_CONVOLVING, "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {**_CONVOLVING, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_CONVOLVING},
    "llama": {},
    "llama4_text": {
        **_HEAD, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8, "num_hidden_layers": 4,
        "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "attn_temperature_tuning": True,
        "floor_scale": 4, "attn_scale": 0.5,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "modernbert-decoder": {"local_attention": WINDOW},
    "minimax": {**_HEAD, **_MIXED, **_LOCAL_EXPERTS, "block_size": 16},
    "minimax_m2": {**_HEAD, **_LOCAL_EXPERTS},
    "ministral": {**_HEAD, **_ALTERNATING},
    "ministral3": {**_HEAD},
    "mistral": {**_SLIDING},
    "mixtral": {**_SLIDING, **_LOCAL_EXPERTS},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        **_HEAD, **_ROUTED, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "num_hidden_layers": 4, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "chunk_size": 16, "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {**_ALTERNATING},
    "olmo_hybrid": _DELTA,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "persimmon": {},
    "phi": {},
    "phi3": {**_SLIDING},
    "phimoe": {**_SLIDING, **_LOCAL_EXPERTS},
    "qwen2": {**_QWEN_WINDOW},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {**_HEAD, **_QWEN_WINDOW},
    "qwen3_5_moe_text": {**_HEAD, **_DELTA, **_EXPERTS, **_HALF_TURNED, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": {**_HEAD, **_DELTA, **_HALF_TURNED},
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "qwen3_next": {
        **_HEAD, **_DELTA, **_EXPERTS, **_HALF_TURNED, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    },
    "recurrent_gemma": {
        "intermediate_size": 192, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"],
    },
    "seed_oss": {**_HEAD},
    "smollm3": {**_QWEN_WINDOW, "num_hidden_layers": 4},
    "stablelm": {},
    "starcoder2": {**_SLIDING},
    "vaultgemma": {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 16},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "mamba_d_state": 8,
        "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 16, "num_mem_blocks": 1,
    },
}
#: Those with recurrent layers, or short convolutions, which keep states.
HYBRIDS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "zamba2",
)
_WITHOUT_COMMON = frozenset({"gpt2", "gpt_bigcode", "dbrx"})


def config_of(family: str, **changes: Any) -> Any:
    """Return the tiny configuration of an architecture."""
    from transformers import CONFIG_MAPPING

    settings = FAMILIES.get(family, {})
    common = {} if family in _WITHOUT_COMMON else _COMMON
    return CONFIG_MAPPING[family](**{**common, **settings, **changes})


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model with random weights large enough that attention matters to every logit."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    return model.to(dtype)

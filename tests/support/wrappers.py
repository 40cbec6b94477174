"""One tiny random model of text and images per wrapper, of transformers' own classes, and what it generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.families import VOCAB, config_of

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "image_size": 16, "patch_size": 8}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
                                "out_hidden_size": 64}
_CLIP: dict[str, Any] = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32}
_SIGLIP: dict[str, Any] = {**_VISION, "model_type": "siglip_vision_model"}
_COHERE: dict[str, Any] = {"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 8,
                           "layer_types": ["sliding_attention", "full_attention"]}
_CONVOLVING: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}
_IMAGE = {"image_token_id": 190}
_QWEN_IDS = {**_IMAGE, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **others}}


#: Wrapper -> its configuration.
WRAPPERS: dict[str, dict[str, Any]] = {
    "aya_vision": {"text_config": {**_TEXT, **_COHERE}, "vision_config": _SIGLIP, "image_token_index": 190},
    "cohere2_vision": {"text_config": {**_TEXT, **_COHERE}, "vision_config": _SIGLIP, **_IMAGE},
    "gemma3": {"text_config": {**_TEXT, **_HEAD, "sliding_window": 8, "query_pre_attn_scalar": 16,
                               "layer_types": ["sliding_attention", "full_attention"]},
               "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": {**_TEXT, "sliding_window": 8, "hidden_size_per_layer_input": 16,
                               "vocab_size_per_layer_input": VOCAB},
               "vision_config": {**_VISION, **_HEAD}, "audio_config": None, **_IMAGE},
    "gemma4_unified": {"text_config": {**_TEXT, "sliding_window": 8}, **_IMAGE},
    "got_ocr2": {"text_config": {**_TEXT, "model_type": "qwen2"}, "image_token_index": 190,
                 "vision_config": {"hidden_size": 32, "output_channels": 32, "num_hidden_layers": 1, "mlp_dim": 32,
                                   "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "window_size": 2,
                                   "global_attn_indexes": [0]}},
    "glm4v": {"text_config": {**_TEXT, **_mrope(1, 1, 2, partial_rotary_factor=0.5)},
              "vision_config": {**_QWEN_VISION, "image_size": 28}, **_IMAGE, "video_token_id": 191},
    "glm4v_moe": {"text_config": {**_TEXT, **_HEAD, **_mrope(1, 1, 2, partial_rotary_factor=0.5), "n_routed_experts": 4,
                                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
                                  "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
                  "vision_config": {**_QWEN_VISION, "image_size": 28}, **_IMAGE, "video_token_id": 191},
    "internvl": {"text_config": {**_TEXT, "model_type": "qwen2"}, **_IMAGE,
                 "vision_config": {**_VISION, "model_type": "internvl_vision", "image_size": [16] * 2,
                                   "patch_size": [8] * 2}},
    "lfm2_vl": {"text_config": {**_TEXT, **_CONVOLVING, "model_type": "lfm2", "block_auto_adjust_ff_dim": False},
                "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
                "projector_hidden_size": 32, **_IMAGE},
    "lfm3_vl": {"text_config": {**_TEXT, **_CONVOLVING, "model_type": "lfm3"}, **_QWEN_IDS, "projector_hidden_size": 32,
                "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                  "num_attention_heads": 2, "num_key_value_heads": 2}},
    "llama4": {"text_config": {**_TEXT, **_HEAD, "num_local_experts": 4, "num_experts_per_tok": 1,
                               "intermediate_size_mlp": 96, "attention_chunk_size": 8, "no_rope_layers": [1, 0],
                               "interleave_moe_layer_step": 2},
               "vision_config": {**_VISION, "vision_output_dim": 32, "projector_input_dim": 32,
                                 "projector_output_dim": 32, "intermediate_size": 128}},
    "llava": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP},
    "llava_next": {"text_config": {**_TEXT, "model_type": "mistral", **_HEAD}, "vision_config": _CLIP},
    "llava_onevision": {"text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": _SIGLIP, **_IMAGE},
    "mistral3": {"text_config": {**_TEXT, **_HEAD, "model_type": "mistral"},
                 "vision_config": {**_VISION, **_HEAD, "model_type": "pixtral"}},
    "mllama": {"text_config": {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
               "image_token_index": VOCAB,
               "vision_config": {**_VISION, "vision_output_dim": 96, "attention_heads": 2, "num_global_layers": 1,
                                 "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}},
    "qwen2_vl": {"text_config": {**_TEXT, **_mrope(2, 3, 3)}, **_QWEN_IDS,
                 "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64}},
    "qwen2_5_vl": {"text_config": {**_TEXT, **_mrope(2, 3, 3)}, "vision_config": _QWEN_VISION, **_QWEN_IDS},
    "qwen3_5": {"text_config": {**_TEXT, **_HEAD, **_DELTA}, **_QWEN_IDS,
                "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    "qwen3_5_moe": {"text_config": {**_TEXT, **_HEAD, **_DELTA, "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, **_QWEN_IDS,
                    "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    "qwen3_vl": {"text_config": {**_TEXT, **_HEAD, **_mrope(2, 3, 3)}, **_QWEN_IDS,
                 "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_HEAD, **_mrope(2, 3, 3), "num_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 32, "mlp_only_layers": [0]}, **_QWEN_IDS,
                     "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0],
                                       "num_position_embeddings": 16}},
    "vipllava": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "vision_feature_layers": [0]},
}
PROMPTS = [[int(token) for token in torch.randint(3, 185, (length,), generator=torch.Generator().manual_seed(length))]
           for length in (1, 3, 17, 40)]


def randomise(model: Any) -> Any:
    """Give a model random weights, vectors too: those that all models begin with hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1
            noise = torch.randn_like(parameter) * (0.15 if is_matrix else 0.1)
            parameter.copy_(noise if is_matrix else parameter + noise)
    return model.eval()


def tiny_wrapper(kind: str, **changes: Any) -> Any:
    """Return a wrapper."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**json.loads(json.dumps(WRAPPERS[kind])), **changes})
    return randomise(AutoModelForImageTextToText.from_config(config))


def write_gemma3n(directory: Path) -> Any:
    """Write a directory as the wrapper of Gemma 3n has it, whose image tower needs another library, and return the
    language model in it.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = randomise(AutoModelForCausalLM.from_config(config_of("gemma3n_text")))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {name: torch.ones(2, 2) for name in ("model.vision_tower.stem.weight", "model.embed_audio.weight")}
    save_file({**renamed, **others}, directory / "model.safetensors", {"format": "pt"})
    own = json.loads((directory / "config.json").read_text())
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": own}
    (directory / "config.json").write_text(json.dumps(config))
    return model


def generated(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Return the twelve most likely tokens after each prompt, by transformers."""
    with torch.no_grad():
        outputs = [model.generate(torch.tensor([list(one)]), do_sample=False, max_new_tokens=12)[0] for one in prompts]
    return [output[len(one):].tolist() for one, output in zip(prompts, outputs, strict=True)]

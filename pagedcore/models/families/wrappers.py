"""Models of text and images whose language model runs alone: what their configuration and their tensors' names mean.

Owns which wrappers these are. Each was compared with the ``generate`` of its own class on prompts of text; of any
other wrapper it is not known what its language model does without the rest. Nothing is read or computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagedcore.errors import ModelNotSupported

WHOLE: Final = "_part_of"
"""A field that configurations here get, with the wrapper's ``model_type``; no file has it."""
_PLAIN_HEADS: Final = {name: name for name in ("llama", "mistral", "ministral3", "qwen2", "qwen3")}
"""Language models whose own class does nothing with logits that a wrapper around them does not."""
_COHERE: Final = {"cohere2": "cohere2"}
"""Its class multiplies logits by a number of the configuration, as those models were made; the wrappers around it in
transformers leave that out, which changes no order of tokens."""
_TEXT_MODELS: Final[Mapping[str, Mapping[str, str]]] = {
    "aya_vision": _COHERE,
    "cohere2_vision": _COHERE,
    "gemma3": {"gemma3_text": "gemma3_text"},
    "gemma3n": {"gemma3n_text": "gemma3n_text"},
    "gemma4": {"gemma4_text": "gemma4_text"},
    "gemma4_unified": {"gemma4_unified_text": "gemma4_unified_text"},
    "got_ocr2": {"qwen2": "qwen2"},
    "glm4v": {"glm4v_text": "glm4"},
    "glm4v_moe": {"glm4v_moe_text": "glm4_moe"},
    "llama4": {"llama4_text": "llama4_text"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": "qwen3_moe"},
    **dict.fromkeys(("internvl", "llava", "llava_next", "llava_onevision", "mistral3", "vipllava"), _PLAIN_HEADS),
}
"""By the wrapper's ``model_type``: what its language model may be, and the architecture that computes the same."""
_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4": {"attention_bias": True}, "qwen3_moe": {"norm_topk_prob": True, "use_sliding_window": False},
}
"""What the language model in a wrapper always is and the architecture that computes the same has a field for."""
_FUSED_EXPERTS: Final = frozenset({"qwen3_vl_moe"})
"""Wrappers whose files have one tensor for all experts of a layer where the architecture's have one for each."""
_OF_LANGUAGE: Final = ("embed_tokens", "layers", "norm")
"""Parts of a language model in files that have no name for the whole of it."""
_OF_IMAGES: Final = ("mrope_section", "mrope_interleaved", "type")
"""Parameters of rotary embeddings that count where tokens lie in an image; those of a text have one position."""


def text_model_type(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of the language model in a wrapper; ``None``: this is no wrapper that runs without the
    rest.

    Args:
        config: what ``config.json`` has.
    """
    inner = config.get("text_config")
    known = _TEXT_MODELS.get(str(config.get("model_type")))
    return known.get(str(inner.get("model_type"))) if known and isinstance(inner, Mapping) else None


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a wrapper of these; an older one may not say what its language model is."""
    return str(config.get("model_type")) in _TEXT_MODELS


def fuses_experts(config: Mapping[str, Any]) -> bool:
    """Whether the files of a wrapper, by its ``config.json``, may have one tensor for all experts of a layer."""
    return str(config.get("model_type")) in _FUSED_EXPERTS


def raw_text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``config.json`` would have for the language model alone; ``None``: it takes transformers to know, as
    classes have defaults of their own, among them whether embedding and output layer are one.
    """
    model_type, inner, is_tied = text_model_type(config), config.get("text_config"), config.get("tie_word_embeddings")
    if model_type is None or not isinstance(inner, Mapping) or not isinstance(is_tied, bool):
        return None
    if inner.get("tie_word_embeddings") and not is_tied:
        return None
    fixed = _FIXED.get(model_type, {})
    found = {**inner, **fixed, "model_type": model_type, "tie_word_embeddings": is_tied}
    for name in ("dtype", "torch_dtype", "eos_token_id"):
        if config.get(name) is not None:
            found[name] = config[name]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(name), Mapping):
            found[name] = _of_text(rope)
    return found


def text_config(config: Any) -> Any:
    """Return the configuration of a wrapper's language model, both as transformers has them; the wrapper's says whether
    embedding and output layer are one, and which tokens end a completion if it says any.

    Raises:
        ModelNotSupported: that language model is not known to compute alone what it computes in a wrapper.
    """
    from transformers import AutoConfig

    whole, inner = config.to_dict(), config.text_config
    if (model_type := text_model_type(whole)) is None:
        raise ModelNotSupported(
            f"model: architecture {config.model_type!r} cannot run here: the language model in it is "
            f"{inner.model_type!r}, allowed are {', '.join(_TEXT_MODELS[config.model_type])}."
        )
    fields = {name: value for name, value in inner.to_dict().items() if name not in ("model_type", "architectures")}
    if isinstance(rope := fields.get("rope_parameters"), Mapping):
        fields["rope_parameters"] = _of_text(rope)
    if model_type != inner.model_type:
        # Why: the classes differ in what they take where nothing is said.
        heads = inner.num_attention_heads
        own = {"head_dim": fields.get("head_dim") or inner.hidden_size // heads, **_FIXED.get(model_type, {})}
        fields = {**fields, **own}
    found = AutoConfig.for_model(model_type, **fields)
    setattr(found, WHOLE, config.model_type)
    found.tie_word_embeddings = config.tie_word_embeddings
    found.dtype = inner.dtype or config.dtype
    if whole.get("eos_token_id") is not None:
        found.eos_token_id = whole["eos_token_id"]
    return found


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
    kind = rope.get("rope_type") or rope.get("type")
    return {**kept, "rope_type": "default" if kind == "mrope" else kind} if kind else kept


def text_name(name: str) -> str:
    """Return what the language model alone calls a wrapper's tensor; "" for one of the other parts."""
    first, _, rest = name.partition(".")
    if first == "model" and rest.startswith("language_model."):
        return f"model.{rest.removeprefix('language_model.')}"
    if first == "language_model":
        return rest
    is_text = first == "lm_head" or (first == "model" and rest.split(".")[0] in _OF_LANGUAGE)
    return name if is_text else ""

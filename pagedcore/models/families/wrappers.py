"""Models of text and images whose language model runs alone: what their configuration and their tensors' names mean.

Owns which wrappers these are. Each was compared with the ``generate`` of its own class on prompts of text; of any
other wrapper it is not known what its language model does without the rest. Nothing is read or computed here.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pagedcore.errors import ModelNotSupported
from pagedcore.models.families import file_names

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
    "lfm2_vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "lfm3_vl": {"lfm3": "lfm3"},
    "llama4": {"llama4_text": "llama4_text"},
    "mllama": {"mllama_text_model": "llama"},
    "mllama_text_model": {"mllama_text_model": "llama"},
    "qwen2_vl": {"qwen2_vl_text": "qwen2"},
    "qwen2_5_vl": {"qwen2_5_vl_text": "qwen2"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text"},
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
_WITH_IMAGE_LAYERS: Final = frozenset({"mllama", "mllama_text_model"})
"""Wrappers of which some layers of the language model attend to an image alone: without one their class skips them. Its
embedding has rows more than the vocabulary, of tokens that stand for images; output layer and embedding are never one.
"""
_NUM_SPARE_ROWS: Final = 8
"""As in transformers' class."""
_IMAGE_LAYERS: Final = range(3, 40, 5)
"""Which these are where a configuration does not say, as in transformers' class."""
_LAYER: Final = re.compile(r"(model\.layers\.)(\d{1,9})(\..+)")
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
    inner = _inner(config)
    known = _TEXT_MODELS.get(str(config.get("model_type")))
    return known.get(str(inner.get("model_type"))) if known and isinstance(inner, Mapping) else None


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a wrapper of these; an older one may not say what its language model is."""
    return str(config.get("model_type")) in _TEXT_MODELS


def _inner(config: Mapping[str, Any]) -> Any:
    """Return what a ``config.json`` says of the language model; one of a part says it alone."""
    return config.get("text_config", config)


def fuses_experts(config: Mapping[str, Any]) -> bool:
    """Whether the files of a model, by its ``config.json``, may have one tensor for all experts of a layer."""
    model_type = str(config.get("model_type"))
    return model_type in _FUSED_EXPERTS or file_names.fuses_experts(model_type)


def raw_text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``config.json`` would have for the language model alone; ``None``: it takes transformers to know, as
    classes have defaults of their own, among them whether embedding and output layer are one.
    """
    model_type, inner, whole = text_model_type(config), _inner(config), str(config.get("model_type"))
    is_tied = config.get("tie_word_embeddings") if whole not in _WITH_IMAGE_LAYERS else False
    if model_type is None or not isinstance(inner, Mapping) or not isinstance(is_tied, bool):
        return None
    if whole in _WITH_IMAGE_LAYERS:
        inner = _without_image_layers(inner)
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

    whole = config.to_dict()
    inner = config if whole.get("text_config") is None else config.text_config
    if (model_type := text_model_type(whole)) is None:
        raise ModelNotSupported(
            f"model: architecture {config.model_type!r} cannot run here: the language model in it is "
            f"{inner.model_type!r}, allowed are {', '.join(_TEXT_MODELS[config.model_type])}."
        )
    fields = {name: value for name, value in inner.to_dict().items() if name not in ("model_type", "architectures")}
    if is_cut := config.model_type in _WITH_IMAGE_LAYERS:
        fields = _without_image_layers(fields)
    if isinstance(rope := fields.get("rope_parameters"), Mapping):
        fields["rope_parameters"] = _of_text(rope)
    if model_type != inner.model_type:
        # Why: the classes differ in what they take where nothing is said.
        heads = inner.num_attention_heads
        own = {"head_dim": fields.get("head_dim") or inner.hidden_size // heads, **_FIXED.get(model_type, {})}
        fields = {**fields, **own}
    found = AutoConfig.for_model(model_type, **fields)
    setattr(found, WHOLE, config.model_type)
    found.tie_word_embeddings = not is_cut and config.tie_word_embeddings
    found.dtype = inner.dtype or config.dtype
    if whole.get("eos_token_id") is not None:
        found.eos_token_id = whole["eos_token_id"]
    return found


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
    kind = rope.get("rope_type") or rope.get("type")
    return {**kept, "rope_type": "default" if kind == "mrope" else kind} if kind else kept


def _image_layers(inner: Any) -> list[int]:
    """Return which layers of a language model attend to an image alone."""
    given = inner.get("cross_attention_layers") if isinstance(inner, Mapping) else None
    given = _IMAGE_LAYERS if given is None else given
    return sorted({one for one in given if type(one) is int}) if isinstance(given, Sequence) else []


def _without_image_layers(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a language model's configuration would say without layers for images."""
    fields = {name: value for name, value in inner.items() if name not in ("cross_attention_layers", "dropout")}
    if type(num_layers := fields.get("num_hidden_layers")) is int:
        fields["num_hidden_layers"] = num_layers - sum(0 <= one < num_layers for one in _image_layers(inner))
    return fields


def num_spare_rows(config: Mapping[str, Any]) -> int:
    """Return how many rows at the end of a wrapper's embedding its language model does not have, by the wrapper's
    ``config.json``.
    """
    return _NUM_SPARE_ROWS if str(config.get("model_type")) in _WITH_IMAGE_LAYERS else 0


def leaves_layers_out(model_type: str) -> bool:
    """Whether the language model in a wrapper of this ``model_type`` runs without some layers, so that the others have
    new numbers.
    """
    return model_type in _WITH_IMAGE_LAYERS


def names_of_text(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return what makes of a tensor's name in a wrapper that of the language model alone; "" for one of other parts.

    Args:
        config: what ``config.json`` has.
    """
    left_out = _image_layers(_inner(config)) if str(config.get("model_type")) in _WITH_IMAGE_LAYERS else []
    return text_name if not left_out else lambda name: _renumbered(text_name(name), left_out)


def _renumbered(name: str, left_out: list[int]) -> str:
    if not (found := _LAYER.fullmatch(name)):
        return name
    number = int(found[2])
    before = bisect_left(left_out, number)
    return "" if number in left_out[before:before + 1] else f"{found[1]}{number - before}{found[3]}"


def text_name(name: str) -> str:
    """Return what the language model alone calls a wrapper's tensor; "" for one of the other parts."""
    first, _, rest = name.partition(".")
    if first == "model" and rest.startswith("language_model."):
        return f"model.{rest.removeprefix('language_model.')}"
    if first == "language_model":
        return rest
    is_text = first == "lm_head" or (first == "model" and rest.split(".")[0] in _OF_LANGUAGE)
    return name if is_text else ""

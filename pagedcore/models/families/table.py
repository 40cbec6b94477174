"""What distinguishes each architecture that the fused decoder computes from Llama, as data.

Owns the descriptions that ``decoders/fused_match.py`` compares a model's modules with, that ``decoders/fused.py``
computes by, and that ``llama_modules.py`` builds modules by. What an architecture's modules or configuration say
themselves, such as windows, shapes, biases and angles, is not repeated here. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
    norms: tuple[str, str, str, str] = _BEFORE
    """A layer's norms before and after the attention, before and after the rest; "" for none."""
    norm_offset: float | None = None
    """``None``: norms round before they multiply by their weight; a number is added to it, and the product rounded."""
    has_head_norms: bool = False
    """Whether queries and keys are normed: each head, or all heads of a row together, as their weights are long."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    has_multipliers: bool = False
    """Whether the configuration has multipliers of embeddings and of what a layer adds, and a divisor of logits."""
    is_gemma: bool = False
    """Whether embeddings are multiplied by the root of their size, and logits may have a soft cap."""
    has_experts: bool = False
    """Whether layers may be mixtures of experts."""
    has_wide_angles: bool = False
    """Whether cosines and sines stay in float32."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules by path whose classes are not called as Llama's: ends of the names."""


_MIXTRAL: Final = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""What Mixtral's files call what others call like its modules."""
_GEMMA: Final = {"model.embed_tokens": "TextScaledWordEmbedding"}
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(classes="Llama"),
    "mistral": Family(classes="Mistral"),
    "qwen2": Family(classes="Qwen2"),
    "qwen3": Family(classes="Qwen3", has_head_norms=True),
    "phi3": Family(classes="Phi3", qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn"),
    "granite": Family(classes="Granite", has_multipliers=True),
    "smollm3": Family(classes="SmolLM3"),
    "olmo2": Family(classes="Olmo2", norms=_AFTER, norm_offset=0.0, has_head_norms=True, has_wide_angles=True),
    "olmo3": Family(classes="Olmo3", norms=_AFTER, norm_offset=0.0, has_head_norms=True, has_wide_angles=True),
    "gemma2": Family(classes="Gemma2", norms=_AROUND, norm_offset=1.0, is_gemma=True, modules=_GEMMA),
    "gemma3_text": Family(
        classes="Gemma3", norms=_AROUND, norm_offset=1.0, has_head_norms=True, is_gemma=True,
        modules={**_GEMMA, "model": "TextModel"},
    ),
    "mixtral": Family(classes="Mixtral", has_experts=True),
    "qwen3_moe": Family(classes="Qwen3Moe", has_head_norms=True, has_experts=True),
    "olmoe": Family(classes="Olmoe", has_head_norms=True, has_experts=True),
}
"""By ``model_type``."""


def module_name(name: str) -> str:
    """Return the name of a file's tensor in the way of its modules; only Mixtral's differ."""
    if ".block_sparse_moe." in name:
        for old, new in _MIXTRAL.items():
            name = name.replace(old, new)
    return name


def file_name(name: str, model_type: str) -> str:
    """Return what files of an architecture call a tensor or a module; the inverse of ``module_name``."""
    if model_type == "mixtral":
        for new, old in _MIXTRAL.items():
            name = f"{name}.".replace(old, new)[:-1]
    return name

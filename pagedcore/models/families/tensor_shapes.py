"""The tensors that the files of a known architecture have, by name, and their shapes, computed from its configuration.

Owns the names of ``FAMILIES``' tensors in files; ``quick_start.py`` compares them with the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagedcore.models.families.file_names import file_name
from pagedcore.models.families.table import FAMILIES

Shapes = dict[str, tuple[int, ...]]
EMBEDDING: Final = "model.embed_tokens.weight"
EXPERT_COUNTS: Final = ("num_local_experts", "num_experts")
"""Names that a configuration may have for the number of experts."""


def shapes_of(config: Any) -> Shapes:
    """Return the shape of every tensor; ``config`` as ``read_config`` returns it."""
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention, dense = _shapes_of_attention(config), _shapes_of_mlp(config)
    sparse = _shapes_of_experts(config) if FAMILIES[config.model_type].has_experts else {}
    for number in range(config.num_hidden_layers):
        layer = attention | (sparse if is_mixture(config, number) else dense)
        shapes |= {file_name(f"model.layers.{number}.{name}", config.model_type): shape
                   for name, shape in layer.items()}
    return shapes


def _shapes_of_attention(config: Any) -> Shapes:
    """Return the tensors of a layer but for its second half, by the rest of their names; norms are here."""
    hidden, head = config.hidden_size, config.head_dim
    query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    family, size = FAMILIES[config.model_type], {"q_proj": query, "k_proj": kv, "v_proj": kv}
    products = {
        **{f"self_attn.{name}": (size.get(name, query + 2 * kv), hidden) for name in family.qkv},
        "self_attn.o_proj": (hidden, query),
    }
    vectors = dict.fromkeys(filter(None, family.norms), hidden)
    if family.has_head_norms:
        is_whole = family.norms_whole_rows
        vectors |= {"self_attn.q_norm": query if is_whole else head, "self_attn.k_norm": kv if is_whole else head}
    return {**_with_biases(config, products), **{f"{name}.weight": (size,) for name, size in vectors.items()}}


def _shapes_of_mlp(config: Any) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    names = FAMILIES[config.model_type].gate_up
    products = {f"mlp.{name}": (2 * inner // len(names), hidden) for name in names}
    return _with_biases(config, {**products, "mlp.down_proj": (hidden, inner)})


def _shapes_of_experts(config: Any) -> Shapes:
    """Return the tensors of a mixture."""
    hidden, inner = config.hidden_size, vars(config).get("moe_intermediate_size", config.intermediate_size)
    shapes: Shapes = {"mlp.gate.weight": (num_experts(config), hidden)}
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for number in range(num_experts(config)):
        shapes |= {f"mlp.experts.{number}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def is_mixture(config: Any, number: int) -> bool:
    """Whether a layer is one: the configuration of Qwen3-MoE may say of some that they are dense."""
    fields, has_experts = vars(config), FAMILIES[config.model_type].has_experts
    is_left_out = number in fields.get("mlp_only_layers", ())
    return has_experts and not is_left_out and (number + 1) % fields.get("decoder_sparse_step", 1) == 0


def num_experts(config: Any) -> int:
    """Return how many a mixture has; 0: the architecture has none."""
    return next((int(vars(config)[name]) for name in EXPERT_COUNTS if name in vars(config)), 0)


def _with_biases(config: Any, products: Mapping[str, tuple[int, ...]]) -> Shapes:
    biases = {f"{name}.bias": (shape[0],) for name, shape in products.items() if _has_bias(config, name)}
    return {**{f"{name}.weight": shape for name, shape in products.items()}, **biases}


def _has_bias(config: Any, name: str) -> bool:
    if name.startswith("mlp."):
        return bool(config.mlp_bias)
    return bool(config.attention_bias) or (FAMILIES[config.model_type].has_qkv_bias and not name.endswith("o_proj"))

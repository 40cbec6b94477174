"""Recognises the module trees that ``FusedDecoder`` computes: Llama, Mistral, Qwen2 and Qwen3, exactly as they come,
from transformers or from ``llama_tree.py``.

Owns the comparison of a model with what its architecture is known to be: classes, names of submodules, plain linear
layers, activation, rotary embedding. Anything unexpected, such as an adapter around a linear layer, one more norm, or
a hook, means "not recognised", and the model runs through its own modules. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from pagedcore.models import llama_tree
from pagedcore.models.attention_layers import AttentionLayer
from pagedcore.models.cpu.packed_linear import FASTEST
from pagedcore.models.quantization.stored_weight import StoredWeight, can_join
from pagedcore.protocols import LinearFactory
from pagedcore_kernels.cpu.layers.elementwise import can_compute

#: Name of the classes of each architecture: ``<name>Model``, ``<name>DecoderLayer`` and so on.
FAMILIES: Final = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

#: Modules by path: the end of the name of one of transformers' classes, which begins with the architecture's, or the
#: class itself. The class of ``act_fn`` depends on the configuration.
_MODEL: Final[Mapping[str, str | type[nn.Module]]] = {
    "": "ForCausalLM", "model": "Model", "model.embed_tokens": nn.Embedding, "model.layers": nn.ModuleList,
    "model.norm": "RMSNorm", "model.rotary_emb": "RotaryEmbedding", "lm_head": nn.Linear,
}
_LAYER: Final[Mapping[str, str | type[nn.Module]]] = {
    "": "DecoderLayer", ".input_layernorm": "RMSNorm", ".self_attn": "Attention", ".self_attn.q_proj": nn.Linear,
    ".self_attn.k_proj": nn.Linear, ".self_attn.v_proj": nn.Linear, ".self_attn.o_proj": nn.Linear,
    ".post_attention_layernorm": "RMSNorm", ".mlp": "MLP", ".mlp.gate_proj": nn.Linear, ".mlp.up_proj": nn.Linear,
    ".mlp.down_proj": nn.Linear, ".mlp.act_fn": nn.Module,
}
_HEAD_NORMS: Final = {".self_attn.q_norm": "RMSNorm", ".self_attn.k_norm": "RMSNorm"}

#: Activation by configuration value: the kernels' name and the class of the module.
_ACTIVATIONS: Final = {
    "silu": ("silu", ("SiLUActivation", "SiLU")),
    "swish": ("silu", ("SiLUActivation", "SiLU")),
    "gelu_pytorch_tanh": ("gelu_tanh", ("GELUTanh",)),
}
#: Rotary embeddings whose angles depend on more than the position.
_MOVING_ANGLES: Final = frozenset({"dynamic", "longrope"})


def recognised_activation(
    model: Any, layers: Mapping[int, AttentionLayer], linears: LinearFactory = FASTEST
) -> str | None:
    """Return the activation of a model that the fused decoder computes, a key of the kernels' ``ACTIVATIONS``.

    ``None`` is any other model, and one with a product that ``linears`` does not support; see ``best_decoder``.
    """
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None or not (_has_known_modules(model, family) and _has_known_layers(model, layers)):
        return None
    activation, class_names = _ACTIVATIONS.get(config.hidden_act, (None, ()))
    widths = [module.in_features for module in model.modules() if type(module) is nn.Linear]
    is_joinable = all(
        can_join(getattr(parent, name).weight for name in names)
        for layer in model.model.layers
        for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj")))
    )
    fits = is_joinable and all(linears.supports(model.dtype, width) for width in widths) and can_compute(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        head_size=layers[0].key_head_size, dtype=model.dtype,
    )
    has_activation = all(type(layer.mlp.act_fn).__name__ in class_names for layer in model.model.layers)
    return activation if fits and has_activation else None


def _has_known_modules(model: Any, family: str) -> bool:
    """Whether every module is of the class that the architecture has in its place, and computes as its class says."""
    modules = dict(model.named_modules(remove_duplicate=False))
    of_layer = {**_LAYER, **_HEAD_NORMS} if family == "Qwen3" else _LAYER
    known = dict(_MODEL)
    for number in range(model.config.num_hidden_layers):
        known |= {f"model.layers.{number}{path}": kind for path, kind in of_layer.items()}
    return (
        modules.keys() == known.keys()
        and all(_is(modules[path], kind, family) and _is_untouched(modules[path]) for path, kind in known.items())
        and model.model.rotary_emb.rope_type not in _MOVING_ANGLES
    )


def _is(module: nn.Module, kind: str | type[nn.Module], family: str) -> bool:
    if isinstance(kind, str):
        own = type(module)
        is_theirs = own.__name__ == f"{family}{kind}" and own.__module__.startswith("transformers.models.")
        is_known = is_theirs or own is getattr(llama_tree, kind)
        return is_known and (kind != "RMSNorm" or set(dict(module.named_parameters())) == {"weight"})
    # Why: a subclass of a linear layer, or of a tensor, computes in its own way.
    is_exact = kind is nn.Module or type(module) is kind
    return is_exact and (kind is not nn.Linear or type(module.weight) in (nn.Parameter, StoredWeight))


def _is_untouched(module: nn.Module) -> bool:
    """Whether nothing was hung on this one module: no hook, and no forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def _has_known_layers(model: Any, layers: Mapping[int, AttentionLayer]) -> bool:
    """Whether all layers attend alike, each to its own K and V; they may differ in their window."""
    if sorted(layers) != list(range(len(model.model.layers))):
        return False
    parameters = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
    heads = {(layer.num_heads, layer.num_kv_heads, layer.key_head_size) for layer in layers.values()}
    # Shape: on "meta" are models that are only looked at.
    return parameters in ({(model.dtype, "cpu")}, {(model.dtype, "meta")}) and len(heads) == 1 and all(
        layer.owns_kv and layer.index == number and layer.query_tuning is None
        and layer.key_head_size == layer.value_head_size
        for number, layer in layers.items()
    )

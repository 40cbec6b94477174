"""Recognises the module trees that ``FusedDecoder`` computes: Llama, Mistral, Qwen2 and Qwen3, exactly as they come.

Owns the comparison of a model with what its architecture is known to be: classes, names of submodules, plain linear
layers, activation, rotary embedding. Anything unexpected, such as an adapter around a linear layer, one more norm, or
a hook, means "not recognised", and the model runs through its own modules. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from pagedcore.models.attention_layers import AttentionLayer
from pagedcore.models.cpu.packed_linear import FASTEST
from pagedcore.protocols import LinearFactory
from pagedcore_kernels.cpu.layers.elementwise import can_compute

#: Name of the classes of each architecture: ``<name>Model``, ``<name>DecoderLayer`` and so on.
_FAMILIES: Final = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

_MODEL: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS: Final = {"q_norm", "k_norm"}
_MLP: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}

#: Activation by configuration value: the kernels' name and the class of the module.
_ACTIVATIONS: Final = {
    "silu": ("silu", "SiLUActivation"),
    "swish": ("silu", "SiLUActivation"),
    "gelu_pytorch_tanh": ("gelu_tanh", "GELUTanh"),
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
    family = _FAMILIES.get(config.model_type)
    if family is None or not (_has_known_modules(model, family) and _has_known_layers(model, layers)):
        return None
    activation, class_name = _ACTIVATIONS.get(config.hidden_act, (None, ""))
    fits = all(linears.supports(model.dtype, linear.in_features) for linear in _linears(model)) and can_compute(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        head_size=layers[0].key_head_size, dtype=model.dtype,
    )
    has_activation = {type(layer.mlp.act_fn).__name__ for layer in model.model.layers} == {class_name}
    return activation if fits and has_activation else None


def _has_known_modules(model: Any, family: str) -> bool:
    """Whether every module is of the class that the architecture has in its place, and computes as its class says."""
    if not _is(model, f"{family}ForCausalLM", {"model", "lm_head"}) or not _is(model.model, f"{family}Model", _MODEL):
        return False
    body = model.model
    known = (
        _is(body.rotary_emb, f"{family}RotaryEmbedding", set())
        and body.rotary_emb.rope_type not in _MOVING_ANGLES
        and _is_norm(body.norm, family)
        and type(body.embed_tokens) is nn.Embedding
        and type(body.layers) is nn.ModuleList
        and all(_is_known_layer(layer, family) for layer in body.layers)
    )
    return known and all(_is_untouched(module) for module in model.modules()) and all(
        type(linear) is nn.Linear and type(linear.weight) is nn.Parameter for linear in _linears(model)
    )


def _is_known_layer(layer: Any, family: str) -> bool:
    if not _is(layer, f"{family}DecoderLayer", _LAYER):
        return False
    attention, head_norms = layer.self_attn, _HEAD_NORMS if family == "Qwen3" else set()
    if not _is(attention, f"{family}Attention", _ATTENTION | head_norms) or not _is(layer.mlp, f"{family}MLP", _MLP):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(getattr(attention, name) for name in head_norms)]
    return all(_is_norm(norm, family) for norm in norms)


def _linears(model: Any) -> Iterator[Any]:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield model.lm_head


def _is(module: Any, class_name: str, children: set[str]) -> bool:
    """Whether a module is transformers' own class of this name and has exactly these submodules."""
    kind = type(module)
    is_known = kind.__name__ == class_name and kind.__module__.startswith("transformers.models.")
    return is_known and {name for name, _ in module.named_children()} == children


def _is_norm(module: Any, family: str) -> bool:
    return _is(module, f"{family}RMSNorm", set()) and set(dict(module.named_parameters())) == {"weight"}


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
    return parameters == {(model.dtype, "cpu")} and len(heads) == 1 and all(
        layer.owns_kv and layer.index == number and layer.query_tuning is None
        and layer.key_head_size == layer.value_head_size
        for number, layer in layers.items()
    )

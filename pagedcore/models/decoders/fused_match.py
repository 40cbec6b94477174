"""Recognises the module trees that ``FusedDecoder`` and ``CudaDecoder`` compute: the architectures of
``families/table.py``, exactly as they come, from transformers or from ``llama_modules.py``.

Owns the comparison of a model with what its architecture is known to be: classes, names of submodules, plain linear
layers, activation, rotary embedding. Anything unexpected, such as an adapter around a linear layer, one more norm, or
a hook, means "not recognised", and the model runs through its own modules. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from pagedcore.models.attention import recurrences
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.families import llama_modules
from pagedcore.models.families.table import FAMILIES, Family
from pagedcore.models.linears import expert_modules
from pagedcore.models.linears.float8_linear import Float8Linear
from pagedcore.models.linears.packed_experts import left_alone
from pagedcore.models.linears.packed_linear import FASTEST, VECTOR
from pagedcore.models.linears.stored_weight import StoredWeight, can_join
from pagedcore.protocols import LinearFactory
from pagedcore_kernels.cpu.layers.elementwise import can_compute

_MODEL: Final[Mapping[str, str | type[nn.Module]]] = {
    "": "ForCausalLM", "model": "Model", "model.embed_tokens": nn.Embedding, "model.layers": nn.ModuleList,
    "model.norm": "RMSNorm", "model.rotary_emb": "RotaryEmbedding", "lm_head": nn.Linear,
}
"""Modules by path: the end of the name of one of transformers' classes, which begins with the architecture's, or the
class itself. The class of an activation depends on the configuration."""
_EXPERTS: Final[Mapping[str, str | type[nn.Module]]] = {
    ".mlp": "SparseMoeBlock", ".mlp.gate": "TopKRouter", ".mlp.experts": "Experts", ".mlp.experts.act_fn": nn.Module,
}
_CONVOLUTION: Final[Mapping[str, str | type[nn.Module]]] = {
    "": "ShortConv", ".conv": nn.Conv1d, ".in_proj": nn.Linear, ".out_proj": nn.Linear,
}
_DELTA_RULE: Final[Mapping[str, str | type[nn.Module]]] = {
    "": "GatedDeltaNet", ".conv1d": nn.Conv1d, ".norm": "RMSNormGated", ".out_proj": nn.Linear,
}
_ACTIVATIONS: Final = {
    "silu": ("silu", ("SiLUActivation", "SiLU")),
    "swish": ("silu", ("SiLUActivation", "SiLU")),
    "gelu_pytorch_tanh": ("gelu_tanh", ("GELUTanh",)),
}
"""Activation by configuration value: the kernels' name and the class of the module."""
KNOWN_WEIGHTS: Final[set[type]] = {nn.Parameter, StoredWeight}
"""The classes of the weights of linear layers."""


class NotFused(Exception):
    """A model that its own modules compute; the message says why."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """What is known of a model that the fused decoder computes."""

    family: Family
    activation: str
    """A key of the kernels' ``ACTIVATIONS``."""


def recognise(
    model: Any, layers: Mapping[int, AttentionLayer], linears: LinearFactory = FASTEST
) -> Recognised:
    """Return what the fused decoder of the CPU computes a model by.

    Raises:
        NotFused: it is any other model, or has a product that ``linears`` does not support; see ``best_decoder``.
    """
    known, config = recognise_tree(model, layers), model.config
    family = known.family
    # Shape: on "meta" are models that are only looked at.
    require(devices_of(model) in ({"cpu"}, {"meta"}), "its weights are not on the CPU")
    are_alike = all(can_join(weights) for weights in joined_weights(model, family))
    require(are_alike, "the parts of a product are stored unlike")
    widths = [module.in_features for module in model.modules() if type(module) is nn.Linear]
    require(
        all(linears.supports(model.dtype, width) for width in widths) and not left_alone(model, linears),
        f"no packed product here takes all its matrices in {model.dtype}",
    )
    # Why: torch computes the last elements of rows of broken vectors in another way.
    shared = config.shared_expert_intermediate_size if family.has_shared_expert else 0
    require(shared % VECTOR == 0, "its shared experts are not of whole vectors")
    fits = can_compute(
        hidden_size=config.hidden_size, intermediate_size=_intermediate_size(model, family),
        head_size=next(iter(layers.values())).key_head_size, dtype=model.dtype,
        # Shape: the module keeps a frequency for every two elements.
        rotary_size=2 * len(next(model.model.get_submodule(family.name_of("rotary_emb")).buffers())),
    )
    require(fits, "the fused kernels do not take its sizes or its number format")
    return known


def recognise_tree(model: Any, layers: Mapping[int, AttentionLayer]) -> Recognised:
    """Return what a model's own modules say that it computes, wherever its weights are.

    Raises:
        NotFused: its architecture is not known, or it does not come exactly as its architecture does.
    """
    config, fields = model.config, model.config.to_dict()
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotFused(f"the fused kernels know {', '.join(FAMILIES)}")
    require(_has_known_modules(model, family), "its modules are not those of its architecture")
    require(_has_known_layers(model, layers, family), "its layers do not attend alike, each to K and V of its own")
    require(fields.get("clip_qkv") is None, "clip_qkv bounds its queries, keys and values")
    name = str(fields.get("hidden_activation") or fields.get("hidden_act") or "silu")
    activation, class_names = _ACTIVATIONS.get(name, ("", ()))
    is_act = f".mlp.{family.activation}" if family.activation else "no module"
    acts = [module for path, module in model.named_modules() if path.endswith(is_act)]
    require(
        activation and all(type(module).__name__ in class_names for module in acts), f"its activation is {name!r}"
    )
    return Recognised(family, activation)


def devices_of(model: Any) -> set[str]:
    """Return the kinds of devices that a model's weights are on."""
    return {parameter.device.type for parameter in model.parameters()}


def require(is_known: object, reason: str) -> None:
    """Raise ``NotFused`` for a reason unless something is so."""
    if not is_known:
        raise NotFused(reason)


def joined_weights(model: Any, family: Family) -> list[list[Any]]:
    """Return the weights that become one product each."""
    layers, mlp = model.model.layers, family.name_of("mlp")
    mixers = [("self_attn", family.qkv), *((family.delta_rule, names) for names in family.delta_inputs)]
    parents = [(layer.get_submodule(name), names) for layer in layers for name, names in mixers
               if name in dict(layer.named_children())]  # fmt: skip
    parents += [(layer.get_submodule(mlp), family.gate_up) for layer in layers if not has_experts(layer, family)]
    return [[getattr(parent, name).weight for name in names] for parent, names in parents]


def _intermediate_size(model: Any, family: Family) -> int:
    """Return the width of the gated half of layers, which a configuration may mean otherwise than it says."""
    path = f'{family.name_of("mlp")}.{family.name_of("down_proj")}'
    dense = (layer for layer in model.model.layers if not has_experts(layer, family))
    width = next((layer.get_submodule(path).in_features for layer in dense), None)
    return int(width or model.config.to_dict().get("intermediate_size") or model.config.hidden_size)


def has_experts(layer: Any, family: Family) -> bool:
    """Return whether a layer of a recognised model is a mixture of experts."""
    return type(layer.get_submodule(family.name_of("mlp"))).__name__.endswith("SparseMoeBlock")


def _has_known_modules(model: Any, family: Family) -> bool:
    """Whether every module is of the class that the architecture has in its place, and computes as its class says."""
    # Why: a dropout of a model that is not trained does nothing.
    modules = {
        path: module for path, module in model.named_modules(remove_duplicate=False)
        if type(module) is not nn.Dropout or not _is_untouched(module)
    }
    known = {_path(path, family): kind for path, kind in {**_MODEL, **family.modules}.items()}
    for number in range(model.config.num_hidden_layers):
        place = f"model.layers.{number}"
        is_sparse = family.has_experts and f'{place}.{family.name_of("mlp")}.experts' in modules
        is_recurrent = family.recurrence and f"{place}.{family.recurrence}" in modules
        mixer = _recurrence(family) if is_recurrent else _attention(family)
        norms = {f".{name}": "RMSNorm" for name in family.norms if name}
        layer = {"": "DecoderLayer", **norms, **mixer, **(_experts(family) if is_sparse else _mlp(family))}
        known |= {place + _path(path, family): kind for path, kind in layer.items()
                  if family.activation or not path.endswith(".act_fn")}
    return modules.keys() == known.keys() and all(
        _is(modules[path], kind, family) and _is_untouched(modules[path]) for path, kind in known.items()
    )


def _path(path: str, family: Family) -> str:
    """Return the path of a module in an architecture, by that of Llama's."""
    return ".".join(family.name_of(part) for part in path.split("."))


def _attention(family: Family) -> dict[str, str | type[nn.Module]]:
    linears = dict.fromkeys((f".self_attn.{name}" for name in (*family.qkv, "o_proj")), nn.Linear)
    norms = (".self_attn.q_norm", ".self_attn.k_norm") if family.has_head_norms else ()
    gate: dict[str, type[nn.Module]] = {f".self_attn.{family.head_gate}": nn.Linear} if family.head_gate else {}
    return {".self_attn": "Attention", **linears, **dict.fromkeys(norms, "RMSNorm"), **gate}


def _recurrence(family: Family) -> dict[str, str | type[nn.Module]]:
    parts = dict(_CONVOLUTION if family.convolution else _DELTA_RULE)
    if family.delta_rule:
        parts |= {f".{name}": nn.Linear for names in family.delta_inputs for name in names}
    return {f".{family.recurrence}{path}": kind for path, kind in parts.items()}


def _mlp(family: Family, place: str = ".mlp") -> dict[str, str | type[nn.Module]]:
    linears = dict.fromkeys((f"{place}.{name}" for name in (*family.gate_up, "down_proj")), nn.Linear)
    activation = {f"{place}.{family.activation}": nn.Module} if family.activation else {}
    return {place: "MLP", **linears, **activation}


def _experts(family: Family) -> dict[str, str | type[nn.Module]]:
    if not family.has_shared_expert:
        return dict(_EXPERTS)
    return {**_EXPERTS, **_mlp(family, ".mlp.shared_expert"), ".mlp.shared_expert_gate": nn.Linear}


def _is(module: nn.Module, kind: str | type[nn.Module], family: Family) -> bool:
    if isinstance(kind, str):
        own = type(module)
        is_theirs = own.__name__ == f"{family.classes}{kind}" and own.__module__.startswith("transformers.models.")
        is_known = is_theirs or own in (vars(llama_modules).get(kind), vars(expert_modules).get(kind))
        return is_known and (kind != "RMSNorm" or set(dict(module.named_parameters())) == {"weight"})
    # Why: a subclass of a linear layer, or of a tensor, computes in its own way.
    is_exact = kind is nn.Module or type(module) is kind
    is_known = is_exact and (kind is not nn.Linear or type(module.weight) in KNOWN_WEIGHTS)
    return is_known or (kind is nn.Linear and type(module) is Float8Linear)


def _is_untouched(module: nn.Module) -> bool:
    """Whether nothing was hung on this one module: no hook, and no forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    # Why: a tree without memory is given experts that look at no number; see ``blueprint.py``.
    is_looked_at = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    is_own = is_looked_at or "forward" not in vars(module) or recurrences.is_redirected(module)
    return is_own and not any(hooks)


def _has_known_layers(model: Any, layers: Mapping[int, AttentionLayer], family: Family) -> bool:
    """Whether all layers that attend do so alike, each to its own K and V; they may differ in their window."""
    has_kv = [number for number, layer in enumerate(model.model.layers)
              if not family.recurrence or family.recurrence not in dict(layer.named_children())]  # fmt: skip
    if sorted(layers) != has_kv or not layers:
        return False
    dtypes = {parameter.dtype for parameter in model.parameters()}
    heads = {(layer.num_heads, layer.num_kv_heads, layer.key_head_size) for layer in layers.values()}
    return dtypes == {model.dtype} and len(heads) == 1 and all(
        layers[number].owns_kv and layers[number].index == index and layers[number].query_tuning is None
        for index, number in enumerate(has_kv)
    ) and all(layer.key_head_size == layer.value_head_size for layer in layers.values())

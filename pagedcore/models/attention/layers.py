"""What each attention layer of a model does, found out by calling the model once on two tokens.

Owns the record of one call per layer and its translation to the words of ``AttentionBackend``: shapes, scale, window,
chunk, softcap, and whose K and V a layer reads. Shapes come from the call, never from the configuration, because
architectures disagree on what their configuration means. Calls that paged attention would compute wrongly are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention import older_modules
from pagedcore.models.attention.recurrences import RecordedStates

QueryTuning = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_KNOWN_ARGUMENTS: Final = frozenset({
    "scaling", "sliding_window", "softcap", "s_aux", "dropout", "position_ids", "is_causal", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "logits_to_keep",
})
"""Arguments that are understood, or that say nothing about the result of an attention call without dropout and mask."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function, as seen from inside it."""

    module: Any
    query: torch.Tensor
    """[1, H, T, D]; the result is [1, T, H, Dv]."""
    key: torch.Tensor
    """[1, KVH, T, D]; it is kept so that no later key can have its address and look shared."""
    value: torch.Tensor
    """[1, KVH, T, Dv]"""
    mask: torch.Tensor | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How to send one layer of the model to an attention backend."""

    index: int
    """The layout's layer whose K and V are read."""
    owns_kv: bool
    """Whether this layer writes them; else an earlier layer has."""
    num_heads: int
    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    query_tuning: QueryTuning | None = None
    """Maps queries [T, H, D] and positions [T] to queries, where a layer scales them by position."""


class LayersByCall(dict[int, AttentionLayer]):
    """Those of a model in which a layer attends more than once in one forward: by the number of the call."""


class RecordingStep:
    """Records every attention call, and what ``states`` would be kept, and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.states = RecordedStates()

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record the call; shapes as in ``AttentionCall``."""
        if not isinstance(getattr(module, "layer_idx", None), int):
            raise ModelNotSupported(f"{type(module).__name__}: an attention layer does not know its own number.")
        self.calls.append(AttentionCall(module, query, key, value, mask, arguments))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def number_layers(model: Any) -> None:
    """Give the attention layers of Zamba 2, which do not know their own numbers, those of their places."""
    unknown = [module for module in model.modules() if getattr(module, "layer_idx", None) == -1]
    for module, number in zip(unknown, getattr(model.config, "hybrid_layer_ids", ()), strict=False):
        module.layer_idx = number


def layers_of(calls: list[AttentionCall], config: Any) -> dict[int, AttentionLayer]:
    """Translate recorded calls; keys are the modules' own numbers, or ``LayersByCall``.

    Raises:
        ModelNotSupported: a call asks for something that an attention backend cannot do.
    """
    is_repeated = len({call.module.layer_idx for call in calls}) < len(calls)
    layers = LayersByCall() if is_repeated else dict[int, AttentionLayer]()
    index_of_key: dict[tuple[int, ...], int] = {}
    layer_types = getattr(config, "layer_types", None)
    for order, call in enumerate(calls):
        _refuse_what_is_not_causal_attention(call)
        number, scale, head_size = call.module.layer_idx, call.arguments.get("scaling"), call.key.shape[3]
        kind = None if layer_types is None else layer_types[number]
        place = *_place_of(call.key), *_place_of(call.value)
        owns_kv = place not in index_of_key
        layers[order if is_repeated else number] = AttentionLayer(
            index=index_of_key.setdefault(place, len(index_of_key)),
            owns_kv=owns_kv,
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1],
            key_head_size=head_size,
            value_head_size=call.value.shape[3],
            scale=float(scale) if scale is not None else head_size**-0.5,
            window=_window_of(call, config, kind),
            chunk=int(config.attention_chunk_size) if kind == "chunked_attention" else 0,
            softcap=float(call.arguments.get("softcap") or 0.0),
            query_tuning=_take_over_query_tuning(call.module),
        )
    return layers


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    # Why not the address: this also tells tensors without memory apart.
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _refuse_what_is_not_causal_attention(call: AttentionCall) -> None:
    if call.mask is not None:
        raise _refusal(call, "it makes an attention mask of its own, which a paged KV cache cannot honour")
    if call.arguments.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise _refusal(call, "it looks at later tokens; only causal language models can run")
    for argument, value in call.arguments.items():
        if argument not in _KNOWN_ARGUMENTS and value is not None and value is not False:
            raise _refusal(call, f"it depends on {argument!r}, which paged attention does not know")


def _refusal(call: AttentionCall, reason: str) -> ModelNotSupported:
    return ModelNotSupported(f"model: the attention of {type(call.module).__name__} cannot be paged: {reason}.")


def _window_of(call: AttentionCall, config: Any, kind: str | None) -> int:
    """Return the sliding window that transformers would build into the layer's mask, 0 for none.

    What the layer passes and what its configuration says must agree.
    """
    has_window = _masks_with_windows(call.module) if kind is None else kind == "sliding_attention"
    configured = int(getattr(config, "sliding_window", None) or 0) if has_window else 0
    passed = int(call.arguments.get("sliding_window") or 0)
    if older_modules.is_known(call.module):
        return passed
    if passed and passed != configured:
        number = call.module.layer_idx
        raise _refusal(call, f"layer {number} passes a window of {passed} tokens, its configuration means {configured}")
    return configured


def _masks_with_windows(module: Any) -> bool:
    """Whether the code of this architecture, which has no types of layers, makes windowed masks at all."""
    return hasattr(sys.modules.get(type(module).__module__), "create_sliding_window_causal_mask")


def _take_over_query_tuning(module: Any) -> QueryTuning | None:
    """Switch off a scaling by position that Llama 4 derives from the token's place in the batch, and return the same.

    Without a cache of its own the module counts from the start of the batch, which is not a sequence's start here.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    module.attn_temperature_tuning = False
    floor_scale, factor = float(module.floor_scale), float(module.attn_scale)

    def tune(query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * factor + 1.0
        return (query * scales[:, None, None]).to(query.dtype)

    return tune

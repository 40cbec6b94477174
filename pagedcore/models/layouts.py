"""What a model keeps in its pools, found by calling it once on two tokens, and which layouts such pools can have.

Owns the order in which layers are redirected and looked at; what they are is in ``attention/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from pagedcore.errors import InvalidConfig
from pagedcore.models.attention import older_modules, recurrences
from pagedcore.models.attention.interface import ATTENTION_KEY, attention_step, current_step, register
from pagedcore.models.attention.layers import (
    AttentionLayer,
    LayersByCall,
    RecordingStep,
    layers_of,
    number_layers,
)
from pagedcore.models.decoders.plain import call_model
from pagedcore.models.families import model_facts, supported_models
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.protocols import AttentionFactory, AttentionRequirements, StoresScaledKV
from pagedcore_kernels.layout import BlockLayout, KVLayout, LayerShape, ScaledKVLayout
from pagedcore_kernels.state_layout import StateLayout

MakeLayout = Callable[[int, torch.dtype, tuple[LayerShape, ...]], BlockLayout]
"""``(block_size, dtype, shapes) -> layout``, of a model in ``dtype``."""
_SCALED: Final = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


class _PlainRequirements:
    devices = ("cpu",)
    layout_type = KVLayout

    def preferred_block_size(self, dtype: torch.dtype) -> int:
        return 16


def requirements_of(attention_factory: AttentionFactory) -> AttentionRequirements:
    """Return what an attention factory needs: what it says, or else what every backend for the CPU can do with."""
    return attention_factory if isinstance(attention_factory, AttentionRequirements) else _PlainRequirements()


def layout_maker(attention_factory: AttentionFactory, kv_cache_dtype: str) -> MakeLayout:
    """Return what makes the layouts of an attention factory's pools; ``kv_cache_dtype`` as in ``EngineConfig``.

    Raises:
        InvalidConfig: the factory's backends keep no such KV.
    """
    if kv_cache_dtype == "auto":
        return requirements_of(attention_factory).layout_type
    stored: tuple[str, ...] = ()
    if isinstance(attention_factory, StoresScaledKV):
        stored = attention_factory.kv_cache_dtypes
    if kv_cache_dtype not in stored:
        others = "".join(f" or {name!r}" for name in stored)
        raise InvalidConfig(
            f"kv_cache_dtype: got {kv_cache_dtype!r}, which this attention backend does not store. Leave it at 'auto'"
            f"{others}, or set attention_backend: 'numba-cpu' stores int8 on a CPU, 'numba-cuda' on a GPU and "
            "'reference' anywhere store int8 and e4m3."
        )
    dtype = _SCALED[kv_cache_dtype]
    return lambda block_size, query_dtype, shapes: ScaledKVLayout(block_size, dtype, shapes, query_dtype)


def redirect_attention(model: Any) -> tuple[dict[int, AttentionLayer], int, StateLayout | None]:
    """Send the model's attention to the current step; return what its layers do, the width of its logits, and what
    its recurrent layers keep, if it has any.

    Raises:
        ModelNotSupported: the attention cannot be redirected, or asks for what a paged KV cache cannot do.
    """
    register()
    if not older_modules.redirect(model, current_step):
        model.set_attn_implementation(ATTENTION_KEY)
        supported_models.check_attention_was_taken(model.config)
    number_layers(model)
    recurrences.redirect(model, current_step)
    step = RecordingStep()
    # Why none: a tree of ours computes no tokens too, and reads no weight for them.
    num_tokens, device = 0 if isinstance(model, ForCausalLM) else 2, model_facts.format_and_device(model)[1]
    tokens = torch.arange(num_tokens, device=device)
    with attention_step(step):
        logits = call_model(model, tokens, tokens, tokens)
    layers, recurrent = layers_of(step.calls, model.config), recurrences.known_recurrences(model)
    # Why an address: layers of RecurrentGemma do not know their numbers, and are of one kind each.
    numbers = {*layers, *(vars(one).get("layer_idx", id(one)) for one in recurrent)}
    counts = {len(numbers), len({id(call.module) for call in step.calls})} if isinstance(layers, LayersByCall) else {
        len(numbers)
    }  # fmt: skip
    supported_models.check_num_attention_layers(model.config, counts)
    return layers, logits.shape[-1], step.states.layout(len(recurrent))


@contextmanager
def not_redirected(model: Any, attention: str) -> Iterator[None]:
    """Let a redirected model compute by itself in the ``with`` block, with the ``attention`` that it had before."""
    takes_a_key = not older_modules.known_modules(model)
    if takes_a_key:
        model.set_attn_implementation(attention)
    with recurrences.own_recurrences(model), older_modules.own_attention(model):
        yield
    if takes_a_key:
        model.set_attn_implementation(ATTENTION_KEY)


def kv_shapes(layers: Mapping[int, AttentionLayer]) -> tuple[LayerShape, ...]:
    """Return the shapes of K and V that a pool holds: those of the layers that keep their own."""
    owners = [layer for layer in layers.values() if layer.owns_kv]
    return tuple(LayerShape(o.num_kv_heads, o.key_head_size, o.value_head_size) for o in owners)

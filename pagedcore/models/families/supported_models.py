"""Which architectures are refused, by name and reason, and the checks that catch those without a name here.

Everything here looks at a configuration or at an idle module tree; nothing is loaded or computed. A refusal is better
than a completion that is silently wrong: state-space layers, for example, run without an error on a ragged batch and
mix its sequences. Every check raises ``ModelNotSupported`` with the architecture's name and the reason, unless it says
otherwise. ``attention/layers.py`` has the checks on a running model, ``self_test.py`` the last one.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn

from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.attention.interface import ATTENTION_KEY
from pagedcore.models.attention.recurrences import known_recurrences
from pagedcore.models.families.table import FAMILIES
from pagedcore.models.linears.shared_embedding import RowsOfProduct
from pagedcore.models.linears.stored_weight import StoredWeight

_OWN_ATTENTION: Final = (
    "its attention does not go through transformers' attention interface, so it cannot be given a paged KV cache"
)
_STATE: Final = (
    "some of its layers carry a recurrent or convolutional state from token to token, which a batch of several "
    "sequences without padding would mix up"
)
_SELECTION: Final = "its attention reads a selection of positions that it computes outside of the attention function"
_QUANTIZED: Final = (
    "its weights are quantized in a format of another library; load unquantized weights, or name the directory of a "
    "checkpoint of compressed-tensors, FP8, GPTQ or AWQ"
)
_HEAD: Final = (
    "causal language model that computes the logits of chosen tokens only (logits_to_keep); load the model with its "
    "language model head, by AutoModelForCausalLM"
)
_BOTH_SIDES: Final = (
    "its configuration says that a token looks at those behind it too (is_causal, use_bidirectional_attention), and a "
    "KV cache has what is before it"
)
_ENCODER_DECODER: Final = "it is an encoder-decoder; only decoder-only language models can run"
_OWN_POSITIONS: Final = (
    "it is the decoder of an encoder-decoder: it counts positions by the length of its cache and takes none, which a "
    "batch of several sequences needs"
)
_OFFSET: Final = "it is an encoder used as a decoder, which counts positions from the id of its padding token on"
_BYTES: Final = "it groups bytes into patches whose borders depend on the whole input"

_REASONS: Final[Mapping[str, tuple[str, ...]]] = {
    _OWN_ATTENTION: (
        "bloom", "cpmant", "falcon", "mpt", "openai-gpt", "reformer", "transfo-xl", "xlm", "xlnet",
    ),
    _STATE: (
        "inkling2_text", "inkling_text", "qwen4_exp", "qwen4_exp_text", "rwkv", "xlstm", "zamba", "zaya",
    ),
    _SELECTION: (
        "axk2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4",
        "minimax_m3_vl_text",
    ),
    _BYTES: ("blt",),
    _OWN_POSITIONS: ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"),
    _OFFSET: ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
_REFUSED: Final = {name: reason for reason, names in _REASONS.items() for name in names}
_CONVOLVING: Final = frozenset(name for name, family in FAMILIES.items() if family.convolution)
"""Architectures whose layers of type "conv" are those of ``attention/recurrences.py``."""
_RECURRENT: Final = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "recurrent_gemma", "zamba2",
    *(name for name, family in FAMILIES.items() if family.delta_rule),
})
"""Architectures whose layers of the types ``_STATES`` are those of ``attention/recurrences.py``."""
_LAYER_TYPES: Final = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
""""attention" is how configurations from before the other names say "full_attention"."""
_STATES: Final = frozenset({"linear_attention", "mamba", "hybrid"})
_WITHOUT_MIXER: Final = frozenset({"mlp", "moe"})
"""Types of layers that compute each token by itself."""
_OTHER_INPUTS: Final = ("vision_config", "audio_config", "text_config", "speech_config", "image_config")


def check(model: Any, name: str, device_kind: str) -> None:
    """Raise for a model whose configuration or modules say that it cannot run on a device; see the checks."""
    check_config(model.config.to_dict())
    check_modules(model, name)
    check_device(model, device_kind)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what a configuration, as a dictionary, already shows to be impossible."""
    name = str(config.get("model_type", "unknown"))
    if config.get("is_encoder_decoder"):
        raise _refusal(name, _ENCODER_DECODER)
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") in (True, "all"):
        raise _refusal(name, _BOTH_SIDES)
    if name in _REFUSED:
        raise _refusal(name, _REFUSED[name])
    if other := next((key for key in _OTHER_INPUTS if config.get(key) is not None), None):
        raise _refusal(
            name, f"it wraps a language model with other parts ({other}), and is none of those whose language model is "
                  "known to compute the same alone"
        )
    if config.get("quantization_config") is not None:
        raise _refusal(name, _QUANTIZED)
    if config.get("position_embedding_type") not in (None, "absolute", "nope", "rope", "rotary"):
        raise _refusal(name, f"its positions are of type {config['position_embedding_type']!r}")
    _check_layer_types(name, config.get("layer_types"))


def _check_layer_types(name: str, layer_types: Any) -> None:
    if not isinstance(layer_types, list | tuple | None):
        raise _refusal(name, "its layer_types are no list")
    known = _LAYER_TYPES | ({"conv"} if name in _CONVOLVING else set())
    known |= (_STATES | _WITHOUT_MIXER) if name in _RECURRENT else set()
    if layer_types is not None and (others := sorted({str(kind) for kind in layer_types} - known)):
        raise _refusal(name, f"{_STATE}; its layers of type {', '.join(others)} are not known to be otherwise")


def check_modules(model: nn.Module, name: str) -> None:
    """Refuse a model without a head that computes logits, one with layers that look at neighbouring tokens other than
    through attention, and one whose weights are in a format of another library.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _refusal(name, f"{type(model).__name__} is no {_HEAD}")
    redirected = {one for layer in known_recurrences(model) for one in layer.children()}
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase) and module not in redirected:
            raise _refusal(name, f"{_STATE} ({type(module).__name__})")
        # Why by type: a subclass of a tensor computes in its own way.
        weight = getattr(module, "weight", None)
        if weight is None or isinstance(weight, StoredWeight | RowsOfProduct):
            continue
        if type(weight) not in (torch.Tensor, nn.Parameter) or not weight.is_floating_point():
            raise _refusal(name, f"{_QUANTIZED} ({type(module).__name__})")


def check_device(model: nn.Module, allowed: str = "cpu") -> None:
    """Refuse, as ``InvalidConfig``, weights that are neither in this machine's memory nor on the device that will run
    the model.
    """
    for parameter in model.parameters():
        if (kind := parameter.device.type) not in ("cpu", allowed):
            raise InvalidConfig(f"model: it has weights on {kind!r}, allowed is {allowed!r}. Move it there.")


def check_num_layers(files: Sequence[Path], config: Any) -> None:
    """Refuse more layers than files of safetensors have tensors, before a layer is made.

    Args:
        files: with the model's weights.
        config: as transformers has it.

    Raises:
        ModelNotSupported: there are fewer.
        SafetensorError: a file is damaged.
    """
    num_tensors = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            num_tensors += len(file.keys())
    check_layers_of(num_tensors, config)


def check_layers_of(num_tensors: int, config: Any) -> None:
    """Refuse more layers than there are tensors; arguments and errors as of ``check_num_layers``."""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > num_tensors:
        raise ModelNotSupported(f"model: num_hidden_layers is {num_layers}, and its files have {num_tensors} tensors.")


def check_attention_was_taken(config: Any) -> None:
    """Refuse a model that ignored the attention function it was given, as some do without an error."""
    if getattr(config, "_attn_implementation", None) != ATTENTION_KEY:
        raise _refusal(str(config.model_type), _OWN_ATTENTION)


def check_num_attention_layers(config: Any, num_called: Collection[int]) -> None:
    """Refuse a model in which not every layer attends or is recurrent: the others may keep a state elsewhere.

    Args:
        config: as transformers has it.
        num_called: the number of layers that were called, and that of calls where some were called more than once.
    """
    expected = getattr(config, "num_hidden_layers", None)
    if expected is not None and config.model_type in _RECURRENT:
        expected -= sum(kind in _WITHOUT_MIXER for kind in getattr(config, "layer_types", None) or ())
    if expected not in num_called:
        raise _refusal(
            str(config.model_type),
            f"{max(num_called)} attention calls were made by {expected} layers; the rest is unknown",
        )


def _refusal(name: str, reason: str) -> ModelNotSupported:
    return ModelNotSupported(f"model: architecture {name!r} cannot run here: {reason}.")

"""What a model's configuration says about its limits: the longest context and the tokens that end a completion.

Owns the reading of fields that architectures name differently, and of what the weights of a model have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from pagedcore.embedding_defaults import EmbeddingDefaults
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.families.table import FAMILIES

HEADLESS: Final = "_has_no_head"
"""A field that the configuration of a model gets whose files have no output layer; no file has it."""
_TURN_ALONE: Final = frozenset({"phimoe"})
"""Architectures beside the families that read positions for nothing but the angles of queries and keys."""
_WITHOUT_POSITIONS: Final = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Architectures that read no positions, whose configurations name no longest context."""
_LONGEST_RECURRENCE: Final = 2**20
"""What they get for one: a state has one size at any length, and a prompt takes memory for its tokens alone."""
_LENGTH_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def format_and_device(model: Any) -> tuple[torch.dtype, torch.device]:
    """Return the number format and the device of a model of transformers.

    They are its first floating parameter's, as transformers has it, or its embedding's where all parameters are
    quantised and norms have none.
    """
    parameters = (one for one in model.parameters() if one.is_floating_point())
    first: Any = next(parameters, model.get_input_embeddings().weight)
    return first.dtype, first.device


def max_model_len(config: Any) -> int:
    """Return the longest context at which the model computes the same as it would with one sequence alone.

    Rotary embeddings of type "dynamic" change the frequencies of a whole batch when its longest sequence passes the
    original length, so they are held below it; so are those of type "longrope" unless there is a ``num_short_tokens``.
    "yarn" and "linear" stretch the context by a factor.

    Raises:
        ModelNotSupported: the configuration names no length.
    """
    length, short = configured_len(config), num_short_tokens(config)
    for kind, original, rope in _ropes(config):
        if kind == "dynamic" or (kind == "longrope" and short is None):
            length = min(length, original)
        elif kind == "yarn":
            length = max(length, int(original * float(rope.get("factor") or 1.0)))
    return length


def num_short_tokens(config: Any) -> int | None:
    """Return the tokens of the longest sequence that "longrope" turns by its short factors; longer ones by the others.

    ``None``: no sequence is longer, or the architecture is not one of those that read positions for this alone.
    Raises as ``max_model_len``.
    """
    if config.model_type not in FAMILIES and config.model_type not in _TURN_ALONE:
        return None
    originals = {original for kind, original, _ in _ropes(config) if kind == "longrope"}
    return originals.pop() if len(originals) == 1 and min(originals) < configured_len(config) else None


def _ropes(config: Any) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Return the kind, the original length and all parameters of each rotary embedding."""
    length = configured_len(config)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [
        (str(rope.get("rope_type") or rope.get("type")),
         int(rope.get("original_max_position_embeddings") or length), rope)
        for rope in of_layers or [parameters]
    ]


def hidden_size(model: Any) -> int:
    """Return how many numbers the output layer is given for a token; 0 if the model has no other part than it."""
    if model.base_model is model:
        return 0
    return int(model.get_input_embeddings().weight.shape[-1])


def is_named_headless(config: Any) -> bool:
    """Whether a configuration names a class without an output layer, whose files may have none."""
    # Rule: transformers calls such a class by its architecture's name and "Model"; GPT2LMHeadModel has one.
    named = vars(config).get("architectures") or [""]
    return all(str(name).endswith("Model") and not str(name).endswith("HeadModel") for name in named)


def embedding_defaults(config: Any) -> EmbeddingDefaults:
    """Return what a model without a directory says of embeddings: whether they are all that it makes."""
    return EmbeddingDefaults(generates=not getattr(config, HEADLESS, False))


def generation_fields(model: Any) -> dict[str, Any]:
    """Return what a model's generation settings have, by the names of transformers."""
    settings = getattr(model, "generation_config", None)
    return {name: value for name, value in vars(settings).items() if value is not None} if settings is not None else {}


def configured_len(config: Any) -> int:
    """Return the longest context that the configuration names. Raises as ``max_model_len``."""
    length = next((int(value) for name in _LENGTH_FIELDS if (value := getattr(config, name, None))), None)
    if length is None and config.model_type in _WITHOUT_POSITIONS:
        return _LONGEST_RECURRENCE
    if length is None:
        raise ModelNotSupported(f"model: the configuration of {config.model_type!r} names no longest context.")
    return length


def eos_token_ids(model: Any) -> frozenset[int]:
    """Return the tokens that end a completion, from the generation settings and the configuration.

    Raises:
        InvalidConfig: one of them is no whole number.
    """
    sources = (getattr(model, "generation_config", None), model.config)
    values = [getattr(source, "eos_token_id", None) for source in sources]
    flat = [token for value in values for token in (value if isinstance(value, list | tuple) else [value])]
    found = [token for token in flat if token is not None]
    if wrong := [token for token in found if type(token) is not int]:
        raise InvalidConfig(f"model: eos_token_id has {str(wrong[0])[:80]!r}, allowed are ids of tokens.")
    return frozenset(found)

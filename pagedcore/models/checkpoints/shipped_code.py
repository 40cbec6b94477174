"""Models whose files name code of their own (``auto_map``) for an architecture that transformers has a class of.

Owns when that class runs them and the code does not: the configuration names the class, and every tensor of the files
is one of its own, of the same shape. The code itself is not looked at.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.stored_experts import shapes_of_expert
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.checkpoints.weight_files import only_file
from pagedcore.models.families.file_names import renaming_of
from pagedcore.models.families.supported_models import check_num_layers
from pagedcore.models.families.wrappers import is_wrapper

_log = logging.getLogger("pagedcore")
AUTO_MAP: Final = "auto_map"
"""The field of ``config.json`` that names the code."""
_BUFFER: Final = "rotary_emb.inv_freq"
"""What files of earlier versions have, and is computed now."""
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")


def ships_code(directory: Path) -> bool:
    """Whether the configuration of a directory names code of its own."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # Why: what is wrong with a configuration, its loader says.
    return isinstance(config, dict) and bool(config.get(AUTO_MAP))


def tell_own_class(directory: Path, trust_remote_code: bool) -> None:
    """Log that the code of a directory does not run, if it names some that is not trusted."""
    if not trust_remote_code and ships_code(directory):
        _log.info("The model names code that is shipped with it (%s), which does not run: the architecture is one of "
                  "transformers' own, and all tensors fit its class.", AUTO_MAP)


def require_class(raw: Mapping[str, Any]) -> None:
    """Refuse a configuration that names code, unless it also names the class that transformers has for it.

    Args:
        raw: what ``config.json`` has.

    Raises:
        ModelNotSupported: transformers has no such class, or another one for the architecture.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    known, kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, str(raw.get("model_type"))
    if is_wrapper(raw):
        known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if raw.get("architectures") != [known.get(kind)]:
        raise _refusal("transformers has no class of that name for this architecture")


def require_fit(directory: Path, config: Any, *, is_quantised: bool) -> None:
    """Refuse files that name code and have a tensor that transformers' class does not, or of another shape there.

    Args:
        directory: has config.json and safetensors, of which only heads are read.
        config: of the model, or of the language model in it, as transformers has it.
        is_quantised: the layers may be stored as other tensors, whose shapes the reader of the format knows.

    Raises:
        ModelNotSupported: one does not fit, or there are no files.
        SafetensorError: a file is damaged.
    """
    from transformers import AutoModelForCausalLM

    # Safety: layers that files do not have are found before anything of their number is made.
    check_num_layers(only_file(directory), config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files = TensorFiles(directory, renaming_of(model))
    expected = _Expected(model)
    for name, one in files.unread().items():
        shape = tuple(one.get_shape())
        is_stored = is_quantised and expected.is_of_layer(name)
        if not (is_stored or expected.shape_of(name) == shape or _is_left_out(name, config)):
            own = expected.shape_of(name)
            differs = "none of that name" if own is None else f"one of shape {list(own)}"
            raise _refusal(f"its files have {name} of shape {list(shape)}, and {type(model).__name__} of transformers "
                           f"has {differs}")


class _Expected:
    """The tensors of a class, those of each expert by the names of files."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        self._linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
        # Safety: a configuration may name more experts than there is memory for their names.
        self._experts = {name: (shapes, len(module.get_parameter("down_proj")))
                         for name, module in model.named_modules() if (shapes := shapes_of_expert(module))}

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; ``None``: the class has none of that name."""
        layer, _, last = name.rpartition(".")
        return self._shapes.get(name) or (self._shape_in_expert(layer) if last == "weight" else None)

    def is_of_layer(self, name: str) -> bool:
        """Whether a tensor is part of a layer, as what formats store in the place of its weight; a bias is none."""
        return not name.endswith(".bias") and any(
            layer in self._linears or self._shape_in_expert(layer) is not None for layer in _parents(name)
        )

    def _shape_in_expert(self, layer: str) -> tuple[int, int] | None:
        name, _, part = layer.rpartition(".")
        experts, _, number = name.rpartition(".")
        shapes, count = self._experts.get(experts, ({}, 0))
        return shapes.get(part) if number.isdecimal() and int(number) < count else None


def _is_left_out(name: str, config: Any) -> bool:
    """Whether a tensor is one that no class computes with: of layers that predict tokens further on, as the
    configuration says, or a buffer."""
    first, layer = config.num_hidden_layers, _LAYER.match(name)
    last = first + (vars(config).get("num_nextn_predict_layers") or 0)
    return name.endswith(_BUFFER) or (layer is not None and first <= int(layer[1]) < last)


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _refusal(reason: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"model: its configuration names code that is shipped with it ({AUTO_MAP}), trust_remote_code is False, and "
        f"{reason}. Read that code and set trust_remote_code=True, or, if you know that transformers' own class does "
        f"the same, remove {AUTO_MAP}."
    )

"""Weights of a loaded model that its files do not have, so that transformers made them up.

Owns what shows it: transformers marks a parameter that it loaded and not one that it initialised, torch counts what was
written to a parameter since, and a model knows the files it was loaded from. Values say nothing. A model of a
configuration, a copy and whatever was written to or put in a parameter's place later is taken as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints.ownership import version_of
from pagedcore.models.checkpoints.weight_files import weight_files
from pagedcore.models.families.file_names import module_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOADED: Final = "_is_hf_initialized"
"""The mark."""


def require_loaded(model: PreTrainedModel) -> None:
    """Refuse a model with weights that can be shown to be random numbers.

    Raises:
        InvalidConfig: its files lack some, and nothing was written to these since.
    """
    made_up = [name for name, one in model.named_parameters() if _LOADED not in vars(one) and version_of(one) == 1]
    if not made_up or (directory := _directory_of(model)) is None:
        return
    prefix = f"{model.base_model_prefix}."
    known = {name.removeprefix(prefix) for name in _names_in(directory)}
    if missing := [name for name in made_up if known and name.removeprefix(prefix) not in known]:
        raise InvalidConfig(
            f"model: {len(missing)} of its weights are random numbers, {missing[0]} among them: the files that it was "
            f"loaded from have none of that name for {type(model).__name__}. Give the name or the directory of the "
            "files instead of the model, or, if you set these weights yourself, save it and give that directory."
        )


def _directory_of(model: PreTrainedModel) -> Path | None:
    """Return the directory that a model was loaded from, or its snapshot in the hub's cache; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    name = model.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # what it raises for what cannot be a name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _names_in(directory: Path) -> set[str]:
    """Return the names of tensors in a directory's files; none if they are not all of safetensors."""
    names = set()
    try:
        for path in weight_files(directory):
            with safe_open(path, framework="pt") as file:
                names |= {module_name(name) for name in file.keys()}  # noqa: SIM118
    except (ModelNotSupported, OSError, RuntimeError, SafetensorError):
        return set()
    return names

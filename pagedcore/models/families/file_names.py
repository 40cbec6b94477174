"""What files of some architectures call tensors otherwise than the modules of transformers do.

Owns both directions of it. Files of Granite's mixtures have one tensor for all experts of a layer, as its modules have;
those of Mixtral and of Nemotron-H have one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from pagedcore.models.families.table import FAMILIES

_Names = tuple[tuple[str, str], ...]
_OF_GRANITE: Final[_Names] = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer", "block_sparse_moe.router"),
)
_NAMES: Final[Mapping[str, _Names]] = {
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), _OF_GRANITE),
    "nemotron_h": (("backbone", "model"),),
}
"""Parts of names in files, between dots, and those of modules."""


def module_name(name: str, model_type: str = "") -> str:
    """Return the name of a file's tensor in the way of its modules; without a type, for whichever architecture of the
    table has files that call a part of it otherwise.
    """
    for old, new in _NAMES.get(model_type, ()):
        name = _replaced(name, old, new)
    for family in () if model_type in _NAMES else FAMILIES.values():
        # Rule: the first of the parts marks the files; the others are short words that any file might use.
        if family.file_names and f".{next(iter(family.file_names.values()))}." in name:
            for new, old in family.file_names.items():
                name = name.replace(f".{old}.", f".{new}.")
    return name


def file_name(name: str, model_type: str) -> str:
    """Return what files of an architecture call a tensor or a module; the inverse of ``module_name``."""
    family = FAMILIES.get(model_type)
    for new, old in family.file_names.items() if family is not None else ():
        name = f"{name}.".replace(f".{new}.", f".{old}.")[:-1]
    for old, new in _NAMES.get(model_type, ()):
        name = _replaced(name, new, old)
    return name


def renaming_of(model: Any) -> Callable[[str], str]:
    """Return what makes of names in the files of a model those of its modules."""
    if (model_type := model.config.model_type) in _NAMES:
        return partial(module_name, model_type=model_type)
    is_named_so = any("block_sparse_moe" in name for name, _ in model.named_modules())
    return str if is_named_so else module_name


def fuses_experts(model_type: str) -> bool:
    """Whether the files of an architecture have one tensor for all experts of a layer."""
    return _NAMES.get(model_type) is _OF_GRANITE


def _replaced(name: str, old: str, new: str) -> str:
    return f".{name}.".replace(f".{old}.", f".{new}.", 1)[1:-1]

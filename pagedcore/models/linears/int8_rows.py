"""Rows in int8 for a checkpoint whose weights are int4 already: the files' values and scales stay what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedcore.config.schemes import SCHEMES, scheme_of
from pagedcore.errors import InvalidConfig
from pagedcore.models.linears.schemes import fits
from pagedcore.models.linears.stored_weight import StoredMatrices, StoredWeight

_OF_FILES = scheme_of(4)
_WITH_ROWS = scheme_of(4, quantizes_rows=True)


def may_take_int8_rows(stored: str, wanted: str) -> bool:
    """Whether a checkpoint stored in a scheme, or as "gguf", may be computed in the scheme ``wanted``."""
    return wanted == _WITH_ROWS and stored in (_OF_FILES, "gguf")


def take_int8_rows(model: Any, wanted: str) -> None:
    """Let the products of a model's stored int4 weights take int8 rows, before these are packed.

    Weights of other bits, of parts of several types, and values that are numbers of a codebook, stay what they are.

    Raises:
        InvalidConfig: there is no weight that can.
    """
    num_changed = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if not isinstance(value, StoredWeight | StoredMatrices):
                continue
            some = value if isinstance(value, StoredMatrices) else (value,)
            if all(map(_can, some)):
                changed = [replace(one, scheme=_WITH_ROWS) for one in some]
                setattr(module, name, StoredMatrices(changed) if isinstance(value, StoredMatrices) else changed[0])
                num_changed += 1
    if not num_changed:
        raise InvalidConfig(
            f"quantization: got {wanted!r} for a checkpoint without weights that are whole numbers of 4 bits. Leave it."
        )


def _can(weight: StoredWeight) -> bool:
    is_int4 = weight.scheme == _OF_FILES and weight.decode is None and weight.look_up is None and not weight.codebook
    # Why not parts: some of them may be of other bits.
    return is_int4 and not weight.parts and fits(SCHEMES[_WITH_ROWS], weight.shape[1], weight.num_groups)

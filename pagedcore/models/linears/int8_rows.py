"""Rows in int8 for a checkpoint of weights in groups already: the files' values and scales stay what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from pagedcore.config.schemes import GROUPS_OF_BYTES, STORED_SCHEMES, scheme_of
from pagedcore.errors import InvalidConfig
from pagedcore.models.linears.schemes import fits
from pagedcore.models.linears.stored_weight import StoredMatrices, StoredWeight

_WANTED: Final = scheme_of(4, quantizes_rows=True)
_WITH_ROWS: Final = {scheme_of(4): _WANTED, scheme_of(8): GROUPS_OF_BYTES}
"""What the scheme of a weight becomes."""


def may_take_int8_rows(stored: str, wanted: str) -> bool:
    """Whether a checkpoint stored in a scheme, or as "gguf", may be computed in the scheme ``wanted``."""
    return wanted == _WANTED and stored in (scheme_of(4), "gguf")


def take_int8_rows(model: Any, wanted: str) -> None:
    """Let the products of a model's stored weights of 4 and 8 bits take int8 rows, before these are packed.

    Values that are numbers of a codebook, those of 8 bits with zero points, and weights of parts of several types, stay
    what they are.

    Raises:
        InvalidConfig: there is no weight that can.
    """
    num_changed = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if not isinstance(value, StoredWeight | StoredMatrices):
                continue
            some = value if isinstance(value, StoredMatrices) else (value,)
            schemes = [_with_rows(one) for one in some]
            if None not in schemes:
                changed = [replace(one, scheme=scheme) for one, scheme in zip(some, schemes, strict=True) if scheme]
                setattr(module, name, StoredMatrices(changed) if isinstance(value, StoredMatrices) else changed[0])
                num_changed += 1
    if not num_changed:
        raise InvalidConfig(
            f"quantization: got {wanted!r} for a checkpoint without weights that are whole numbers of 4 or 8 bits in "
            "groups. Leave it."
        )


def _with_rows(weight: StoredWeight) -> str | None:
    """Return the scheme of a weight with int8 rows; ``None``: there is none."""
    scheme = _WITH_ROWS.get(weight.scheme)
    # Why not parts: some of them may be of other bits.
    if scheme is None or weight.parts or weight.decode is not None or weight.look_up is not None or weight.codebook:
        return None
    has_product = scheme == _WANTED or not weight.has_zeros
    return scheme if has_product and fits(STORED_SCHEMES[scheme], weight.shape[1], weight.num_groups) else None

"""Checks of fields in a ``config.json``: whether a value is one that the modules here compute as transformers would."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
"""Takes the value of a field, ``None`` if it is not there."""


def is_anything(value: Any) -> bool:
    """Accept every value: the field changes nothing that is computed, or is read elsewhere."""
    return True


def is_size(value: Any) -> bool:
    """Accept integers from 1 to 2**31 - 1."""
    return type(value) is int and 0 < value < 2**31


def is_positive(value: Any) -> bool:
    """Accept finite numbers above 0."""
    return type(value) in (int, float) and 0 < value < math.inf


def is_number(value: Any) -> bool:
    """Accept 0 and finite numbers above it."""
    return is_positive(value) or (type(value) in (int, float) and value == 0)


def is_bool(value: Any) -> bool:
    """Accept truth values."""
    return type(value) is bool


def is_flag(value: Any) -> bool:
    """Accept truth values and ``None``."""
    return value is None or type(value) is bool


def is_off(value: Any) -> bool:
    """Accept what leaves a feature out."""
    return value is None or value is False


def is_one(value: Any) -> bool:
    """Accept 1 and ``None``."""
    return value in (None, 1)


def is_gelu(value: Any) -> bool:
    """Accept the name of Gemma's activation."""
    return bool(value == "gelu_pytorch_tanh")


def is_cap(value: Any) -> bool:
    """Accept soft caps and ``None``."""
    return value is None or is_positive(value)


def is_window(value: Any) -> bool:
    """Accept sizes of windows and ``None``."""
    return value is None or is_size(value)


def are_flags(value: Any) -> bool:
    """Accept lists of integers and truth values."""
    return isinstance(value, list) and all(type(one) in (int, bool) for one in value)


def are_integers(value: Any) -> bool:
    """Accept lists of integers."""
    return isinstance(value, list) and all(type(one) is int for one in value)


def are_layer_types(value: Any) -> bool:
    """Accept lists of layers' types of attention."""
    return isinstance(value, list) and all(one in ("full_attention", "sliding_attention") for one in value)


def names_tokens(value: Any) -> bool:
    """Accept a token id, a list of such, and ``None``."""
    return value is None or all(type(one) is int for one in (value if isinstance(value, list) else [value]))

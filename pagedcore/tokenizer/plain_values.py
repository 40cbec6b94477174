"""What of messages and tools a chat template sees: values that JSON has, whatever they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np

_TEXT: Final = frozenset((str,))
_AS_THEY_ARE: Final = frozenset((type(None), str, int, float, bool))


def plain(value: Any) -> Any:
    """Return what JSON has of a value. Why: other objects have methods that a template could call."""
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is dict and _TEXT.issuperset(map(type, value)):
        return {name: one if type(one) in _AS_THEY_ARE else plain(one) for name, one in value.items()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"

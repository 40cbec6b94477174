"""The metadata of one architecture of a GGUF file, read with their types and limits.

Owns the errors that name an entry, its value and what is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import torch

from pagedcore.models.linears.stored_weight import refusal


class Metadata:
    """Entries by their names without the architecture's, and the names of the tensors that they describe."""

    def __init__(self, given: Mapping[str, Any], architecture: str, tensors: AbstractSet[str]) -> None:
        self.tensors = tensors
        self.given = {name.removeprefix(f"{architecture}."): value for name, value in given.items()
                      if name.startswith(f"{architecture}.")}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry as it is."""
        return self.given.get(name, default)

    def refuse(self, name: str, needed: str) -> NoReturn:
        """Raise ``ModelNotSupported`` for an entry."""
        raise refusal(f"its {name} is {str(self.given.get(name))[:80]}, needed is {needed}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1 to 2**31 - 1; ``ModelNotSupported``: it is none."""
        value = self.given.get(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            self.refuse(name, "a size")
        return value

    def sizes(self, name: str, count: int, default: int | None = None, *, least: int = 1) -> list[int]:
        """Return a size for each of ``count`` layers, which may be one number for all; errors as of ``size``. Some, but
        not all, may be 0 where that is the ``least``.
        """
        value = self.given.get(name, default)
        if not isinstance(value, list):
            return [self.size(name, default)] * count
        if len(value) != count or not all(type(one) is int and least <= one < 2**31 for one in value) or not any(value):
            self.refuse(name, f"a size, or one for each of {count} layers")
        return value

    def flags(self, name: str, count: int) -> list[bool]:
        """Return whether something holds for each of ``count`` layers; ``ModelNotSupported``: it is not said so."""
        value = self.given.get(name)
        if not isinstance(value, list) or len(value) != count or not {*map(type, value)} <= {bool}:
            self.refuse(name, f"true or false for each of {count} layers")
        return value

    def count(self, name: str) -> int:
        """Return a whole number below 2**31, 0 if it is not there; ``ModelNotSupported``: it is none."""
        return self.size(name) if self.given.get(name) not in (None, 0) else 0

    def size_or_none(self, name: str) -> int | None:
        """Return a size; ``None``: it is 0 or there is none."""
        return self.size(name) if self.given.get(name) else None

    def at_most(self, name: str, value: int, most: int) -> int:
        """Return an entry's value; ``ModelNotSupported``: it is more than this."""
        if value > most:
            self.refuse(name, f"at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0, as a configuration writes it; ``ModelNotSupported``: it is none."""
        value = self.given.get(name, default)
        if type(value) not in (int, float) or not 0 < float(value or 0) < math.inf:
            self.refuse(name, "a number above 0")
        # Why: in float32 this is the number that a configuration writes, as 1e-06.
        return float(str(torch.tensor(value, dtype=torch.float32).numpy()))

    def require(self, name: str, value: Any) -> None:
        """Refuse an entry that is there and is another; ``ModelNotSupported``."""
        if self.given.get(name, value) != value:
            self.refuse(name, str(value))

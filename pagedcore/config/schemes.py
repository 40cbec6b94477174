"""Quantisation schemes as data: the one table of their names and of what they do.

Settings, commands and pages read it, and so do the modules that quantise, store and compute. Nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What the weights and the rows of a linear layer become."""

    bits: int
    """Of a weight."""
    quantizes_rows: bool = False
    """Whether rows become int8 too, or may: with a scale for each row, or for each of its groups of inputs."""
    has_groups: bool = False
    """Whether each group of an output's inputs gets a scale when floating numbers are quantised, or each output one."""
    is_chosen: bool = False
    """Whether each product follows another scheme of as many bits, or none, whichever is exact enough."""
    called: tuple[str, ...] = ()
    """What other projects call it."""
    summary: str
    """What help and documentation say of it."""

    @property
    def sums_whole_rows(self) -> bool:
        """Whether an output is one sum of integers, which a scale of the row and one of the output belong to."""
        return self.quantizes_rows and not self.has_groups


AUTO_INT8: Final = "auto-int8"
SCHEMES: Final[Mapping[str, Scheme]] = {
    "w8a8": Scheme(
        bits=8, quantizes_rows=True, called=("int8", "8bit"),
        summary="int8 weights with a scale for each output, and int8 rows with a scale each",
    ),
    "w8a16": Scheme(bits=8, summary="int8 weights with a scale for each output"),
    "w4a16": Scheme(
        bits=4, has_groups=True, called=("int4", "4bit"),
        summary="int4 weights with a scale for each group of 128 inputs",
    ),
    "w4a8": Scheme(
        bits=4, quantizes_rows=True, has_groups=True,
        summary="int4 weights and int8 rows with a scale for each group of 128 inputs",
    ),
    AUTO_INT8: Scheme(
        bits=8, quantizes_rows=True, is_chosen=True, called=("auto",),
        summary="w8a8, w8a16 or neither, for each product",
    ),
}
"""By the name that ``EngineConfig.quantization`` has; that also takes "none"."""

GROUPS_OF_BYTES: Final = "w8a8-groups"
STORED_SCHEMES: Final[Mapping[str, Scheme]] = {
    **SCHEMES,
    GROUPS_OF_BYTES: Scheme(
        bits=8, quantizes_rows=True, has_groups=True,
        summary="int8 weights of a file, and int8 rows, with a scale for each of the file's groups of inputs",
    ),
}
"""Those that a weight of a file may have; nothing is quantised by the last one, which w4a8 makes of such a weight."""


def scheme_of(bits: int, *, quantizes_rows: bool = False) -> str:
    """Return the name of the first scheme with such weights and rows; none of those that choose."""
    wanted = bits, quantizes_rows, False
    return next(name for name, one in SCHEMES.items() if (one.bits, one.quantizes_rows, one.is_chosen) == wanted)


def listed(words: Iterable[str]) -> str:
    """Return two words or more as a sentence has them: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}"

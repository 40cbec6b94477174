"""How the weights of a model were loaded, for whoever loads others in the same way. Read ``new_weights.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_SUFFIXES: Final = frozenset({".safetensors", ".gguf", ".bin", ".json"})


@dataclass(frozen=True, slots=True)
class Succession:
    """A model that takes the place of one that is computed with."""

    like: Any
    """A ``TransformersModel`` of the same shapes and settings, on the same processor: whether its decoder passed the
    self-test, and its products are invariant, no weight changes."""
    on_packed: Callable[[torch.Tensor], None]
    """Called with each weight that was packed, before the next one is."""
    keeps_nothing: bool = False
    """Whether what is not packed is copied, so that the caller may change every tensor afterwards."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How the present weights of a backend were loaded."""

    quantization: str
    """The scheme that they were given, or had."""
    load_files: Callable[..., Any]
    """``(source, on_loaded, succession)`` makes a backend of a directory, a GGUF file or a name on the hub."""
    no_tensors: str
    """Why tensors by name cannot take their place; "": they can."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors of the model as it was loaded."""
    tied: Mapping[str, str]
    """Further names of tied ones, and the name that is in ``shapes``."""
    source: str | None = None
    """The directory or GGUF file that they were read from; ``None``: they were given in memory."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes and time of the last change, in nanoseconds, of every file with weights there, before they were read."""


def weight_files(source: str) -> dict[str, tuple[int, int]]:
    """Return what ``Origin.files`` is of a source now, as far as its files can be looked at."""
    place, found = Path(source), dict[str, tuple[int, int]]()
    with suppress(OSError):
        for one in [place] if place.is_file() else [one for one in place.iterdir() if one.suffix in _SUFFIXES]:
            known = one.stat()
            found[one.name] = known.st_size, known.st_mtime_ns
    return found

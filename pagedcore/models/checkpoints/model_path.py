"""Which file a user means by a path: one in the format GGUF, or the only one of a directory.

Owns the look at names; nothing is opened. A projector of images (``mmproj``), which files of a model of text and images
have beside it, is no model of text.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final

from pagedcore.errors import InvalidConfig

_log = logging.getLogger("pagedcore")
_PROJECTOR: Final = re.compile(r"mmproj|.*[-._]mmproj\b", re.IGNORECASE)
"""How files of projectors are called, by llama.cpp's tools and by people: it comes first, or after a separator."""
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""How parts of one model are called, counted from 1."""


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Whether this names a file whose name ends in ``.gguf``."""
    return Path(source).suffix.lower() == ".gguf" and Path(source).is_file()


def part_of(path: str | os.PathLike[str], number: int, count: int) -> Path | None:
    """Return the file of a part, counted from 1, beside the first one; ``None``: the path is not that of the first of
    so many.
    """
    found = _PART.fullmatch(Path(path).name)
    if found is None or (int(found[2]), int(found[3])) != (1, count):
        return None
    return Path(path).with_name(f"{found[1]}-{number:05d}-of-{count:05d}{found[4]}")


def parts_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return a GGUF file and, if it is the first of several, the others, as far as they are there."""
    found = _PART.fullmatch(Path(path).name)
    count = int(found[3]) if found is not None else 1
    others = (part_of(path, number, count) for number in range(2, count + 1))
    return [Path(path), *(one for one in others if one is not None and one.is_file())]


def _is_further_part(path: Path) -> bool:
    """Whether a name says that there is a part before, which is in the directory."""
    found = _PART.fullmatch(path.name)
    return found is not None and int(found[2]) > 1 and path.with_name(
        f"{found[1]}-00001-of-{found[3]}{found[4]}").is_file()


def gguf_in(source: str) -> str:
    """Return the one GGUF file, or the first of its parts, of a directory that has no other weights, or else ``source``
    itself. Projectors of images are left out, which one line of the log says.

    Raises:
        InvalidConfig: there are several.
    """
    directory = Path(source)
    found = sorted(path for path in directory.glob("*.gguf") if path.is_file()) if directory.is_dir() else []
    models = [path for path in found if not _PROJECTOR.match(path.name)]
    if 0 < len(models) < len(found):
        _log.info("A projector of images lies beside the model (mmproj): the model runs as a model of text.")
        found = models
    found = [path for path in found if not _is_further_part(path)]
    if not found or any(directory.glob("*.safetensors")):
        return source
    if len(found) > 1:
        raise InvalidConfig(f"model: the directory has {len(found)} GGUF files. Name the one that is meant.")
    return os.fspath(found[0])

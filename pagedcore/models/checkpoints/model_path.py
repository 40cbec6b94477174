"""Which file a user means by a path: one in the format GGUF, or the only one of a directory.

Owns the look at names; nothing is opened.
"""

from __future__ import annotations

import os
from pathlib import Path

from pagedcore.errors import InvalidConfig


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Whether this names a file whose name ends in ``.gguf``."""
    return Path(source).suffix.lower() == ".gguf" and Path(source).is_file()


def gguf_in(source: str) -> str:
    """Return the one GGUF file of a directory that has no other weights, or else ``source`` itself.

    Raises:
        InvalidConfig: there are several.
    """
    directory = Path(source)
    found = sorted(path for path in directory.glob("*.gguf") if path.is_file()) if directory.is_dir() else []
    if not found or any(directory.glob("*.safetensors")):
        return source
    if len(found) > 1:
        raise InvalidConfig(f"model: the directory has {len(found)} GGUF files. Name the one that is meant.")
    return os.fspath(found[0])

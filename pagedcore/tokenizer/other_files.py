"""Tokenizers that are not in ``tokenizer.json``: the names of their files, and the packages that they take to read.

Owns what a message says of them; nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tekken.json": (), "*.tiktoken": ("tiktoken",),
    "tokenizer.model": ("sentencepiece", "google.protobuf"), "spiece.model": ("sentencepiece", "google.protobuf"),
    "sentencepiece*.model": ("sentencepiece", "google.protobuf"), "merges.txt": (),
}
"""By the names of files, what has to be there beside transformers."""


def tokenizer_file(directory: Path) -> str:
    """Return the name of a directory's file that has a tokenizer, if it has no ``tokenizer.json``; "" for none."""
    if (directory / "tokenizer.json").exists():
        return ""
    return next((path.name for pattern in _PACKAGES for path in sorted(directory.glob(pattern))), "")


def missing_packages(name: str) -> list[str]:
    """Return what has to be installed for a tokenizer in a file of this name to be read."""
    needed = next((packages for pattern, packages in _PACKAGES.items() if Path(name).match(pattern)), ())
    return [package.rpartition(".")[2] for package in needed if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that this one is in
        return False

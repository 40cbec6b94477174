"""Compiled kernels as files: what is in one, where they are kept, and when one is too old.

Owns the file format and the key. A file is one line of JSON and the cubin after it. Its name holds the kernel's name,
the architecture and a digest of the sources it was compiled from, so files of several versions live side by side and
a directory built elsewhere can be used on a machine without a compiler. It never compiles; ``library.py`` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pagedcore_kernels.errors import InternalError, InvalidConfig

SUFFIX: Final = ".kernel"
FORMAT: Final = 1
_SOURCES: Final = ("device/*.py", "shapes.py", "build/variants.py", "build/compiler.py")


@dataclass(frozen=True)
class KernelImage:
    """One compiled kernel and all that a launch has to know about it."""

    name: str
    arch: str
    entry: str
    threads: int
    shared_bytes: int
    registers: int
    toolchain: dict[str, str]
    cubin: bytes
    local_bytes: int = 0
    """Stack and spilled registers of a thread; 0 in everything that is shipped."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        head = {key: value for key, value in asdict(self).items() if key != "cubin"}
        head |= {"format": FORMAT, "sha256": hashlib.sha256(self.cubin).hexdigest()}
        return json.dumps(head, sort_keys=True).encode() + b"\n" + self.cubin

    @classmethod
    def from_bytes(cls, content: bytes) -> KernelImage:
        """Read a file's content.

        Raises:
            ValueError: it is damaged or of another format.
        """
        first, _, cubin = content.partition(b"\n")
        head = json.loads(first)
        if not isinstance(head, dict) or head.pop("format", None) != FORMAT:
            raise ValueError("the format is another one")
        if head.pop("sha256", None) != hashlib.sha256(cubin).hexdigest():
            raise ValueError("the cubin is not the one that was written")
        try:
            return cls(**head, cubin=cubin)
        except TypeError as error:
            raise ValueError("the header is not complete") from error


@cache
def source_digest() -> str:
    """A digest of everything in this package that a cubin depends on."""
    return digest_of(Path(__file__).parents[1])


def digest_of(package: Path) -> str:
    """The digest of the sources in a copy of this package.

    Raises:
        InternalError: files that a cubin depends on are not where they are looked for.
    """
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        found = sorted(package.glob(pattern))
        # Safety: a digest that leaves files out gives changed kernels the key of those before.
        if not found:
            raise InternalError(f"CUDA kernels: no source {pattern} in {package}, expected one at least.")
        for path in found:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def default_cache_directory() -> Path:
    """Where compiled kernels are kept by default."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "pagedcore" / "cuda"


class ImageStore:
    """A directory of kernel images.

    Invariant: a file appears under its name only when it is complete, so readers need no lock.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, name: str, arch: str) -> KernelImage | None:
        """Return the image of these sources; ``None`` if there is none or it is damaged.

        Raises:
            InvalidConfig: the directory belongs to another user, who could put any code there.
        """
        path = self._path(name, arch)
        if not path.is_file():
            return None
        self._refuse_foreign()
        try:
            image = KernelImage.from_bytes(path.read_bytes())
        except (ValueError, OSError):
            return None
        return image if (image.name, image.arch) == (name, arch) else None

    def any_image(self) -> KernelImage | None:
        """Return some image of these sources, which says what all of a directory were compiled by; ``None``: there is
        none. Raises as ``read``.
        """
        ending = f".{source_digest()}{SUFFIX}"
        for path in sorted(self.directory.glob(f"*{ending}")):
            name, _, arch = path.name.removesuffix(ending).rpartition(".")
            if (image := self.read(name, arch)) is not None:
                return image
        return None

    def write(self, image: KernelImage) -> Path:
        """Store an image, in one step as far as readers can see; returns its path."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(image.name, image.arch)
        with tempfile.NamedTemporaryFile(dir=self.directory, suffix=".part", delete=False) as file:
            file.write(image.to_bytes())
        os.replace(file.name, path)
        return path

    def _path(self, name: str, arch: str) -> Path:
        return self.directory / f"{name}.{arch}.{source_digest()}{SUFFIX}"

    def _refuse_foreign(self) -> None:
        # Safety: a cubin is code; it is taken only from directories that only the user or root can fill.
        owner = self.directory.stat()
        if owner.st_uid not in (os.getuid(), 0) or owner.st_mode & 0o002:
            raise InvalidConfig(
                "CUDA kernel directory: it belongs to another user or everybody may write to it; allowed is one that "
                "only you or root can fill. Change its owner and mode, or name another directory."
            )

"""Where a launch gets its kernel from: a directory built ahead, the cache on disk, or the compiler, in this order.

Owns the search and the fallbacks between architectures. Keeps nothing in memory; ``driver.py`` keeps what is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pagedcore_kernels.cuda.build.compiler import compile_kernel, parse_arch
from pagedcore_kernels.cuda.build.images import ImageStore, KernelImage, default_cache_directory
from pagedcore_kernels.cuda.build.toolchain import compiler_versions, missing_compiler_parts
from pagedcore_kernels.errors import MissingDependency

_log = logging.getLogger("pagedcore")

class KernelLibrary:
    """Finds or makes kernel images.

    Args:
        prebuilt: directories that ``pagedcore kernels build`` has filled; what they have is taken as it is.
        cache: where kernels compiled here are kept; by default the user's cache directory.
    """

    def __init__(self, prebuilt: Sequence[Path] = (), cache: Path | None = None) -> None:
        self._prebuilt = [ImageStore(directory) for directory in prebuilt]
        self._cache = ImageStore(cache or default_cache_directory())

    def find(self, name: str, arch: str) -> KernelImage:
        """Return the image of a named kernel for a GPU's architecture, compiling it if there is none.

        Raises:
            MissingDependency: it is not prebuilt and there is no compiler.
            InvalidConfig: the name or the architecture is unknown, or a directory is not to be trusted.
        """
        for store in self._prebuilt:
            for candidate in runs_on(arch):
                if (image := store.read(name, candidate)) is not None:
                    return image
        return self._compiled(name, arch)

    def _compiled(self, name: str, arch: str) -> KernelImage:
        cached = self._cache.read(name, arch)
        missing = missing_compiler_parts()
        if cached is not None and (missing or cached.toolchain == compiler_versions()):
            return cached
        if missing:
            raise MissingDependency(
                f"CUDA kernel {name} for {arch}: it was not built ahead, and building it needs {', '.join(missing)}. "
                f"Install pagedcore[cuda], or run 'pagedcore kernels build --arch {arch}' with this version of "
                "pagedcore where that is installed and name its directory."
            )
        _tell(name, arch)
        image = build_image(name, arch)
        self._cache.write(image)
        return image


@cache
def _tell_why() -> None:
    """Say once why a start takes minutes."""
    _log.warning("CUDA kernels are compiled, some ten seconds each, and kept for the next start; `pagedcore kernels "
                 "build` makes them ahead, for cuda_kernels=DIR")


def _tell(name: str, arch: str) -> None:
    _tell_why()
    _log.info("compiling CUDA kernel %s for %s", name, arch)


def runs_on(arch: str) -> list[str]:
    """Architectures whose cubins run on a GPU of ``arch``: itself and older ones of its generation."""
    major, minor = parse_arch(arch)
    return [f"sm_{major}{m}" for m in range(minor, -1, -1)]


def build_image(name: str, arch: str) -> KernelImage:
    """Compile a named kernel.

    Raises:
        MissingDependency: a part of the compiler is not installed.
    """
    source, entry, cubin, resources = compile_kernel(name, arch)
    return KernelImage(
        name, arch, entry, source.threads, source.shared_bytes, resources.registers, compiler_versions(), cubin,
        resources.stack_bytes + resources.spill_bytes,
    )

"""Compiling functions to plain C entries, kept in Numba's cache on disk.

Owns the key under which Numba keeps them: Numba looks at a function's own file only, while the intrinsics that are
inlined into it live in other files.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import cfunc

from pagedcore_kernels.errors import InternalError

_PACKAGE = "pagedcore_kernels.cpu"
_compiling: list[str] = []
_entries: list[CompiledEntry] = []


class CompiledEntry:
    """A C function; keeps the machine code alive as long as its ``address`` is in use."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.address = int(compiled.address)

    @property
    def was_cached(self) -> bool:
        """Whether the machine code came from Numba's cache on disk."""
        return bool(self._compiled.cache_hits)

    @property
    def cache_directory(self) -> str | None:
        """Where Numba keeps the machine code, ``None`` if there is no place that it may write to."""
        return self._compiled._cache.cache_path  # type: ignore[no-any-return]


def compile_entry(function: Callable[..., Any], signature: Any) -> CompiledEntry:
    """Compile ``function`` with a Numba signature of numbers and addresses, or take it from Numba's cache.

    The interpreter's lock is not held while it runs, unless its caller holds it.

    Raises:
        InternalError: ``function`` closes over something else than integers; Numba's cache would never hit.
    """
    constants = [cell.cell_contents for cell in function.__closure__ or ()]
    if not all(isinstance(constant, int) for constant in constants):
        raise InternalError(f"{function.__name__}: closes over {constants}, a kernel may close over integers only.")
    # Why: a name of its own for each variant also keeps two processes from overwriting each other's entry in one index.
    variant = zlib.crc32(repr(constants).encode(), _source_fingerprint(function.__module__))
    function.__qualname__ += f"_{variant:08x}"
    _compiling.append(function.__qualname__)
    try:
        entry = CompiledEntry(cfunc(signature, cache=True, error_model="numpy")(function))
    except RuntimeError:  # Numba found no writable place for a cache
        entry = CompiledEntry(cfunc(signature, error_model="numpy")(function))
    finally:
        _compiling.pop()
    _entries.append(entry)
    return entry


def compiled_entries() -> list[CompiledEntry]:
    """Everything that this process has compiled or taken from the cache, in this order."""
    return list(_entries)


def present_kernel() -> str | None:
    """Name of a kernel that some thread of this process compiles now, or reads from the cache."""
    return next(iter(_compiling), None)


@cache
def _source_fingerprint(module: str) -> int:
    """Checksum of a module and of the modules of this package that it takes names from, directly or not."""
    found, unread = set(), [module]
    while unread:
        name = unread.pop()
        if name not in found:
            found.add(name)
            values = vars(sys.modules[name]).values()
            origins = {value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
                       for value in values}
            unread += [origin for origin in origins if origin.startswith(_PACKAGE)]
    sources = [Path(sys.modules[name].__file__ or "").read_bytes() for name in sorted(found)]
    return zlib.crc32(b"".join(sources))

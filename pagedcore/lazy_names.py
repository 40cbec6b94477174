"""Names that are imported when they are first used: a package's public ones, and functions of a storey above."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, extra: str = "", brought: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose public names live in other modules.

    Args:
        package: the package's name.
        homes: each public name's module.
        extra: what brings the libraries that the modules need, for the message, such as "pagedcore[openai]".
        brought: the top-level modules that ``extra`` brings.

    The function raises ``AttributeError`` for other names, and ``MissingDependency`` if one of ``brought`` is missing.
    """

    def get(name: str) -> Any:
        """Import a public name from its module on first use."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in brought:
                raise
            from pagedcore.errors import MissingDependency

            raise MissingDependency(f"{package} needs {error.name}. Install {extra}.") from error
        setattr(sys.modules[package], name, value)
        return value

    return get


def delegate(module: str, name: str) -> Callable[..., Any]:
    """Return a stand-in for a function of a module that is imported at its first call.

    For what an engine offers and a storey above it does, which nobody pays for who does not use it.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **keywords)

    return call

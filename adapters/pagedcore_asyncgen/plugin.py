"""Registers the async-generator adapter with pagedcore. Imports nothing but the hook marker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedcore.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from pagedcore.plugins.registry import Registry


@hookimpl
def pagedcore_register(registry: Registry) -> None:
    """Add the adapter to the table."""
    registry.adapters.add("async-generator", "pagedcore_asyncgen:create",
                          summary="a callable that returns an async generator of deltas")

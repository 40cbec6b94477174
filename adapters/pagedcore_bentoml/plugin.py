"""What pagedcore's plugin manager loads: the adapter's name, without importing BentoML."""

from __future__ import annotations

from typing import Any

from pagedcore.plugins.hookspecs import hookimpl


@hookimpl
def pagedcore_register(registry: Any) -> None:
    """Add the service to the table of adapters."""
    registry.adapters.add("bentoml", "pagedcore_bentoml:create_service", extra="bentoml",
                          summary="a BentoML service with the engine in its own process")

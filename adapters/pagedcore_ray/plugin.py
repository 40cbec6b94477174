"""What pagedcore's plugin manager loads: the adapter's name, without importing Ray."""

from __future__ import annotations

from typing import Any

from pagedcore.plugins.hookspecs import hookimpl


@hookimpl
def pagedcore_register(registry: Any) -> None:
    """Add the application to the table of adapters."""
    registry.adapters.add("ray", "pagedcore_ray.application:create", extra="ray",
                          summary="a Ray Serve application: replicas, prefix-affinity routing, OpenAI's interface")

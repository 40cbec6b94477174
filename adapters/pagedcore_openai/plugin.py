"""What pagedcore's plugin manager loads: the adapter's name, without importing Starlette."""

from __future__ import annotations

from typing import Any

from pagedcore.plugins.hookspecs import hookimpl


@hookimpl
def pagedcore_register(registry: Any) -> None:
    """Add the app to the table of adapters."""
    registry.adapters.add("openai", "pagedcore_openai.app:create", extra="openai",
                          summary="an ASGI app that speaks OpenAI's HTTP interface")

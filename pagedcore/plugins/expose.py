"""Make an adapter by name: the door from a framework's world into an engine. Adapters are plugins.

Owns the lookup only; every adapter lives in its own package and is imported when it is asked for.
"""

from __future__ import annotations

from typing import Any

from pagedcore.plugins.manager import create_plugin_manager


def expose(name: str, /, *, model: Any, **settings: Any) -> Any:
    """Build the adapter called ``name`` around a model.

    ``expose("async-generator", model="demo")`` returns a callable that produces async generators;
    ``pagedcore plugins --table adapters`` lists the names.

    Args:
        name: an entry of the plugin table ``adapters``.
        model: what ``Engine.from_pretrained`` takes.
        settings: what the adapter takes; fields of ``EngineConfig`` among them.

    Raises:
        InvalidConfig: no adapter has that name, or a setting is refused.
        MissingDependency: the adapter's framework is not installed; the message names the extra.
    """
    factory = create_plugin_manager().registry.adapters.load(name)
    return factory(model, **settings)

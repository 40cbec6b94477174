"""What of a service's configuration is refused before any worker starts: a worker that fails is started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import bentoml

from pagedcore import EngineConfig
from pagedcore.errors import InvalidConfig, describe

F = TypeVar("F", bound=Callable[..., Any])
#: Settings of ``AsyncEngine.from_pretrained`` that are no fields of ``EngineConfig``, or may be objects.
_NOT_IN_CONFIG: Final = frozenset({"tokenizer", "plugins", "stream_interval_s", "dead_after_s"})


def before_any_worker(hook: F) -> F:
    """Have BentoML call a class method once, in the process that starts the workers."""
    # Why not as a decorator: BentoML's makes a static method of it, which does not know its class.
    bentoml.on_deployment(hook)
    return hook


def require_valid_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``InvalidConfig`` for a setting that is unknown or out of range."""
    EngineConfig.from_keywords(**{name: value for name, value in settings.items() if name not in _NOT_IN_CONFIG})


def require_one_worker(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidConfig`` for a service configuration with another number of workers than 1."""
    workers = config.get("workers", 1)
    if workers != 1:
        raise InvalidConfig(f"workers: got {describe(workers)}, allowed is 1. For more, deploy the service again.")

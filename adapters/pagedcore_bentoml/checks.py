"""What of a service's configuration is refused before any worker starts: a worker that fails is started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import bentoml

from pagedcore import EngineConfig
from pagedcore.errors import InvalidConfig, describe

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_WORKER: Final = "_bentoml_impl.worker.service"
"""The module that BentoML runs in a worker."""
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


def require_model(model: Any) -> None:
    """Raise ``InvalidConfig`` if there is no model, or a path leads to no directory."""
    if model is None:
        raise InvalidConfig("model: got None, needed is a model; set it on the class or use create_service.")
    is_path = isinstance(model, os.PathLike) or (isinstance(model, str) and model.startswith(("/", ".", "~")))
    if is_path and not Path(model).is_dir():
        raise InvalidConfig("model: there is no directory at this path, seen from the service's own.")


def end_supervisor(error: Exception) -> None:
    """End ``bentoml serve`` where this process is a worker of it whose start failed: it would start one after another.

    With ``--reload`` it stays, for the next change of the code.
    """
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == _WORKER and "--development-mode" not in sys.argv:
        _log.error("the service cannot start and ends: %s: %s", type(error).__name__, error)
        os.kill(os.getppid(), signal.SIGTERM)


def require_one_worker(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidConfig`` for a service configuration with another number of workers than 1."""
    workers = config.get("workers", 1)
    if workers != 1:
        raise InvalidConfig(f"workers: got {describe(workers)}, allowed is 1. For more, deploy the service again.")

"""What of a service's configuration is refused before any worker starts: a worker that fails is started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import bentoml

from pagedcore import EngineConfig
from pagedcore.errors import InvalidConfig, describe
from pagedcore_http.drain import KEEP_IDLE_S

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_WORKER: Final = "_bentoml_impl.worker.service"
"""The module that BentoML runs in a worker."""
_FAILED: Final = signal.SIGUSR1
"""What a worker whose start failed sends to the process that started it."""
_SUPERVISOR: Final = "PAGEDCORE_BENTOML_SUPERVISOR"
"""Environment variable with the number of the process that takes ``_FAILED``."""
_NOT_IN_CONFIG: Final = frozenset({"tokenizer", "plugins", "stream_interval_s", "dead_after_s"})
"""Settings of ``AsyncEngine.from_pretrained`` that are no fields of ``EngineConfig``, or may be objects."""


def before_any_worker(hook: F) -> F:
    """Have BentoML call a class method once, in the process that starts the workers."""
    # Why not as a decorator: BentoML's makes a static method of it, which does not know its class.
    bentoml.on_deployment(hook)
    return hook


def require_valid_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``InvalidConfig`` for a setting that is unknown or out of range."""
    EngineConfig.require_names(settings)
    EngineConfig.from_keywords(**{name: value for name, value in settings.items() if name not in _NOT_IN_CONFIG})


def require_model(model: Any) -> None:
    """Raise ``InvalidConfig`` if there is no model, or a path leads to no directory."""
    if model is None:
        raise InvalidConfig("model: got None, needed is a model; set it on the class or use create_service.")
    is_path = isinstance(model, os.PathLike) or (isinstance(model, str) and model.startswith(("/", ".", "~")))
    if is_path and not Path(model).is_dir():
        raise InvalidConfig("model: there is no directory at this path, seen from the service's own.")


def end_on_failed_start() -> None:
    """Have ``bentoml serve``, which is this process, end with status 1 when a worker calls ``end_supervisor``."""
    # Why: BentoML also runs inside programs that have signals of their own.
    if "bentoml" in Path(sys.argv[0]).parts[-2:] and threading.current_thread() is threading.main_thread():
        os.environ[_SUPERVISOR] = str(os.getpid())
        signal.signal(_FAILED, _end_as_failed)


def _end_as_failed(number: int, frame: FrameType | None) -> None:
    told_to_end: Any = signal.getsignal(signal.SIGTERM)
    arbiter = getattr(getattr(getattr(told_to_end, "__self__", None), "controller", None), "arbiter", None)
    if arbiter is None:
        raise SystemExit(1)
    # Why: circus raises it when it has ended the other workers; after a signal alone the status would be 0.
    arbiter._exception = SystemExit(1)
    told_to_end(signal.SIGTERM, frame)


def end_supervisor(error: Exception) -> None:
    """End ``bentoml serve`` where this process is a worker of it whose start failed: it would start one after another.

    With ``--reload`` it stays, for the next change of the code.
    """
    if _is_worker() and "--development-mode" not in sys.argv:
        _log.error("the service cannot start and ends: %s: %s", type(error).__name__, error)
        knows_failures = os.environ.get(_SUPERVISOR) == str(os.getppid())
        os.kill(os.getppid(), _FAILED if knows_failures else signal.SIGTERM)


def _is_worker() -> bool:
    main = sys.modules["__main__"].__spec__
    return main is not None and main.name == _WORKER


def keep_idle_connections() -> None:
    """Have the server of this worker keep idle connections for ``KEEP_IDLE_S``, unless its operator set a limit.

    BentoML's 5 seconds are as long as clients keep theirs: a call would meet a connection that is being closed.
    """
    config: Any = getattr(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), "config", None)
    if _is_worker() and config is not None and "--timeout-keep-alive" not in sys.argv:
        config.timeout_keep_alive = KEEP_IDLE_S


def require_one_worker(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidConfig`` for a service configuration with another number of workers than 1."""
    workers = config.get("workers", 1)
    if workers != 1:
        raise InvalidConfig(f"workers: got {describe(workers)}, allowed is 1. For more, deploy the service again.")

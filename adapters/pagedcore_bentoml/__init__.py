"""A BentoML service around a pagedcore engine, in the service's own process.

    from pagedcore_bentoml import create_service

    LLM = create_service("demo")                 # then: bentoml serve service:LLM

Uses only public names of pagedcore and what all HTTP doors share (``pagedcore_http``). BentoML is imported when one of
the names below is first used. Read ``runner.py`` for the service, ``wire.py`` for requests and responses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from pagedcore.errors import MissingDependency

if TYPE_CHECKING:
    from pagedcore_bentoml.openai_mount import OpenAIMount
    from pagedcore_bentoml.packing import bento_image
    from pagedcore_bentoml.runner import PagedCoreRunner
    from pagedcore_bentoml.service import create_service
    from pagedcore_bentoml.wire import BatchCompletion, Completion
    from pagedcore_http.events import Event, EventParser, parse_events

__all__ = ["BatchCompletion", "Completion", "Event", "EventParser", "OpenAIMount", "PagedCoreRunner", "bento_image",
           "create_service", "parse_events"]

_HOMES: Final = {
    "BatchCompletion": "pagedcore_bentoml.wire",
    "Completion": "pagedcore_bentoml.wire",
    "Event": "pagedcore_http.events",
    "EventParser": "pagedcore_http.events",
    "OpenAIMount": "pagedcore_bentoml.openai_mount",
    "PagedCoreRunner": "pagedcore_bentoml.runner",
    "bento_image": "pagedcore_bentoml.packing",
    "create_service": "pagedcore_bentoml.service",
    "parse_events": "pagedcore_http.events",
}
_BROUGHT_BY_THE_EXTRA: Final = ("bentoml", "_bentoml_sdk", "starlette", "pydantic")


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_bentoml' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _BROUGHT_BY_THE_EXTRA:
            raise
        raise MissingDependency(f"pagedcore_bentoml needs {error.name}. Install pagedcore[bentoml].") from error
    globals()[name] = value
    return value

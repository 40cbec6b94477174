"""Makes a service in one line, as ``expose("bentoml", model=...)`` does. Next: ``runner.py``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import bentoml

from pagedcore_bentoml.checks import require_one_worker
from pagedcore_bentoml.packing import bento_image, is_directory
from pagedcore_bentoml.runner import PagedCoreRunner

TIMEOUT_S: Final = 300
"""BentoML's limit for a whole response, and for the first byte of a stream, in seconds."""
UNTRACED: Final = "/stream$|/v1/"
"""Requests without OpenTelemetry spans unless ``service`` sets another, as a regular expression of addresses."""


def create_service(
    model: Any,
    *,
    name: str = "pagedcore",
    runner: type[PagedCoreRunner] = PagedCoreRunner,
    service: Mapping[str, Any] | None = None,
    openai: bool | str = False,
    **settings: Any,
) -> bentoml.Service[PagedCoreRunner]:
    """Make a BentoML service around a model; assign it to a name of a module and serve that.

    Args:
        model: what ``AsyncEngine.from_pretrained`` takes; nothing is loaded before the service starts.
        name: the service's name.
        runner: a subclass with further endpoints or other limits.
        service: keywords of ``bentoml.service``, such as ``traffic`` and ``resources``. ``image`` is ``bento_image`` of
            the model unless it is given: with it ``bentoml build`` packs pagedcore and a model that is a directory.
            Streams are not traced unless there is ``tracing``: BentoML makes a span of every event, which costs more
            than the event.
        openai: whether OpenAI's interface is mounted at ``/v1``, over the same engine; text is the name that calls give
            as their ``model``, ``True`` the model's own.
        **settings: keywords of ``AsyncEngine.from_pretrained``.

    Raises:
        MissingDependency: ``openai``, and ``pagedcore[openai]`` is not installed.
        InvalidConfig: ``service`` asks for more than one worker, or a setting is unknown or out of range. The model is
            looked for when the service starts.
    """
    options = {"traffic": {"timeout": TIMEOUT_S}, "tracing": {"excluded_urls": UNTRACED}, **(service or {})}
    options.setdefault("workers", 1)
    options.setdefault("image", bento_image(model))
    require_one_worker(options)
    inner = type(runner.__name__, (runner,), {"model": model, "settings": settings, "__doc__": runner.__doc__,
                                              "__module__": runner.__module__})
    made: bentoml.Service[PagedCoreRunner] = bentoml.service(inner, name=name, **options)
    _belongs_to(made, _caller())
    if openai:
        from pagedcore_bentoml.openai_mount import OpenAIMount

        made.mount_asgi_app(OpenAIMount(openai if isinstance(openai, str) else _name_of(model)), path="/v1")
    return made


def _name_of(model: Any) -> str:
    """Return a name that shows no path."""
    if is_directory(model):
        return Path(model).resolve().name
    return model if isinstance(model, str) else "pagedcore"


def _belongs_to(made: Any, module: str) -> None:
    # Why: BentoML looks the service up in the module that calls ``bentoml.service``, which is this one.
    if hasattr(made, "_caller_module"):
        made._caller_module = module


def _caller() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0].startswith("pagedcore"):
        frame = frame.f_back
    return "__main__" if frame is None else str(frame.f_globals["__name__"])

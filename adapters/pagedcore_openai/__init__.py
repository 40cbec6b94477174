"""An OpenAI-compatible ASGI app around pagedcore engines, and the server ``pagedcore serve``.

    from pagedcore_openai import openai_app

    app.mount("/llm", openai_app(engine, name="demo"))        # then: OpenAI(base_url=".../llm/v1")

Uses only public names of pagedcore and what all HTTP doors share (``pagedcore_http``). Starlette is imported when one
of the names below is first used, uvicorn by ``serve`` alone. Read ``endpoints.py`` for the way of a call, ``fields.py``
for what a body may say, and ``chat.py``, ``completions.py`` and ``responses.py`` for what is returned.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from pagedcore.errors import MissingDependency

if TYPE_CHECKING:
    from pagedcore_openai.app import OpenAIApp, create, openai_app
    from pagedcore_openai.server import serve
    from pagedcore_openai.tenants import ApiKeys

__all__ = ["ApiKeys", "OpenAIApp", "create", "openai_app", "serve"]

_HOMES: Final = {
    "ApiKeys": "pagedcore_openai.tenants",
    "OpenAIApp": "pagedcore_openai.app",
    "create": "pagedcore_openai.app",
    "openai_app": "pagedcore_openai.app",
    "serve": "pagedcore_openai.server",
}
_BROUGHT_BY_THE_EXTRA: Final = ("starlette", "uvicorn")


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedcore_openai' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _BROUGHT_BY_THE_EXTRA:
            raise
        raise MissingDependency(f"pagedcore_openai needs {error.name}. Install pagedcore[openai].") from error
    globals()[name] = value
    return value

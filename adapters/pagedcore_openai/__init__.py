"""An OpenAI-compatible ASGI app around pagedcore engines, and the server ``pagedcore serve``.

    from pagedcore_openai import openai_app

    app.mount("/llm", openai_app(engine, name="demo"))        # then: OpenAI(base_url=".../llm/v1")

Uses only public names of pagedcore and what all HTTP doors share (``pagedcore_http``). Starlette is imported when one
of the names below is first used, uvicorn by ``serve`` alone. Read ``endpoints.py`` for the way of a call, ``fields.py``
for what a body may say, and ``chat.py``, ``completions.py`` and ``responses.py`` for what is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pagedcore.lazy_names import lazy_names

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

__getattr__ = lazy_names(__name__, _HOMES, extra="pagedcore[openai]", brought=("starlette", "uvicorn", "httptools"))

"""The page at ``/``: its files, with the headers that keep everything foreign out, and the events of its live view."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagedcore_http.event_stream import EventStream
from pagedcore_http.refusals import Refusal
from pagedcore_openai.endpoints import Endpoint
from pagedcore_openai.errors import openai_refusal

_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
                 ".js": "text/javascript; charset=utf-8"}
INDEX: Final = "index.html"
HEADERS: Final = {
    # Why no exception of any kind: the page has no inline script or style, and nothing of it comes from elsewhere.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                               "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Read the page's files: by name, their bytes and their types."""
    return {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _FOLDER.iterdir() if path.suffix in _TYPES}


class Page(Endpoint):
    """Sends the page and its files; needs no key, because the page asks for it and knows nothing without it."""

    is_counted: ClassVar = False
    needs_key: ClassVar = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return one of the files that were read at the start. Raises ``HTTPException``: no such file."""
        name = request.path_params.get("name", INDEX)
        if name not in self.service.page_files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        content, media_type = self.service.page_files[name]
        return Response(content, headers=HEADERS, media_type=media_type)


class LiveStream(EventStream):
    """Sends the frames of a live view."""

    def refusal_of(self, error: Exception) -> Refusal:
        """Return the refusal with OpenAI's body."""
        return openai_refusal(error)


class Live(Endpoint):
    """Streams what the engine of a model does: all of it without keys and to admins, else the caller's own part."""

    is_counted: ClassVar = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the stream, which ends when the app drains."""
        served = self.service.model_of(dict(request.query_params), tenant)
        key, sees = await self.service.view_of(request, tenant)
        stream = LiveStream(self.service.live[self.service.names.base_of(served)].events(key, sees))
        stream.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        return stream

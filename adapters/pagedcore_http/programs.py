"""For a Starlette or FastAPI program of one's own: pagedcore's errors become the responses of pagedcore's own doors."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import PagedcoreError
from pagedcore_http.event_stream import ClientGone
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, refusal_of


def answer_refusals(app: Starlette) -> None:
    """Have an application answer what its endpoints let through of pagedcore's errors, instead of with 500.

    A refused request is a 400, a full queue a 429, a drain or a closed engine a 503, a time limit a 504; the body has
    field, value and limit, and 429 and 503 carry ``Retry-After``. A failure of the engine stays a 500. For a client
    that has left (``ClientGone``) the access log has 499.
    """
    app.add_exception_handler(PagedcoreError, _refuse)
    app.add_exception_handler(ClientGone, _close)


async def _refuse(_: Request, error: Exception) -> Response:
    return refusal_of(error).response()


async def _close(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)

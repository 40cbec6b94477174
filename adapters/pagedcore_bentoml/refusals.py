"""What a caller is told when a call fails: the status, the body and the headers for every kind of error.

The body says what was refused, the given value and the limit, as the error itself does; never a prompt, a path or the
repr of an object.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from starlette.responses import Response

from pagedcore.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    PagedcoreError,
    QueueTimeout,
    RequestTimeout,
)

_log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST: Final = 499
"""Nobody reads it; it keeps an answer that was not wanted any more apart in the access log."""
RETRY_AFTER_S: Final = 1
"""When to try again after a refusal for lack of room, in seconds: a few steps later there may be some."""
RETRY_ELSEWHERE_S: Final = 5
"""When to try again while this process drains or its engine stands still: another one has to come first."""


class RefusedAtTheDoor(InvalidRequest):
    """A call is refused by its HTTP side, before the engine hears of it.

    Attributes:
        status: the HTTP status that says so.
    """

    def __init__(self, status: HTTPStatus, what: str, given: object, limit: str, advice: str = "") -> None:
        super().__init__(what, given, limit, advice)
        self.status = status


class NotServing(PagedcoreError):
    """This process takes no calls: it drains, or its engine stands still."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failure as it is told."""

    status: int
    body: dict[str, Any]
    retry_after_s: int | None = None

    def response(self) -> Response:
        """Make the response that tells it."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Response(json.dumps(self.body), self.status, headers, "application/json")


def refusal_of(error: Exception) -> Refusal:
    """Say how an error is told; one that nobody foresaw is logged and told without its words."""
    status, retry_after_s = _status_of(error)
    if not isinstance(error, PagedcoreError):
        _log.error("a call failed with an unforeseen error", exc_info=error)
        message = "an unforeseen error; the service's log has it."
        return Refusal(status, {"error": {"type": "InternalError", "message": message}})
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InvalidRequest):
        told |= {"what": error.what, "given": error.given, "limit": error.limit}
    elif isinstance(error, EngineOverloaded):
        told |= {"what": "waiting queue", "given": str(error.num_waiting), "limit": str(error.limit)}
    if retry_after_s is not None:
        told["retry_after_s"] = retry_after_s
    return Refusal(status, {"error": told}, retry_after_s)


def _status_of(error: Exception) -> tuple[int, int | None]:
    if isinstance(error, RefusedAtTheDoor):
        return error.status, None
    for kind, status, retry_after_s in _STATUSES:
        if isinstance(error, kind):
            return status, retry_after_s
    return HTTPStatus.INTERNAL_SERVER_ERROR, None


_STATUSES: Final[tuple[tuple[type[Exception], HTTPStatus, int | None], ...]] = (
    (InvalidRequest, HTTPStatus.BAD_REQUEST, None),
    (EngineOverloaded, HTTPStatus.TOO_MANY_REQUESTS, RETRY_AFTER_S),
    (QueueTimeout, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S),
    (NotServing, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (EngineClosed, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (RequestTimeout, HTTPStatus.GATEWAY_TIMEOUT, None),
)

"""Error to status: the response, with body and headers, for every kind of error.

The body has what was refused, the given value and the limit, as the error itself does; never a prompt, a path or the
repr of an object.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedcore.errors import (
    DeadlineMissed,
    EngineAsleep,
    EngineClosed,
    EngineOverloaded,
    GrammarFailed,
    InvalidRequest,
    PagedcoreError,
    PromiseRefused,
    QueueTimeout,
    RequestTimeout,
    WeightsIncomplete,
)

_log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST: Final = 499
"""The status in the access log of a call whose client left; no client receives it."""
RETRY_AFTER_S: Final = 1
"""When to try again after a refusal for lack of room, in seconds."""
RETRY_ELSEWHERE_S: Final = 5
"""When to try again while this process drains or its engine is stalled: another process has to start first."""


class RefusedAtTheDoor(InvalidRequest):
    """A call is refused by its HTTP side, before it reaches the engine.

    Attributes:
        status: the HTTP status of the response.
    """

    def __init__(
        self, status: HTTPStatus, what: str, given: object, limit: str, advice: str = "", *, is_described: bool = False
    ) -> None:
        super().__init__(what, given, limit, advice, is_described=is_described)
        self.status = status


class NotServing(PagedcoreError):
    """This process takes no calls: it drains, or its engine is stalled."""


class SaltNotDerived(PagedcoreError):
    """The operator's hook gave no salt for a call, which is refused rather than run without one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The response to a call that failed."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """Return the Starlette response."""
        return Response(json.dumps(self.body), self.status, dict(self.headers), "application/json")


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal for an error; an unforeseen one is logged, and its message stays in the log."""
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, {"error": {"type": "HTTPException", "message": error.detail}},
                       error.headers or {})
    status, retry_after_s = _status_of(error)
    if not isinstance(error, PagedcoreError):
        _log.error("a call failed with an unforeseen error", exc_info=error)
        message = "an unforeseen error; the service's log has it."
        return Refusal(status, {"error": {"type": "InternalError", "message": message}})
    fields: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InvalidRequest):
        fields |= {"what": error.what, "given": error.given, "limit": error.limit}
    elif isinstance(error, GrammarFailed):
        fields |= {"what": "structured", "given": "a grammar that fails while it is used",
                   "limit": "one that this model's tokens can follow"}
    elif isinstance(error, PromiseRefused):
        fields |= {"what": "deadline_s", "given": str(error.deadline_s), "limit": "what can be promised"}
    elif isinstance(error, EngineOverloaded):
        fields |= {"what": "waiting queue", "given": str(error.num_waiting), "limit": str(error.limit)}
    if retry_after_s is None:
        return Refusal(status, {"error": fields})
    return Refusal(status, {"error": {**fields, "retry_after_s": retry_after_s}}, {"Retry-After": str(retry_after_s)})


def _status_of(error: Exception) -> tuple[int, int | None]:
    if isinstance(error, RefusedAtTheDoor):
        return error.status, RETRY_AFTER_S if error.status in _PASSING else None
    if isinstance(error, PromiseRefused):
        # Safety: whole seconds. A finer time would say more of what others have to do.
        return HTTPStatus.TOO_MANY_REQUESTS, max(RETRY_AFTER_S, math.ceil(error.retry_after_s))
    for kind, status, retry_after_s in _STATUSES:
        if isinstance(error, kind):
            return status, retry_after_s
    return HTTPStatus.INTERNAL_SERVER_ERROR, None


_PASSING: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_STATUSES: Final[tuple[tuple[type[Exception], HTTPStatus, int | None], ...]] = (
    (InvalidRequest, HTTPStatus.BAD_REQUEST, None),
    # Why: a grammar fails again however often a client tries; a 500 would make it.
    (GrammarFailed, HTTPStatus.BAD_REQUEST, None),
    (EngineOverloaded, HTTPStatus.TOO_MANY_REQUESTS, RETRY_AFTER_S),
    (QueueTimeout, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S),
    (DeadlineMissed, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_AFTER_S),
    (NotServing, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (EngineClosed, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (WeightsIncomplete, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (EngineAsleep, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_ELSEWHERE_S),
    (RequestTimeout, HTTPStatus.GATEWAY_TIMEOUT, None),
)

"""The endpoints that let a served model give its memory back and take it again, for admins, with vLLM's names."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar, Final, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import EngineInUse, InvalidConfig, InvalidRequest
from pagedcore_http.events import encode
from pagedcore_http.refusals import RefusedAtTheDoor
from pagedcore_openai import fields as known
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.endpoints import JSON, Endpoint

_SLEEP: Final = known.Form(frozenset({"model", "level", "mode"}))
_WAKE: Final = known.Form(frozenset({"model"}))
_LEVELS: Final[dict[str, Any]] = {"1": 1, "2": 2}
Ending = Literal["wait", "abort"]


def _told(served: ServedModel) -> Response:
    level = served.engine.sleep_level
    return Response(encode({"model": served.name, "is_sleeping": level > 0, "level": level}), media_type=JSON)


class Sleep(Endpoint):
    """Lets an engine sleep, as ``AsyncEngine.sleep``."""

    is_for_admins: ClassVar = True

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return what ``IsSleeping`` does. Raises ``InvalidRequest``, and ``RefusedAtTheDoor`` (429) as below."""
        given = _SLEEP.read(dict(request.query_params))
        served, level, mode = self.service.model_of(given, tenant), given.get("level", "1"), given.get("mode", "wait")
        if level not in _LEVELS:
            raise InvalidRequest("level", level, "1 or 2")
        if mode not in ("wait", "abort"):
            raise InvalidRequest("mode", mode, '"wait" or "abort"')
        shared, level, ending = self.service.shared, _LEVELS[level], cast(Ending, mode)
        try:
            if shared is None:
                await served.engine.sleep(level, running=ending)
            else:
                await shared.sleep(self.service.names.base_of(served), level, running=ending)
        except EngineInUse:
            raise _busy() from None
        return _told(served)


class WakeUp(Endpoint):
    """Wakes an engine, as ``AsyncEngine.wake``."""

    is_for_admins: ClassVar = True

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return what ``IsSleeping`` does.

        Raises ``RefusedAtTheDoor``: 429 while another change is made, 503 where there is no room, or other files.
        """
        served = self.service.model_of(_WAKE.read(dict(request.query_params)), tenant)
        try:
            if self.service.shared is not None:
                async with self.service.shared.use(self.service.names.base_of(served)):
                    return _told(served)
            await served.engine.wake()
        except EngineInUse:
            raise _busy() from None
        except (InvalidConfig, InvalidRequest, MemoryError) as error:
            raise RefusedAtTheDoor(HTTPStatus.SERVICE_UNAVAILABLE, "wake", str(error) or type(error).__name__,
                                   "room for the model, and the files that it was read from", is_described=True
                                   ) from None
        return _told(served)


class IsSleeping(Endpoint):
    """Says whether an engine sleeps, and at which level; 0 is awake."""

    is_for_admins: ClassVar = True
    is_counted: ClassVar = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the model's name and level."""
        return _told(self.service.model_of(_WAKE.read(dict(request.query_params)), tenant))


def _busy() -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.TOO_MANY_REQUESTS, "changes of a model's memory", 2, "at most 1")

"""Calls of texts that get no completion: what vectors, scores and classes have in common."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import DeadlineMissed, InvalidRequest, RequestTimeout
from pagedcore_http.event_stream import run_until_disconnect
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.endpoints import JSON, Endpoint
from pagedcore_openai.errors import with_names
from pagedcore_openai.prompts import prompts_of
from pagedcore_openai.service import Service
from pagedcore_openai.times import Timed

MAX_TEXTS: Final = 2048
"""Texts of one call, as OpenAI takes them; the engine has 64 of them at a time."""


class Pooled(Endpoint):
    """Answers a call of texts that get no completion."""

    def __init__(self, service: Service, kind: type[PooledCall]) -> None:
        super().__init__(service)
        self._kind = kind

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the whole response."""
        kind = self._kind
        fields = kind.form.read(await self.service.read_body(request))
        served = self.service.model_of(fields, tenant)
        caller = await self.service.caller_of(request, tenant)
        try:
            call = kind(served, fields, caller)
            await self.service.begin(request, served, call)
            call.owner = self.service.owner_of(call.options["cache_salt"], caller.derived)
            content = await run_until_disconnect(request.receive, call.whole())
        except InvalidRequest as error:
            raise with_names(error, kind.names) from None
        except (DeadlineMissed, RequestTimeout) as error:
            raise call.as_asked(error) from None
        return Response(content, 200, {"x-request-id": call.id}, JSON)


class PooledCall(Timed, ABC):
    """A call whose fields were read; making one raises ``InvalidRequest`` for what is refused before the engine."""

    form: ClassVar[known.Form]
    verb: ClassVar[str]
    """The method of an ``AsyncEngine`` that it takes."""
    prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str]]
    """What a body calls otherwise than the engine does."""

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        if not hasattr(served.engine, self.verb):
            # Why: an engine in another process, behind Ray Serve, completes alone.
            raise HTTPException(HTTPStatus.NOT_FOUND,
                                f"This model answers no calls of {self.verb}: its engine is not here.")
        self.served, self.engine = served, served.engine
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.options = known.options_of(fields, caller, self.id, served.lora)
        self.owner: object = None
        """Kept for the time of the call, so that the live view knows whose requests have its salt."""
        self.read(fields)
        self.timeout_s = known.timeout_of(fields)

    @property
    def limits(self) -> dict[str, Any]:
        """What every method takes."""
        return {"timeout_s": self.left_s, "wait_for_room": False, **self.options_left}

    @abstractmethod
    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the fields of its own. Raises ``InvalidRequest``."""

    @abstractmethod
    async def whole(self) -> str:
        """Compute and return the response as JSON; cancelling this aborts the requests.

        Raises:
            PagedcoreError: as from the method of ``AsyncEngine``.
        """


class TextsCall(PooledCall):
    """A call whose ``input`` is text, token ids, or a list of either."""

    names: ClassVar = {"text": "input", "texts": "input", "prompt": "input"}

    def read(self, fields: Mapping[str, Any]) -> None:
        """Read the texts."""
        given = known.required(fields, "input", "text, token ids, or a list of either")
        self._texts = prompts_of(given, "input", MAX_TEXTS)

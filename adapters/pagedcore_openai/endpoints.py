"""The endpoints. A call passes in this order: host, key, drain, number of calls, body, fields, model, salt, engine."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedcore import Chat
from pagedcore.errors import InvalidPrompt, RecordingError
from pagedcore.metrics.recorder import engine_metrics_text
from pagedcore_http.event_stream import ClientGone, run_until_disconnect
from pagedcore_http.events import encode
from pagedcore_http.refusals import CLIENT_CLOSED_REQUEST, RETRY_ELSEWHERE_S, RefusedAtTheDoor
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call
from pagedcore_openai.chat_prompt import read_chat
from pagedcore_openai.errors import openai_refusal
from pagedcore_openai.service import Service
from pagedcore_openai.tools import functions_only

JSON = "application/json"


class Endpoint(ABC):
    """An ASGI app for one route, so that the response is a part of the call that it answers."""

    is_for_admins: ClassVar[bool] = False
    is_counted: ClassVar[bool] = True
    """Whether it is refused while the app drains, and waited for."""
    needs_key: ClassVar[bool] = True

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call; every error becomes a response."""
        request = Request(scope, receive)
        async with AsyncExitStack() as stack:
            # Why not left with ``respond``: a stream is sent after it.
            request.state.until_answered = stack
            try:
                tenant = self.service.admit(request, is_for_admins=self.is_for_admins, needs_key=self.needs_key)
                if self.is_counted:
                    stack.enter_context(self.service.open_calls.call())
                    self.service.require_room()
                response = await self.respond(request, tenant)
            except (ClientGone, ClientDisconnect):
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:  # every error becomes a response
                response = openai_refusal(error).response()
            await response(scope, receive, send)

    @abstractmethod
    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the response to a call of a tenant; what it raises becomes one."""


class Completing(Endpoint):
    """Completes what the body of a call asks for."""

    def __init__(self, service: Service, kind: type[Call]) -> None:
        super().__init__(service)
        self._kind = kind

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the whole response, or the stream that will be sent."""
        fields = self._kind.form.read(await self.service.read_body(request))
        served = self.service.model_of(fields, tenant)
        caller = await self.service.caller_of(request, tenant)
        call = self._kind(served, fields, caller)
        # Why so late: what is refused wakes no model.
        await self.service.begin(request, served, call)
        call.owner = self.service.owner_of(call.options["cache_salt"], caller.derived)
        headers = {"x-request-id": call.id}
        if call.is_stream:
            return call.stream_class(call.events(), headers)
        return Response(await run_until_disconnect(request.receive, call.whole()), 200, headers, JSON)


class Tokenize(Endpoint):
    """Tells the tokens of a text or a chat, as a completion would get them."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the token ids, their number and the longest context."""
        fields = known.TOKENIZE.read(await self.service.read_body(request))
        served, wants_names = self.service.model_of(fields, tenant), known.flag(fields, "return_token_strs")
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidPrompt("prompt", fields.get("prompt"), "given, or messages, and not both")
        if "prompt" in fields:
            prompt = Chat(fields["prompt"], functions_only(fields["tools"])) if "tools" in fields else fields["prompt"]
        else:
            prompt = read_chat(fields["messages"], fields, served.engine.chat_format)
        if not isinstance(prompt, str | list | Chat) or (isinstance(prompt, list) and "prompt" in fields):
            raise InvalidPrompt("prompt", prompt, "text")
        token_ids = await asyncio.to_thread(served.engine.encode, prompt)
        told: dict[str, Any] = {"count": len(token_ids), "max_model_len": served.max_model_len, "tokens": token_ids}
        if wants_names:
            told["token_strs"] = [served.spell(token_id).text for token_id in token_ids]
        return Response(await asyncio.to_thread(encode, told), media_type=JSON)


class Detokenize(Endpoint):
    """Tells the text of tokens."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the text."""
        fields = known.DETOKENIZE.read(await self.service.read_body(request))
        served = self.service.model_of(fields, tenant)
        token_ids = known.required(fields, "tokens", "a list of token ids")
        text = await asyncio.to_thread(served.engine.decode, token_ids)
        return Response(encode({"prompt": text}), media_type=JSON)


class Models(Endpoint):
    """Lists the models, or shows one."""

    is_counted: ClassVar = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the models that calls may name."""
        name, names = request.path_params.get("model"), self.service.names
        if name is None:
            listed = names.listed(tenant)
        else:
            found = self.service.model_of({"model": name}, tenant)
            listed = [(found, None if found.lora is None else names.base_of(found))]
        models = [
            {"id": one.name, "object": "model", "created": one.created, "owned_by": "pagedcore",
             "max_model_len": one.max_model_len, "generation_defaults": one.engine.generation_defaults,
             **({} if parent is None else {"parent": parent})}
            for one, parent in listed
        ]
        return Response(encode(models[0] if name is not None else {"object": "list", "data": models}), media_type=JSON)


class StoredResponse(Endpoint):
    """Shows a stored response, or removes it."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the response; after a DELETE, that it is gone."""
        response_id, owner = request.path_params["response"], (await self.service.caller_of(request, tenant)).derived
        stores = [one.stored for one in self.service.models.values()]
        stored = next((one for one in stores if response_id in one), stores[0])
        if request.method != "DELETE":
            return Response(stored.body_of(response_id, owner), media_type=JSON)
        stored.forget(response_id, owner)
        return Response(encode({"id": response_id, "object": "response", "deleted": True}), media_type=JSON)


class Metrics(Endpoint):
    """Shows the metrics of all engines, to admins alone where there are keys: they count all tenants together."""

    is_for_admins: ClassVar = True
    is_counted: ClassVar = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return them in Prometheus' text format."""
        engines = [one.engine for one in self.service.models.values()]
        # Why: on threads, because the numbers are taken between two steps, which may be long.
        texts = await asyncio.gather(*(asyncio.to_thread(engine_metrics_text, engine) for engine in engines))
        return Response(join_metrics(texts), media_type="text/plain; version=0.0.4")


class Recording(Endpoint):
    """Sends what the flight recorder of one engine has, to admins alone where there are keys; one at a time."""

    is_for_admins: ClassVar = True
    is_counted: ClassVar = False

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._is_writing = False

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the file that ``pagedcore replay`` reads.

        Raises ``RefusedAtTheDoor`` (429) while another one is written, and ``HTTPException`` (404) if there is none.
        """
        served = self.service.model_of(dict(request.query_params), tenant)
        if self._is_writing:
            raise RefusedAtTheDoor(HTTPStatus.TOO_MANY_REQUESTS, "recordings in flight", 2, "at most 1")
        self._is_writing = True
        try:
            write = await served.engine.call(lambda engine: engine.take_recording())
            # Why on a thread: it is some ten megabytes to compress, and neither engine nor loop may wait for it.
            content = await asyncio.to_thread(_written, write)
        except RecordingError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, str(error)) from None
        finally:
            self._is_writing = False
        headers = {"Content-Disposition": 'attachment; filename="recording.jsonl.gz"', "Cache-Control": "no-store",
                   "X-Content-Type-Options": "nosniff"}
        return Response(content, headers=headers, media_type="application/gzip")


def _written(write: Callable[[Path], None]) -> bytes:
    # Safety: a new directory of this user alone, removed at once.
    with TemporaryDirectory(prefix="pagedcore-recording-") as folder:
        write(path := Path(folder) / "recording.jsonl.gz")
        return path.read_bytes()


class Health(Endpoint):
    """Says whether to send calls here; needs no key."""

    is_counted: ClassVar = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without looking at the call."""
        await (await self.respond(Request(scope), None))(scope, receive, send)

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the worst state of all engines, 503 unless it is "ready"."""
        states = {one.engine.health().status for one in self.service.models.values()}
        state = next((one for one in ("dead", "degraded") if one in states), "ready")
        if self.service.open_calls.is_draining:
            state = "draining"
        is_ready = state == "ready"
        headers = {} if is_ready else {"Retry-After": str(RETRY_ELSEWHERE_S)}
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(encode({"status": state}), status, headers, JSON)


def join_metrics(texts: list[str]) -> str:
    """Return several pages of metrics as one, each family with one head and the samples of all pages."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for family in text.split("# HELP ")[1:]:
            head, kind, *samples = family.splitlines(keepends=True)
            families.setdefault(f"# HELP {head}{kind}", []).extend(samples)
    return "".join(head + "".join(samples) for head, samples in families.items())

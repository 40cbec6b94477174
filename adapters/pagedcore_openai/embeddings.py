"""``/v1/embeddings``: the vectors of texts or token ids, as numbers or in base64."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagedcore import Embedding
from pagedcore.errors import InvalidRequest
from pagedcore_http.event_stream import run_until_disconnect
from pagedcore_http.events import encode
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_http.salts import Caller
from pagedcore_openai import fields as known
from pagedcore_openai.calls import ServedModel
from pagedcore_openai.endpoints import JSON, Endpoint
from pagedcore_openai.errors import with_names
from pagedcore_openai.prompts import prompts_of

MAX_TEXTS: Final = 2048
"""Texts of one call, as OpenAI takes them; the engine has 64 of them at a time."""
_FORMATS: Final = ("float", "base64")
_NAMES: Final = {"text": "input", "texts": "input", "prompt": "input"}
"""What a body calls otherwise than the engine does."""


class Embeddings(Endpoint):
    """Embeds what the body of a call has."""

    async def respond(self, request: Request, tenant: bytes | None) -> Response:
        """Return the vectors, in the order of the texts."""
        fields = known.EMBEDDING.read(await self.service.read_body(request))
        served = self.service.model_of(fields)
        caller = await self.service.caller_of(request, tenant)
        try:
            call = EmbeddingCall(served, fields, caller)
            call.owner = self.service.owner_of(call.options["cache_salt"], caller.derived)
            content = await run_until_disconnect(request.receive, call.whole())
        except InvalidRequest as error:
            raise with_names(error, _NAMES) from None
        return Response(content, 200, {"x-request-id": call.id}, JSON)


class EmbeddingCall:
    """A call whose fields were read; making one raises ``InvalidRequest`` for what is refused before the engine."""

    prefix: ClassVar[str] = "embd"

    def __init__(self, served: ServedModel, fields: Mapping[str, Any], caller: Caller) -> None:
        if not hasattr(served.engine, "embed"):
            # Why: an engine in another process, behind Ray Serve, completes alone.
            raise HTTPException(HTTPStatus.NOT_FOUND, "There are no embeddings of this model: its engine is not here.")
        self.served = served
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.options = known.options_of(fields, caller, self.id)
        self.owner: object = None
        """Kept for the time of the call, so that the live view knows whose requests have its salt."""
        given = known.required(fields, "input", "text, token ids, or a list of either")
        self._texts = prompts_of(given, "input", MAX_TEXTS)
        self._asked = {name: fields[name] for name in ("pooling", "normalize", "dimensions", "prompt_name")
                       if name in fields}
        self._timeout_s = known.timeout_of(fields)
        self._format = fields.get("encoding_format", "float")
        if self._format not in _FORMATS:
            raise InvalidRequest("encoding_format", self._format, f"one of {', '.join(_FORMATS)}")

    async def whole(self) -> str:
        """Embed and return the response as JSON; cancelling this aborts the requests.

        Raises:
            PagedcoreError: as from ``AsyncEngine.embed``.
        """
        found = await self.served.engine.embed(
            self._texts, timeout_s=self._timeout_s, wait_for_room=False, **self._asked, **self.options)
        write = partial(_written, is_packed=self._format == "base64")
        entries = await map_in_pieces(write, [*enumerate(found)], at_once=1)
        count = sum(one.num_prompt_tokens for one in found)
        rest = encode({"model": self.served.name, "usage": {"prompt_tokens": count, "total_tokens": count}})
        return f'{{"object":"list","data":[{",".join(entries)}],{rest[1:]}'


def _written(placed: tuple[int, Embedding], *, is_packed: bool) -> str:
    """Return one entry of a response; packed vectors are float32 with the lowest byte first, as clients read them."""
    place, one = placed
    vector: str | Sequence[float] = (
        base64.b64encode(one.vector.astype(np.dtype("<f4")).tobytes()).decode() if is_packed else one.vector.tolist())
    return encode({"object": "embedding", "index": place, "embedding": vector})

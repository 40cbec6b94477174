"""Reading a request's body within limits: nothing is parsed before its size, its type and its depth are known.

Owns what HTTP lets a caller send; what the values may be is the engine's one validator's business.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request

from pagedcore.errors import InvalidPrompt, UnknownParameter
from pagedcore_bentoml.refusals import RefusedAtTheDoor

MAX_BODY_BYTES: Final = 2**20
"""Bytes of a body unless the service says otherwise: a quarter of a million tokens of text."""
MAX_HEADER_BYTES: Final = 2**14
"""Bytes of all header names and values."""
MAX_JSON_DEPTH: Final = 64
"""Lists and objects inside each other."""


async def read_fields(request: Request, known: Collection[str], required: Collection[str],
                      max_body_bytes: int) -> dict[str, Any]:
    """Read a JSON object whose names are all ``known``, the ``required`` ones among them.

    Raises:
        RefusedAtTheDoor: the type, the size or the form is refused, with the status that says so.
        UnknownParameter: a name that is not known; names are never ignored.
        InvalidPrompt: a required name is missing.
    """
    _require_short_headers(request)
    _require_json(request)
    fields = _parse(await _read(request, max_body_bytes))
    for name in fields:
        if name not in known:
            raise UnknownParameter("field name", name, f"one of {', '.join(known)}")
    for name in required:
        if name not in fields:
            raise InvalidPrompt(name, None, f"an object with the field {name}")
    return fields


def _require_short_headers(request: Request) -> None:
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > MAX_HEADER_BYTES:
        raise RefusedAtTheDoor(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers", size,
                               f"at most {MAX_HEADER_BYTES} bytes")


def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RefusedAtTheDoor(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content type", media_type, "application/json")


async def _read(request: Request, max_bytes: int) -> bytes:
    # Safety: what is announced is refused unread; what is not announced is counted while it comes.
    announced = int(request.headers.get("content-length", "0")[:20])
    if announced > max_bytes:
        raise _too_large(announced, max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    return bytes(body)


def _too_large(given: object, max_bytes: int) -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body", given, f"at most {max_bytes} bytes")


def _parse(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Why: from None, because the parser's own message repeats the text.
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", len(body), "JSON text in UTF-8") from None
    if not isinstance(fields, dict):
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", fields, "a JSON object")
    if _is_deeper_than(fields, MAX_JSON_DEPTH):
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", "nested JSON", f"at most {MAX_JSON_DEPTH} levels")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        if not level:
            return False
        inside = [child for holder in level for child in (holder.values() if isinstance(holder, dict) else holder)]
        level = [child for child in inside if isinstance(child, dict | list)]
    return bool(level)

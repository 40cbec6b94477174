"""Reads a request's JSON body within limits of type, size and depth. The engine validates the values."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request

from pagedcore.errors import InvalidPrompt, UnknownParameter, describe_name
from pagedcore_http.refusals import RefusedAtTheDoor

TEXT_BYTES_PER_TOKEN: Final = 16
"""Bytes of text per token of context, and their most for any context, as the engine accepts them in a chat."""
MAX_TEXT_BYTES: Final = 2**22
ROOM_BYTES: Final = 2**18
"""Bytes of a body besides one prompt as long as the context: parameters, and batches of short prompts."""
MAX_BODY_BYTES: Final = MAX_TEXT_BYTES + ROOM_BYTES
"""Bytes of a body for any context."""
MAX_OF_A_KIND: Final = 2**14
"""Strings, lists, and words such as ``null`` of a body: the longest tools of a chat, or 128 chats of 32 messages. The
parser makes as many in two milliseconds, but a collection of garbage may come in between."""
MAX_ESCAPES: Final = 2**18
"""Backslashes of a body. The parser takes up to ten times as long for an escape as for a byte of text."""
MAX_JSON_DEPTH: Final = 64
"""Lists and objects inside each other."""
_HOLDERS: Final = frozenset((dict, list))
_LONG_BODY: Final = 2**14
"""Bytes that take up to a millisecond to parse."""
_BYTES_PER_VALUE: Final = 16
"""Bytes of the limit per number or object of a body: it has as many as the context has tokens, and room."""
_VALUES_AT_ONCE: Final = 2048
_SEARCHED_AT_ONCE: Final = 2**19
"""Bytes that are searched for a word within one to two milliseconds."""
_PAUSE_S: Final = 50e-6
"""Long enough for a thread that waits for the interpreter's lock to wake and get it."""


def body_limit(max_model_len: int) -> int:
    """Return the bytes of a body that may be needed for a context of so many tokens."""
    return min(TEXT_BYTES_PER_TOKEN * max_model_len, MAX_TEXT_BYTES) + ROOM_BYTES


async def read_object(request: Request, max_body_bytes: int) -> dict[str, Any]:
    """Read a JSON object of any names.

    Raises:
        RefusedAtTheDoor: the type, the size or the form is refused, with the status that says so.
        ClientDisconnect: the client disconnected before the end of its body.
    """
    _require_json(request)
    body = await _read(request, max_body_bytes)
    if len(body) <= _LONG_BODY:
        return _require_flat_object(_load(_decode(body), object_pairs_hook=_object))
    return await asyncio.to_thread(_parse_long, body, max_body_bytes // _BYTES_PER_VALUE)


async def read_fields(request: Request, known: Collection[str], required: Collection[str],
                      max_body_bytes: int) -> dict[str, Any]:
    """Read a JSON object whose names are all ``known``, the ``required`` ones among them.

    Raises:
        RefusedAtTheDoor, ClientDisconnect: as from ``read_object``.
        UnknownParameter: a name that is not known; names are never ignored.
        InvalidPrompt: a required name is missing.
    """
    fields = await read_object(request, max_body_bytes)
    for name in fields:
        if name not in known:
            raise UnknownParameter.named("field name", name, known)
    for name in required:
        if name not in fields:
            raise InvalidPrompt(name, None, f"an object with the field {name}")
    return fields


def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RefusedAtTheDoor(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content type", media_type, "application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RefusedAtTheDoor(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content encoding", describe_name(encoding),
                               "identity", "Send the body as it is, without compression.", is_described=True)


async def _read(request: Request, max_bytes: int) -> bytes:
    # Safety: a body that is announced as too large is refused unread, any other is counted while it arrives.
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "content-length", length, "a number of bytes")
    announced = int(length[:20])
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


class _Pauses:
    """Lets other threads run while a long body is parsed, as the parser itself never releases the interpreter's lock.
    Numbers and objects are counted, at most ``limit`` of them; strings and lists were counted before.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_values = 0

    def integer(self, digits: str) -> int:
        """Parse an integer."""
        # Why: the time for one grows with the square of its length; the longest that is parsed takes as long as 200.
        self._count(1 + len(digits) // 20)
        return int(digits)

    def real(self, digits: str) -> float:
        """Parse a number that is no integer."""
        self._count(1)
        return float(digits)

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Make an object."""
        self._count(1)
        return dict(pairs) if len(pairs) < 2 else _object(pairs)

    def _count(self, num_values: int) -> None:
        before, self._num_values = self._num_values, self._num_values + num_values
        if self._num_values > self._limit:
            raise _too_many("numbers and objects", self._num_values, self._limit)
        if before // _VALUES_AT_ONCE != self._num_values // _VALUES_AT_ONCE:
            time.sleep(_PAUSE_S)


def _parse_long(body: bytes, max_values: int) -> dict[str, Any]:
    # Why: each of these goes through the body once, and none of them releases the interpreter's lock.
    for check in (_require_few_escapes, _require_few_strings, _require_few_lists_and_words):
        check(body)
        time.sleep(_PAUSE_S)
    text = _decode(body)
    time.sleep(_PAUSE_S)
    pauses = _Pauses(max_values)
    fields = _load(text, parse_int=pauses.integer, parse_float=pauses.real, object_pairs_hook=pauses.object)
    time.sleep(_PAUSE_S)
    return _require_flat_object(fields)


def _require_few_escapes(body: bytes) -> None:
    num_backslashes = body.count(b"\\")
    if num_backslashes > MAX_ESCAPES:
        raise _too_many("backslashes (a client can send UTF-8 instead of escapes)", num_backslashes, MAX_ESCAPES)


def _require_few_strings(body: bytes, limit: int = MAX_OF_A_KIND) -> None:
    # Why: the parser calls nothing while it makes strings, lists or words, so they are counted before. A string has
    # one or two quotes that do not follow a backslash.
    num_quotes = body.count(b'"') - body.count(b'\\"')
    if num_quotes > 2 * limit:
        raise _too_many("strings", num_quotes // 2, limit)


def _require_few_lists_and_words(body: bytes, limit: int = MAX_OF_A_KIND) -> None:
    for what, marks in (("lists", (b"[",)), ("words", (b"null", b"true", b"false"))):
        if _count_all(body, marks) > limit:
            time.sleep(_PAUSE_S)
            outside_of_strings = b" ".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
            time.sleep(_PAUSE_S)
            num_found = _count_all(outside_of_strings, marks)
            if num_found > limit:
                raise _too_many(what, num_found, limit)


def _count_all(body: bytes, marks: Collection[bytes]) -> int:
    # Why in pieces: a search never releases the interpreter's lock. Of thousands, a few that are cut are not counted.
    num_found = 0
    for start in range(0, len(body), _SEARCHED_AT_ONCE):
        num_found += sum(body.count(mark, start, start + _SEARCHED_AT_ONCE) for mark in marks)
        time.sleep(_PAUSE_S)
    return num_found


def _too_many(what: str, given: int, limit: int) -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body", given, f"at most {limit} {what}")


def _decode(body: bytes) -> str:
    # Safety: decoded here, because the parser would take UTF-16 and UTF-32 too, which no filter before us reads.
    try:
        return body.decode() or "{}"
    except ValueError:
        raise _not_json("bytes that are no UTF-8") from None


def _load(text: str, **hooks: Any) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, **hooks)
    except RefusedAtTheDoor:
        raise
    except (ValueError, RecursionError) as error:
        # Safety: from None, and its place alone, because the parser's own message repeats the text.
        raise _not_json(_flaw(text, error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Safety: a filter before us may have read the other one of two members with one name.
    if len(members := dict(pairs)) < len(pairs):
        raise _not_json("an object with two members of one name")
    return members


def _flaw(text: str, error: Exception) -> str:
    if text.startswith("\ufeff"):
        return "a byte order mark before the JSON text"
    if isinstance(error, json.JSONDecodeError):
        kind = "something after the JSON text" if error.msg.startswith("Extra data") else "text that is no JSON"
        return f"{kind}, at character {error.pos + 1} of {len(text)}"
    return f"text of {len(text)} characters that is no JSON"


def _not_json(flaw: str) -> RefusedAtTheDoor:
    return RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", flaw, "JSON text in UTF-8", is_described=True)


def _require_flat_object(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", fields, "a JSON object")
    if _is_deeper_than(fields, MAX_JSON_DEPTH):
        raise RefusedAtTheDoor(HTTPStatus.BAD_REQUEST, "body", "JSON that is nested deeper",
                               f"at most {MAX_JSON_DEPTH} levels", is_described=True)
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        children = [holder.values() if type(holder) is dict else holder for holder in level]
        # Why: most lists hold numbers only, and this looks at them fifty times as fast as a loop.
        level = [child for some in children if not _HOLDERS.isdisjoint(map(type, some))
                 for child in some if type(child) in _HOLDERS]  # fmt: skip
        if not level:
            return False
    return True

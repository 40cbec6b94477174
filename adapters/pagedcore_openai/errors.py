"""Errors as OpenAI's clients expect them: the body of a refusal, and how a stream ends that fails.

What an error says and which status it has is the same as at every HTTP door (``pagedcore_http.refusals``).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException

from pagedcore.errors import (
    InvalidMaxTokens,
    InvalidPrompt,
    InvalidRequest,
    InvalidText,
    PromptEmpty,
    PromptTooLong,
    UnknownParameter,
)
from pagedcore_http.event_stream import EventStream
from pagedcore_http.events import frame
from pagedcore_http.refusals import Refusal, RefusedAtTheDoor, refusal_of
from pagedcore_openai.stored import ResponseNotFound
from pagedcore_openai.tenants import InvalidKey

Refused = TypeVar("Refused", bound=InvalidRequest)

DONE: Final = "data: [DONE]\n\n"
"""The last event of a stream of chat or text completions."""
_WORD: Final = re.compile(r"\w+")
_PARAMETER: Final = re.compile(r"\b[a-z]+(_[a-z]+)+\b")
"""A name that is no word of a sentence."""
_FIELD: Final = re.compile(r"[A-Za-z_][\w.\[\]]{0,63}", re.ASCII)
"""What may be repeated of a caller's body: the name of a field, or the place of one."""
_TYPES: Final = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error", HTTPStatus.FORBIDDEN: "permission_error",
}


class FieldNotSupported(RefusedAtTheDoor):
    """A field of OpenAI's or vLLM's interface, or a value of it, that would change completions if it were ignored."""

    def __init__(self, name: str, given: object, limit: str, advice: str = "", *, is_described: bool = False) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, name, given, limit, advice, is_described=is_described)

    @classmethod
    def of_name(cls, what: str, given: object, limit: str, advice: str = "") -> FieldNotSupported:
        """Make the error of a value that is a name of the interface, which it repeats if it looks like one."""
        # Safety: any other text may be a part of a prompt.
        is_name = isinstance(given, str) and is_field(given)
        return cls(what, repr(given) if is_name else given, limit, advice, is_described=is_name)


class CompletionTooLong(InvalidMaxTokens):
    """Prompt and completion together are more than the context; each of them alone is not."""

    @classmethod
    def of(cls, error: InvalidMaxTokens) -> CompletionTooLong:
        """Make it of the engine's refusal of a completion's length."""
        return cls(error.what, error.given, error.limit, _advice_of(error), is_described=True)


class FieldMissing(RefusedAtTheDoor):
    """A field without which there is nothing to do."""

    def __init__(self, name: str, limit: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, name, None, limit)


class ModelNotFound(RefusedAtTheDoor):
    """No model of the given name is served."""

    def __init__(self, given: object) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, "model", given, "a model that is served", "GET /v1/models lists them.")


def renamed(error: Refused, what: str, given: str = "", advice: str = "", limit: str = "") -> Refused:
    """Return a refusal with the name of a field of the body, and whatever else is known better here.

    For the kinds that are made of these alone.
    """
    return type(error)(what, given or error.given, limit or error.limit, advice or _advice_of(error), is_described=True)


def _advice_of(error: InvalidRequest) -> str:
    return str(error).partition(f"allowed is {error.limit}. ")[2]


def with_names(error: Refused, names: Mapping[str, str]) -> Refused:
    """Return a refusal with the body's own names for what the engine calls otherwise, or as it is if there are none.

    Args:
        error: what it is about is a name of ``names``, or the place of something within one.
        names: those of the engine, with those of the body.
    """
    name = _WORD.match(error.what)
    own = names.get(name[0]) if name is not None else None
    limit = _PARAMETER.sub(lambda found: names.get(found[0], found[0]), error.limit)
    if name is None or (own in (None, name[0]) and limit == error.limit):
        return error
    return renamed(error, (own or name[0]) + error.what[name.end() :], limit=limit)


_CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (InvalidKey, "invalid_api_key"),
    (ModelNotFound, "model_not_found"),
    (ResponseNotFound, "previous_response_not_found"),
    (FieldNotSupported, "unsupported_parameter"),
    (FieldMissing, "missing_required_parameter"),
    (UnknownParameter, "unknown_parameter"),
    (PromptTooLong, "context_length_exceeded"),
    (CompletionTooLong, "context_length_exceeded"),
    (InvalidText, "invalid_prompt"),
    (InvalidPrompt, "invalid_prompt"),
    (PromptEmpty, "invalid_prompt"),
    (InvalidRequest, "invalid_value"),
)


def openai_refusal(error: Exception) -> Refusal:
    """Return the refusal for an error, its body in OpenAI's form; an unforeseen one's message stays in the log."""
    refusal = refusal_of(error)
    # Why: clients of others know OpenAI's error by these words, and not by its code: litellm by the first, LangChain by
    # the last.
    is_exceeded = isinstance(error, PromptTooLong | CompletionTooLong)
    start = "This model's maximum context length is exceeded: the prompt is too long. " if is_exceeded else ""
    told: dict[str, Any] = {"message": start + refusal.body["error"]["message"], "type": _type_of(refusal.status),
                            "param": _param_of(error), "code": _code_of(error, refusal.status)}
    return Refusal(refusal.status, {"error": told}, refusal.headers)


def _type_of(status: int) -> str:
    return _TYPES.get(HTTPStatus(status), "invalid_request_error" if status < 500 else "server_error")


def _param_of(error: Exception) -> str | None:
    if not isinstance(error, InvalidRequest):
        return None
    # Why: the name of a field may go on with the keyword of a schema.
    field, _, _ = error.what.partition(", ")
    return field if is_field(field) else None


def is_field(text: str) -> bool:
    """Whether text is the name or the place of a field, which a refusal may repeat."""
    return _FIELD.fullmatch(text) is not None


def _code_of(error: Exception, status: int) -> str | None:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    # Why: what is refused for the form of the call has no value of a field to blame.
    if isinstance(error, HTTPException) or status not in (400, 401, 404):
        return None
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)


class ChunkStream(EventStream):
    """Sends the chunks of a completion; an error after the first becomes an event with OpenAI's error body.

    Invariant: the response ends with ``[DONE]`` or an error, or the client has disconnected.
    """

    def __init__(self, events: AsyncGenerator[str, None], headers: dict[str, str]) -> None:
        super().__init__(events)
        self.headers.update(headers)

    def ends(self, text: str) -> bool:
        """Whether ``text`` has the last event; JSON in ASCII on one line cannot end like it."""
        return text.endswith(DONE)

    def refusal_of(self, error: Exception) -> Refusal:
        """Return the refusal with OpenAI's body."""
        return openai_refusal(error)

    def error_event(self, refusal: Refusal) -> str:
        """Return the event after which clients raise the error."""
        return frame(refusal.body)


class NamedEventStream(ChunkStream):
    """Sends the events of a response; the last one is known by the end of the generator."""

    def ends(self, text: str) -> bool:
        """The response's body ends when there is nothing more to send."""
        return False

    def error_event(self, refusal: Refusal) -> str:
        """Return the event "error", whose data has the error's fields themselves."""
        told = refusal.body["error"]
        fields = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
        return frame({**fields, "sequence_number": 0}, "error")

"""What a body says of the form of its completions: ``response_format``, ``text.format``, and vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pagedcore import Chat, StructuredOutput
from pagedcore.errors import InvalidGrammar, InvalidRequest
from pagedcore_openai.errors import FieldNotSupported, is_field, renamed

NAMES: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                "guided_grammar")
"""The fields of chats and text completions that are read here."""
_VLLM: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
                "json_object": "json_object"}
_FORMAT_FIELDS: Final = {"type", "json_schema"}
_SCHEMA_FIELDS: Final = {"type", "name", "description", "schema", "strict"}
_LIMIT: Final = "name, description, schema and strict"
_LINE: Final = re.compile(r"\bat (\d+)\(\d+\)")
"""Where a grammar is refused, as the library says it."""
_ARGUMENTS: Final = re.compile(r"arguments_(\d+):")
"""The rule of a tool's arguments, by its place among those that may be called."""
_EBNF: Final = re.compile(r"(?m)^\s*[\w-]+\s*::=")


def structured_of(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the form that a body asks for, ``None`` for any text.

    Raises:
        InvalidRequest: it asks in two ways, or the grammar is refused; the field is named.
        FieldNotSupported: a format or a kind of grammar that is not supported.
    """
    found: dict[str, StructuredOutput] = {}
    for name in NAMES:
        if name in fields:
            value = fields[name]
            one = format_of(name, value) if name == "response_format" else _of_vllm(name, value)
            if one is not None:
                found[name] = one
    if len(found) > 1:
        *others, last = found
        raise InvalidRequest(last, "a second grammar", f"null beside {others[0]}", is_described=True)
    return next(iter(found.values()), None)


def format_of(name: str, value: Any) -> StructuredOutput | None:
    """Return the form of ``response_format``, or of ``text.format`` of a response. Raises as ``structured_of``.

    ``strict`` changes nothing: a schema is always kept, whether or not it names all its properties as required.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(name, value, "an object")
    given = {key: one for key, one in value.items() if one is not None}
    match given.get("type"):
        case "text":
            _require_names(name, given, {"type"}, "type alone; a schema needs the type json_schema")
            return None
        case "json_object":
            # Why: llama.cpp's form of a schema.
            _require_names(name, given, {"type", "schema"}, "type and schema")
            return _schema(name, given) if "schema" in given else StructuredOutput(json_object=True)
        case "json_schema":
            # Why: chats have the schema one level deeper than responses.
            inner = given.get("json_schema", given)
            _require_names(name, given, _FORMAT_FIELDS | _SCHEMA_FIELDS, _LIMIT)
            if isinstance(inner, dict):
                _require_names(name, inner, _SCHEMA_FIELDS, _LIMIT)
            return _schema(name, inner)
    raise FieldNotSupported(name, value.get("type"), "text, json_object or json_schema as its type")


def _require_names(name: str, value: Mapping[str, Any], known: Collection[str], limit: str) -> None:
    for one in value.keys() - known:
        raise FieldNotSupported(f"{name}.{one}" if is_field(one) else name, value[one], limit)


def _schema(name: str, value: Any) -> StructuredOutput:
    """Return the form of an object with a schema."""
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise InvalidRequest(f"{name}.schema", value, "a JSON schema, an object")
    if type(value.get("strict")) not in (bool, type(None)):
        raise InvalidRequest(f"{name}.strict", value["strict"], "true or false")
    with naming(name):
        return StructuredOutput(json_schema=value["schema"])


@contextmanager
def naming(name: str) -> Generator[None, None, None]:
    """Raise what is refused of a grammar with the caller's name of the field, not the engine's."""
    try:
        yield
    except InvalidGrammar as error:
        raise of_field(error, name) from None


def of_field(error: InvalidGrammar, name: str, given: str = "") -> InvalidGrammar:
    """Return the refusal of a grammar with the name of the field that gave it, and what was given if that is known.

    The engine's own name is that of a kind of grammar, and may go on with a keyword of the schema.
    """
    _, _, keyword = error.what.partition(", ")
    return renamed(error, f"{name}, {keyword}" if keyword else name, given)


def field_of(fields: Mapping[str, Any]) -> str:
    """Return the name of the field that gives the grammar of a call; tools do where no other field does."""
    text = fields.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        return "text.format"
    return next((name for name in NAMES if name in fields and fields[name] != {"type": "text"}), "tools")


def refused_tool(error: InvalidGrammar, grammar: StructuredOutput | None, chat: Chat, choice: object) -> int | None:
    """Return the place of the tool whose schema is refused, if it is one's: the message has the line of the grammar."""
    line, lines = _LINE.search(str(error)), (grammar.lark or "").splitlines() if grammar is not None else []
    if line is None or not 1 <= int(line[1]) <= len(lines):
        return None
    rule = _ARGUMENTS.match(lines[int(line[1]) - 1])
    if rule is None or not isinstance(choice, dict):
        return None if rule is None else int(rule[1])
    return next(place for place, one in enumerate(chat.functions) if one["name"] == choice["function"]["name"])


def _of_vllm(name: str, value: Any) -> StructuredOutput | None:
    """Return the form of ``structured_outputs``, an object, or of one of the older fields, its value."""
    if name != "structured_outputs":
        return _form(name, name.removeprefix("guided_"), value)
    if not isinstance(value, dict):
        raise InvalidRequest(name, value, "an object")
    given = {key: one for key, one in value.items() if one is not None and one is not False}
    for key in given.keys() - _VLLM.keys():
        raise FieldNotSupported(name, key, f"one of {', '.join(_VLLM)}")
    if len(given) > 1:
        raise InvalidRequest(name, len(given), "one kind of grammar")
    return next((_form(name, key, one) for key, one in given.items()), None)


def _form(name: str, kind: str, value: Any) -> StructuredOutput:
    field = _VLLM[kind]
    if field == "grammar":
        field = "ebnf" if isinstance(value, str) and _EBNF.search(value) else "lark"
    with naming(name):
        return StructuredOutput.from_mapping({field: value})

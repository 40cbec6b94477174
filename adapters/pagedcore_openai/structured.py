"""What a body says of the form of its completions: ``response_format``, ``text.format``, and vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pagedcore import StructuredOutput
from pagedcore.errors import InvalidGrammar, InvalidRequest
from pagedcore_openai.errors import FieldNotSupported

NAMES: Final = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                "guided_grammar")
"""The fields of chats and text completions that are read here."""
_VLLM: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
                "json_object": "json_object"}
_FORMAT_FIELDS: Final = {"type", "json_schema"}
_SCHEMA_FIELDS: Final = {"type", "name", "description", "schema", "strict"}
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
            try:
                one = format_of(name, value) if name == "response_format" else _of_vllm(name, value)
            except InvalidGrammar as error:
                # Why: the caller's name of the field, not the engine's.
                raise InvalidGrammar(name, error.given, error.limit, is_described=True) from None
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
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            # Why: chats have the schema one level deeper than responses.
            inner = value.get("json_schema", value)
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise InvalidRequest(f"{name}.schema", value, "a JSON schema, an object")
            for one in (value.keys() - _FORMAT_FIELDS - _SCHEMA_FIELDS) | (inner.keys() - _SCHEMA_FIELDS):
                raise FieldNotSupported(name, one, "name, description, schema and strict")
            if type(inner.get("strict")) not in (bool, type(None)):
                raise InvalidRequest(f"{name}.strict", inner["strict"], "true or false")
            return StructuredOutput(json_schema=inner["schema"])
    raise FieldNotSupported(name, value.get("type"), "text, json_object or json_schema as its type")


def _of_vllm(name: str, value: Any) -> StructuredOutput | None:
    """Return the form of ``structured_outputs``, an object, or of one of the older fields, its value."""
    if name != "structured_outputs":
        return _form(name.removeprefix("guided_"), value)
    if not isinstance(value, dict):
        raise InvalidRequest(name, value, "an object")
    given = {key: one for key, one in value.items() if one is not None and one is not False}
    for key in given.keys() - _VLLM.keys():
        raise FieldNotSupported(name, key, f"one of {', '.join(_VLLM)}")
    if len(given) > 1:
        raise InvalidRequest(name, len(given), "one kind of grammar")
    return next((_form(key, one) for key, one in given.items()), None)


def _form(kind: str, value: Any) -> StructuredOutput:
    field = _VLLM[kind]
    if field == "grammar":
        field = "ebnf" if isinstance(value, str) and _EBNF.search(value) else "lark"
    return StructuredOutput.from_mapping({field: value})

"""What a JSON schema lets one argument be, for formats that write arguments as text between tags.

Law: bounded work; a schema is any JSON that a caller has sent.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagedcore.tool_calls.json_scanner import WHITESPACE, JsonScanner

TEXT: Final = frozenset({"string"})
Types = frozenset[str] | None
"""Types of JSON, "integer" is "number"; ``None``: any."""
_MOST_STEPS: Final = 8
"""References and alternatives within each other that are followed."""
_LONGEST_LITERAL: Final = 65_536
"""Characters of a value in Python's form that is read."""
_OF_FIRST: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Types:
    """Return the types that a schema lets a value have; references are looked up in ``root``."""
    if not isinstance(schema, Mapping) or depth > _MOST_STEPS:
        return None
    if isinstance(path := schema.get("$ref"), str):
        return types_of(_found(path, root), root, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str):
        return frozenset(map(_type_of, values))
    if (kind := schema.get("type")) is not None:
        kinds = [kind] if isinstance(kind, str) else kind
        return frozenset("number" if one == "integer" else str(one) for one in kinds) if kinds else None
    for name in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(name), Sequence) and several:
            each = [types_of(one, root, depth + 1) for one in several[:64]]
            return frozenset().union(*(one for one in each if one is not None)) if None not in each else None
    if isinstance(several := schema.get("allOf"), Sequence) and several:
        return types_of(several[0], root, depth + 1)
    return None


def type_of_text(text: str) -> str:
    """Return the type of JSON that a text is; empty: it is none."""
    text, scanner = text.strip(WHITESPACE), JsonScanner()
    # Why a blank: a number ends with what follows it.
    end = scanner.push(text + " ") if text else 0
    is_json = scanner.is_done and end >= len(text)
    return _OF_FIRST.get(text[0], "number") if is_json else ""


def json_of_python(text: str) -> str:
    """Return the JSON of ``True``, ``False``, ``None``, or of a list or a dictionary of Python; empty: it is none."""
    if text not in ("True", "False", "None") and (text[:1] not in ("[", "{") or len(text) > _LONGEST_LITERAL):
        return ""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # what it says of text that is none
        return ""


def _found(path: str, root: Any) -> Any:
    if not path.startswith("#"):
        return None
    for name in path.split("/")[1:_MOST_STEPS]:
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _type_of(value: Any) -> str:
    kinds = ((str, "string"), (bool, "boolean"), (int | float, "number"), (Mapping, "object"), (Sequence, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")

"""What is done to a JSON schema before the library compiles it: words that say nothing are left out, and what the
library would keep otherwise than it is meant is said so that it keeps it, or refused.

A schema that is lenient (the one of a tool without ``strict``) loses what cannot be kept instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedcore.errors import InvalidGrammar

_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Those that the library keeps; all others are annotations, as JSON Schema has it."""
_DATE: Final = (r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
                "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))")
_TIME: Final = (r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?"
                "([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])")
_AS_PATTERNS: Final = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[tT]{_TIME}$", "time": f"^{_TIME}$"}
"""Formats without the leap seconds and the year 0 that RFC 3339 has and what reads dates refuses. A pattern instead of
a format, and not beside it: an intersection takes the library half a millisecond."""
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES: Final = ("const", "enum")
_LAST: Final = 2**63 - 1
_UNREADABLE: Final = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!])|\\[1-9])")
"""Look-around and references back, which the library's regular expressions have not."""
_IS_OF_INTEREST: Final = re.compile(
    r'"(?:format|uniqueItems|patternProperties)"|[0-9]{16}|[0-9][eE]\+?[0-9]{2}|\(\?|\\\\[1-9]|\\u')
"""Without any of this in its text a schema stays as it is."""
_NAME: Final = re.compile(r"\^([A-Za-z0-9_-]+)\$")
"""A pattern that is one name."""
_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
                   "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def kept_exactly(what: str, schema: Any, text: str) -> Any:
    """Return a schema that the library keeps as this one is meant.

    Args:
        what: the name of the schema in errors.
        schema: decoded JSON.
        text: the same before it was decoded.

    Raises:
        InvalidGrammar: a number is beyond what the library can tell from its neighbours, unless the schema is lenient.
    """
    if not _IS_OF_INTEREST.search(text):
        return schema
    own = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    return _kept(what, schema, is_lenient=isinstance(own, Mapping) and own.get("lenient") is True)


def _kept(what: str, schema: Any, *, is_lenient: bool) -> Any:
    if isinstance(schema, list):
        # An old form of ``items``.
        return [_kept(what, one, is_lenient=is_lenient) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    is_integer = made.get("type") == "integer"
    for name in (*_NUMBERS, *_VALUES):
        is_far = name in _NUMBERS and not is_integer and _is_far(made.get(name))
        number = made.get(name) if is_far else next(_inexact(made.get(name), is_bound=name in _NUMBERS), None)
        if number is not None:
            if not is_lenient:
                raise InvalidGrammar(f"{what}, {name}", number, "a number that a double holds exactly, below 2**63",
                                     "Ask for longer numbers as strings, with a pattern.")
            del made[name]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if is_lenient and isinstance(made.get("pattern"), str) and _UNREADABLE.search(made["pattern"]):
        del made["pattern"]
    form = made.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del made["format"]
    elif isinstance(form, str) and form in _AS_PATTERNS:
        pattern, others = _AS_PATTERNS[made.pop("format")], made.get("allOf")
        if made.setdefault("pattern", pattern) != pattern:
            made["allOf"] = [*(others if isinstance(others, list) else ()), {"type": "string", "pattern": pattern}]
    _declare_required(made)
    for name in _SCHEMAS:
        if name in made:
            made[name] = _kept(what, made[name], is_lenient=is_lenient)
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [_kept(what, one, is_lenient=is_lenient) for one in made[name]]
    for name in _MAPS:
        if isinstance(made.get(name), dict):
            made[name] = {key: _kept(what, one, is_lenient=is_lenient) for key, one in made[name].items()}
    return made


def _is_far(bound: Any) -> bool:
    """Whether the library has no expression for the numbers up to a bound; of integers it has one."""
    return isinstance(bound, float) and abs(bound) > _LAST


def _inexact(value: Any, *, is_bound: bool) -> Iterator[Any]:
    """Yield numbers of a value that the library, which reads all as doubles, would write or compare as others."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int | float) and not _is_exact(one, is_bound=is_bound):
            yield one


def _is_exact(number: float, *, is_bound: bool) -> bool:
    if isinstance(number, float):
        return math.isfinite(number)
    # Why the last: the library cuts a bound at the largest integer of 64 bits, which is then right.
    return abs(number) <= 2**53 or (abs(number) <= _LAST and int(float(number)) == number) or (
        is_bound and number == _LAST)


def _declare_required(schema: dict[str, Any]) -> None:
    """Declare members that a pattern names, and those that are required and that patterns alone would describe: the
    library cannot require these otherwise, and goes on where no name is left.
    """
    patterns, required = schema.get("patternProperties"), schema.get("required")
    if not isinstance(patterns, dict) or not patterns:
        return
    declared = schema.get("properties")
    declared = dict(declared) if isinstance(declared, dict) else {}
    names = [found[1] for pattern in patterns if (found := _NAME.fullmatch(pattern))]
    names += [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
    for name in dict.fromkeys(names):
        fitting = [one for pattern, one in patterns.items() if _matches(pattern, name)]
        if fitting and name not in declared:
            declared[name] = fitting[0] if len(fitting) == 1 else {"allOf": fitting}
        elif fitting:
            declared[name] = {"allOf": [declared[name], *fitting]}
    schema["properties"] = declared
    schema["patternProperties"] = {pattern: one for pattern, one in patterns.items() if not _NAME.fullmatch(pattern)}


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError):
        return False

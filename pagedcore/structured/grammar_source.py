"""From a ``StructuredOutput`` to the text that the grammar library compiles.

Owns what is refused before compiling: regular expressions and terminals that expand to too much, and the few keywords
whose compilation takes more than in proportion to their text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

from pagedcore.config import limits
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammar_size import size_of_lark, size_of_patterns, size_of_regex
from pagedcore.structured.schema_rules import kept_exactly
from pagedcore.structured_output import INLINE_SCHEMA, WHITESPACE, StructuredOutput

_ESCAPES: Final = 'nrbtf\\"'
"""What may follow a backslash in JSON texts where a character must not have two spellings; all others are written."""


class GrammarSource(NamedTuple):
    """A grammar as the library's JSON, and what it expands to."""

    text: str
    size: int


def source_of(wanted: StructuredOutput) -> GrammarSource:
    """Return the grammar as the library takes it.

    Raises:
        InvalidGrammar: it cannot be converted, it expands to too much, or it has a keyword that takes too long to
            compile.
    """
    source = _source_of(wanted)
    if source.size > limits.MAX_GRAMMAR_SIZE:
        raise InvalidGrammar(
            f"{wanted.kind}, what it expands to", f"at least {source.size}", f"at most {limits.MAX_GRAMMAR_SIZE}",
            "A part that may be left out counts with all that may come next: use fewer of them in a row.",
            is_described=True,
        )
    return source


def _source_of(wanted: StructuredOutput) -> GrammarSource:
    from llguidance import LLMatcher

    if wanted.json_object:
        return _of_schema({"type": "object"})
    if wanted.json_schema is not None:
        return _of_schema(*_prepared("json_schema", json.loads(wanted.json_schema), wanted.json_schema))
    if wanted.choice is not None:
        return GrammarSource(str(LLMatcher.grammar_from_regex("|".join(map(_quoted, wanted.choice)))), 0)
    if wanted.regex is not None:
        return GrammarSource(str(LLMatcher.grammar_from_regex(wanted.regex)), size_of_regex(wanted.regex).branches)
    if wanted.ebnf is not None:
        lark = _lark_of_ebnf(wanted.ebnf)
        return GrammarSource(_in_lark(lark), size_of_lark(lark))
    return _of_lark(wanted.lark or "")


def _lark_of_ebnf(ebnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(ebnf))
    except Exception as error:  # Why any: the library raises the bare Exception.
        advice = f"It cannot be converted: {first_line(error)}"
    raise InvalidGrammar("ebnf", ebnf, "a grammar in EBNF as llama.cpp has it (GBNF)", advice)


def first_line(error: object) -> str:
    """Return the beginning of what the library says, which may repeat a part of the caller's own grammar."""
    text = str(error).partition("\n")[0][: limits.MAX_GRAMMAR_ERROR]
    return "".join(one if one.isprintable() else "?" for one in text)


class _Looked(NamedTuple):
    """What was seen in a schema."""

    size: int
    """Branches of all its regular expressions."""
    is_open: bool
    """Whether objects with declared members may have others."""


def _look_through(what: str, schema: Any) -> _Looked:
    """Raises ``InvalidGrammar`` for keywords whose compilation takes the square of their size or number, or longer."""
    num_properties = num_patterns = size = 0
    multiple, is_open = 1, False
    for one in _objects(schema):
        properties, patterns, divisor = one.get("properties"), one.get("patternProperties"), one.get("multipleOf")
        if properties is not None:
            num_properties += _size(properties)
            is_open = is_open or one.get("additionalProperties") is not False
        if patterns is not None:
            num_patterns += _size(patterns)
        if divisor is not None:
            multiple = math.lcm(multiple, _without_point(divisor))
        if size <= limits.MAX_GRAMMAR_SIZE and (patterns is not None or "pattern" in one or "x-guidance" in one):
            size += size_of_patterns(one)
        if multiple > limits.MAX_MULTIPLE_OF or num_properties > limits.MAX_SCHEMA_PROPERTIES or (
                num_patterns > limits.MAX_PATTERN_PROPERTIES):
            break
    for name, number, most in (
        ("properties", num_properties, limits.MAX_SCHEMA_PROPERTIES),
        ("patternProperties", num_patterns, limits.MAX_PATTERN_PROPERTIES),
        ("multipleOf, the common multiple of all", multiple, limits.MAX_MULTIPLE_OF),
    ):
        if number > most:
            raise InvalidGrammar(f"{what}, {name}", number, f"at most {most} in a schema")
    return _Looked(size, is_open)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _without_point(divisor: Any) -> int:
    """Return a divisor's digits as an integer, 1 for what is no divisor."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not divisor:
        return 1
    _, digits, exponent = Decimal(abs(divisor) if isinstance(divisor, int) else repr(abs(divisor))).as_tuple()
    number: int = int("".join(map(str, digits)).rstrip("0"))
    zeros = len(digits) - len(str(number)) + int(exponent)
    return int(number * 10 ** max(0, zeros))


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object inside of decoded JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _of_schema(schema: dict[str, Any], size: int = 0) -> GrammarSource:
    own = schema.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    if "whitespace_flexible" not in own:
        own = {"whitespace_pattern": WHITESPACE, **own}
    text = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": own}}]})
    return GrammarSource(text, size)


def _of_lark(lark: str) -> GrammarSource:
    size, pieces, end = size_of_lark(lark), list[str](), 0
    for place in INLINE_SCHEMA.finditer(lark):
        if place.start() < end:
            continue
        try:
            schema, past = json.JSONDecoder().raw_decode(lark, place.end())
        except (ValueError, RecursionError):
            schema = past = None
        if schema is None or past is None:
            raise InvalidGrammar("lark", lark, "a grammar with JSON after %json")
        schema, size_of_this = _prepared("lark", schema, lark[place.end() : past])
        size += size_of_this
        pieces += [lark[end : place.end()], json.dumps(schema)]
        end = past
    return GrammarSource(_in_lark("".join([*pieces, lark[end:]])), size)


def _prepared(what: str, schema: Any, text: str) -> tuple[Any, int]:
    """Return a schema as the library is given it, and its size."""
    seen, schema = _look_through(what, schema), kept_exactly(what, schema, text)
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not seen.is_open or not isinstance(own, dict):
        return schema, seen.size
    # Why: "\\u0061" is another spelling of the member "a", which its schema would not reach.
    return {**schema, "x-guidance": {"json_allowed_escapes": _ESCAPES, **own}}, seen.size


def _in_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _quoted(text: str) -> str:
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)

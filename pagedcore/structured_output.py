"""What a completion has to look like, in one of the ways in which that can be written.

Text only: checked for type, size and depth here, where nothing is known of a model. What a grammar means, and whether
it can be followed, is decided in ``structured/``, which compiles it for one vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

from pagedcore.config import limits
from pagedcore.config.keywords import refuses_unknown
from pagedcore.config.strict_json import load_json
from pagedcore.errors import InvalidGrammar, describe_name, did_you_mean

if TYPE_CHECKING:
    from pagedcore.protocols import Constraint

_BRACKETS: Final = b"()[]{}"
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_RULE: Final = "::="
INLINE_SCHEMA: Final = re.compile(r"%json\s*(?=\{)")
"""What begins a JSON schema in Lark."""
WHITESPACE: Final = r"\x20|\x0A\x20{0,16}"
"""Between the parts of JSON, on one line or indented: bounded, so that a model cannot go on with it for ever."""


@dataclass(frozen=True, init=False, kw_only=True, slots=True)
class StructuredOutput:
    """The form of a completion: exactly one of the fields says it.

    Raises:
        InvalidGrammar: not exactly one field is given, or it is of another type, too large or too deep.
    """

    json_schema: str | None = None
    """JSON that this JSON schema accepts: an object, or its text; stored as text without spaces. Properties come in
    the order of the schema. Keywords that cannot be kept are refused with the request, never ignored."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole, in the syntax of Rust's ``regex``: no look-around, no
    references back."""
    choice: tuple[str, ...] | None = None
    """One of these texts, at most 1,024."""
    lark: str | None = None
    """Text of this context-free grammar in the syntax of Lark, from its rule ``start``; ``%json {...}`` embeds a JSON
    schema. It has 64 KiB, and 512 KiB with the schemas."""
    ebnf: str | None = None
    """The same in the EBNF of llama.cpp (GBNF), from its rule ``root``; at most 256 rules."""

    @refuses_unknown("structured")
    def __init__(
        self,
        *,
        json_schema: str | Mapping[str, Any] | None = None,
        json_object: bool = False,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        lark: str | None = None,
        ebnf: str | None = None,
    ) -> None:
        if type(json_object) is not bool:
            raise InvalidGrammar("json_object", json_object, "True or False")
        given = {"json_schema": json_schema, "json_object": json_object or None, "regex": regex, "choice": choice,
                 "lark": lark, "ebnf": ebnf}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise InvalidGrammar("structured", " and ".join(named) or "none of its fields", f"one of {_names()}",
                                 is_described=True)
        (name,) = named
        for one in fields(self):
            object.__setattr__(self, one.name, one.default)
        object.__setattr__(self, name, _CHECKS[name](name, given[name]))

    @property
    def kind(self) -> str:
        """The name of the field that says the form."""
        return next(name for name in _CHECKS if getattr(self, name))

    @classmethod
    def from_mapping(cls, mapping: Any) -> StructuredOutput:
        """Make one from decoded JSON or any other mapping of field names to values; ``None`` is "not given".

        Raises ``InvalidGrammar``, also for a name that is no field.
        """
        if type(mapping) is cls:
            return mapping
        if not isinstance(mapping, Mapping):
            raise InvalidGrammar("structured", mapping, "a StructuredOutput, or a mapping of its fields")
        for name in mapping:
            if name not in _CHECKS:
                raise InvalidGrammar("structured", f"the field {describe_name(name)}", f"one of {_names()}",
                                     did_you_mean(name, _CHECKS), is_described=True)
        return cls(**mapping)

    def as_mapping(self) -> dict[str, Any]:
        """Return the field that says the form and its value, as JSON has it; ``from_mapping`` takes it."""
        value = getattr(self, self.kind)
        return {self.kind: list(value) if isinstance(value, tuple) else value}


def _names() -> str:
    return ", ".join(_CHECKS)


def _text(name: str, value: Any, max_bytes: int = limits.MAX_GRAMMAR_BYTES) -> str:
    """Accept text that could be a grammar: not empty, encodable, and neither too long nor too deep."""
    if not isinstance(value, str) or not value:
        raise InvalidGrammar(name, value, "text")
    _require_size(name, value, max_bytes)
    brackets = value.encode("utf-8", "replace").translate(None, _NO_BRACKETS)
    depth = max(accumulate(1 if byte in b"([{" else -1 for byte in brackets), default=0)
    if depth > limits.MAX_GRAMMAR_DEPTH:
        raise InvalidGrammar(name, f"brackets {depth} deep", f"at most {limits.MAX_GRAMMAR_DEPTH} deep",
                             is_described=True)
    return value


def _require_size(name: str, text: str, max_bytes: int = limits.MAX_GRAMMAR_BYTES) -> None:
    # Why: a character is at least a byte, so this bounds the work of encoding.
    size = len(text)
    if size <= max_bytes:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            size = -1
    # Safety: raised out here, because the codec's own error holds the text.
    if size < 0:
        raise InvalidGrammar(name, text, "text that UTF-8 can encode", "It holds a lone surrogate.")
    if size > max_bytes:
        raise InvalidGrammar(name, text, f"at most {max_bytes} bytes of UTF-8")


def _lark(name: str, value: Any) -> str:
    text = _text(name, value, limits.MAX_LARK_BYTES)
    if len(text) > limits.MAX_GRAMMAR_BYTES // 4:
        _require_size(f"{name} without its JSON schemas", _without_schemas(text))
    return text


def _without_schemas(lark: str) -> str:
    """Return the rest of a grammar; all from what is no JSON on belongs to it."""
    kept, start = list[str](), 0
    while (found := INLINE_SCHEMA.search(lark, start)) is not None:
        try:
            _, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            # Safety: the end, because a search that goes on could look at the same text for each of thousands.
            break
        kept.append(lark[start : found.end()])
        start = end
    return "".join([*kept, lark[start:]])


def _ebnf(name: str, value: Any) -> str:
    text = _text(name, value)
    if text.count(_RULE) > limits.MAX_EBNF_RULES:
        raise InvalidGrammar(name, text.count(_RULE), f"at most {limits.MAX_EBNF_RULES} rules")
    return text


def _choice(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidGrammar(name, value, "a list or tuple of texts")
    if len(value) > limits.MAX_CHOICES:
        raise InvalidGrammar(name, len(value), f"at most {limits.MAX_CHOICES} texts")
    for one in value:
        if not isinstance(one, str) or not one:
            raise InvalidGrammar(name, one, "texts, none of them empty")
        _require_size(name, one)
    if sum(map(len, value)) > limits.MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(name, sum(map(len, value)), f"at most {limits.MAX_GRAMMAR_BYTES} characters together")
    return tuple(dict.fromkeys(value))


def _json_schema(name: str, value: Any) -> str:
    given = value
    if isinstance(value, str):
        _require_size(name, value)
        value = _decoded(value)
    if not isinstance(value, Mapping):
        raise InvalidGrammar(name, given, "a JSON schema: an object, or its text")
    _require_json(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    except (ValueError, TypeError):
        text = ""
    if not text:
        raise InvalidGrammar(name, value, "an object of values that JSON has")
    _require_size(name, text)
    return text


def _decoded(text: str) -> Any:
    """Decode JSON; ``None`` for what is none. Safety: the decoder's error holds the text, so it ends here."""
    try:
        return load_json(text, None)
    except (ValueError, RecursionError):
        return None


def _require_json(name: str, schema: Any) -> None:
    """Refuse what is too deep or too large to be written out, an object that contains itself among it."""
    level, num_values = [schema], 0
    for _ in range(limits.MAX_GRAMMAR_DEPTH):
        inner: list[Any] = []
        for one in level:
            num_values += len(one) if isinstance(one, Mapping | list | tuple | str) else 0
            # Why before they are looked at: one of them may be an object that is there a million times.
            if num_values > limits.MAX_GRAMMAR_BYTES:
                raise InvalidGrammar(name, f"more than {limits.MAX_GRAMMAR_BYTES} values and characters", "fewer",
                                     is_described=True)
            if isinstance(one, Mapping):
                inner += one
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        if not inner:
            return
        level = inner
    raise InvalidGrammar(name, f"more than {limits.MAX_GRAMMAR_DEPTH} levels", f"at most {limits.MAX_GRAMMAR_DEPTH}",
                         is_described=True)


_CHECKS: Final = {"json_schema": _json_schema, "json_object": lambda _, value: value, "regex": _text,
                  "choice": _choice, "lark": _lark, "ebnf": _ebnf}


class CompilesGrammars(Protocol):
    """What makes constraints of requests' structured output; ``structured.grammars.Grammars`` is the shipped one."""

    def compile(self, wanted: StructuredOutput, owner: bytes = b"") -> Constraint:
        """Compile what a completion has to look like.

        Args:
            wanted: by a request.
            owner: of the request; one owner never keeps all others waiting.

        Raises:
            InvalidGrammar: it cannot be kept to.
            GrammarsBusy: the grammars of all requests together take too much.
            MissingDependency: the library is not installed.
        """

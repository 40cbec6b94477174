"""What filters, tests, operators and methods of a chat template may make, checked before they make it.

Owns a rule for each operation whose result, or whose work, is not in proportion to what it is given. All others are
bounded by what they are given, which is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Final

from jinja2 import pass_context
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import generate_lorem_ipsum

from pagedcore.config.limits import MAX_TEMPLATE_BITS
from pagedcore.tokenizer.disguise import seeing, seen
from pagedcore.tokenizer.template_budget import (
    OverBound,
    budget,
    digits,
    is_plain,
    items,
    made,
    measure,
    require_format,
    require_pieces,
    require_replace,
    scan,
    text,
    text_bytes,
)

_CALL_STEPS: Final = 4
"""Steps of a filter, a test or a call, beside those of the nodes that they are."""
_MAX_SQUARED: Final = 2**16
"""Characters that filters take whose work grows with the square of their text."""
_MAX_SHORT: Final = 1024
"""Characters of what is stripped, of the name of an attribute, and of a number that is read."""
_MAX_DIGITS: Final = 10**3
_METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset((
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
        "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
        "title", "upper", "zfill",
    )),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
"""Methods of the interpreter's types that a template may call."""
_NO_METHODS: Final = frozenset[str]()


def methods_of(value: Any) -> frozenset[str]:
    """Return the methods of the interpreter that a template may call of a value."""
    return next((names for kind, names in _METHODS.items() if isinstance(value, kind)), _NO_METHODS)


def check_method(own: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Check a call of a method of a text, and return its arguments.

    Raises:
        OverBound: what it makes may take more than the budget has left.
    """
    budget().step(_CALL_STEPS)
    scan(len(own))
    if name == "join" and args:
        args = (items(args[0]), *args[1:])
        _require_joined(own, args[0])
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        widths = sum(abs(one) for one in (*args, *kwargs.values()) if isinstance(one, int)) or 8
        budget().require(text_bytes(own) + 4 * widths * (own.count("\t") if name == "expandtabs" else 1))
    elif name == "replace":
        require_replace(own, *args, *kwargs.values())
    elif name in ("split", "rsplit", "splitlines"):
        given = {**dict(zip(("sep", "maxsplit"), args, strict=False)), **kwargs}
        require_pieces(own, "\n" if name == "splitlines" else given.get("sep"), given.get("maxsplit"))
    elif name in ("strip", "lstrip", "rstrip"):
        _require_short(*args)
    else:
        for one in args:
            measure(one)
    return args


def _require_joined(separator: str, values: Any) -> None:
    size = measure(values)
    count = len(values) if isinstance(values, str) else size.parts
    budget().require(4 * (size.characters + count * len(separator)))


def _require_short(*values: Any) -> None:
    if any(isinstance(one, str) and len(one) > _MAX_SHORT for one in values):
        raise OverBound("characters of an argument", _MAX_SHORT)


def joined(values: tuple[Any, ...]) -> str:
    """Return the text of values, one after the other. Raises ``OverBound``."""
    texts = [text(value) for value in values]
    budget().require(text_bytes(*texts))
    made(whole := "".join(texts))
    return whole


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget().take(4 * (len(left) + len(right)))
        return left + right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget().require(8 * (len(left) + len(right)))
    return made(left + right)


def _multiply(left: Any, right: Any) -> Any:
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(count, int) and count > 0:
            size = text_bytes(repeated) if isinstance(repeated, str) else 8 * len(repeated)
            budget().require(size * count)
    if isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() + right.bit_length())
    return made(left * right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        _require_bits(left.bit_length() * right)
    return left**right


def _require_bits(count: int) -> None:
    if count > MAX_TEMPLATE_BITS:
        raise OverBound("bits of a number", MAX_TEMPLATE_BITS)


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        require_format(left, right)
    return made(left % right)


def _subtract(left: Any, right: Any) -> Any:
    for one in (left, right):
        measure(one)
    return made(left - right)


OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": _add, "-": _subtract, "*": _multiply, "**": _power, "%": _modulo,
}
"""Operators that check first; others make nothing larger than they are given."""


class _Bounded(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one field."""
        budget().require(4 * (digits(format_spec) + measure(value).characters))
        return made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Convert one field, as ``!r`` says."""
        budget().require(4 * measure(value).characters)
        return made(super().convert_field(value, conversion))


class Formatter(_Bounded):
    """``str.format`` of a plain text."""


class EscapeFormatter(_Bounded, SandboxedEscapeFormatter):
    """``str.format`` of a text that is marked as safe."""


def lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Return meaningless words. Raises ``OverBound``."""
    budget().step(n * max)
    return generate_lorem_ipsum(n, html, min, max)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON, without the escapes of HTML that jinja2's own has. Raises ``OverBound``."""
    size, margin = measure(value), len(indent) if isinstance(indent, str) else indent or 0
    between = 8 if separators is None else measure(separators).characters
    budget().require(12 * size.characters + size.parts * (between + size.depth * margin))
    made(written := json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    ))
    return written


def _center(value: Any, width: Any = 80) -> None:
    budget().require(text_bytes(text(value)) + 4 * width)


def _indent(value: Any, width: Any = 4, *others: Any, **named: Any) -> None:
    own, margin = text(value), len(width) if isinstance(width, str) else width
    budget().require(text_bytes(own) + 4 * margin * (own.count("\n") + 2))


def _replace(value: Any, old: Any, new: Any, count: Any = None) -> None:
    require_replace(text(value), text(old), text(new), count)


def _batch(value: Any, count: Any, *others: Any, **named: Any) -> None:
    length = len(value)
    budget().step(length + count)
    budget().take(64 * (length + count))


def _format(value: Any, *args: Any, **kwargs: Any) -> None:
    require_format(text(value), kwargs or args)


def _join(value: Any, d: Any = "", attribute: Any = None) -> None:
    _require_joined(text(d), value)


def _round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if not isinstance(value, int | float) or not isinstance(precision, int) or abs(precision) > _MAX_DIGITS:
        raise TypeError("only a number can be rounded, to digits that it may have")


def _int(value: Any, *others: Any, **named: Any) -> None:
    _require_short(value)


def _trim(value: Any, chars: Any = None) -> None:
    _require_short(chars)


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    _require_short(attribute)
    if not isinstance(start, int | float):
        budget().step(len(value) * measure(value).parts)


def _by_attribute(value: Any, *others: Any, **named: Any) -> None:
    _require_short(*others, *named.values())


def _squared(value: Any, *others: Any, **named: Any) -> None:
    size = measure([value, *others, *named.values()])
    if size.characters + size.parts > _MAX_SQUARED:
        raise OverBound("characters for such a filter", _MAX_SQUARED)


_CHECKS: Final[Mapping[str, Callable[..., None]]] = {
    "batch": _batch, "center": _center, "format": _format, "indent": _indent, "int": _int, "join": _join,
    "replace": _replace, "round": _round, "slice": _batch, "sum": _sum, "trim": _trim,
    **dict.fromkeys(("groupby", "max", "min", "sort", "unique"), _by_attribute),
    **dict.fromkeys(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"), _squared),
}
_LIGHT_FILTERS: Final = frozenset((
    "attr", "count", "d", "default", "first", "items", "last", "length", "random",
))
"""Filters that return, or go through later, what they are given, and do not look into it."""
_LAZY_FILTERS: Final = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
_LIGHT_TESTS: Final = frozenset((
    "boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none", "number",
    "sameas", "sequence", "string", "true", "undefined",
))
_GROWTH: Final[Mapping[str, int]] = {"e": 6, "escape": 6, "forceescape": 6, "urlencode": 12}
"""Times that a text may grow; others at most double it."""
_OF_ITEMS: Final = frozenset((
    "batch", "groupby", "in", "join", "list", "max", "min", "reverse", "slice", "sort", "sum", "unique", "urlencode",
))
"""Filters and tests that go through the elements, which of a text are its characters."""


def _weighed(name: str, value: Any) -> Any:
    """Measure what a filter or test is given; where its elements are wanted, of a generator too."""
    if name in _OF_ITEMS:
        value = items(value)
    elif isinstance(value, str):
        budget().require(text_bytes(value) * _GROWTH.get(name, 2))
    elif not is_plain(value):
        size = measure(value)
        budget().require(4 * (size.characters + size.parts))
        return value
    return _operand(value)


def _bounded(name: str, function: Any) -> Callable[..., Any]:
    """Return a filter or test that is measured and checked before it is computed."""
    num_first, check = 1 if hasattr(function, "jinja_pass_arg") else 0, _CHECKS.get(name)

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget().step(_CALL_STEPS)
        first, given = args[:num_first], [_weighed(name, one) for one in args[num_first:]]
        kwargs = {key: _weighed("", one) for key, one in kwargs.items()}
        if check is not None:
            check(*given, **kwargs)
        return made(function(*first, *given, **kwargs))

    return bounded


def _lazy(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def lazy(context: Any, value: Any = (), *args: Any, **kwargs: Any) -> Any:
        _by_attribute(value, *args, **kwargs)
        if not isinstance(value, Iterator):
            items(value)
        return function(context, value, *args, **kwargs)

    return lazy


@pass_context
def _steps(context: Any, value: Any, count: int) -> Any:
    """Count steps. Why the context: without it a filter of constants is computed once, when a template is compiled."""
    budget().step(count)
    return value


def _operand(value: Any) -> Any:
    if isinstance(value, str):
        scan(len(value))
    elif not is_plain(value):
        measure(value)
    return value


def _holder(value: Any) -> Any:
    """Measure what something is looked for in; that is done without a look at all parts in a dictionary."""
    return value if isinstance(value, dict | range) else _operand(items(value))


def _seen_after(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a check that gives what a template compares, which has no disguise."""
    return lambda value: seen(check(value))


def _of_seen(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def test(*args: Any) -> Any:
        return function(*map(seen, args))

    return test


def _replaced(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Return what the filter of jinja2 does, whose method would not look through a disguise."""
    whole: str = seeing(str(value).replace)(str(old), str(new), -1 if count is None else count)
    return whole


def _number_test(name: str) -> Callable[..., Any]:
    """Return a test that computes a remainder. Why not of a text: it would be formatted."""
    tests: Mapping[str, Any] = JINJA_TESTS

    def bounded(value: Any, *args: Any) -> Any:
        if isinstance(value, str):
            raise TypeError(f"{name} is a test of numbers")
        return tests[name](value, *args)

    return bounded


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _bounded(name, function) for name, function in JINJA_FILTERS.items() if name not in _LIGHT_FILTERS},
    **{name: _lazy(JINJA_FILTERS[name]) for name in _LAZY_FILTERS}, "tojson": _tojson,
    "replace": _bounded("replace", _replaced),
    "pagedcore steps": _steps, "pagedcore operand": _seen_after(_operand), "pagedcore holder": _seen_after(_holder),
    "pagedcore key": _operand, "pagedcore joined": joined, "pagedcore made": made,
}
"""The filters of transformers, all but those that cost nothing, and the counters."""
TESTS: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: _bounded(name, _of_seen(function)) for name, function in JINJA_TESTS.items() if name not in _LIGHT_TESTS},
    **{name: _number_test(name) for name in ("divisibleby", "even", "odd")},
}
"""Tests that compare or compute a hash."""

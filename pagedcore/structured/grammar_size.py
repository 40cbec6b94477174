"""What the regular expressions and terminals of a grammar expand to, counted without the library that compiles them.

The library takes the derivative of an expression in one piece, which none of its own limits interrupts. Where parts may
be left out, the derivative has a branch for everything that can come next, so a row of them costs the square of its
length, and a class of Unicode has a branch for each of its beginnings in UTF-8. The size of a grammar is the number of
these branches in all its derivatives; each takes a few bytes and some tens of nanoseconds. In case of doubt it is too
large, not too small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pagedcore.config import limits

_MANY_WORDS: Final = 1000
"""Words, texts and signs of the rules of a grammar."""
_SHORT: Final = 128
"""Characters of patterns whose sizes are kept."""
_MOST: Final = 10**12
"""Larger sizes are as good as this one: terminals that refer to each other multiply without end."""


class Size(NamedTuple):
    """The size of an expression, and what counts when others stand next to it."""

    branches: int
    first: int
    """Branches at its beginning."""
    ends: int
    """Places after which nothing need follow: each gets the branches of what stands behind."""
    is_optional: bool

    def optional(self) -> Size:
        """Return the size when it may be left out."""
        return self if self.is_optional else Size(self.branches + self.first, self.first, self.ends + 1, True)

    def repeated(self, how: str) -> Size:
        """Return the size when it may come as often as ``how`` says. The library counts, it copies nothing, so what
        matters is whether it may be left out, and whether it may come again."""
        if how[0] == "?":
            return self.optional()
        size = self._replace(branches=min(_MOST, self.branches + self.ends * self.first))
        return size if _AT_LEAST_ONE.match(how) else size.optional()

    def then(self, other: Size) -> Size:
        """Return the size of this and something behind it."""
        return Size(
            min(_MOST, self.branches + other.branches + self.ends * other.first),
            min(_MOST, self.first + (other.first if self.is_optional else 0)),
            min(_MOST, other.ends + (self.ends if other.is_optional else 0)), self.is_optional and other.is_optional,
        )

    def either(self, other: Size) -> Size:
        """Return the size of this or something else."""
        size = Size(self.branches + other.branches, self.first + other.first, self.ends + other.ends, False)
        is_optional = self.is_optional or other.is_optional
        # Why: an alternative without any part has no place of its own.
        return size._replace(is_optional=is_optional) if size.ends else size.optional() if is_optional else size


_AT_LEAST_ONE: Final = re.compile(r"\+|[{~]\s*0*[1-9]")
_NOTHING: Final = Size(0, 0, 0, True)
_NEVER: Final = Size(0, 0, 0, False)
_ONE: Final = Size(0, 1, 0, False)
_ANY: Final = Size(8, 8, 0, False)
"""Almost any character: a branch for each length and beginning that it has in UTF-8."""
_CLASS: Final = Size(40, 40, 0, False)
"""A class of Unicode: as many branches as ``\\W`` was measured to have."""


@dataclass(slots=True)
class _Level:
    """A group while it is read: the alternatives that have ended, the row of parts, and its last part."""

    others: Size = _NEVER
    row: Size = _NOTHING
    last: Size = _NOTHING
    is_negated: bool = False
    """Whether the complement of the part that comes next is meant."""
    is_verbose: bool = False
    """Whether blanks and comments mean nothing."""

    def add(self, part: Size) -> None:
        # Why: whether a complement may be left out is not worth knowing exactly.
        part = part.optional() if self.is_negated else part
        self.row, self.last, self.is_negated = self.row.then(self.last), part, False

    def bar(self) -> None:
        self.others, self.row, self.last = self.size(), _NOTHING, _NOTHING

    def size(self) -> Size:
        return self.others.either(self.row.then(self.last))


def _close(levels: list[_Level], is_maybe: bool = False) -> None:
    """End a group. One that was never begun is the library's to refuse."""
    if len(levels) > 1:
        size = levels.pop().size()
        levels[-1].add(size.optional() if is_maybe else size)


def _end(levels: list[_Level]) -> Size:
    while len(levels) > 1:
        _close(levels)
    return levels[0].size()


# Why at most 99 in braces and names: each that does not end would be searched to the end of the text.
_REGEX: Final = re.compile(r"""
      (?P<text>[A-Za-z0-9_]+(?![*+?{])) | (?P<class>\\[pP](?:\{[^}]{0,99}\}|.)|\\[dDsSwW])
    | (?P<escape>\\(?:[xuU](?:\{[^}]{0,99}\}|[0-9A-Fa-f]{2,8})|.)) | \(\?(?P<flags>[A-Za-z-]*)\)
    | (?P<open>\((?:\?(?:P?<[^>]{0,99}>|[A-Za-z-]*:))?) | (?P<close>\)) | (?P<bar>\|)
    | (?P<repeat>(?:\{[\d\s,]*\}|[*+?])\??)
    | (?P<set>\[) | (?P<any>\.) | (?P<anchor>[\^$]) | (?P<blank>[\s\#]) | (?P<one>.)
""", re.VERBOSE | re.DOTALL)
_IN_SET: Final = re.compile(r"\\(?:[pP]\{[^}]{0,99}\}|.)|\[\^?\]?|.", re.DOTALL)
_UNICODE: Final = re.compile(r"[^\x00-\x7f]|\\[dDsSwWpP]|&&|--|~~")


def size_of_regex(text: str, is_verbose: bool = False) -> Size:
    """Return the size of a regular expression in the syntax of Rust's ``regex``; with its flag x, if it is verbose.

    Beyond the limit on a grammar's size, only that it is beyond.
    """
    levels, place = [_Level(is_verbose=is_verbose)], 0
    while (found := _REGEX.match(text, place)) and levels[-1].row.branches <= limits.MAX_GRAMMAR_SIZE:
        level, kind, written, place = levels[-1], found.lastgroup, found.group(), found.end()
        if kind == "open":
            levels.append(_Level(is_verbose=_has_x(written, level)))
        elif kind == "flags":
            level.is_verbose = _has_x(written, level)
        elif kind == "close":
            _close(levels)
        elif kind == "bar":
            level.bar()
        elif kind == "repeat":
            level.last = level.last.repeated(written)
        elif kind == "set":
            place = _end_of_set(text, found.start(), level.is_verbose)
            level.add(_size_of_set(text[found.start() : place]))
        elif kind == "blank" and level.is_verbose:
            place = _end_of_comment(text, place) if written == "#" else place
        elif kind != "anchor":
            level.add(_CLASS if kind == "class" else _ANY if kind == "any" else _ONE)
    return _end(levels)


def _has_x(written: str, level: _Level) -> bool:
    """Whether the flag x holds after flags, or in a group; a group's name has none."""
    on, _, off = ("" if "<" in written else written).partition("-")
    return "x" in on or (level.is_verbose and "x" not in off)


def _end_of_set(text: str, place: int, is_verbose: bool) -> int:
    depth = 0
    while found := _IN_SET.match(text, place):
        written = found.group()
        place = _end_of_comment(text, place) if written == "#" and is_verbose else found.end()
        depth += (written[0] == "[") - (written == "]")
        if not depth:
            break
    return place


def _end_of_comment(text: str, place: int) -> int:
    return len(text) if (end := text.find("\n", place)) < 0 else end


def _size_of_set(text: str) -> Size:
    return _CLASS if _UNICODE.search(text) else _ANY if "^" in text else _ONE


_LARK: Final = re.compile(r"""
      (?P<blank>(?:\#|//)[^\n]*|[ \t\r]+) | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*) | %(?P<json>json|regex|llguidance)\b | (?P<statement>%[a-z]+)
    | (?P<repeat>\{[\d\s,]*\}|~\s*\d[\d\s.]*|[*+?])
    | (?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*) | (?P<token><[^<>\s]+>|@[\w-]+)
    | (?P<open>[(\[]) | (?P<close>\)) | (?P<maybe>\]) | (?P<bar>\|) | (?P<and>&) | (?P<not>~) | (?P<colon>:)
    | (?P<line>\n|\{) | (?P<other>.)
""", re.VERBOSE | re.DOTALL)
_ANY_TEXT: Final = re.compile(r"(?=.*\(\?s:)(?:\(\?s:\.\*\))?(?:[\w<>=:@!,;-]|\\\W|\\n|\[\\n \]\?)*(?:\(\?s:\.\*\))?")
"""Any text, or any with something in it, at its beginning or at its end: this can be intersected in proportion to its
length."""
_BLANKS: Final = re.compile(r"\s*")
_Token = tuple[str, Any]
"""Its kind, and what it says: the size of a part, the name of a terminal or rule, or how often something comes."""


def size_of_lark(text: str) -> int:
    """Return the branches of all terminals and rules of a grammar in the syntax of Lark, without those of schemas.

    One with an intersection or a complement counts as too large to be compiled untried: whether an intersection
    matches anything is a search whose length nobody knows, and which the library does not limit. So does one with long
    rules that refer to themselves, which take the library the third power of their length.
    """
    bodies, terminals = {"": list[_Token]()}, {""}
    name, line = "", list[_Token]()
    for token in [*_tokens(text), ("line", None)]:
        if token[0] == "colon":
            name = next((value for kind, value in line if kind == "name"), "")
            # Why: what a rule has in brackets, "stop" for example, makes a terminal of it, and may be a terminal.
            if ("open", None) in line or not name.islower():
                terminals.add(name)
            _begin(bodies, "").extend(line[1:])
            _begin(bodies, name)
        elif token[0] == "line":
            if ("statement", None) in line:
                name = ""
                _begin(bodies, name)
            bodies[name] += line
        else:
            line.append(token)
            continue
        line = []
    sizes = _sizes_of({name: bodies[name] for name in terminals})
    rules = [_size_of_body(body, sizes if ("not", None) in body else {})
             for name, body in bodies.items() if name not in terminals]
    is_to_try = any(map(_is_search, bodies.values())) or _is_long_recursion(
        {name: body for name, body in bodies.items() if name not in terminals})
    least = limits.MAX_UNTRIED_GRAMMAR_SIZE + 1 if is_to_try else 0
    return max(least, sum(size.branches for size in (*sizes.values(), *rules)))


def _begin(bodies: dict[str, list[_Token]], name: str) -> list[_Token]:
    """Return the body of a name for one more definition: nested grammars may have one of the same name."""
    body = bodies.setdefault(name, [])
    body += [("bar", None)] if body else []
    return body


def _is_long_recursion(rules: Mapping[str, list[_Token]]) -> bool:
    """Whether rules with more than a thousand words in all refer to themselves, each by itself or through others."""
    if sum(map(len, rules.values())) <= _MANY_WORDS:
        return False
    used = {name: {value for kind, value in body if kind == "name" and value in rules} for name, body in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in used.items():
        for other in others:
            users[other].append(name)
    left, ready = len(rules), [name for name, others in used.items() if not others]
    while ready:
        left -= 1
        name = ready.pop()
        for user in users[name]:
            used[user].discard(name)
            if not used[user]:
                ready.append(user)
    return left > 0


def _is_search(body: list[_Token]) -> bool:
    kinds = {kind for kind, _ in body}
    return not kinds.isdisjoint(("and", "not")) and not kinds.isdisjoint(("part", "name"))


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while found := _LARK.match(text, place):
        kind, place = found.lastgroup or "", found.end()
        if kind == "flags":
            is_any = _ANY_TEXT.fullmatch(found["regex"]) and not found["flags"]
            yield "text" if is_any else "part", size_of_regex(found["regex"], "x" in found["flags"])
        elif kind == "json":
            place = _end_of_json(text, place)
            # Why: a schema is counted on its own; any piece of a text is as many alternatives as the text is long.
            length = place - found.start() if found["json"] == "regex" else 0
            yield "part", Size(length, length, length, True) if length else _ONE
        elif kind == "repeat":
            yield kind, found.group()
        elif kind == "name":
            yield kind, found["name"].lstrip("!?")
        elif kind in ("string", "token"):
            yield "text", _NOTHING if found.group() == '""' else _ONE
        elif kind not in ("blank", "other"):
            yield kind, None


def _end_of_json(text: str, place: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, _BLANKS.match(text, place).end())[1]  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return place


def _sizes_of(bodies: Mapping[str, list[_Token]]) -> dict[str, Size]:
    """Return the sizes of terminals, each with those that it refers to; one that contains itself is refused later."""
    sizes, waiting, seen = dict[str, Size](), list(bodies), set[str]()
    while waiting:
        name = waiting[-1]
        if name not in seen:
            seen.add(name)
            waiting += {value for kind, value in bodies[name] if kind == "name" and value in bodies} - seen
        elif waiting.pop() not in sizes:
            sizes[name] = _size_of_body(bodies[name], sizes)
    return sizes


def _size_of_body(body: list[_Token], sizes: Mapping[str, Size]) -> Size:
    levels = [_Level()]
    for kind, value in body:
        if kind in ("part", "text", "name"):
            levels[-1].add(sizes.get(value, _ONE) if kind == "name" else value)
        elif kind == "open":
            levels.append(_Level())
        elif kind in ("close", "maybe"):
            _close(levels, kind == "maybe")
        elif kind in ("bar", "and"):
            levels[-1].bar()
        elif kind == "repeat":
            levels[-1].last = levels[-1].last.repeated(value)
        elif kind == "not":
            levels[-1].is_negated = True
    return _end(levels)


def size_of_patterns(schema: Mapping[str, Any]) -> int:
    """Return the branches of the regular expressions of one schema object, without those of the schemas in it."""
    own, names = schema.get("x-guidance"), schema.get("patternProperties")
    texts = [schema.get("pattern"), *(own.values() if isinstance(own, dict) else ()),
             *(names if isinstance(names, dict) else ())]
    return sum(_size_of_pattern(text) for text in texts if isinstance(text, str))


def _size_of_pattern(text: str) -> int:
    return _size_of_short_pattern(text) if len(text) <= _SHORT else size_of_regex(text).branches


@lru_cache(512)  # Why: programs send the same few patterns with every request.
def _size_of_short_pattern(text: str) -> int:
    return size_of_regex(text).branches

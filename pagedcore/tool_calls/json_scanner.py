"""Reads JSON that arrives in pieces: where a value ends, and what a call's name and arguments are.

Law: the state after some text does not depend on where the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Final

from pagedcore.config.limits import MAX_TOOL_DEPTH

WHITESPACE: Final = " \t\r\n"
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARACTERS: Final = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_SCALAR: Final = 1024
_ESCAPED: Final = '"\\/bfnrt'
_HEXADECIMAL: Final = "0123456789abcdefABCDEF"


_Step = Callable[[str, int], int]


class _Next(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    IN_STRING = auto()
    IN_ESCAPE = auto()
    IN_SCALAR = auto()
    DONE = auto()
    MALFORMED = auto()


class JsonScanner:
    """Finds the end of one JSON value, or the first character that makes it no JSON (RFC 8259).

    Invariant: text up to the returned place is the beginning of some JSON value.
    """

    __slots__ = ("_closers", "_escape", "_is_key", "_next", "_scalar")

    def __init__(self) -> None:
        self._next = _Next.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._escape = ""
        self._scalar = ""

    @property
    def is_done(self) -> bool:
        """Whether the value has ended."""
        return self._next is _Next.DONE

    @property
    def is_malformed(self) -> bool:
        """Whether the next character makes it no JSON, or it is nested deeper than a schema of a tool may be."""
        return self._next is _Next.MALFORMED

    def push(self, text: str, place: int = 0) -> int:
        """Read on from a place in ``text``; return the place after the last character that belongs to the value."""
        while place < len(text) and self._next not in (_Next.DONE, _Next.MALFORMED):
            if self._next is _Next.IN_STRING:
                place = self._read_string(text, place)
            elif self._next is _Next.IN_SCALAR:
                place = self._read_scalar(text, place)
            else:
                read = self._read_escape if self._next is _Next.IN_ESCAPE else self._read_structure
                place += read(text[place])
        return place

    def _read_string(self, text: str, place: int) -> int:
        match = _PLAIN.match(text, place)
        place = match.end() if match else place
        if place == len(text):
            return place
        if text[place] == '"':
            self._next = _Next.COLON if self._is_key else self._after_value()
        else:
            self._next, self._escape = (_Next.IN_ESCAPE if text[place] == "\\" else _Next.MALFORMED), ""
        return place + (self._next is not _Next.MALFORMED)

    def _read_escape(self, character: str) -> bool:
        allowed = _HEXADECIMAL if self._escape else _ESCAPED + "u"
        if character not in allowed:
            self._next = _Next.MALFORMED
            return False
        self._escape += character
        if self._escape[0] != "u" or len(self._escape) == 5:
            self._next = _Next.IN_STRING
        return True

    def _read_scalar(self, text: str, place: int) -> int:
        match = _SCALAR_CHARACTERS.match(text, place)
        end = match.end() if match else place
        if len(self._scalar) + end - place > _MAX_SCALAR:
            end, self._next = place + _MAX_SCALAR - len(self._scalar), _Next.MALFORMED
            return end
        self._scalar += text[place:end]
        if end < len(text):
            self._next = self._after_value() if _SCALAR.fullmatch(self._scalar) else _Next.MALFORMED
        return end

    def _read_structure(self, character: str) -> bool:
        expected = self._next
        if character in WHITESPACE:
            return True
        if expected in (_Next.VALUE, _Next.VALUE_OR_END) and self._begins_value(character):
            return self._next is not _Next.IN_SCALAR
        if expected in (_Next.KEY, _Next.KEY_OR_END) and character == '"':
            self._next, self._is_key = _Next.IN_STRING, True
        elif expected is _Next.COLON and character == ":":
            self._next = _Next.VALUE
        elif expected is _Next.COMMA_OR_END and character == ",":
            self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
        elif self._may_end(expected) and character == self._closers[-1]:
            self._closers.pop()
            self._next = self._after_value()
        else:
            self._next = _Next.MALFORMED
            return False
        return True

    def _begins_value(self, character: str) -> bool:
        if character == '"':
            self._next, self._is_key = _Next.IN_STRING, False
        elif character in "{[" and len(self._closers) < MAX_TOOL_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self._next = _Next.KEY_OR_END if character == "{" else _Next.VALUE_OR_END
        elif character in "-0123456789tfn":
            self._next, self._scalar = _Next.IN_SCALAR, ""
        else:
            return False
        return True

    def _may_end(self, expected: _Next) -> bool:
        return expected in (_Next.VALUE_OR_END, _Next.KEY_OR_END, _Next.COMMA_OR_END)

    def _after_value(self) -> _Next:
        return _Next.COMMA_OR_END if self._closers else _Next.DONE


class CallScanner:
    """Reads the JSON object of one call, such as ``{"name": "f", "arguments": {...}}``, in any order of its members.

    Invariant: ``arguments`` taken so far are the beginning of the text of one JSON object.
    """

    def __init__(self, is_offered: Callable[[str], bool], keys: Collection[str], name: str | None = None) -> None:
        """Begin before the object, or before the arguments alone of a call whose ``name`` is known.

        Args:
            is_offered: whether there is a tool of a name; another name makes the call malformed.
            keys: how the member with the arguments may be called.
            name: of the call, where it is written elsewhere.
        """
        self._is_offered, self._keys = is_offered, keys
        self._is_bare = name is not None
        self._step: _Step = self._argument_start if self._is_bare else self._object_start
        self._value = JsonScanner()
        self._text: list[str] = []
        self._taken: list[str] = []
        self.name: str | None = name
        self.has_arguments = False
        """Whether the arguments have begun."""
        self.has_all_arguments = False
        self.is_done = False
        self.is_malformed = False

    def push(self, text: str) -> int:
        """Read on; return how many characters belong to the call."""
        place = 0
        while place < len(text) and not (self.is_done or self.is_malformed):
            place = self._step(text, place)
        return place

    def take_arguments(self) -> str:
        """Return what was added to the text of the arguments."""
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def _object_start(self, text: str, place: int) -> int:
        return self._expect(text, place, {"{": self._key_start})

    def _key_start(self, text: str, place: int) -> int:
        return self._expect(text, place, {'"': self._key, "}": None}, is_kept=True)

    def _next_key(self, text: str, place: int) -> int:
        return self._expect(text, place, {'"': self._key}, is_kept=True)

    def _colon(self, text: str, place: int) -> int:
        return self._expect(text, place, {":": self._value_start})

    def _comma(self, text: str, place: int) -> int:
        return self._expect(text, place, {",": self._next_key, "}": None})

    def _argument_start(self, text: str, place: int) -> int:
        return self._expect(text, place, {"{": self._argument}, is_kept=True)

    def _expect(self, text: str, place: int, steps: dict[str, _Step | None],
                is_kept: bool = False) -> int:
        character = text[place]
        if character in WHITESPACE:
            return place + 1
        if character not in steps:
            self.is_malformed = True
            return place
        step = steps[character]
        if step is None:
            self.is_done = True
            return place + 1
        self._step, self._value, self._text = step, JsonScanner(), []
        return place if is_kept else place + 1

    def _read(self, text: str, place: int) -> int:
        end = self._value.push(text, place)
        self._text.append(text[place:end])
        self.is_malformed = self._value.is_malformed
        return end

    def _key(self, text: str, place: int) -> int:
        end = self._read(text, place)
        if self._value.is_done:
            self._member, self._step = json.loads("".join(self._text)), self._colon
        return end

    def _value_start(self, text: str, place: int) -> int:
        is_arguments = self._member in self._keys
        # Safety: of two members with one name, two readers of the text may take different ones.
        if (is_arguments and self.has_arguments) or (self._member == "name" and self.name is not None):
            self.is_malformed = True
            return place
        self._step = self._argument_start if is_arguments else self._other
        self._value, self._text = JsonScanner(), []
        return place

    def _argument(self, text: str, place: int) -> int:
        self.has_arguments = True
        end = self._read(text, place)
        self._taken.append(self._text.pop())
        if self._value.is_done:
            self.has_all_arguments, self.is_done, self._step = True, self._is_bare, self._comma
        return end

    def _other(self, text: str, place: int) -> int:
        end = self._read(text, place)
        if self._value.is_done:
            self._step = self._comma
            if self._member == "name":
                name = json.loads("".join(self._text))
                if not isinstance(name, str) or not self._is_offered(name):
                    self.is_malformed = True
                else:
                    self.name = name
        return end

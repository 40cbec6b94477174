"""What formats share that write each argument of a call between tags, as text: GLM's, Qwen3-Coder's and others.

Text is written as it is, everything else as JSON; only the tool's schema says which. So text is delivered while it is
written, and a value that may be something else when it has ended. Of two arguments with one name the first counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pagedcore.tool_calls.call_parser import CallParser, split_at_tag
from pagedcore.tool_calls.events import ArgumentsDelta
from pagedcore.tool_calls.json_scanner import WHITESPACE
from pagedcore.tool_calls.schema_types import TEXT, Types, json_of_python, type_of_text, types_of


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a call is written: ``begin``, then for each call ``call`` NAME ``name_end``, arguments, ``call_end``, then
    ``end``. An argument is ``key`` NAME ``key_end``, ``value``, its value, ``value_end``.
    """

    begin: str
    call: str = ""
    name_end: str = ""
    key: str
    key_end: str
    value: str = ""
    value_end: str
    call_end: str
    end: str = ""
    """Empty where ``call_end`` is the end."""
    blank: str = ""
    """What is around a value besides."""
    line: str = "\n"
    """What is between tags; another format may write it or not."""
    may_lack_line: bool = False
    is_block: bool = False
    """Whether several calls come between one ``begin`` and ``end``."""


class TaggedCallParser(CallParser):
    """Reads text with calls anywhere in it."""

    end_of_raw = ""

    def __init__(self, names: Collection[str], new_id: Callable[[], str], tags: Tags) -> None:
        """Begin before any text; ``names`` may be a mapping to the schemas of arguments."""
        super().__init__(names, new_id)
        self._tags, self._schemas = tags, names if isinstance(names, Mapping) else {}
        self._key, self._value = list[str](), list[str]()
        self._keys, self._is_kept = set[str](), False
        self._types: Types = None

    def _start(self) -> bool:
        if self._write_until(self._tags.begin):
            self._undecided, self._state = [self._tags.begin], self._before_name
            return True
        return False

    def _before_name(self) -> bool:
        self._skip()
        is_there = self._skip_tag(self._tags.call) if self._rest else None
        if not is_there:
            return False if is_there is None else self._reject()
        return self._begin_name(self._after_name)

    def _after_name(self) -> bool:
        tags = self._tags
        if not tags.name_end:
            self._skip()
        is_there = self._skip_tag(tags.name_end) if tags.name_end else self._begins_with(tags.key, tags.call_end)
        if not is_there:
            return False if is_there is None else self._reject()
        self._open(self._name)
        self._keys, self._state = set(), self._in_call
        return True

    def _in_call(self) -> bool:
        tags, self._rest = self._tags, self._rest.lstrip(WHITESPACE)
        known = [tag for tag in (tags.key, tags.call_end, tags.end) if tag]
        is_there = self._begins_with(*known) if self._rest else None
        if is_there is None:
            return False
        tag = next((one for one in known if self._rest.startswith(one)), "")
        if tag == tags.key:
            self._key, self._state = [], self._read_key
        elif tag:
            self._add("}" if self._keys else "{}")
            self._end()
            self._close()
        else:  # Why dropped: it is within a call, of which nothing is content.
            found = [place for one in known if (place := self._rest.find(one)) > 0]
            last = self._rest.rfind("<", 1)
            is_begun = last > 0 and any(one.startswith(self._rest[last:]) for one in known)
            self._rest = self._rest[min(found) :] if found else self._rest[last:] if is_begun else ""
        self._rest = self._rest.removeprefix(tag)
        return True

    def _read_key(self) -> bool:
        part, is_whole, self._rest = split_at_tag(self._rest, self._tags.key_end)
        self._key.append(part)
        if is_whole:
            self._state = self._before_value
        return is_whole

    def _before_value(self) -> bool:
        if tag := self._tags.value:
            self._rest = self._rest.lstrip(WHITESPACE)
            is_there = self._begins_with(tag) if self._rest else None
            if not is_there:
                self._state = self._state if is_there is None else self._in_call
                return is_there is not None
            self._rest = self._rest.removeprefix(tag)
        self._state = self._first_of_value
        return True

    def _first_of_value(self) -> bool:
        self._rest = self._rest.removeprefix(self._tags.blank)
        name, schema = "".join(self._key), self._schemas.get(self._name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        of_value = properties.get(name) if isinstance(properties, Mapping) else None
        self._types = types_of(of_value, schema) if isinstance(schema, Mapping) else None
        self._is_kept = name not in self._keys
        if self._is_kept:
            self._add(f"{', ' if self._keys else '{'}{json.dumps(name, ensure_ascii=False)}: ")
            self._add('"' * (self._types == TEXT))
        self._keys.add(name)
        self._value, self._state = [], self._read_value
        return True

    def _read_value(self) -> bool:
        tags = self._tags
        part, is_whole, self._rest = split_at_tag(self._rest, tags.value_end)
        kept = part.removesuffix(tags.blank)
        if not is_whole:
            self._rest = part[len(kept) :] + self._rest
        if self._types == TEXT:
            self._add(_escaped(kept))
        else:
            self._value.append(kept)
        if is_whole:
            self._add('"' if self._types == TEXT else _as_json("".join(self._value), self._types))
            self._state = self._in_call
        return is_whole

    def _add(self, text: str) -> None:
        if text and (self._is_kept or self._state == self._in_call):
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))

    def _after_call(self) -> bool:
        tags, self._rest = self._tags, self._rest.lstrip(WHITESPACE)
        self._undecided = []
        if not self._rest:
            return False
        if tags.end:
            is_there = self._begins_with(tags.end, tags.call)
            if is_there is None:
                return False
            if is_there and not self._rest.startswith(tags.end):
                self._state = self._before_name
                return True
            self._rest = self._rest.removeprefix(tags.end)
        self._state = self._start
        return True

    def _left(self, rest: str) -> str:
        is_end = self._state == self._after_call and self._tags.end.startswith(rest)
        return "" if is_end else super()._left(rest)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, types: Types) -> str:
    kind, stripped = type_of_text(text), text.strip(WHITESPACE)
    if kind and (kind != "string" if types is None else kind in types - TEXT):
        return stripped
    # Why: templates write values that are no text as Python does, and so models may.
    if types is not None and (written := json_of_python(stripped)) and type_of_text(written) in types - TEXT:
        return written
    # Why: where text is no choice, a string in quotes is what the schema will refuse anyway.
    return json.dumps(text, ensure_ascii=False)

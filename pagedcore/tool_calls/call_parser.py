"""What the parsers of all formats share: text until a tag, and one call after another as events.

Law: whatever the cut of the text into pieces, the events add up to the same completion. Whatever is no call of an
offered tool is content, and nothing raises.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, Final

from pagedcore.tool_calls.events import ArgumentsDelta, ChatEvent, ContentDelta, ToolCallEnd, ToolCallStart
from pagedcore.tool_calls.json_scanner import WHITESPACE, CallScanner

ARGUMENTS: Final = ("arguments",)
MAX_NAME_LENGTH: Final = 64
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]*")
_PIECE: Final = 1024


def split_at_tag(text: str, tag: str) -> tuple[str, bool, str]:
    """Split text before a tag: what is certain to be before it, whether the tag is there, and what follows.

    Without the tag, what follows is the beginning of a tag at the end of the text, or nothing.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, True, after
    length = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return text[: len(text) - length], False, text[len(text) - length :]


class HeldBlank:
    """The whitespace at the end of a text so far, which is held back until there is text after it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def push(self, text: str) -> str:
        """Take further text; return all that is certain by now, which ends with no whitespace."""
        written = text.rstrip(WHITESPACE)
        blank = text[len(written) :]
        if written:
            written = self.take() + written
        if blank:
            self._pieces.append(blank)
        return written

    def take(self) -> str:
        """Return what was held back, and hold it no longer."""
        blank = "".join(self._pieces)
        self._pieces.clear()
        return blank


class CallParser(ABC):
    """A state machine over the text of one completion. A format is its states: methods that take from ``_rest`` what
    they understand, and return whether they can go on without further text.

    Whitespace between content and a call, and between calls, is dropped.

    Invariant: ``_rest`` is short, so that a state may copy it.
    """

    keys: ClassVar[Collection[str]] = ARGUMENTS
    """How the member of a call's object with its arguments may be called."""
    end_of_raw: ClassVar[str]
    """The tag that ends arguments which are no JSON."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        """Begin before any text; only calls of ``names`` are calls."""
        self._names, self._new_id = names, new_id
        self._rest = ""
        self._events: list[ChatEvent] = []
        self._blank = HeldBlank()
        self._undecided: list[str] = []
        self._num_calls = 0
        self._is_after_call = self._is_open = self._has_end = False
        self._scanner = CallScanner(self._is_offered, self.keys)
        self._name = ""
        self._state: Callable[[], bool] = self._start
        self._after_name_state: Callable[[], bool] = self._start

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text; return the events that have become certain."""
        for place in range(0, len(text), _PIECE):
            self._rest += text[place : place + _PIECE]
            while self._rest and self._state():
                pass
        return self._take_events()

    def finish(self) -> list[ChatEvent]:
        """Return what was held back, at the end of the text; a call that is open stays without an end."""
        rest, self._rest = self._rest, ""
        if self._state == self._raw:
            self._events.append(ArgumentsDelta(self._num_calls - 1, rest))
        elif not self._is_open:
            self._write(self._left(rest))
            if not self._num_calls and (blank := self._blank.take()):
                self._events.append(ContentDelta(blank))
        self._undecided, self._blank = [], HeldBlank()
        return self._take_events()

    def cut(self) -> list[ChatEvent]:
        """Return what was held back, at the end of a text that was cut off: a call that has its tag and no more is not
        content, since nobody wrote it for a reader.
        """
        if self._undecided and not self._is_open:
            self._rest, self._undecided = "", []
        return self.finish()

    @abstractmethod
    def _start(self) -> bool:
        """Read what is before the first call."""

    @abstractmethod
    def _after_call(self) -> bool:
        """Read what follows a call."""

    def _after_text(self) -> bool:
        """Read what follows text that looked like a call and is none."""
        return self._start()

    def _left(self, rest: str) -> str:
        """Return what is content of the text that is left at the end."""
        return rest if self._state == self._after_call else "".join(self._undecided) + rest

    def _take_events(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _is_offered(self, name: str) -> bool:
        return name in self._names

    def _write(self, text: str) -> None:
        """Add content, except for whitespace that may be dropped."""
        if self._is_after_call:
            text = text.lstrip(WHITESPACE)
        if not text:
            return
        self._is_after_call = False
        if written := self._blank.push(text):
            self._events.append(ContentDelta(written))

    def _write_until(self, tag: str) -> bool:
        """Add content up to a tag; return whether it was found and taken."""
        before, is_found, self._rest = split_at_tag(self._rest, tag)
        self._write(before)
        return is_found

    def _skip(self, characters: str = WHITESPACE) -> None:
        """Take characters that mean nothing, unless the text after them is no call."""
        stripped = self._rest.lstrip(characters)
        self._undecided.append(self._rest[: len(self._rest) - len(stripped)])
        self._rest = stripped

    def _skip_tag(self, tag: str) -> bool | None:
        """Take a tag; ``None`` if there is only its beginning so far."""
        if self._rest.startswith(tag):
            self._undecided.append(tag)
            self._rest = self._rest[len(tag) :]
            return True
        return None if tag.startswith(self._rest) else False

    def _begins_with(self, *tags: str) -> bool | None:
        """Whether one of several tags is next; ``None`` if that is not known yet."""
        if self._rest.startswith(tags):
            return True
        return None if any(tag.startswith(self._rest) for tag in tags) else False

    def _begin_name(self, after: Callable[[], bool]) -> bool:
        """Read the name of a tool next, and then the state ``after``; another name is no call."""
        self._name, self._after_name_state, self._state = "", after, self._read_name
        return True

    def _read_name(self) -> bool:
        found = _NAME.match(self._rest)
        part = found[0] if found else ""
        self._name += part
        self._undecided.append(part)
        self._rest = self._rest[len(part) :]
        if len(self._name) > MAX_NAME_LENGTH or (self._rest and self._name not in self._names):
            return self._reject()
        if self._rest:
            self._state = self._after_name_state
        return bool(self._rest)

    def _begin_call(self, name: str | None = None) -> bool:
        """Read a call next: its object, or the arguments of a call with this name."""
        self._scanner, self._state = CallScanner(self._is_offered, self.keys, name), self._call
        return True

    def _reject(self) -> bool:
        """Make content of what looked like a call."""
        text, self._undecided = "".join(self._undecided), []
        self._write(text)
        self._state = self._after_text
        return True

    def _call(self) -> bool:
        scanner = self._scanner
        end = scanner.push(self._rest)
        if not self._is_open:
            self._undecided.append(self._rest[:end])
        self._rest = self._rest[end:]
        if not self._is_open and scanner.name is not None and (scanner.has_arguments or scanner.is_done):
            self._open(scanner.name)
        if not self._is_open:
            return self._reject() if scanner.is_malformed or scanner.is_done else False
        if text := scanner.take_arguments():
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))
        if scanner.has_all_arguments and not self._has_end:
            self._end()
        if scanner.is_done:
            if not scanner.has_arguments:
                self._events.append(ArgumentsDelta(self._num_calls - 1, "{}"))
                self._end()
            return self._close()
        if scanner.is_malformed:
            if self._has_end:
                return self._close()
            self._state = self._raw
            return True
        return False

    def _open(self, name: str) -> None:
        self._is_open, self._has_end, self._undecided, self._blank = True, False, [], HeldBlank()
        self._events.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _end(self) -> None:
        self._has_end = True
        self._events.append(ToolCallEnd(self._num_calls - 1))

    def _close(self) -> bool:
        self._is_open, self._is_after_call, self._state = False, True, self._after_call
        return True

    def _raw(self) -> bool:
        """Read arguments that are no JSON, up to the format's end of a call."""
        text, is_found, self._rest = split_at_tag(self._rest, self.end_of_raw)
        if text:
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))
        if is_found:
            self._rest = self.end_of_raw + self._rest
            self._end()
            self._close()
        return is_found

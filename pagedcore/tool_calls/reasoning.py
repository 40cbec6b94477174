"""Reads reasoning: text between two tags at the beginning of a completion, or from its beginning to the second one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagedcore.tool_calls.call_parser import HeldBlank, split_at_tag
from pagedcore.tool_calls.events import ChatEvent, ReasoningDelta
from pagedcore.tool_calls.formats import OutputParser, ReasoningFormat, cut_off
from pagedcore.tool_calls.json_scanner import WHITESPACE


class ReasoningParser:
    """Splits reasoning off and gives the rest to another parser. Whitespace around the reasoning is dropped.

    Law: as of ``OutputParser``. What does not begin with reasoning has none.
    """

    def __init__(self, form: ReasoningFormat, content: OutputParser, *, is_open: bool) -> None:
        """Begin before a completion; with ``is_open`` its prompt has ended with the first tag."""
        self._form, self._content = form, content
        self._rest = ""
        self._blank, self._has_text = HeldBlank(), False
        self._state: Callable[[], list[ChatEvent]] = self._in_reasoning if is_open else self._start

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece of text; return the events that have become certain."""
        self._rest += text
        return self._state()

    def finish(self) -> list[ChatEvent]:
        """Return what was held back, at the end of the text."""
        return self._finish(self._content.finish)

    def cut(self) -> list[ChatEvent]:
        """Return the same of a text that was cut off."""
        return self._finish(partial(cut_off, self._content))

    def _finish(self, finish: Callable[[], list[ChatEvent]]) -> list[ChatEvent]:
        rest, self._rest = self._rest, ""
        if self._state == self._in_reasoning:
            return [*self._write(rest), *finish()]
        rest = self._blank.take() + rest
        return [*(self._content.push(rest) if rest else []), *finish()]

    def _start(self) -> list[ChatEvent]:
        text, tag = self._rest.lstrip(WHITESPACE), self._form.begin
        self._blank.push(self._rest[: len(self._rest) - len(text)])
        self._rest = text
        if text.startswith(tag):
            self._blank = HeldBlank()
            self._rest, self._state = text[len(tag) :], self._in_reasoning
        elif tag.startswith(text):
            return []
        else:
            self._rest, self._state = self._blank.take() + text, self._after
        return self._state()

    def _in_reasoning(self) -> list[ChatEvent]:
        before, is_closed, self._rest = split_at_tag(self._rest, self._form.end)
        events = self._write(before)
        if not is_closed:
            return events
        self._blank, self._state = HeldBlank(), self._before_content
        return [*events, *self._state()]

    def _before_content(self) -> list[ChatEvent]:
        self._rest = self._rest.lstrip(WHITESPACE)
        if not self._rest:
            return []
        self._state = self._after
        return self._state()

    def _after(self) -> list[ChatEvent]:
        text, self._rest = self._rest, ""
        return self._content.push(text)

    def _write(self, text: str) -> list[ChatEvent]:
        written = self._blank.push(text if self._has_text else text.lstrip(WHITESPACE))
        self._has_text = self._has_text or bool(written)
        return [ReasoningDelta(written)] if written else []


def seed_reasoning() -> ReasoningFormat:
    """Return the format ``seed``."""
    return ReasoningFormat("<seed:think>", "</seed:think>")


def mistral_reasoning() -> ReasoningFormat:
    """Return the format ``mistral``."""
    return ReasoningFormat("[THINK]", "[/THINK]")

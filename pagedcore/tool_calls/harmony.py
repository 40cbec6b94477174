"""Completions as gpt-oss writes them ("harmony"): messages with a channel and perhaps a recipient each.

``<|channel|>analysis<|message|>`` begins reasoning, ``final`` the answer, ``commentary to=functions.NAME`` a call with
a JSON object, and ``commentary`` alone text before a call. ``<|end|>`` ends a message, ``<|call|>`` one with a call.
The prompt ends with ``<|start|>assistant``, so that a completion begins within the head of its first message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedcore.tool_calls.call_parser import CallParser, split_at_tag
from pagedcore.tool_calls.events import ReasoningDelta
from pagedcore.tool_calls.formats import ReasoningFormat, ToolGrammar, default_id, quoted, rules_of_calls
from pagedcore.tool_calls.json_scanner import WHITESPACE

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CALL, _RETURN, _CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_ENDS, _BEGINS = (_END, _CALL, _RETURN), (_START, _CHANNEL, " to=")
_MARK: Final = re.compile("|".join(map(re.escape, (*_ENDS, _START, _CHANNEL))))
_RECIPIENT: Final = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")
_REASONING: Final = re.compile(rf"{re.escape(_CHANNEL)}\s*analysis")
_LONGEST_HEAD: Final = 256
"""Characters that may be the head of a message; more are text."""


class HarmonyParser(CallParser):
    """Reads reasoning, text and calls. A call of a tool that was not offered is text, without its head."""

    end_of_raw = _CALL

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        """Begin before any text; only calls of ``names`` are calls."""
        super().__init__(names, new_id)
        self._head, self._room, self._is_reasoning = list[str](), 0, False
        self._has_content = self._has_thought = False
        self._before = {True: "", False: ""}

    def _start(self) -> bool:
        if self._rest.startswith(_BEGINS):
            self._head, self._room, self._state = [], _LONGEST_HEAD, self._read_head
        elif any(tag.startswith(self._rest) for tag in _BEGINS):
            return False
        else:
            self._begin_body("")
        return True

    def _read_head(self) -> bool:
        part, is_whole, self._rest = split_at_tag(self._rest, _MESSAGE)
        self._head.append(part)
        self._room -= len(part)
        if self._room < 0:
            head = "".join(self._head)
            self._rest = head[_LONGEST_HEAD:] + _MESSAGE * is_whole + self._rest
            self._begin_body("")
            self._write_body(head[:_LONGEST_HEAD])
        elif is_whole:
            self._begin_body("".join(self._head))
        return is_whole or self._room < 0

    def _begin_body(self, head: str) -> None:
        recipient = _RECIPIENT.search(head)
        self._is_reasoning, self._state = bool(_REASONING.search(head)), self._body
        if recipient is not None and recipient[1] in self._names:
            self._begin_call(recipient[1])

    def _after_text(self) -> bool:
        self._state = self._body
        return True

    def _body(self) -> bool:
        if (mark := _MARK.search(self._rest)) is not None:
            self._write_body(self._rest[: mark.start()])
            self._rest = self._rest[mark.end() if mark[0] in _ENDS else mark.start() :]
            self._before[self._is_reasoning], self._state = "\n\n", self._start
            return True
        place = self._rest.rfind("<")
        is_held = place >= 0 and any(tag.startswith(self._rest[place:]) for tag in (*_ENDS, _START, _CHANNEL))
        place = place if is_held else len(self._rest)
        self._write_body(self._rest[:place])
        self._rest = self._rest[place:]
        return False

    def _write_body(self, text: str) -> None:
        if not text:
            return
        before, self._before[self._is_reasoning] = self._before[self._is_reasoning], ""
        if not self._is_reasoning:
            self._write(before if self._has_content else "")
            self._write(text)
            self._has_content = True
        else:
            self._events.append(ReasoningDelta((before if self._has_thought else "") + text))
            self._has_thought = True

    def _after_call(self) -> bool:
        self._rest = self._rest.lstrip(WHITESPACE)
        end = next((tag for tag in _ENDS if self._rest.startswith(tag)), "")
        if not end and any(tag.startswith(self._rest) for tag in _ENDS):
            return False
        self._rest, self._state = self._rest.removeprefix(end), self._start
        return bool(self._rest)

    def _left(self, rest: str) -> str:
        if self._state == self._read_head:
            return ""
        if self._state == self._body:
            self._write_body(rest)
            return ""
        return super()._left(rest)


@dataclass(frozen=True)
class HarmonyFormat(ReasoningFormat):
    """The format ``harmony``, of calls and of reasoning: one parser reads both."""

    begin: str = f"{_CHANNEL}analysis{_MESSAGE}"
    end: str = _END
    head_of_answer: str = f"{_START}assistant{_CHANNEL}final{_MESSAGE}"
    efforts: Sequence[str] = ("low", "medium", "high")

    @property
    def markers(self) -> Sequence[str]:
        """The marks of heads and ends."""
        return _START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN

    def recognises(self, template: str) -> bool:
        """Whether a chat template, or what it writes for a call, is of this format."""
        return _CHANNEL in template and _MESSAGE in template

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> HarmonyParser:
        """Return a parser for one completion."""
        return HarmonyParser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules: reasoning and text before, then an answer or one call."""
        mark, is_text = grammar.marker, "" if _CHANNEL in grammar.special_ids else r" & ~/(?s:.*)<\|(?s:.*)/"

        def head(channel: str) -> str:
            return f"{mark(_CHANNEL)} {quoted(channel)} {mark(_MESSAGE)}"

        def head_of_call(name: str) -> str:
            to = f" to=functions.{name}"
            places = f"({mark(_CHANNEL)} {quoted('commentary' + to)} | {quoted(to)} {mark(_CHANNEL)} \"commentary\")"
            return f"{places} (\" \" ({mark(_CONSTRAIN)})? \"json\")? {mark(_MESSAGE)}"

        calls = rules_of_calls(tools, head_of_call)
        ends = [] if grammar.is_required else [f"{head('final')} {'answer' if grammar.answer else 'TEXT'}"]
        if not grammar.is_required and not grammar.answer:
            ends.append(f"{head('analysis')} TEXT")
        return "\n".join([
            f"start: before* ({' | '.join([*ends, *(['call'] if calls else [])])})",
            f"before: ({head('analysis')} | {head('commentary')}) TEXT {mark(_END)} {mark(_START)} \"assistant\"",
            f"TEXT: /(?s:.*)/{is_text}", *calls, *([f"answer: {grammar.answer}"] if grammar.answer else [])])

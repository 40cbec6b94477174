"""Calls as Hermes and Qwen write them: ``<tool_call>`` and ``</tool_call>`` around a JSON object, one for each call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pagedcore.tool_calls.call_parser import CallParser
from pagedcore.tool_calls.formats import ToolGrammar, default_id, rules_of_objects
from pagedcore.tool_calls.json_scanner import WHITESPACE

_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL: Final = re.compile(rf"""{_BEGIN}(\s|\\n|['"{{}}+\-])*\{{\s*\\?["']name""")
"""A call, in the quotes and braces of a template's source too."""


class HermesParser(CallParser):
    """Reads text with calls anywhere in it."""

    end_of_raw = _END

    def _start(self) -> bool:
        if not self._write_until(_BEGIN):
            return False
        self._undecided = [_BEGIN]
        return self._begin_call()

    def _after_call(self) -> bool:
        self._rest = self._rest.lstrip(WHITESPACE)
        if not self._rest or self._skip_tag(_END) is None:
            return False
        self._undecided, self._state = [], self._start
        return True

    def _left(self, rest: str) -> str:
        is_end = self._state == self._after_call and _END.startswith(rest)
        return "" if is_end else super()._left(rest)


class HermesFormat:
    """The format ``hermes``."""

    markers = (_BEGIN, _END)

    def recognises(self, template: str) -> bool:
        """Whether a chat template, or what it writes for a call, has an object with a name within the tags."""
        return _CALL.search(template) is not None

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> HermesParser:
        """Return a parser for one completion."""
        return HermesParser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules."""
        begin, opened = grammar.marker(_BEGIN), f'call "\\n" {grammar.marker(_END)}'
        first = f'"\\n{{" {opened}'
        return grammar.rules(first, f'"\\n" {begin} {first}', rules_of_objects(tools, "arguments"), tag=_BEGIN,
                             head="{", opened=opened)

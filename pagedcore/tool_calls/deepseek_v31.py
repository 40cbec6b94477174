"""Calls as DeepSeek V3.1 writes them: a name, ``<｜tool▁sep｜>`` and a JSON object for each, in one block."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pagedcore.tool_calls.call_parser import CallParser
from pagedcore.tool_calls.formats import ToolGrammar, default_id, quoted, rules_of_calls
from pagedcore.tool_calls.json_scanner import WHITESPACE

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_WRITTEN: Final = re.compile(rf"{_CALL}[^<]*{_SEPARATOR}\{{")


class DeepSeekV31Parser(CallParser):
    """Reads text with blocks of calls anywhere in it."""

    end_of_raw = _CALL_END

    def _start(self) -> bool:
        if self._write_until(_BEGIN):
            self._undecided, self._state = [_BEGIN], self._before_name
            return True
        return False

    def _before_name(self) -> bool:
        self._skip()
        is_there = self._skip_tag(_CALL) if self._rest else None
        if not is_there:
            return False if is_there is None else self._reject()
        return self._begin_name(self._separator)

    def _separator(self) -> bool:
        is_there = self._skip_tag(_SEPARATOR)
        if not is_there:
            return False if is_there is None else self._reject()
        return self._begin_call(self._name)

    def _after_call(self) -> bool:
        self._rest, self._undecided = self._rest.lstrip(WHITESPACE), []
        if not self._rest or self._begins_with(_CALL_END, _CALL, _END) is None:
            return False
        if self._rest.startswith(_CALL_END):
            self._rest = self._rest.removeprefix(_CALL_END)
        elif self._rest.startswith(_CALL):
            self._state = self._before_name
        else:
            self._rest, self._state = self._rest.removeprefix(_END), self._start
        return True

    def _left(self, rest: str) -> str:
        is_end = self._state == self._after_call and _CALL_END.startswith(rest)
        return "" if is_end else super()._left(rest)


class DeepSeekV31Format:
    """The format ``deepseek_v31``."""

    markers = (_BEGIN, _CALL, _SEPARATOR, _CALL_END, _END)

    def recognises(self, template: str) -> bool:
        """Whether a chat template writes calls with an object right after the separator."""
        return _WRITTEN.search(template) is not None

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> DeepSeekV31Parser:
        """Return a parser for one completion."""
        return DeepSeekV31Parser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules."""
        mark = grammar.marker
        calls = rules_of_calls(tools, lambda name: f"{quoted(name)} {mark(_SEPARATOR)}", mark(_CALL_END))
        more = f"({mark(_CALL)} call)*" if grammar.is_parallel else ""
        opened = f"call {more} {mark(_END)}"
        head = "" if _CALL in grammar.special_ids else _CALL
        return grammar.rules(f"{mark(_CALL)} {opened}", f"{mark(_BEGIN)} {mark(_CALL)} {opened}", calls, tag=_BEGIN,
                             head=head, opened=opened)

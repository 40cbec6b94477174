"""Calls as Llama 3 writes them: a JSON object with ``parameters`` instead of text, or after ``<|python_tag|>``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pagedcore.tool_calls.call_parser import CallParser
from pagedcore.tool_calls.formats import ToolGrammar, default_id, rules_of_objects
from pagedcore.tool_calls.json_scanner import WHITESPACE

_TAG = "<|python_tag|>"
_CALL: Final = re.compile(r'\{"name": "[^"]*", "parameters": \{')
_TEXT = r"/(\s*[^\s{](?s:.*))?/"


class Llama3Parser(CallParser):
    """Reads calls at the beginning, separated by semicolons or whitespace, or text with calls after the tag."""

    keys = ("parameters", "arguments")
    end_of_raw = _TAG

    def _start(self) -> bool:
        return self._maybe_call(WHITESPACE)

    def _after_call(self) -> bool:
        return self._maybe_call(WHITESPACE + ";")

    def _maybe_call(self, separators: str) -> bool:
        self._skip(separators)
        if not self._rest:
            return False
        if self._rest[0] == "{":
            return self._begin_call()
        if (is_tagged := self._skip_tag(_TAG)) is None:
            return False
        return self._begin_call() if is_tagged else self._reject()

    def _after_text(self) -> bool:
        if not self._write_until(_TAG):
            return False
        self._undecided = [_TAG]
        return self._begin_call()


class Llama3Format:
    """The format ``llama3``."""

    markers = (_TAG,)

    def recognises(self, template: str) -> bool:
        """Whether a chat template, or what it writes for a call, is of this format."""
        is_written = _CALL.search(template) is not None
        return is_written or ("<|start_header_id|>" in template and '"parameters"' in template)

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> Llama3Parser:
        """Return a parser for one completion."""
        return Llama3Parser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules; without the tag, which models write before built-in tools only."""
        return grammar.rules('"{" call', '"; {" call', rules_of_objects(tools, "parameters"), text=_TEXT)

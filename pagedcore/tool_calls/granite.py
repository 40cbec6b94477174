"""Calls as Granite 3 writes them: ``<|tool_call|>`` and a JSON list of objects. Granite 4 has the format ``hermes``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pagedcore.tool_calls.formats import ToolGrammar, default_id
from pagedcore.tool_calls.mistral import MistralParser, grammar_of_list

_BEGIN: Final = "<|tool_call|>"
_CALL: Final = re.compile(rf"{re.escape(_BEGIN)}(\s*\[| followed by a JSON list)")
"""A call, or what these templates, which write none, tell the model."""


class GraniteParser(MistralParser):
    """Reads text, and calls after the tag."""

    end_of_raw = _BEGIN


class GraniteFormat:
    """The format ``granite``."""

    markers = (_BEGIN,)

    def recognises(self, template: str) -> bool:
        """Whether a chat template, or what it writes of calls, has a list after the tag."""
        return _CALL.search(template) is not None

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> GraniteParser:
        """Return a parser for one completion."""
        return GraniteParser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules."""
        return grammar_of_list(_BEGIN, tools, grammar)

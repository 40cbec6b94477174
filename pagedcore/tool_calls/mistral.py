"""Calls as Mistral writes them after ``[TOOL_CALLS]``: a JSON list, or since version 11 of its tokenizers a name and
``[ARGS]`` with the arguments for each call."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from pagedcore.tool_calls.call_parser import CallParser
from pagedcore.tool_calls.formats import ToolGrammar, quoted, rules_of_calls, rules_of_objects

_BEGIN, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]*")
_ID_LENGTH: Final = 9
_ID_CHARACTERS: Final = string.ascii_letters + string.digits


class MistralParser(CallParser):
    """Reads text, and calls in either form after the tag."""

    end_of_raw = _BEGIN
    """Also what calls begin with."""

    def _start(self) -> bool:
        if self._write_until(self.end_of_raw):
            self._undecided, self._state = [self.end_of_raw], self._kind
            return True
        return False

    def _kind(self) -> bool:
        self._skip()
        if not self._rest:
            return False
        self._is_list = self._rest[0] == "["
        if self._is_list:
            self._undecided.append("[")
            self._rest = self._rest[1:]
            return self._begin_call()
        return self._begin_name(self._before_arguments)

    def _before_arguments(self) -> bool:
        for tag in (_CALL_ID, _ARGS):
            is_there = self._skip_tag(tag)
            if is_there is None:
                return False
            if is_there:
                self._state = self._call_id if tag == _CALL_ID else self._before_arguments
                return bool(self._rest)
        return self._begin_call(self._name)

    def _call_id(self) -> bool:
        match = _NAME.match(self._rest)
        part = match[0] if match else ""
        self._undecided.append(part)
        self._rest = self._rest[len(part) :]
        if self._rest:
            self._state = self._before_arguments
        return bool(self._rest)

    def _after_call(self) -> bool:
        self._skip()
        if not self._rest:
            return False
        if self._is_list and self._rest[0] in ",]":
            self._undecided.append(self._rest[0])
            is_next, self._rest = self._rest[0] == ",", self._rest[1:]
            if is_next:
                return self._begin_call()
        self._undecided, self._state = [], self._start
        return True


class MistralFormat:
    """The format ``mistral``."""

    markers = (_BEGIN, _ARGS, _CALL_ID)

    def recognises(self, template: str) -> bool:
        """Whether a chat template asks for this format."""
        return _BEGIN in template

    def new_id(self) -> str:
        """Return the id of a call: nine letters or digits, as the templates of these models demand."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> MistralParser:
        """Return a parser for one completion."""
        return MistralParser(names, new_id)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules, in the form that the model's template has."""
        if _ARGS not in grammar.template:
            return grammar_of_list(_BEGIN, tools, grammar)
        own_id = f"{grammar.marker(_CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if _CALL_ID in grammar.template else ""
        calls = rules_of_calls(tools, lambda name: f"{quoted(name)} {own_id}{grammar.marker(_ARGS)}")
        return grammar.rules("call", f"{grammar.marker(_BEGIN)} call", calls, tag=_BEGIN, opened="call")


def grammar_of_list(tag: str, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
    """Return the Lark rules of a tag and a list of objects."""
    opened = f"""call {'(", {" call)* ' if grammar.is_parallel else ""}"]" """
    return replace(grammar, is_parallel=False).rules(
        f'"[{{" {opened}', "", rules_of_objects(tools, "arguments"), tag=tag, head="[{", opened=opened)

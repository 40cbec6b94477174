"""What a format of tool calls is, what one of reasoning is, and what formats build their grammars with.

Entries of the plugin tables ``tool_parsers`` and ``reasoning_parsers`` name a ``ToolFormat`` and a ``ReasoningFormat``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pagedcore.tool_calls.events import ChatEvent

MAX_NAME_LENGTH: Final = 64
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class OutputParser(Protocol):
    """Reads one completion's text in pieces.

    Law: the events of any pieces of one text add up to the same completion; no text raises.
    """

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece; return the events that have become certain."""

    def finish(self) -> list[ChatEvent]:
        """Return what was held back, at the end."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that the parser has to see, also where they are special tokens, which texts of completions lack."""

    def recognises(self, template: str) -> bool:
        """Whether a chat template is of these models."""

    def new_id(self) -> str:
        """Return an id for a call: unique, not to be guessed, and of a form that the chat template accepts."""

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> OutputParser:
        """Return a parser for one completion in which the tools of ``names`` may be called."""

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str | None:
        """Return the Lark grammar of completions with these tools; ``None`` if the format has none.

        Args:
            tools: objects with the ``name`` and the ``parameters`` of each.
            grammar: what is allowed, and its parts.
        """


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning between two tags at the beginning of a completion, or of its prompt's end."""

    begin: str = "<think>"
    end: str = "</think>"

    @property
    def markers(self) -> Sequence[str]:
        """Both tags."""
        return self.begin, self.end

    def recognises(self, template: str) -> bool:
        """Whether a chat template is of models that write the tags."""
        return self.end in template


def default_id() -> str:
    """Return the id of a call: 128 random bits."""
    return f"call_{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ToolGrammar:
    """What a completion may be, and how a format writes it down in the Lark syntax of llguidance."""

    template: str
    """The chat template's source."""
    special_ids: Mapping[str, int]
    """Those of the markers that are special tokens."""
    is_parallel: bool = True
    """Whether several calls are allowed."""
    is_required: bool = False
    """Whether a call has to be made, after reasoning at most."""
    before: Sequence[str] = ()
    """The rule ``thought`` of the reasoning before a call, where one has to be made, and what it needs."""
    answer: str = ""
    """Lark of a completion without calls; empty: any text."""

    def marker(self, tag: str) -> str:
        """Return the Lark of a marker."""
        return f"<[{self.special_ids[tag]}]>" if tag in self.special_ids else quoted(tag)

    def rules(self, first: str, following: str, calls: Sequence[str], *, tag: str = "", text: str = "") -> str:
        """Return the grammar of completions.

        Args:
            first: Lark of the first call, without the tag that it begins with.
            following: Lark of each further call.
            calls: rules that these refer to; empty: there is no tool to call.
            tag: what no text without a call has; empty where calls come first.
            text: the regular expression of text without calls; ``None``: all text without the tag.
        """
        first = f"{first} ({following})*" if self.is_parallel else first
        begin = self.marker(tag) if tag else ""
        if self.is_required:
            return "\n".join([f"start: {'thought' if self.before else ''} {begin} {first}", *self.before, *calls])
        is_special = tag in self.special_ids
        if not text:
            text = "/(?s:.*)/" + ("" if is_special else f" & ~/(?s:.*){in_regex(tag)}(?s:.*)/")
        if not calls:
            return f"start: TEXT\nTEXT: {text}"
        if self.answer:
            start = f"start: {'thought' if self.before else ''} (answer | {begin} {first})"
            return "\n".join([start, f"answer: {self.answer}", *self.before, *calls])
        rules = ["answer: TEXT", f"TEXT: {text}", *calls]
        if not tag:
            return "\n".join([f"start: answer | {first}", *rules])
        if not is_special:
            rules.append(f"begin[lazy]: /(?s:.*){in_regex(tag)}/")
        return "\n".join([f"start: answer | {f'TEXT {begin}' if is_special else 'begin'} {first}", *rules])


def rules_of_calls(tools: Sequence[dict[str, Any]], before: Callable[[str], str], after: str = "") -> list[str]:
    """Return the rule ``call`` and those of each tool: Lark made of its name, its arguments, and Lark after them."""
    if not tools:
        return []
    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    for place, tool in enumerate(tools):
        rules.append(f"call_{place}: {before(tool['name'])} arguments_{place} {after}")
        rules.append(f"arguments_{place}: %json {json.dumps(_schema(tool))}")
    return rules


def rules_of_objects(tools: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Return such rules for calls that are objects with a name, and the arguments under a key."""
    return rules_of_calls(tools, lambda name: quoted(f'{{"name": "{name}", "{key}": '), quoted("}"))


def quoted(text: str) -> str:
    """Return a Lark string."""
    return json.dumps(text)


def in_regex(text: str) -> str:
    """Return what matches a text in a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/")


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("parameters") or _NO_ARGUMENTS
    # Why: separators as chat templates write them, which models were trained on; whitespace without end is none.
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
             "lenient": not tool.get("strict")}
    # Why: schemas made of functions leave open whether there may be other arguments, which the function would refuse.
    closed = {"additionalProperties": False} if "properties" in schema and "patternProperties" not in schema else {}
    return {**closed, **schema, "type": "object", "x-guidance": style}

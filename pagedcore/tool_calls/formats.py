"""What a format of tool calls is, what one of reasoning is, and what formats build their grammars with.

Entries of the plugin tables ``tool_parsers`` and ``reasoning_parsers`` name a ``ToolFormat`` and a ``ReasoningFormat``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from pagedcore.tokenizer.template_arguments import EFFORTS
from pagedcore.tool_calls.events import ChatEvent

_MOST_BLANKS: Final = 4
"""Whitespace that may follow the last call where nothing but calls may come."""
STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON of a grammar is written: as chat templates do, and so models; whitespace without end is none."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class OutputParser(Protocol):
    """Reads one completion's text in pieces.

    Law: the events of any pieces of one text add up to the same completion; no text raises.
    """

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next piece; return the events that have become certain."""

    def finish(self) -> list[ChatEvent]:
        """Return what was held back, at the end."""


@runtime_checkable
class TellsCuts(Protocol):
    """What a parser may have besides: it knows completions that were cut off from those that ended by themselves."""

    def cut(self) -> list[ChatEvent]:
        """Return what was held back, instead of ``finish``: without what was the beginning of a call."""


def cut_off(parser: OutputParser) -> list[ChatEvent]:
    """Return what a parser held back, at the end of a completion that was cut off."""
    return parser.cut() if isinstance(parser, TellsCuts) else parser.finish()


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that the parser has to see, also where they are special tokens, which texts of completions lack."""

    def recognises(self, template: str) -> bool:
        """Whether a text is of these models: what a chat template writes for a call of a tool, or if no format knows
        that, its source.
        """

    def new_id(self) -> str:
        """Return an id for a call: unique, not to be guessed, and of a form that the chat template accepts."""

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> OutputParser:
        """Return a parser for one completion in which the tools of ``names`` may be called.

        ``names`` is a mapping to the JSON schemas of their arguments where these are known.
        """

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
    head_of_answer: str = ""
    """What comes between the end and the answer, and is neither: to stop strings it belongs to the reasoning."""
    efforts: Sequence[str] = EFFORTS
    """Values of ``reasoning_effort`` that its models know, if their template writes the word."""

    @property
    def markers(self) -> Sequence[str]:
        """Both tags."""
        return self.begin, self.end

    def recognises(self, template: str) -> bool:
        """Whether a chat template is of models that write the tags."""
        return self.end in template


@runtime_checkable
class ReadsAnswers(Protocol):
    """What a ``ReasoningFormat`` may have besides, whose answers have marks as well: it reads whole completions.

    ``new_parser`` and ``grammar`` are those of ``ToolFormat``.
    """

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> OutputParser:
        """Return a parser of reasoning, content and calls."""

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str | None:
        """Return the Lark grammar of completions."""


def default_id() -> str:
    """Return the id of a call: 128 random bits."""
    return f"call_{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ReasoningRules:
    """The reasoning of a completion in the Lark syntax of llguidance."""

    thought: str
    """Reasoning with its end, and the whitespace after it."""
    unended: str
    """Reasoning at whose end the completion ends."""
    is_open: bool
    """Whether the prompt has ended with its beginning; otherwise it may be missing."""
    begins: Sequence[str]
    """Texts that it begins with; none where it begins with a special token."""
    rules: Sequence[str]
    """What the others refer to."""

    @property
    def thought_if_any(self) -> str:
        """Reasoning with its end, or none where there may be none."""
        return self.thought if self.is_open else f"({self.thought})?"


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
    reasoning: ReasoningRules | None = None
    """What comes before calls and answers, in which a tag is text."""
    answer: str = ""
    """Lark of a completion without calls; empty: any text."""

    def marker(self, tag: str) -> str:
        """Return the Lark of a marker."""
        return f"<[{self.special_ids[tag]}]>" if tag in self.special_ids else quoted(tag)

    def rules(
        self, first: str, following: str, calls: Sequence[str], *, tag: str = "", head: str = "",
        opened: str = "", text: str = "",
    ) -> str:
        """Return the grammar of completions. After a call may come others, text, or the end.

        Args:
            first: Lark of the first call, without the tag that it begins with.
            following: Lark of each further call, where nothing but calls may come.
            calls: rules that these refer to; empty: there is no tool to call.
            tag: what calls begin with; empty where they come first.
            head: what follows the tag of a call, after a space or a line break at most: where something else does, the
                tag is text. Not for tags that are special tokens, which are no text.
            opened: Lark of a call after tag and head.
            text: the regular expression of text without calls, where there is no tag.
        """
        before = "" if self.reasoning is None else self.reasoning.thought_if_any
        own = [*calls, *(() if self.reasoning is None else self.reasoning.rules)]
        if self.is_required or (self.answer and calls):
            run = f"{self.marker(tag) if tag else ''} {first} {f'({following})*' if self.is_parallel else ''} BLANK"
            either = run if self.is_required else f"(answer | {run})"
            return "\n".join([f"start: {before} {either}", rf"BLANK: /[ \t\r\n]{{0,{_MOST_BLANKS}}}/", *own,
                              *([f"answer: {self.answer}"] if self.answer else [])])
        if not tag:
            content, rules = self._untagged(first, following, text, bool(calls))
        elif tag in self.special_ids:
            each = f"(TEXT {self.marker(tag)} {first}){'*' if self.is_parallel else '?'} " if calls else ""
            content, rules = (f"{each}TEXT",) * 2, ["TEXT: /(?s:.*)/"]
        else:
            # Why without the head where there are no calls: text that ends at it would look like one that was cut off.
            begin = in_regex(tag) + (rf"[\n ]?{in_regex(head)}" if head and calls else "")
            content, rules = self._tagged(begin, opened, bool(calls))
        if self.reasoning is None:
            return "\n".join([f"start: {content[0]}", *rules, *own])
        ways = [f"{self.reasoning.thought} {content[0]}", self.reasoning.unended]
        start = " | ".join(ways if self.reasoning.is_open else [*ways, content[1]])
        return "\n".join([f"start: {start}", *rules, *own])

    def _tagged(self, begin: str, opened: str, has_calls: bool) -> tuple[tuple[str, str], list[str]]:
        """Return Lark of text and calls, the same of what does not begin as reasoning does, and the rules of both."""
        def terminals(prefix: str, without: str) -> list[str]:
            return [f"{prefix}TEXT: /(?s:.*)/ & ~/(?s:.*){begin}(?s:.*)/{without}", *([
                f"{prefix}BEGIN: /(?s:.*){begin}/{without}", f"{prefix.lower()}begin[lazy]: {prefix}BEGIN",
            ] if has_calls else [])]

        rules, first = terminals("", ""), ""
        if self._begins:
            first = "FIRST_"
            rules += terminals(first, "".join(f" & ~/{in_regex(text)}(?s:.*)/" for text in self._begins))
        if not has_calls:
            return ("TEXT", f"{first}TEXT"), rules
        each, more = ("*", f"(begin {opened})*") if self.is_parallel else ("?", "")
        return (f"(begin {opened}){each} TEXT",
                f"({first.lower()}begin {opened} {more} TEXT | {first}TEXT)"), rules

    def _untagged(self, first: str, following: str, text: str, has_calls: bool) -> tuple[tuple[str, str], list[str]]:
        """Return the same of calls that come first."""
        rules, name = [f"TEXT: {text}"], "TEXT"
        if self._begins:
            name = "FIRST_TEXT"
            rules.append(f"{name}: {text}" + "".join(f" & ~/{in_regex(begin)}(?s:.*)/" for begin in self._begins))
        if not has_calls:
            return ("TEXT", name), rules
        calls = f"{first} {f'({following})*' if self.is_parallel else ''} AFTER"
        return (f"(TEXT | {calls})", f"({name} | {calls})"), [*rules, r"AFTER: /(\s*([^\s;{](?s:.*))?)?/"]

    @property
    def _begins(self) -> Sequence[str]:
        return () if self.reasoning is None or self.reasoning.is_open else self.reasoning.begins


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
    """Return such rules for calls that are objects with a name, and the arguments under a key, without their ``{``."""
    return rules_of_calls(tools, lambda name: quoted(f'"name": "{name}", "{key}": '), quoted("}"))


def quoted(text: str) -> str:
    """Return a Lark string."""
    return json.dumps(text)


def in_regex(text: str) -> str:
    """Return what matches a text in a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("parameters") or _NO_ARGUMENTS
    style = {**STYLE, "lenient": not tool.get("strict")}
    # Why: schemas made of functions leave open whether there may be other arguments, which the function would refuse.
    closed = {"additionalProperties": False} if "properties" in schema and "patternProperties" not in schema else {}
    return {**closed, **schema, "type": "object", "x-guidance": style}

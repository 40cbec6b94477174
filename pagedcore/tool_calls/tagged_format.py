"""Formats with each argument between tags, and the Lark rules of their calls, made of the tools' schemas.

Arguments come in the order of the schema, and behind them others of any name and text if it says that there may be
such. Text ends at the first tag that ends a value, and what else a schema says of text, a length or a pattern, no rule
keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from pagedcore.errors import InvalidTools
from pagedcore.tool_calls.formats import STYLE, ToolGrammar, default_id, in_regex, quoted
from pagedcore.tool_calls.schema_types import TEXT, types_of
from pagedcore.tool_calls.tagged_calls import TaggedCallParser, Tags

_ANY_NAME: Final = "/[a-zA-Z0-9_.-]{1,64}/"
_NOT_KEPT: Final = ("pattern", "format", "minLength", "maxLength")


class TaggedFormat:
    """A format that is its tags."""

    tags: ClassVar[Tags]

    @property
    def markers(self) -> Sequence[str]:
        """Those tags that have no name in them."""
        tags = self.tags
        of_key = (tags.key, tags.key_end, tags.value) if tags.value else ()
        return tuple(tag for tag in (tags.begin, *of_key, tags.value_end, tags.call_end, tags.end) if tag)

    def recognises(self, template: str) -> bool:
        """Whether a chat template, or what it writes for a call, has a call's first tags one after the other."""
        tags = self.tags
        # Why: in the source of a template a line break is two characters, and a name a variable.
        first = r"(\s|\\n)*" + re.escape(tags.call) if tags.call else "[^<]*" + re.escape(tags.key)
        return re.search(re.escape(tags.begin) + first, template) is not None

    def new_id(self) -> str:
        """Return the id of a call."""
        return default_id()

    def new_parser(self, names: Collection[str], new_id: Callable[[], str]) -> TaggedCallParser:
        """Return a parser for one completion."""
        return TaggedCallParser(names, new_id, self.tags)

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
        """Return the Lark rules. Raises ``InvalidTools``: a strict tool asks of a text what no rule keeps."""
        return grammar_of_tags(self.tags, tools, grammar)


def grammar_of_tags(tags: Tags, tools: Sequence[dict[str, Any]], grammar: ToolGrammar) -> str:
    """Return the Lark grammar of completions with calls in these tags.

    Raises:
        InvalidTools: a strict tool asks of a text what no rule keeps.
    """
    rules = _Rules(tags, grammar)
    calls = rules.of(tools)
    begin, end = grammar.marker(tags.begin), f" {rules.line} {grammar.marker(tags.end)}" if tags.end else ""
    lead, head = rules.tag(tags.call), tags.call
    more = f"({rules.line} {lead} call)*" if tags.is_block and grammar.is_parallel else ""
    opened = f"call {more} {end}"
    first = f"{rules.line} {lead} {opened}"
    return grammar.rules(first, f"{rules.line} {begin} {first}", calls, tag=tags.begin, head=head, opened=opened)


class _Rules:
    """Writes the rules of one set of tools."""

    def __init__(self, tags: Tags, grammar: ToolGrammar) -> None:
        self._tags, self._grammar = tags, grammar
        self.line = f"{quoted(tags.line)}{'?' * tags.may_lack_line}"

    def tag(self, text: str) -> str:
        """Return a tag's Lark; empty for none."""
        return self._grammar.marker(text) if text else ""

    def of(self, tools: Sequence[dict[str, Any]]) -> list[str]:
        """Return the rule ``call`` and those it refers to; none without tools."""
        if not tools:
            return []
        blank, end = in_regex(self._tags.blank), self._tags.value_end
        is_special = end in self._grammar.special_ids
        text = f"VALUE {self.tag(end)}" if is_special else "value"
        rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}",
                 "VALUE: /(?s:.*)/" if is_special else f"value[lazy]: /(?s:.*){blank}{in_regex(end)}/"]
        for place, tool in enumerate(tools):
            arguments, own = self._arguments(place, tool, text)
            after = f"{self.line} {arguments} {self.tag(self._tags.call_end)}"
            rules += [f"call_{place}: {quoted(tool['name'] + self._tags.name_end)} {after}", *own]
        return rules

    def _arguments(self, place: int, tool: Mapping[str, Any], text: str) -> tuple[str, list[str]]:
        schema, names, rules = tool.get("parameters") or {"properties": {}}, list[str](), list[str]()
        properties = schema.get("properties")
        any_key = f"{self.tag(self._tags.key)} {_ANY_NAME} {self.tag(self._tags.key_end)}"
        others = f"({self._argument(any_key, text)})*"
        if not isinstance(properties, Mapping):
            return others, []
        required = schema.get("required") or ()
        for number, (name, one) in enumerate(properties.items()):
            rule, value = f"argument_{place}_{number}", self._value(one, schema, tool, text)
            if value.startswith("%json"):
                rules.append(f"{rule}_value: {value}")
                value = f"{rule}_value {self._end_of_value}"
            key = f"{self.tag(self._tags.key)} {quoted(name)} {self.tag(self._tags.key_end)}"
            rules.append(f"{rule}: {self._argument(key, value)}")
            names.append(rule if name in required else f"{rule}?")
        # Why: one that does not say whether there may be other arguments has none, as in the formats of JSON.
        if schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
            names.append(others)
        return " ".join(names), rules

    @property
    def _end_of_value(self) -> str:
        blank = self._tags.blank
        return f"{quoted(blank) if blank else ''} {self.tag(self._tags.value_end)}"

    def _argument(self, key: str, value: str) -> str:
        tags = self._tags
        before = f"{self.line} {self.tag(tags.value)}" if tags.value else quoted(tags.blank) if tags.blank else ""
        return f"{key} {before} {value} {self.line}"

    def _value(self, one: Any, root: Mapping[str, Any], tool: Mapping[str, Any], text: str) -> str:
        """Return the Lark of a value with its end; of JSON without it."""
        types = types_of(one, root)
        if types is not None and not types & TEXT:
            defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"%json {json.dumps({**defined, **one, 'x-guidance': {**STYLE, 'lenient': not tool.get('strict')}})}"
        choices = one.get("enum") if isinstance(one, Mapping) else None
        if types == TEXT and choices:
            return f"({' | '.join(map(quoted, choices))}) {self._end_of_value}"
        if tool.get("strict") and isinstance(one, Mapping) and (found := [name for name in _NOT_KEPT if name in one]):
            raise InvalidTools("tools", f"strict with {found[0]} of a text",
                               "not strict, or text of any form, which this model's calls have between tags",
                               is_described=True)
        return text

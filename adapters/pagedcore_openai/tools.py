"""Tools and their choice in a body, and calls and reasoning in a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pagedcore.errors import InvalidRequest, InvalidTools
from pagedcore.tool_calls.events import (
    ArgumentsDelta,
    ChatEvent,
    ContentDelta,
    ParsedCompletion,
    ReasoningDelta,
    ToolCallStart,
)
from pagedcore_http.events import encode
from pagedcore_openai.errors import FieldNotSupported, Refused, is_field, renamed
from pagedcore_openai.message_fields import OF_TOOLS

_TOOL: Final = re.compile(r"^tools(\[\d+\])?(\.function)?")
"""The place of a tool, whose function is one level deeper than in the older form, and in responses."""
_NESTED: Final = re.compile(r'("type": "function", )"function": \{"name": ([".]+)\}')
"""A function in the form that a refusal asks for."""


def functions_only(tools: Any) -> Any:
    """Return tools without notes of other providers; anything but a list is left for the engine to refuse.

    Raises ``FieldNotSupported`` for a tool that is no function, or that says something besides its function.
    """
    if not isinstance(tools, list):
        return tools
    return [_function(f"tools[{place}]", tool) for place, tool in enumerate(tools)]


def _function(where: str, tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        advice = "Nothing is run here: leave the tool out, or give a function of your own."
        raise FieldNotSupported.of_name(f"{where}.type", kind, "function", advice)
    plain = _without_notes(tool)
    if not isinstance(function := plain.get("function"), dict):
        return plain
    for name in plain.keys() - {"type", "function"}:
        # Safety: text that is no name of a field may be anything, and is not repeated.
        raise FieldNotSupported(f"{where}.{name}" if is_field(name) else where, plain[name], "type and function",
                                "Leave it out.")
    return {**plain, "function": _without_notes(function)}


def _without_notes(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in tool.items() if name not in OF_TOOLS and (name, one) != ("async", False)}


def from_functions(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat's fields with OpenAI's older ``functions`` and ``function_call`` as tools and their choice.

    Raises:
        InvalidRequest: there are tools as well.
        InvalidTools: the functions are no list.
    """
    functions, choice = fields.get("functions", []), fields.get("function_call")
    if not isinstance(functions, list):
        raise InvalidTools("functions", functions, "a list of functions")
    if not functions and choice in (None, "auto", "none"):
        return fields
    for name in ("tools", "tool_choice"):
        if name in fields:
            raise InvalidRequest(name, fields[name], "null beside functions and function_call")
    tools = [{"type": "function", "function": one} for one in functions]
    chosen = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    # Why one: a message of this form has room for one call.
    return {**fields, "tools": tools, "tool_choice": chosen, "parallel_tool_calls": False}


def of_functions(error: Refused) -> Refused:
    """Return a refusal of tools with the names of the older form."""
    what = _TOOL.sub(r"functions\1", error.what).replace("tool_choice", "function_call")
    return renamed(error, what) if what != error.what else error


def of_flat_tools(error: Refused) -> Refused:
    """Return a refusal of tools as responses have them, which are their functions."""
    limit = _NESTED.sub(r'\1"name": \2', error.limit)
    return renamed(error, _TOOL.sub(r"tools\1", error.what), limit=limit)


def chat_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response's body with tools and choice in the form of chats, which has a further object."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    changed: dict[str, Any] = {}
    if isinstance(tools, list):
        changed["tools"] = [_wrapped(tool) for tool in functions_only(tools)]
    if isinstance(choice, dict):
        changed["tool_choice"] = _wrapped(choice)
    return {**fields, **changed}


def _wrapped(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


def message_of(parsed: ParsedCompletion, *, is_older: bool = False) -> dict[str, Any]:
    """Return the message of a whole chat completion; in the older form its one call is ``function_call``."""
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
             for call in parsed.tool_calls]
    message = {"role": "assistant", "content": parsed.content if parsed.content or not calls else None, "refusal": None}
    if parsed.reasoning:
        message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
    if calls and is_older:
        return message | {"function_call": calls[0]["function"]}
    return message | ({"tool_calls": calls} if calls else {})


def said(parsed: ParsedCompletion) -> dict[str, Any]:
    """Return a completion as a message of the conversation; a call that was cut off is left out."""
    message = message_of(replace(parsed, tool_calls=tuple(call for call in parsed.tool_calls if call.is_complete)))
    kept = ("role", "content", "tool_calls", "reasoning_content")
    return {**{name: message[name] for name in kept if name in message}, "content": parsed.content}


def delta_of(event: ChatEvent, *, is_older: bool = False) -> str | None:
    """Return the delta of a chunk as JSON; ``None`` for an event that chunks do not have."""
    match event:
        case ToolCallStart(_, _, name) if is_older:
            return encode({"function_call": {"name": name, "arguments": ""}})
        case ArgumentsDelta(_, text) if is_older:
            return encode({"function_call": {"arguments": text}})
        case ContentDelta(text):
            return encode({"content": text})
        case ReasoningDelta(text):
            return encode({"reasoning_content": text, "reasoning": text})
        case ToolCallStart(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return encode({"tool_calls": [call]})
        case ArgumentsDelta(index, text):
            return encode({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return None

"""Tools and their choice in a body, and calls and reasoning in a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagedcore import Chat
from pagedcore.tool_calls.events import (
    ArgumentsDelta,
    ChatEvent,
    ContentDelta,
    ParsedCompletion,
    ReasoningDelta,
    ToolCallStart,
)
from pagedcore_http.events import encode


def with_tools(messages: list[Any], fields: Mapping[str, Any]) -> Any:
    """Return the prompt of a chat. Raises ``InvalidTools``."""
    return Chat(messages, fields["tools"]) if fields.get("tools", []) != [] else messages


def chat_tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response's body with tools and choice in the form of chats, which has a further object."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    changed: dict[str, Any] = {}
    if isinstance(tools, list):
        changed["tools"] = [_wrapped(tool) for tool in tools]
    if isinstance(choice, dict):
        changed["tool_choice"] = _wrapped(choice)
    return {**fields, **changed}


def _wrapped(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


def message_of(parsed: ParsedCompletion) -> dict[str, Any]:
    """Return the message of a whole chat completion."""
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
             for call in parsed.tool_calls]
    message = {"role": "assistant", "content": parsed.content if parsed.content or not calls else None, "refusal": None}
    if parsed.reasoning:
        message |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
    return message | ({"tool_calls": calls} if calls else {})


def said(parsed: ParsedCompletion) -> dict[str, Any]:
    """Return a completion as a message of the conversation; a call that was cut off is left out."""
    message = message_of(replace(parsed, tool_calls=tuple(call for call in parsed.tool_calls if call.is_complete)))
    kept = ("role", "content", "tool_calls", "reasoning_content")
    return {**{name: message[name] for name in kept if name in message}, "content": parsed.content}


def delta_of(event: ChatEvent) -> str | None:
    """Return the delta of a chunk as JSON; ``None`` for an event that chunks do not have."""
    match event:
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

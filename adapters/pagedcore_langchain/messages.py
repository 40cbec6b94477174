"""LangChain messages as chat messages of pagedcore: roles, texts, calls and their results, nothing to be fetched.

Refuses what the engine cannot honour (images, files) instead of leaving it out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from pagedcore.errors import InvalidPrompt, PromptEmpty

_OF_CALLS: Final = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")
"""Parts that repeat the calls of a message, which has them beside its content as well."""
_OF_REASONING: Final = ("reasoning", "thinking")


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return a mapping with "role", "content" and what else a message has: its name, its calls, or whose result it is.

    Raises:
        InvalidPrompt: a message is of another kind than system, human, ai, tool or chat, or has a part that is not
            text.
        PromptEmpty: no message.
    """
    if not messages:
        raise PromptEmpty("messages", 0, "at least 1 message")
    return [_to_chat(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _to_chat(what: str, message: BaseMessage) -> dict[str, Any]:
    is_ai = isinstance(message, AIMessage)
    chat: dict[str, Any] = {"role": _role(what, message)}
    chat["content"] = _text(f"{what}.content", message.content, (*_OF_CALLS, *_OF_REASONING) if is_ai else ())
    if message.name:
        chat["name"] = message.name
    if isinstance(message, ToolMessage):
        chat["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [(call, json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
        calls += [(call, call["args"]) for call in message.invalid_tool_calls]  # type: ignore[misc]  # Why: as written
        if calls:
            chat["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": arguments},
                 **({"id": call["id"]} if call["id"] else {})} for call, arguments in calls
            ]
        if isinstance(reasoning := message.additional_kwargs.get("reasoning_content"), str):
            chat["reasoning_content"] = reasoning
    return chat


def _role(what: str, message: BaseMessage) -> str:
    match message:
        case SystemMessage():
            return "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage():
            return "tool"
        case ChatMessage():
            return message.role
    raise InvalidPrompt(what, message, "system, human, ai, tool and chat messages")


def _text(what: str, content: str | list[Any], left_out: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    parts = [(f"{what}[{index}]", part) for index, part in enumerate(content)]
    return "".join(_part(where, part) for where, part in parts
                   if not (isinstance(part, dict) and part.get("type") in left_out))


def _part(what: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise InvalidPrompt(what, part, "text parts", "This model reads text only; nothing is fetched.")
    return text

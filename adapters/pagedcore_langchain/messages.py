"""LangChain messages as chat messages of pagedcore: roles and texts, nothing that would have to be fetched.

Refuses what the engine cannot honour (images, files, tool calls) instead of leaving it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from pagedcore.errors import InvalidPrompt, PromptEmpty


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Return a mapping with "role", "content" and, if it has one, "name" for each message.

    Raises:
        InvalidPrompt: a message is of another kind than system, human, ai or chat, has tool calls, or has a part
            that is not text.
        PromptEmpty: no message.
    """
    if not messages:
        raise PromptEmpty("messages", 0, "at least 1 message")
    return [_to_chat(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _to_chat(what: str, message: BaseMessage) -> dict[str, str]:
    chat = {"role": _role(what, message), "content": _text(f"{what}.content", message.content)}
    return chat | ({"name": message.name} if message.name else {})


def _role(what: str, message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and message.tool_calls:
        raise InvalidPrompt(f"{what}.tool_calls", message, "an ai message without tool calls", "Tools are not offered.")
    match message:
        case SystemMessage():
            return "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ChatMessage():
            return message.role
    raise InvalidPrompt(what, message, "system, human, ai and chat messages", "Tools are not offered.")


def _text(what: str, content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(f"{what}[{index}]", part) for index, part in enumerate(content))


def _part(what: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise InvalidPrompt(what, part, "text parts", "This model reads text only; nothing is fetched.")
    return text

"""OpenAI's form of a message's text, a list of parts, as the one text that the engine takes."""

from __future__ import annotations

from typing import Any

from pagedcore.errors import InvalidPrompt


def join_text_parts(prompt: Any) -> Any:
    """Return a prompt in which the contents of chat messages are text; all else is left for the engine to validate.

    Raises:
        InvalidPrompt: a part is not ``{"type": "text", "text": ...}``; images, audio and files are not read.
    """
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], dict):
        return prompt
    return [_joined(f"messages[{index}].content", message) for index, message in enumerate(prompt)]


def _joined(what: str, message: Any) -> Any:
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    return {**message, "content": "".join(_text(f"{what}[{index}]", part) for index, part in enumerate(parts))}


def _text(what: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidPrompt(what, part, 'a part like {"type": "text", "text": "..."}', "This model reads text only.")
    return text

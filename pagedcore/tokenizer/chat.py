"""Chats: messages, the calls in them, and the tools that the model may call. Checked before a template sees them.

It allocates nothing in proportion to what it refuses. ``chat_template.py`` renders what is accepted here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pagedcore.config.limits import (
    MAX_CHAT_BYTES,
    MAX_CHAT_MESSAGES,
    MAX_TEXT_BYTES_PER_TOKEN,
    MAX_TOOL_CALLS,
    MAX_TOOL_DEPTH,
    MAX_TOOLS,
    MAX_TOOLS_LENGTH,
)
from pagedcore.config.strict_json import load_json
from pagedcore.errors import InvalidPrompt, InvalidTools, PromptEmpty, PromptTooLong, describe, describe_name
from pagedcore.protocols import ChatMessage
from pagedcore.tokenizer.template_arguments import validate_arguments
from pagedcore.tokenizer.text_size import count_text_bytes

TOOL_NAME: Final = re.compile("[a-zA-Z0-9_-]{1,64}")
_FIELDS: Final = ("name", "description", "parameters", "strict", "return")
_MAX_BITS: Final = 1024
_NAME_LIMIT: Final = "1 to 64 letters, digits, _ and -"


@dataclass(frozen=True, init=False, slots=True)
class Chat:
    """A prompt of chat messages with tools; a plain list of messages is a chat without tools.

    Raises:
        InvalidPrompt: a flag is neither true nor false, or a template's argument is none.
        InvalidTools: there are too many tools, one is no function as OpenAI's interface has them, two have one name,
            or their parameters are too long, too deep, or no JSON.
    """

    messages: Sequence[ChatMessage]
    tools: tuple[dict[str, Any], ...]
    """Each ``{"type": "function", "function": {"name", "description", "parameters"}}``; parameters are a JSON schema
    of an object."""
    control_tokens: bool
    """Whether the text of a control token in messages and tools becomes that token: for a caller who wrote them all."""
    template_arguments: Mapping[str, Any]
    """Arguments of the chat template by name, such as ``{"enable_thinking": False}``: at most 16 that it reads, each a
    truth value, a number or short text."""
    add_generation_prompt: bool
    """Whether the prompt ends where a new message of the assistant begins; if not, behind the last message."""
    continue_final_message: bool
    """Whether the completion continues the last message, which is one of the assistant; no new one begins then."""

    def __init__(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None, *,
        control_tokens: bool = False, template_arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
    ) -> None:
        for name, value in (("control_tokens", control_tokens), ("add_generation_prompt", add_generation_prompt),
                            ("continue_final_message", continue_final_message)):
            if type(value) is not bool:
                raise InvalidPrompt(name, value, "True or False")
            object.__setattr__(self, name, value)
        if continue_final_message:
            object.__setattr__(self, "add_generation_prompt", False)
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "tools", validate_tools(tools))
        arguments = validate_arguments("template_arguments", template_arguments)
        object.__setattr__(self, "template_arguments", arguments)

    @staticmethod
    def prompt_of(
        messages: Any, tools: Any, template_arguments: Mapping[str, Any], *, add_generation_prompt: object = None,
        continue_final_message: object = None,
    ) -> Any:
        """Return the prompt of a chat as a door was given its parts: the messages, or a ``Chat`` if more is said.

        Args:
            messages: of the chat, not looked at.
            tools: as for ``Chat``; none of them is none.
            template_arguments: as ``ChatFormat.arguments`` returns them.
            add_generation_prompt: as for ``Chat``; ``None``: unless the last message is continued.
            continue_final_message: as for ``Chat``; ``None``: it is not.

        Raises:
            InvalidPrompt: a flag is neither true nor false, or both are true.
            InvalidTools: as ``Chat``.
        """
        for name, value in (("add_generation_prompt", add_generation_prompt),
                            ("continue_final_message", continue_final_message)):
            if value is not None and type(value) is not bool:
                raise InvalidPrompt(name, value, "true or false")
        continues = continue_final_message is True
        if continues and add_generation_prompt:
            raise InvalidPrompt("add_generation_prompt", True, "false, or null, where the last message is continued")
        adds_prompt = not continues and add_generation_prompt is not False
        if tools in (None, []) and not template_arguments and adds_prompt:
            return messages
        return Chat(messages, tools, template_arguments=template_arguments, add_generation_prompt=adds_prompt,
                    continue_final_message=continues)

    @staticmethod
    def joined_parts(what: str, content: Any, room: int = MAX_CHAT_BYTES) -> Any:
        """Return a message's content in OpenAI's form, a list of text parts, as their text; others as they are.

        Raises:
            InvalidPrompt: a part is not ``{"type": "text", "text": ...}``; images, audio and files are not read.
            InvalidText: the text has more than ``room`` bytes, or UTF-8 cannot encode it.
        """
        if not isinstance(content, list | tuple):
            return content
        texts = [_part_text(f"{what}[{place}]", part) for place, part in enumerate(content)]
        for place, text in enumerate(texts):
            room -= count_text_bytes(f"{what}[{place}]", text, room)
        return "".join(texts)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions of the tools."""
        return [tool["function"] for tool in self.tools]

    @property
    def rendering(self) -> Mapping[str, Any]:
        """All that the template is told besides messages and tools; empty if it is nothing out of the ordinary."""
        if self.add_generation_prompt:
            return self.template_arguments
        continues = {"continue_final_message": True} if self.continue_final_message else {}
        return {**self.template_arguments, "add_generation_prompt": False, **continues}


def validate_tools(tools: object) -> tuple[dict[str, Any], ...]:
    """Return a copy of tools, none for ``None``. Raises ``InvalidTools`` as ``Chat``."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise InvalidTools("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidTools("tools", len(tools), f"at most {MAX_TOOLS} tools")
    copy = _Copy("tools", MAX_TOOLS_LENGTH)
    checked = tuple(_tool(f"tools[{place}]", tool, copy) for place, tool in enumerate(tools))
    names = set[str]()
    for place, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in names:
            raise InvalidTools(f"tools[{place}].function.name", name, "a name that no other tool has")
        names.add(name)
    return checked


def _tool(what: str, tool: Any, copy: _Copy) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.keys() != {"type", "function"} or tool["type"] != "function":
        raise InvalidTools(what, tool, 'an object like {"type": "function", "function": {"name": ...}}')
    for name in function:
        if name not in _FIELDS:
            raise InvalidTools(f"{what}.function", describe_name(name), f"the fields {', '.join(_FIELDS)}",
                               is_described=True)
    given = {name: copy.value(f"{what}.function.{name}", value) for name, value in function.items()
             if value is not None}
    if not isinstance(given.get("name"), str) or not TOOL_NAME.fullmatch(given["name"]):
        raise InvalidTools(f"{what}.function.name", given.get("name"), _NAME_LIMIT)
    if not isinstance(given.get("description", ""), str):
        raise InvalidTools(f"{what}.function.description", given["description"], "text")
    if type(given.get("strict", False)) is not bool:
        raise InvalidTools(f"{what}.function.strict", given["strict"], "true or false")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidTools(f"{what}.function.parameters", parameters, 'a JSON schema of the type "object"')
    return {"type": "function", "function": given}


class _Copy:
    """Copies JSON values, of no more characters in all than there is room for."""

    def __init__(self, what: str, room: int) -> None:
        self._what, self._limit, self._room = what, room, room

    def value(self, what: str, value: Any, depth: int = 0) -> Any:
        self._take(2)
        if depth > MAX_TOOL_DEPTH:
            raise InvalidTools(what, depth, f"at most {MAX_TOOL_DEPTH} levels of objects and lists")
        if isinstance(value, Mapping):
            return {self._text(what, key): self.value(what, one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(what, one, depth + 1) for one in value]
        if isinstance(value, str):
            return self._text(what, value)
        is_number = type(value) is int and value.bit_length() < _MAX_BITS
        if value is None or is_number or type(value) is bool or (type(value) is float and math.isfinite(value)):
            return value
        raise InvalidTools(what, value, "a value that JSON has")

    def _text(self, what: str, text: object) -> str:
        if not isinstance(text, str):
            raise InvalidTools(what, text, "objects whose keys are text")
        self._take(len(text))
        count_text_bytes(what, text, MAX_CHAT_BYTES)
        return str(text)

    def _take(self, num_characters: int) -> None:
        self._room -= num_characters
        if self._room < 0:
            limit = f"at most {self._limit} characters of names, texts and schemas in all"
            raise InvalidTools(self._what, "more", limit, is_described=True)


def tools_length(tools: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many characters a template writes for tools."""
    return len(json.dumps(tools, ensure_ascii=False)) if tools else 0


def validate_chat(messages: object, max_model_len: int | None = None, num_bytes: int = 0) -> list[ChatMessage]:
    """Check chat messages before the template is rendered: "role", "content" and "tool_calls" of each; others may be
    anything. A message with calls needs no content, and the arguments of calls become objects. A content of text parts
    becomes their text.

    Args:
        messages: what a caller wrote.
        max_model_len: tokens of the context, which bounds the text; ``None``: only the absolute limit does.
        num_bytes: of the tools, which count as text of the chat.

    Raises:
        InvalidPrompt: not a list of mappings with a "role" and a "content" of text, or too many of them, or a call
            that is none, or a part of a content that is no text.
        PromptEmpty: no message.
        InvalidText: text that UTF-8 cannot encode.
        PromptTooLong: more text, or longer tools, than a context of ``max_model_len`` could ever hold.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidPrompt("messages", messages, "a list of chat messages")
    if not messages:
        raise PromptEmpty("messages", 0, "at least 1 message")
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidPrompt("messages", len(messages), f"at most {MAX_CHAT_MESSAGES} messages")
    room = MAX_CHAT_BYTES
    if max_model_len is not None:
        room = min(room, MAX_TEXT_BYTES_PER_TOKEN * max_model_len)
    if num_bytes > room:
        raise PromptTooLong("tools", num_bytes, f"at most {room} bytes of JSON",
                            "They could not fit the context, however they are tokenised.")
    room -= num_bytes
    checked: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"messages[{index}]", message, "a mapping with a role and a content")
        if message.get("tool_calls"):
            message, length = _with_calls(f"messages[{index}].tool_calls", message)
            room -= length
        if isinstance(message.get("content"), list | tuple):
            message = {**message, "content": Chat.joined_parts(f"messages[{index}].content", message["content"], room)}
        for key in ("role", "content"):
            what, text = f"messages[{index}].{key}", message.get(key)
            if not isinstance(text, str):
                raise InvalidPrompt(what, text, "text")
            room -= count_text_bytes(what, text, room)
        checked.append(message)
    return checked


def _part_text(what: str, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind == "text" and isinstance(text, str):
        return text
    given = describe_name(kind) if isinstance(kind, str) and kind != "text" else describe(part)
    raise InvalidPrompt(what, given, 'a part like {"type": "text", "text": "..."}', "This model reads text only.",
                        is_described=True)


def require_continuable(messages: Sequence[ChatMessage]) -> None:
    """Raise ``InvalidPrompt`` unless the last message, which ``validate_chat`` has checked, can be continued."""
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidPrompt("continue_final_message", True, "False, or a last message of the assistant without calls")


def uses_tools(messages: Sequence[ChatMessage]) -> bool:
    """Whether a chat has calls or results of them."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def _with_calls(what: str, message: ChatMessage) -> tuple[dict[str, Any], int]:
    calls = message["tool_calls"]
    if not isinstance(calls, list | tuple) or len(calls) > MAX_TOOL_CALLS or message.get("role") != "assistant":
        raise InvalidPrompt(what, calls, f"a list of at most {MAX_TOOL_CALLS} calls, in a message of the assistant")
    room = MAX_CHAT_BYTES
    checked = []
    for place, call in enumerate(calls):
        one, length = _call(f"{what}[{place}]", call)
        checked.append(one)
        room -= length
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": checked}, MAX_CHAT_BYTES - room


def _call(what: str, call: Any) -> tuple[dict[str, Any], int]:
    function = call.get("function") if isinstance(call, Mapping) and call.get("type", "function") == "function" else 0
    if not isinstance(function, Mapping) or not isinstance(call.get("id", ""), str):
        limit = 'an object like {"id": "...", "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise InvalidPrompt(what, call, limit)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidPrompt(f"{what}.function.name", name, _NAME_LIMIT)
    checked, length = _arguments(f"{what}.function.arguments", arguments)
    own_id = {"id": call["id"]} if "id" in call else {}
    return {**own_id, "type": "function", "function": {"name": name, "arguments": checked}}, length


def _arguments(what: str, given: Any) -> tuple[dict[str, Any] | str, int]:
    """Return arguments as templates take them, and their length; text that is no JSON object stays as it is.

    Why: a model has written it, one of ours cut off perhaps, and a history that has it would be refused for ever.
    """
    if isinstance(given, str):
        count_text_bytes(what, given, MAX_CHAT_BYTES)
    parsed = _parsed(given) if isinstance(given, str) else {} if given is None else given
    if isinstance(given, str) and not isinstance(parsed, Mapping):
        return given, len(given)
    if not isinstance(parsed, Mapping):
        raise InvalidPrompt(what, given, "a JSON object, or its text")
    try:
        copied = _Copy(what, MAX_CHAT_BYTES).value(what, parsed)
    except InvalidTools as error:
        raise InvalidPrompt(error.what, error.given, error.limit, is_described=True) from None
    return copied, len(given) if isinstance(given, str) else tools_length([copied])


def _parsed(text: str) -> Any:
    try:
        return load_json(text or "{}")
    except (ValueError, RecursionError):
        return None

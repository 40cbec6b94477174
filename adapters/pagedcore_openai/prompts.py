"""The prompts of a body: chat messages with OpenAI's parts and roles, and the four kinds of a completion's prompt."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, Final

from pagedcore import Chat
from pagedcore.errors import InvalidPrompt
from pagedcore_openai.errors import FieldNotSupported
from pagedcore_openai.message_fields import read_message

MAX_PROMPTS: Final = 256
"""Prompts of one call: they wait for room together, and one caller's must not fill the process."""
_ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles that chat templates do not know, with the one that means the same."""
_CALL, _RESULT = "function_call", "function_call_output"
_ITEMS: Final = ("message", _CALL, _RESULT, "reasoning")
_TEXT_PARTS: Final = ("input_text", "output_text")


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return chat messages as chat templates know them: content as text, and no field that has nothing to say.

    Raises:
        InvalidPrompt: it is no list of objects, or a content is neither text nor parts of text.
        FieldNotSupported: a message has something besides its role, its name, its text and its calls, such as audio.
    """
    if not isinstance(given, list) or not given:
        raise InvalidPrompt("messages", given, "a list of at least one message, an object with role and content")
    return [_message(one, place) for place, one in enumerate(given)]


def _message(given: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(given, dict):
        raise InvalidPrompt(where, given, "an object with role and content")
    message = read_message(where, _with_call(given, place))
    role = message.get("role")
    if isinstance(role, str):
        message["role"] = _ROLES.get(role, role)
    # Why not left to the engine: a response is stored, and its size counted, as text.
    if "content" in message:
        message["content"] = Chat.joined_parts(f"{where}.content", message["content"])
    return message


def _with_call(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a message with the one call of the older form, ``function_call``, as a call of ``tool_calls``."""
    if message.get("role") == "function":
        return {"tool_call_id": f"call_{place - 1}", **message}
    call = message.get("function_call")
    if not isinstance(call, dict) or message.get("tool_calls"):
        return message
    calls = [{"id": f"call_{place}", "type": "function", "function": call}]
    return {**{name: one for name, one in message.items() if name != "function_call"}, "tool_calls": calls}


def input_of(given: Any) -> list[dict[str, Any]]:
    """Return the messages of a response's input: text, or a list of messages. Raises as ``messages_of``."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return messages_of(_joined_calls(given) if isinstance(given, list) else given)


def place_of(index: int, items: list[Any]) -> int:
    """Return the place of the item that began message ``index`` of those that ``input_of`` made of ``items``."""
    return bisect_right(range(len(items)), index, key=lambda place: len(_joined_calls(items[: place + 1])))


def instructions_of(given: Any) -> list[dict[str, Any]]:
    """Return the message that a response's instructions are, if there are any. Raises ``InvalidPrompt``."""
    if given is not None and not isinstance(given, str):
        raise InvalidPrompt("instructions", given, "text")
    return [] if given is None else [{"role": "system", "content": given}]


def _joined_calls(items: list[Any]) -> list[Any]:
    """Return the messages of items: calls are a part of the assistant's message before them, results are messages."""
    messages = list[Any]()
    for place, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == _RESULT:
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text_of(item)})
        elif kind == _CALL:
            call = {"id": item.get("call_id"), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
            if not messages or not isinstance(messages[-1], dict) or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
        elif kind in (None, "message"):
            messages.append(_unmarked(item))
        elif kind != "reasoning":
            advice = "Leave the item out, or write it as text."
            raise FieldNotSupported.of_name(f"input[{place}].type", kind, ", ".join(_ITEMS), advice)
    return messages


def _text_of(result: dict[str, Any]) -> Any:
    output = result.get("output")
    return _unmarked({"content": output})["content"] if isinstance(output, list) else output


def _unmarked(item: Any) -> Any:
    """Return an item of a response as a chat message, its parts called as those of chats."""
    if not isinstance(item, dict):
        return item
    message = dict(item)
    if isinstance(parts := message.get("content"), list):
        message["content"] = [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
                              else part for part in parts]
    return message


def prompts_of(given: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[Any]:
    """Return what the field of a ``name`` has, each of it text or token ids.

    Raises:
        InvalidPrompt: it is none of text, token ids, or a list of 1 to ``most`` of either.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and _are_ids(given)):
        return [given]
    if not isinstance(given, list):
        raise InvalidPrompt(name, given, "text, token ids, or a list of texts or of lists of token ids")
    if not 1 <= len(given) <= most:
        raise InvalidPrompt(name, len(given), f"a list of 1 to {most} {'prompts' if name == 'prompt' else 'texts'}")
    for index, one in enumerate(given):
        if not isinstance(one, str | list) or (isinstance(one, list) and one and not _are_ids(one[:1])):
            raise InvalidPrompt(f"{name}[{index}]", one, "text or token ids")
    return given


def _are_ids(values: Iterable[Any]) -> bool:
    """Whether a list begins as token ids do; the engine looks at the others."""
    return isinstance(next(iter(values)), int)

"""How a chat's template is told of thinking, and of a last message that is continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagedcore import Chat
from pagedcore.errors import InvalidRequest
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore_openai import fields as known
from pagedcore_openai.errors import renamed
from pagedcore_openai.prompts import messages_of
from pagedcore_openai.tools import functions_only

_ARGUMENTS: Final = "chat_template_kwargs"


def read_chat(given: Any, fields: Mapping[str, Any], form: ChatFormat) -> Any:
    """Return the prompt of a chat, its messages as the body has them. Raises as ``messages_of`` and ``chat_of``."""
    messages, is_prefix = _without_prefix(given)
    return chat_of(messages_of(messages), fields, form, is_prefix=is_prefix)


def _without_prefix(messages: Any) -> tuple[Any, bool]:
    """Return messages without Mistral's ``prefix``, and whether the last one, of the assistant, is to be continued."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("prefix") is None:
        return messages, False
    if type(last["prefix"]) is not bool:
        raise InvalidRequest(f"messages[{len(messages) - 1}].prefix", last["prefix"], "true or false")
    kept = {name: value for name, value in last.items() if name != "prefix"}
    return [*messages[:-1], kept], last["prefix"]


def chat_of(messages: list[Any], fields: Mapping[str, Any], form: ChatFormat, *, is_prefix: bool = False) -> Any:
    """Return the prompt of a chat: its messages, or a ``Chat`` if the body says more of it.

    Args:
        messages: as chat templates know them.
        fields: what ``Form.read`` returned.
        form: of the model.
        is_prefix: whether the last message is continued, whatever the fields say.

    Raises:
        InvalidRequest: tools, an argument of the template or a flag is refused.
    """
    given = fields.get(_ARGUMENTS)
    if isinstance(given, dict):
        given = {name: value for name, value in given.items() if value is not None}
    try:
        arguments = form.arguments(given, _effort_of(fields), _ARGUMENTS)
    except InvalidRequest as error:
        within = error.what == "reasoning_effort" and "reasoning_effort" not in fields
        raise (renamed(error, "reasoning.effort") if within else error) from None
    continues = is_prefix or fields.get("continue_final_message")
    return Chat.prompt_of(
        messages, functions_only(fields.get("tools", [])), arguments, continue_final_message=continues,
        add_generation_prompt=fields.get("add_generation_prompt"))


def _effort_of(fields: Mapping[str, Any]) -> Any:
    """Return the effort of reasoning, which responses have within an object."""
    return fields.get("reasoning_effort", known.REASONING.read_in(fields, "reasoning").get("effort"))

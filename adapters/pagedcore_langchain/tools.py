"""LangChain's tools and the choice among them in the form of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from langchain_core.utils.function_calling import convert_to_openai_tool

from pagedcore import Chat
from pagedcore.errors import InvalidTools
from pagedcore_langchain.structured import convertible

OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls", "ls_structured_output_format",
                   "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message")
"""Keywords of a call that are no sampling parameters; "ls_structured_output_format" is for tracers."""
_SAME: Final = ("auto", "none", "required")


def openai_tools(tools: Sequence[Any], strict: bool | None) -> list[dict[str, Any]]:
    """Return tools as the engine takes them.

    Raises:
        InvalidTools: a tool is malformed.
        InvalidRequest: as from ``convertible``.
    """
    known = [convertible("tools", tool) for tool in tools]
    return [Chat((), [convert_to_openai_tool(tool, strict=strict)]).tools[0] for tool in known]


def openai_choice(choice: Any, tools: Sequence[dict[str, Any]]) -> Any:
    """Return a choice as the engine takes it, ``None`` for none. Raises ``InvalidTools``."""
    if choice is None or choice is False:
        return None
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, str) and choice in _SAME:
        return choice
    name = choice.get("function", choice).get("name") if isinstance(choice, dict) else choice
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidTools("tool_choice", choice, "auto, none, required, any, True, or the name of a bound tool")
    return {"type": "function", "function": {"name": name}}

"""LangChain's tools and schemas in the form of the engine, and the runnables of structured output."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, Literal, get_args

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from pagedcore import Chat
from pagedcore.errors import InvalidRequest, InvalidTools

Method = Literal["json_schema", "function_calling", "json_mode"]
OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls", "ls_structured_output_format")
"""Keywords of a call that are no sampling parameters; the last one is for tracers."""
_SAME: Final = ("auto", "none", "required")


def openai_tools(tools: Sequence[Any], strict: bool | None) -> list[dict[str, Any]]:
    """Return tools as the engine takes them. Raises ``InvalidTools`` for one that is malformed."""
    return [Chat((), [convert_to_openai_tool(tool, strict=strict)]).tools[0] for tool in tools]


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


def structured_runnable(
    model: BaseChatModel, schema: Any, method: str, strict: bool | None, include_raw: bool, keywords: dict[str, Any]
) -> Runnable[Any, Any]:
    """Return ``model`` with its output constrained and parsed. Raises as ``ChatPagedCore.with_structured_output``."""
    if method not in get_args(Method):
        raise InvalidRequest("method", method, f"one of {', '.join(get_args(Method))}")
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    shown = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict},
                                             "schema": convert_to_json_schema(schema)}}
    parser: Any
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = model.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **shown,
                                 **keywords)
        parser = (PydanticToolsParser(tools=[schema], first_tool_only=True) if is_model
                  else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True))
    else:
        wanted = {"json_object": True} if method == "json_mode" else {"json_schema": convert_to_json_schema(schema)}
        bound = model.bind(structured=wanted, **shown, **keywords)
        parser = PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()
    if not include_raw:
        runnable: Runnable[Any, Any] = bound | parser
        return runnable
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")

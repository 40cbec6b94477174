"""Structured output: what LangChain takes for a schema as the engine takes it, and runnables that return whole objects.

A completion that was cut off never comes out of them, however well its beginning parses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, Literal, get_args, get_origin

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from pagedcore.errors import InvalidRequest

Method = Literal["json_schema", "function_calling", "json_mode"]
_SCHEMAS: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


def structured_runnable(
    model: BaseChatModel, schema: Any, method: str, strict: bool | None, include_raw: bool, keywords: dict[str, Any]
) -> Runnable[Any, Any]:
    """Return ``model`` with its output constrained and parsed. Raises as ``ChatPagedCore.with_structured_output``."""
    if method not in get_args(Method):
        raise InvalidRequest("method", method, f"one of {', '.join(get_args(Method))}")
    schema = convertible("schema", schema)
    json_schema = json_schema_of(schema, strict)
    # What tracers are shown is LangChain's own form, where there is one.
    traced = convert_to_json_schema(schema) if _is_converted(schema) else json_schema
    shown = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": traced}}
    if method == "function_calling":
        tool = _tool_of(schema, json_schema)
        name = tool["function"]["name"]
        bound = model.bind_tools([tool], tool_choice=name, strict=strict, parallel_tool_calls=False, **shown,
                                 **keywords)
        parser: Any = (PydanticToolsParser(tools=[schema], first_tool_only=True) if _is_model(schema)
                       else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True))
    else:
        wanted = {"json_object": True} if method == "json_mode" else {"json_schema": json_schema}
        bound = model.bind(structured=wanted, **shown, **keywords)
        parser = _parser_of(schema)
    whole: Runnable[Any, Any] = RunnableGenerator(_whole, _whole_async, name="whole_completion") | parser
    if not include_raw:
        return bound | whole
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | whole, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # Why behind it: a map hands the keywords of a call, a salt among them, on to nothing in it.
    raw = bound | RunnableMap(raw=RunnablePassthrough())
    return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")


def response_format(given: Any) -> dict[str, Any] | None:
    """Return ``structured`` for OpenAI's ``response_format``, which agents bind. Raises ``InvalidRequest``."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    inner = given.get("json_schema") if isinstance(given, Mapping) else None
    if kind == "json_schema" and isinstance(inner, Mapping) and isinstance(inner.get("schema"), dict | bool):
        schema = inner["schema"]
        return {"json_schema": closed(schema) if inner.get("strict") else schema}
    raise InvalidRequest("response_format", given, '{"type": "json_schema", "json_schema": {"name": ..., "schema": '
                         '{...}}}, {"type": "json_object"} or {"type": "text"}')


def json_schema_of(schema: Any, strict: bool | None) -> Any:
    """Return the JSON schema of a pydantic model, a ``TypedDict``, any other type, a function, or a dictionary.

    A dictionary is taken as it is; with ``strict`` its objects have no members beside those that are declared, as
    those of Python's types have where they do not ask for more. ``uniqueItems``, which Python's sets have, is left
    out: a set is made of what is returned.
    """
    if isinstance(schema, dict):
        inner = _inner(schema)
        return closed(inner) if strict else inner
    if not _is_converted(schema):
        return closed(TypeAdapter(schema).json_schema(), drop=("uniqueItems",))
    return closed(convert_to_json_schema(schema), drop=("uniqueItems",))


def convertible(what: str, schema: Any) -> Any:
    """Return what LangChain makes a schema of: a ``TypedDict`` whose members may be missing, of which it makes none, as
    pydantic's schema of it, anything else as it is.

    Raises:
        InvalidRequest: pydantic knows no such ``TypedDict`` either; ``what`` names it.
    """
    if not is_typeddict(schema):
        return schema
    try:
        convert_to_openai_tool(schema)
    except TypeError:
        try:
            return closed(TypeAdapter(schema).json_schema(), drop=("uniqueItems",))
        except PydanticUserError as error:
            raise InvalidRequest(what, schema, "a TypedDict that pydantic knows",
                                 "Python before 3.12 needs the one of typing_extensions.") from error
    return schema


def closed(schema: Any, *, drop: tuple[str, ...] = ()) -> Any:
    """Return a schema whose objects have declared members only, unless it says otherwise, without some keywords."""
    if not isinstance(schema, dict):
        return schema
    made = {name: value for name, value in schema.items() if name not in drop}
    for name in _SCHEMAS:
        if name in made:
            made[name] = closed(made[name], drop=drop)
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [closed(one, drop=drop) for one in made[name]]
    for name in _MAPS:
        if isinstance(made.get(name), dict):
            made[name] = {key: closed(one, drop=drop) for key, one in made[name].items()}
    # Why not with allOf: each of its parts would refuse the members of the others.
    if "properties" in made and not made.keys() & {"additionalProperties", "patternProperties", "allOf"}:
        made["additionalProperties"] = False
    return made


def _inner(schema: dict[str, Any]) -> Any:
    """Return the JSON schema in OpenAI's form of a tool or of a response; others are none but themselves."""
    function = schema.get("function") if schema.get("type") == "function" else schema
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        for name in ("parameters", "schema", "input_schema"):
            if isinstance(function.get(name), dict | bool):
                return function[name]
    return schema


def _tool_of(schema: Any, json_schema: Any) -> dict[str, Any]:
    """Return the tool whose arguments are an object of a schema. Raises ``InvalidRequest`` for other schemas."""
    properties = json_schema.get("properties") if isinstance(json_schema, dict) else None
    if not isinstance(properties, dict):
        raise InvalidRequest("schema", schema, "a schema of objects, with properties, with method='function_calling'",
                             "The default method takes any schema.")
    name = schema.get("name") if isinstance(schema, dict) else None
    if isinstance(name, str):
        return {"type": "function", "function": {"name": name, "parameters": json_schema}}
    tool = convert_to_openai_tool(schema)
    return {**tool, "function": {**tool["function"], "parameters": json_schema}}


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _is_converted(schema: Any) -> bool:
    """Whether LangChain makes a schema of it: a model, a ``TypedDict``, a function or a tool; other types are
    pydantic's.
    """
    if isinstance(schema, BaseTool) or _is_model(schema) or is_typeddict(schema):
        return True
    return callable(schema) and not _is_type(schema)


def _is_type(schema: Any) -> bool:
    return isinstance(schema, type) or get_origin(schema) is not None


def _parser_of(schema: Any) -> Any:
    if _is_model(schema):
        return PydanticOutputParser(pydantic_object=schema)
    if isinstance(schema, dict) or _is_converted(schema):
        return JsonOutputParser()
    adapter: TypeAdapter[Any] = TypeAdapter(schema)

    def parse(message: BaseMessage) -> Any:
        try:
            return adapter.validate_json(str(message.text))
        except ValidationError as error:
            raise OutputParserException(str(error), llm_output=str(message.text)) from error

    return RunnableLambda(parse)


class _Ending:
    """How the completion ended that a message, or the chunks of one, tell of."""

    def __init__(self) -> None:
        self._metadata: dict[str, Any] = {}
        self._text = ""

    def note(self, message: BaseMessage) -> None:
        self._metadata |= message.response_metadata
        self._text += str(message.text)

    def require_whole(self) -> None:
        reason, stop = self._metadata.get("finish_reason"), self._metadata.get("stop_reason")
        if stop is not None:
            why = f"its own stop {stop!r} ended it before the end of the object. Ask without that stop"
        elif reason == "length":
            why = "max_tokens, or the context, ended it before the end of the object. Allow more tokens"
        elif reason not in (None, "stop", "tool_calls"):
            why = f"it ended with {reason!r}"
        else:
            return
        raise OutputParserException(f"the completion is not whole: {why}.", llm_output=self._text)


def _whole(messages: Iterator[Any]) -> Iterator[Any]:
    """Pass on a message, or its chunks. Raises ``OutputParserException`` at the end if it was cut off."""
    ending = _Ending()
    for message in messages:
        ending.note(message)
        yield message
    ending.require_whole()


async def _whole_async(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    ending = _Ending()
    async for message in messages:
        ending.note(message)
        yield message
    ending.require_whole()

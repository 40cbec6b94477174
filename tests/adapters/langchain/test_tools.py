"""Tools and structured output of the LangChain chat model, beyond what the standard suites ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from adapters.langchain.assistant import assistant, call
from pagedcore import AsyncEngine
from pagedcore.errors import InvalidRequest, InvalidTools
from pagedcore.tool_calls.hermes import HermesFormat
from pagedcore_langchain import ChatPagedCore
from support.paused_steps import paused_after
from support.scripted_model import TEMPLATES, scripted_engine


@tool
def my_adder_tool(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "sunny in " + location


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


QUESTION = "What is 3 + 4?"
WANTED = [{"name": "my_adder_tool", "args": {"a": 3, "b": 4}, "type": "tool_call"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """A model that calls tools."""
    with scripted_engine(assistant) as engine:
        yield engine


def without_id(calls: Any) -> list[Any]:
    assert all(one["id"] for one in calls)
    return [{name: one[name] for name in ("name", "args", "type")} for one in calls]


async def test_every_way_of_asking_gives_the_same_calls(engine: AsyncEngine) -> None:
    """Blocking, on a loop, batched and streamed; the sum of the chunks is the message, with its usage."""
    chat = ChatPagedCore.from_engine(engine)
    bound = chat.bind_tools([my_adder_tool, get_weather])
    whole = bound.invoke(QUESTION)
    answers = [whole, await bound.ainvoke(QUESTION), *bound.batch([QUESTION] * 2), *await bound.abatch([QUESTION] * 2)]
    for message in answers:
        assert (without_id(message.tool_calls), message.content) == (WANTED, "")
        assert message.response_metadata["finish_reason"] == "tool_calls"
    assert len({message.tool_calls[0]["id"] for message in answers}) == len(answers)
    for chunks in (list(bound.stream(QUESTION)), [chunk async for chunk in bound.astream(QUESTION)]):
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert isinstance(total, AIMessageChunk)
        assert (without_id(total.tool_calls), total.usage_metadata["output_tokens"]) == (
            WANTED, whole.usage_metadata["output_tokens"])
        assert total.response_metadata["finish_reason"] == "tool_calls"


async def test_calls_stream_while_they_are_written(engine: AsyncEngine) -> None:
    """A chunk has the name and others the beginning of the arguments before the last tokens are generated."""
    bound = ChatPagedCore.from_engine(engine).bind_tools([my_adder_tool])
    num_tokens = bound.invoke(QUESTION).usage_metadata["output_tokens"]
    with paused_after(engine, num_tokens - 6) as pause:
        for chunk in bound.stream(QUESTION):
            if any(one["args"] for one in chunk.tool_call_chunks):
                pause.end()
    with paused_after(engine, num_tokens - 6) as pause:
        async for chunk in bound.astream(QUESTION):
            if any(one["args"] for one in chunk.tool_call_chunks):
                pause.end()


@pytest.mark.parametrize(("choice", "names"), [
    (None, ["my_adder_tool"]), ("auto", ["my_adder_tool"]), ("any", ["my_adder_tool"]), (True, ["my_adder_tool"]),
    ("required", ["my_adder_tool"]), ("my_adder_tool", ["my_adder_tool"]), ("get_weather", ["get_weather"]),
    ({"type": "function", "function": {"name": "get_weather"}}, ["get_weather"]), ("none", []),
])
def test_choices_in_all_forms(engine: AsyncEngine, choice: Any, names: list[str]) -> None:
    """What other chat models of LangChain take as a choice is taken."""
    bound = ChatPagedCore.from_engine(engine, max_tokens=80).bind_tools(
        [my_adder_tool, get_weather], tool_choice=choice, parallel_tool_calls=False)
    assert [one["name"] for one in bound.invoke(QUESTION).tool_calls] == names


@pytest.mark.parametrize("keywords", [{"tool_choice": "rm"}, {"tool_choice": {"type": "function"}}])
def test_choices_that_are_none_are_refused_when_bound(engine: AsyncEngine, keywords: Any) -> None:
    """A tool that is not bound, and a tool of another kind, are refused at once."""
    chat = ChatPagedCore.from_engine(engine)
    with pytest.raises(InvalidTools, match="tool_choice"):
        chat.bind_tools([get_weather], **keywords)
    with pytest.raises(InvalidTools):
        chat.bind_tools([{"type": "function", "function": {"name": "a b"}}])
    with pytest.raises(InvalidRequest, match="parallel_tool_calls"):
        chat.bind_tools([get_weather], parallel_tool_calls=5).invoke("Hi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="method"):
        chat.with_structured_output(Joke, method="magic")  # type: ignore[arg-type]


def test_calls_and_results_are_in_the_next_prompt() -> None:
    """The history that an agent keeps is rendered by the template: calls with their arguments, and results."""
    prompts: list[str] = []
    engine = scripted_engine(lambda prompt: prompts.append(prompt) or "Seven.")
    chat = ChatPagedCore.from_engine(engine)
    made = AIMessage("", tool_calls=[{"name": "my_adder_tool", "args": {"a": 3, "b": 4}, "id": "1"}])
    history = [HumanMessage(QUESTION), made, ToolMessage(json.dumps(7), tool_call_id="1")]
    assert chat.bind_tools([my_adder_tool]).invoke(history).content == "Seven."
    assert call("my_adder_tool", a=3, b=4) + "<|im_end|>\n<|im_start|>tool\n7<|im_end|>" in prompts[0]
    tokens = chat.get_num_tokens_from_messages(history, [my_adder_tool])
    assert tokens > chat.get_num_tokens_from_messages(history)
    broken = AIMessage("", invalid_tool_calls=[
        {"type": "invalid_tool_call", "name": "f", "args": '{"a', "id": "1", "error": None}])
    assert chat.invoke([HumanMessage("Hi"), broken, ToolMessage("?", tool_call_id="1")]).content == "Seven."
    assert json.dumps('{"a') in prompts[1]
    engine.close()


class Free(HermesFormat):
    """Hermes without a grammar, as for a model that nothing holds."""

    def grammar(self, tools: Any, grammar: Any) -> Any:
        """Return none."""


@pytest.mark.parametrize(("arguments", "end"), [
    ('{"a": 1, "a": 2, "b": 3}', "}</tool_call>"), ('{"a": NaN}', "}</tool_call>"), ("{'a': 1}", "}</tool_call>"),
    ('{"a": 1, "b": 2', ""),
])
def test_arguments_that_are_not_sound_are_invalid_calls(arguments: str, end: str) -> None:
    """Arguments that two readers could read in two ways, that are no JSON, or that are cut off, are not carried out."""
    with scripted_engine(f'<tool_call>{{"name": "my_adder_tool", "arguments": {arguments}{end}') as engine:
        vars(engine.chat_format)["tools"] = Free()
        message = ChatPagedCore.from_engine(engine).bind_tools([my_adder_tool]).invoke("Hi")
    assert not message.tool_calls
    assert message.invalid_tool_calls[0]["args"].startswith(arguments)


def test_reasoning_is_beside_the_content() -> None:
    """It is in ``additional_kwargs`` and in the content blocks, whole and streamed, and goes back with its message."""
    with scripted_engine("<think>\nHm.\n</think>\n\nSeven.", "{#- </think> #}" + TEMPLATES["hermes"]) as engine:
        chat = ChatPagedCore.from_engine(engine)
        total: Any = None
        for chunk in chat.stream(QUESTION):
            total = chunk if total is None else total + chunk
        for message in (chat.invoke(QUESTION), total):
            assert (message.content, message.additional_kwargs) == ("Seven.", {"reasoning_content": "Hm."})
            assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_with_the_raw_message(engine: AsyncEngine, method: Any) -> None:
    """Each method gives the object, and with ``include_raw`` the message beside it; what does not parse is reported."""
    chat = ChatPagedCore.from_engine(engine)
    for schema in (Joke, Joke.model_json_schema()):
        result = chat.with_structured_output(schema, include_raw=True, method=method).invoke("Tell me a joke")
        assert (dict(result["parsed"])["setup"], result["parsing_error"]) == ("Why do cats purr?", None)
        assert isinstance(result["raw"], AIMessage)
    short = ChatPagedCore.from_engine(engine, max_tokens=3)
    failed = short.with_structured_output(Joke, include_raw=True, method=method).invoke("Tell me a joke")
    assert failed["parsed"] is None
    if method != "function_calling":
        assert isinstance(failed["parsing_error"], OutputParserException)


def test_structured_output_of_the_demo_model() -> None:
    """A model that was never asked for JSON writes it, of the schema that it is given."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=64) as engine:
        schema = {"title": "City", "type": "object", "additionalProperties": False, "required": ["size"],
                  "properties": {"size": {"enum": ["small", "large"]}}}
        given = ChatPagedCore.from_engine(engine, max_tokens=60).with_structured_output(schema).invoke("How large?")
    assert given["size"] in ("small", "large")

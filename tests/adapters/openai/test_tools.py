"""Tools through OpenAI's own client: chats and responses, whole and streamed, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

import openai
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from adapters.openai.loopback import serving
from pagedcore import AsyncEngine
from pagedcore_openai import openai_app
from pagedcore_openai.message_fields import OF_TOOLS
from support.paused_steps import paused_after
from support.scripted_model import TEMPLATES, scripted_engine

TOOL: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"], "additionalProperties": False}}}
FLAT: Any = {"type": "function", **TOOL["function"], "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}\n</tool_call>'
ARGUMENTS = '{"city": "Oslo", "unit": "C"}'
CHAT: Any = [{"role": "user", "content": "Weather in Oslo?"}]
WRONG: Any = {"type": "function", "function": {"name": "wrong", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "pattern": "(?!a)b"}}}}}
"""A tool whose pattern no grammar has."""
ALWAYS: Any = {"model": "scripted", "temperature": 0}
PLAIN: Any = {**ALWAYS, "model": "plain"}
"""A model that does not reason."""


def script(prompt: str) -> str:
    """Call the tool, and say what it returned; think first where the user asks for it."""
    if "<|im_start|>tool\n" in prompt:
        return "It is " + prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0] + "."
    if "Think" in prompt:
        return f"<think>\nHm.\n</think>\n\nLook: {CALL}"
    return "Hello." if "Hello" in prompt else f"{CALL}\n{CALL.replace('Oslo', 'Rome')}" if "Rome" in prompt else CALL


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """A model that calls tools, and one engine for all tests."""
    with scripted_engine(script, "{#- </think> #}" + TEMPLATES["hermes"]) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    """Where it is served, beside two others."""
    with (scripted_engine("Hello.", "none") as toolless, scripted_engine(script) as plain,
          serving(openai_app({"scripted": engine, "toolless": toolless, "plain": plain})) as url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_calls_a_tool_and_uses_its_result(client: OpenAI) -> None:
    """The call comes with its own id and reason; the message can be sent back as it came, with the result."""
    (choice,) = client.chat.completions.create(messages=CHAT, tools=[TOOL], **ALWAYS).choices
    (call,) = choice.message.tool_calls or ()
    assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "rainy"}]}
    (last,) = client.chat.completions.create(messages=[*CHAT, choice.message, result], tools=[TOOL], **ALWAYS).choices
    assert (last.message.content, last.finish_reason, last.message.tool_calls) == ("It is rainy.", "stop", None)


def test_calls_stream_as_the_client_expects(client: OpenAI) -> None:
    """The first chunk of a call has index, id and name, further ones arguments; the helper adds them up to the calls of
    the whole completion; text that is none has no calls."""
    chat: Any = [{"role": "user", "content": "Oslo and Rome?"}]
    chunks = list(client.chat.completions.create(messages=chat, tools=[TOOL], stream=True, **ALWAYS))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    heads = [delta for delta in deltas if delta.id]
    assert [(one.index, one.function and one.function.name, one.type) for one in heads] == [
        (0, "get_weather", "function"), (1, "get_weather", "function")]
    assert len({one.id for one in heads}) == 2
    written = ["".join((one.function and one.function.arguments) or "" for one in deltas if one.index == index)
               for index in (0, 1)]
    assert written == [ARGUMENTS, ARGUMENTS.replace("Oslo", "Rome")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(messages=chat, tools=[TOOL], **ALWAYS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [one.function.arguments for one in final.tool_calls or ()] == written
    (one,) = client.chat.completions.create(messages=chat, tools=[TOOL], parallel_tool_calls=False, **ALWAYS
                                            ).choices[0].message.tool_calls or ()
    assert one.function.arguments == ARGUMENTS


def test_calls_stream_while_they_are_written(client: OpenAI, engine: AsyncEngine) -> None:
    """The name and the beginning of the arguments arrive before the last tokens are generated."""
    asked: Any = {"messages": CHAT, "tools": [TOOL], **ALWAYS}
    usage = client.chat.completions.create(**asked).usage
    assert usage is not None
    with paused_after(engine, usage.completion_tokens - 6) as pause:
        for chunk in client.chat.completions.create(stream=True, **asked):
            if any(one.function and one.function.arguments for one in chunk.choices[0].delta.tool_calls or ()):
                pause.end()


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["C", "F"]


async def test_the_parse_helper_validates_arguments(client: OpenAI, url: str) -> None:
    """A pydantic model is a tool, and the arguments come back as one, of the blocking and the asynchronous client."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    parsed = client.chat.completions.parse(messages=CHAT, tools=[tool], **ALWAYS)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
        same = await other.chat.completions.parse(messages=CHAT, tools=[tool], **ALWAYS)
    for one in (parsed, same):
        (call,) = one.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == GetWeather(city="Oslo", unit="C")


def test_the_choice_is_kept(client: OpenAI) -> None:
    """A model that only greets calls a tool if it must, and one that calls does not if it may not."""
    hello: Any = [{"role": "user", "content": "Hello"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        (forced,) = client.chat.completions.create(messages=hello, tools=[TOOL], tool_choice=choice, max_tokens=60,
                                                   parallel_tool_calls=False, **PLAIN).choices
        assert [call.function.name for call in forced.message.tool_calls or ()] == ["get_weather"]
        assert "city" in json.loads((forced.message.tool_calls or ())[0].function.arguments)  # type: ignore[union-attr]
    (none,) = client.chat.completions.create(messages=CHAT, tools=[TOOL], tool_choice="none", max_tokens=9, **ALWAYS
                                             ).choices
    assert (none.message.tool_calls, bool(none.message.content)) == (None, True)
    assert client.chat.completions.create(messages=hello, tools=[TOOL], **ALWAYS).choices[0].message.content == "Hello."


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_has_fields_of_its_own(client: OpenAI, is_stream: bool) -> None:
    """It is in ``reasoning_content`` and ``reasoning``, before the content and the calls, and in no other field."""
    chat: Any = [{"role": "user", "content": "Think"}]
    if is_stream:
        chunks = client.chat.completions.create(messages=chat, tools=[TOOL], stream=True, **ALWAYS)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        reasoning = ["".join((one.model_extra or {}).get(name, "") for one in deltas)
                     for name in ("reasoning_content", "reasoning")]
        content = "".join(one.content or "" for one in deltas)
    else:
        message = client.chat.completions.create(messages=chat, tools=[TOOL], **ALWAYS).choices[0].message
        reasoning = [(message.model_extra or {})[name] for name in ("reasoning_content", "reasoning")]
        content = message.content or ""
        assert len(message.tool_calls or ()) == 1
        result: Any = {"role": "tool", "content": "rainy", "tool_call_id": "1"}
        back = client.chat.completions.create(messages=[*chat, message.model_dump(), result], tools=[TOOL], **ALWAYS)
        assert back.choices[0].message.content == "It is rainy."
    assert (reasoning, content) == (["Hm."] * 2, "Look:")


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"tools": [{"name": "add"}]}, "tools[0]", '{"type": "function", "name": ...}'),
    ({"tools": [{"type": "custom", "name": "add"}]}, "tools[0].type", "got 'custom', allowed is function"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "1 to 64 letters"),
    ({"tools": [FLAT], "tool_choice": {"type": "custom"}}, "tool_choice", '{"type": "function", "name": "..."}'),
    ({"tools": [FLAT, {"type": "function", **WRONG["function"]}]}, "tools[1].parameters", "the tool wrong"),
])
def test_refusals_of_a_responses_tools_have_their_own_form(
    client: OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    """What is asked for is what the same door takes: a response's tool is its function, without an object around it."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="Weather?", **ALWAYS, **fields)
    assert refused.value.param == param
    assert words in refused.value.message


NOTES: Any = {"cache_control": {"type": "ephemeral"}, "defer_loading": True, "output_schema": {"type": "string"},
              "allowed_callers": ["direct"], "async": False}


def test_notes_of_a_tool_are_no_part_of_the_prompt(client: OpenAI) -> None:
    """Beside a function or in it, in chats and in responses; and every name of the client's own type is known."""
    noted = {**TOOL, **NOTES, "function": {**TOOL["function"], **NOTES}}
    usages = [client.chat.completions.create(messages=CHAT, tools=[one], **ALWAYS).usage for one in (TOOL, noted)]
    assert len({one and one.prompt_tokens for one in usages}) == 1
    responses = [client.responses.create(input="hi", tools=[one], **ALWAYS) for one in (FLAT, {**FLAT, **NOTES})]
    assert len({one.usage and one.usage.input_tokens for one in responses}) == 1
    read = {"type", "name", "description", "parameters", "strict", "async"}
    assert FunctionToolParam.__annotations__.keys() <= read | OF_TOOLS


def test_what_an_agent_in_a_terminal_sends_is_understood(client: OpenAI) -> None:
    """Its further turn: items with ids and states, reasoning that another model has encrypted, fields that identify."""
    turns: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": ARGUMENTS,
         "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "rainy"},
    ]
    events = list(client.responses.create(
        input=turns, instructions="You are an agent.", tools=[FLAT], tool_choice="auto", parallel_tool_calls=False,
        store=False, stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="k",
        text={"verbosity": "low"}, extra_body={"client_metadata": {"session": "s"}, "reasoning": {"summary": "auto"}},
        **ALWAYS))
    last: Any = events[-1]
    assert (last.type, last.response.output_text) == ("response.completed", "It is rainy.")


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_older_form_has_functions_and_one_call(client: OpenAI, is_stream: bool) -> None:
    """``functions`` give what ``tools`` with one call give, as ``function_call``, and the message can be sent back."""
    asked: Any = {"messages": [{"role": "user", "content": "Rome?"}], "functions": [TOOL["function"]], **ALWAYS}
    if is_stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
        parts = [choice.delta.function_call for choice in choices if choice.delta.function_call]
        name, reason = "".join(part.name or "" for part in parts), choices[-1].finish_reason
        arguments = "".join(part.arguments or "" for part in parts)
        assert not any(choice.delta.tool_calls for choice in choices)
    else:
        (choice,) = client.chat.completions.create(**asked).choices
        call, reason = choice.message.function_call, choice.finish_reason
        name, arguments = (call.name, call.arguments) if call else ("", "")
        assert choice.message.tool_calls is None
    assert (name, arguments, reason) == ("get_weather", ARGUMENTS, "function_call")
    history: Any = [*asked["messages"], {"role": "assistant", "content": None, "function_call": {
        "name": name, "arguments": arguments}}, {"role": "function", "name": name, "content": "rainy"}]
    (last,) = client.chat.completions.create(**{**asked, "messages": history}).choices
    assert (last.message.content, last.finish_reason) == ("It is rainy.", "stop")


def test_several_completions_log_probabilities_and_token_ids(client: OpenAI) -> None:
    """Each choice has its calls; each token's log-probability and id is reported once, in a stream too."""
    more: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(messages=CHAT, tools=[TOOL], n=2, **more, **ALWAYS)
    ids = [one.message.tool_calls[0].id for one in whole.choices if one.message.tool_calls]
    assert len({*ids}) == 2
    chunks = list(client.chat.completions.create(messages=CHAT, tools=[TOOL], stream=True, **more, **ALWAYS))
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    entries = [entry for one in logprobs if one for entry in one.content or ()]
    tokens = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids") or ()]
    assert tokens == whole.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert len(entries) == len(tokens)


def test_responses_call_functions(client: OpenAI) -> None:
    """A call is an item of its own; its output goes back as an item, beside the items of the response."""
    whole = client.responses.create(input="Weather in Oslo?", tools=[FLAT], **ALWAYS)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rainy"}
    items: Any = [{"role": "user", "content": "Weather in Oslo?"}, *whole.to_dict()["output"], result]  # type: ignore[misc]
    assert client.responses.create(input=items, tools=[FLAT], **ALWAYS).output_text == "It is rainy."
    continued = client.responses.create(input=[result], previous_response_id=whole.id, tools=[FLAT], **ALWAYS)  # type: ignore[list-item]
    assert continued.output_text == "It is rainy."
    forced = client.responses.create(input="Hello", tools=[FLAT], max_output_tokens=60, parallel_tool_calls=False,
                                     tool_choice={"type": "function", "name": "get_weather"}, **PLAIN)
    assert [item.type for item in forced.output] == ["function_call"]
    parsed = client.responses.parse(input="Weather in Oslo?", tools=[openai.pydantic_function_tool(
        GetWeather, name="get_weather")], **ALWAYS)  # type: ignore[list-item]
    assert parsed.output[0].parsed_arguments == GetWeather(city="Oslo", unit="C")  # type: ignore[union-attr]


def test_responses_stream_their_items(client: OpenAI) -> None:
    """Reasoning, text and calls come one after the other, each added, written and done; the last event has them all."""
    with client.responses.stream(input="Think", tools=[FLAT], **ALWAYS) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert [event.item.type for event in events if event.type == "response.output_item.added"] == [
        "reasoning", "message", "function_call"]
    assert kinds.count("response.output_item.done") == 3
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == done.arguments == ARGUMENTS
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["reasoning", "message", "function_call"]
    assert last.response.output_text == "Look:"
    raw = list(client.responses.create(input="Think", tools=[FLAT], stream=True, **ALWAYS))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    cut = client.responses.create(input="Weather in Oslo?", tools=[FLAT], max_output_tokens=40, **ALWAYS)
    assert (cut.status, cut.output[0].type, cut.output[0].status) == ("incomplete", "function_call", "incomplete")  # type: ignore[union-attr]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": "get_weather"}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"), ({"tools": [TOOL] * 257}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [TOOL], "model": "toolless"}, "tools"),
    ({"messages": [*CHAT, {"role": "tool", "content": "4"}], "model": "toolless"}, "tools"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
        "name": "f", "arguments": 5}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"tools": [{"type": "function", "function": {"name": "long", "description": "d" * 40_000}}]}, "tools"),
    ({"tools": [{**TOOL, "retries": 3}]}, "tools[0].retries"), ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
    ({"tools": [TOOL, WRONG]}, "tools[1].function.parameters"),
    ({"tools": [TOOL, WRONG], "tool_choice": {"type": "function", "function": {"name": "wrong"}}},
     "tools[1].function.parameters"),
    ({"functions": "get_weather"}, "functions"), ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [TOOL["function"], WRONG["function"]]}, "functions[1].parameters"),
    ({"functions": [TOOL["function"]], "function_call": {"name": "other"}}, "function_call"),
    ({"functions": [TOOL["function"]], "tools": [TOOL]}, "tools"),
])
@pytest.mark.parametrize("is_stream", [False, True])
def test_refusals_of_tools(client: OpenAI, fields: dict[str, Any], param: str, is_stream: bool) -> None:
    """Malformed tools, choices and calls, and tools for a model whose template knows none, are a 400 that names them,
    before a stream begins."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"messages": CHAT, "stream": is_stream, **ALWAYS, **fields})
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


def test_a_call_that_a_stop_text_cuts_off_is_none_that_ended(client: OpenAI) -> None:
    """Whole and streamed the reason is "stop", and the item of a response is incomplete."""
    asked: Any = {"messages": CHAT, "tools": [TOOL], "stop": ["Oslo"], **ALWAYS}
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or ()
    assert (choice.finish_reason, call.function.arguments) == ("stop", '{"city": "')
    assert list(client.chat.completions.create(stream=True, **asked))[-1].choices[0].finish_reason == "stop"
    (choice,) = client.chat.completions.create(**{**asked, "stop": ["get_"]}).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "", None)
    more: Any = {"stop": ["Oslo"]}
    response = client.responses.create(input="Weather in Oslo?", tools=[FLAT], extra_body=more, **ALWAYS)
    assert [(item.type, item.status) for item in response.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]


def test_reasoning_is_counted_in_the_usage(client: OpenAI) -> None:
    """Of chats and responses, whole and streamed; without reasoning there are none."""
    for text, is_thought in (("Think of Oslo.", True), ("Hello.", False)):
        chat: Any = {"messages": [{"role": "user", "content": text}], **ALWAYS}
        whole = client.chat.completions.create(**chat).usage
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat))
        response = client.responses.create(input=text, **ALWAYS).usage
        assert whole is not None
        assert whole.completion_tokens_details is not None
        assert response is not None
        number = whole.completion_tokens_details.reasoning_tokens
        assert bool(number) == is_thought
        assert response.output_tokens_details.reasoning_tokens == number
        streamed = chunks[-1].usage
        assert streamed is not None
        assert streamed.completion_tokens_details == whole.completion_tokens_details

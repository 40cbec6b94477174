"""From tools to calls through an engine: what the prompt has, what the model may write, and what readers get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedcore import AsyncEngine, Chat, SamplingParams
from pagedcore.errors import InvalidConfig, InvalidTools, PagedcoreError, PromptTooLong, TextFailed
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.tool_calls.events import ParsedCompletion, collect
from support.scripted_model import TEMPLATES, scripted_engine

ADD = {"type": "function", "function": {
    "name": "add", "description": "Add two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
        "additionalProperties": False}}}
NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
}
SECOND = {
    "hermes": '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '; {"name": "now", "parameters": {}}', "mistral": "[TOOL_CALLS]now[ARGS]{}",
}
ONE = [("add", {"a": 1, "b": 2})]


def ask(engine: AsyncEngine, tools: Any = (ADD, NOW), choice: Any = None, is_parallel: bool = True,
        **params: Any) -> tuple[ParsedCompletion, Any]:
    """Ask, whole and as a stream, which have to agree; return the completion as read, and as written."""
    prompt = Chat(QUESTION, tools)
    turn = engine.chat_format.turn(prompt, SamplingParams(**{"max_tokens": 120, **params}), choice, is_parallel)
    (output,) = engine.submit(prompt, turn.params).result(60).outputs
    if output.error:
        raise output.error
    parsed = turn.reader().read_all(output)
    reader, events = turn.reader(), list[Any]()
    for delta in engine.generate_sync(prompt, turn.params):
        events += reader.read(delta)
    assert without_ids(collect(events)) == without_ids(parsed)
    return parsed, output


def without_ids(parsed: ParsedCompletion) -> Any:
    return parsed.content, parsed.reasoning, [(one.name, one.arguments, one.is_complete) for one in parsed.tool_calls]


def calls_of(parsed: ParsedCompletion) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@pytest.mark.parametrize("form", CALLS)
def test_a_model_calls_tools(form: str) -> None:
    """Text or calls, as the model likes: both are read, in the format that its template is recognised by, also where
    the marks of calls are special tokens, which the completion's own text lacks."""
    with scripted_engine(CALLS[form] + SECOND[form], form) as engine:
        parsed, output = ask(engine)
        assert (calls_of(parsed), parsed.content) == ([*ONE, ("now", {})], "")
        assert "[TOOL_CALLS]" not in output.text
        one, _ = ask(engine, is_parallel=False)
        assert calls_of(one) == ONE
    with scripted_engine("Three.", form) as engine:
        assert ask(engine)[0] == ParsedCompletion("Three.", "", ())


@pytest.mark.parametrize("form", CALLS)
def test_a_call_can_be_demanded(form: str) -> None:
    """A model that would write text makes a call if it has to, of the tool that it has to, with arguments that the
    tool's schema accepts."""
    with scripted_engine("Three.", form) as engine:
        parsed, _ = ask(engine, choice="required", is_parallel=False)
        assert len(parsed.tool_calls) == 1
        for name in ("add", "now"):
            parsed, _ = ask(engine, choice={"type": "function", "function": {"name": name}})
            ((called, arguments),) = calls_of(parsed)
            assert (called, set(arguments)) == (name, {"a", "b"} if name == "add" else set())
            assert all(type(value) is int for value in arguments.values())


@pytest.mark.parametrize("form", CALLS)
def test_no_call_is_made_where_none_is_wanted(form: str) -> None:
    """With the choice "none" the tools stay in the prompt, and the model cannot write a call."""
    with scripted_engine(CALLS[form], form) as engine:
        parsed, output = ask(engine, choice="none")
        assert not parsed.tool_calls
        assert parsed.content == output.text
        assert "<tool_call>" not in output.text


def test_arguments_follow_the_schema() -> None:
    """A model that gets a type, a name of a member or the tool's name wrong cannot write it."""
    wrong = '<tool_call>\n{"name": "ad", "arguments": {"a": "x", "c": 2}}\n</tool_call>'
    with scripted_engine(wrong) as engine:
        ((name, arguments),) = calls_of(ask(engine, is_parallel=False)[0])
        assert (name, set(arguments)) == ("add", {"a", "b"})


def test_calls_in_the_prompt_are_not_calls_of_the_model() -> None:
    """What a user or a tool writes is in the prompt, and only the completion is read."""
    made = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]}
    prompt = Chat([{"role": "user", "content": CALLS["hermes"]}, made, {"role": "tool", "content": CALLS["hermes"]}],
                  [ADD])
    with scripted_engine("Done.") as engine:
        turn = engine.chat_format.turn(prompt, SamplingParams())
        (output,) = engine.submit(prompt, turn.params).result(60).outputs
        assert turn.reader().read_all(output) == ParsedCompletion("Done.", "", ())


def test_the_prompt_has_tools_calls_and_results() -> None:
    """The template gets the tools' schemas, arguments as objects, and results, as that of transformers does."""
    prompts: list[str] = []
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": "\\u00e9"}'}}]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"}]
    with scripted_engine(lambda prompt: prompts.append(prompt) or "3.") as engine:
        engine.submit(Chat(messages, [ADD])).result(60)
    (prompt,) = prompts
    assert json.loads(prompt.splitlines()[0].removeprefix("# ")) == ADD
    assert '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in prompt


async def test_a_session_continues_with_results() -> None:
    """A turn of a conversation may be the result of a call, and the next call is read like the first."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "It is 3." if "<|im_start|>tool" in prompt else CALLS["hermes"]

    with scripted_engine(script) as engine:
        turn = engine.chat_format.turn(chat := Chat(QUESTION, [ADD]), SamplingParams(max_tokens=120))
        async with engine.session(turn.params) as session:
            first = (await session.ask(chat)).outputs[0]
            assert calls_of(turn.reader().read_all(first)) == ONE
            last = (await session.ask(Chat([{"role": "tool", "content": "3"}], [ADD]))).outputs[0]
            assert turn.reader().read_all(last).content == "It is 3."
    assert prompts[1].startswith(prompts[0] + CALLS["hermes"] + "<|im_end|>\n<|im_start|>tool\n3<|im_end|>")


@pytest.mark.parametrize("tools", [[ADD], None])
def test_a_template_that_knows_no_tools_refuses_them(tools: Any) -> None:
    """Tools, calls and results are refused before anything is tokenised, rather than left out of the prompt."""
    messages: list[Any] = [*QUESTION, *([] if tools else [{"role": "tool", "content": "3"}])]
    with scripted_engine("Three.", "none") as engine:
        with pytest.raises(InvalidTools, match="chat template"):
            engine.submit(Chat(messages, tools)).result(60)
        with pytest.raises(InvalidTools):
            engine.submit([*QUESTION, {"role": "assistant", "tool_calls": [
                {"function": {"name": "a", "arguments": {}}}]}]).result(60)


@pytest.mark.parametrize(("choice", "tools"), [
    ("required", None), ("any", [ADD]), ({"type": "function", "function": {"name": "rm"}}, [ADD]), (5, [ADD]),
    ({"type": "function"}, [ADD]), ({"type": "function", "function": {"name": "add"}}, None),
])
def test_choices_that_are_none_are_refused(choice: Any, tools: Any) -> None:
    """A tool that was not given, or a word that means nothing, is a typed refusal."""
    with scripted_engine("") as engine, pytest.raises(InvalidTools, match="tool_choice"):
        engine.chat_format.turn(Chat(QUESTION, tools), SamplingParams(), choice)


def test_calls_and_structured_output_together() -> None:
    """With a JSON schema the completion is calls, or JSON of it; other forms are refused beside tools."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    with scripted_engine('{"sum": 3}') as engine:
        assert ask(engine, structured={"json_schema": schema})[0].content == '{"sum": 3}'
        with pytest.raises(InvalidTools, match="structured"):
            ask(engine, structured={"regex": "[0-9]"})
    with scripted_engine(CALLS["hermes"]) as engine:
        assert calls_of(ask(engine, structured={"json_schema": schema})[0]) == ONE


THINKS = "{#- </think> #}" + TEMPLATES["hermes"]


def test_reasoning_comes_before_calls_and_forms() -> None:
    """A model that reasons may do so before a call that it has to make and before structured output."""
    with scripted_engine(f"<think>\nHm.\n</think>\n\n{CALLS['hermes']}", THINKS) as engine:
        for choice in (None, "required"):
            parsed, _ = ask(engine, choice=choice)
            assert (parsed.reasoning, parsed.content, calls_of(parsed)) == ("Hm.", "", ONE)
    with scripted_engine('<think>\nHm.\n</think>{"sum": 3}', THINKS) as engine:
        parsed, _ = ask(engine, tools=None, structured={"json_object": True})
        assert (parsed.reasoning, parsed.content) == ("Hm.", '{"sum": 3}')
        parsed, _ = ask(engine, tools=None, structured={"regex": "[0-9]"})
        assert parsed.reasoning == ""


def test_reasoning_that_the_prompt_opens() -> None:
    """Where the template ends with the first tag, the completion is reasoning from its beginning."""
    opened = THINKS.replace("assistant\\n' }}", "assistant\\n' }}{{- '<think>\\n' }}")
    with scripted_engine("<think>\nHm.</think>\nThree.", opened) as engine:
        parsed, output = ask(engine, tools=None)
        assert (output.text, parsed.reasoning, parsed.content) == ("Hm.</think>\nThree.", "Hm.", "Three.")
    with scripted_engine("Hm.</think>Three.", THINKS) as engine:
        assert ask(engine, tools=None)[0].content == "Hm.</think>Three."


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_a_format_is_named_or_switched_off(setting: str) -> None:
    """A name that no plugin has is the operator's error at the start; with "none" calls are text, and reasoning too."""
    with pytest.raises(InvalidConfig, match="mine"):
        scripted_engine("", **{setting: "mine"})
    with scripted_engine("<think>Hm.</think>", THINKS, **{setting: "none"}) as engine:
        if setting == "tool_parser":
            with pytest.raises(InvalidTools, match="tool_parser"):
                ask(engine)
        else:
            assert ask(engine, tools=None)[0].content == "<think>Hm.</think>"


class Shouts:
    """A third party's format: a call is a line ``!name {arguments}``."""

    markers = ()

    def recognises(self, template: str) -> bool:
        return "shouts" in template

    def new_id(self) -> str:
        return "id"

    def new_parser(self, names: Any, new_id: Any) -> Any:
        return self

    def push(self, text: str) -> Any:
        raise ZeroDivisionError("secret " + text)

    def finish(self) -> Any:
        return []

    def grammar(self, tools: Any, grammar: Any) -> str | None:
        return None


class ShoutsPlugin:
    """Adds it."""

    @hookimpl
    def pagedcore_register(self, registry: Any) -> None:
        """Add the format."""
        registry.tool_parsers.add("shouts", f"{__name__}:Shouts")


def test_a_format_of_a_plugin_is_found_and_fails_alone() -> None:
    """It is recognised by the template; without a grammar no call can be demanded; what its parser raises is a typed
    error that repeats nothing."""
    with scripted_engine("!add {}", "{#- shouts #}" + TEMPLATES["hermes"].replace("<tool_call>", "!"),
                         plugins=[ShoutsPlugin()]) as engine:
        assert isinstance(engine.chat_format.tools, Shouts)
        with pytest.raises(TextFailed) as failed:
            ask(engine)
        assert "secret" not in str(failed.value)
        with pytest.raises(InvalidTools, match="grammar"):
            ask(engine, choice="required")


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return {"type": "object", **value}


def tool(**function: Any) -> Any:
    return {"type": "function", "function": {"name": "f", **function}}


SHARED: Any = {"x": "y" * 50}
for _ in range(40):
    SHARED = {"a": SHARED, "b": SHARED}


@pytest.mark.parametrize("tools", [
    "tools", {"a": 1}, [5], [{}], [{"type": "function"}], [{"type": "custom", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "f"}, "more": 1}], [tool(name="")], [tool(name="a" * 65)],
    [tool(name="a b")], [tool(name="a\n")], [tool(name=5)], [tool(), tool()], [tool(description=5)], [tool(more=1)],
    [tool(strict=1)], [tool(parameters=[])], [tool(parameters={"type": "string"})], [tool(parameters={5: 1})],
    [tool(parameters={"a": float("nan")})], [tool(parameters={"a": {1, 2}})], [tool(parameters={"a": 10**400})],
    [tool(parameters=deep(40))], [tool(description="a" * 270_000)], [tool(parameters=SHARED)],
    [tool(description="\ud800")], [tool(name=f"f{n}") for n in range(257)], [tool(parameters={"a": [0] * 140_000})],
], ids=range(28))
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    """Another form, name or type, two of one name, too many, too deep, too long, or a small object that is large when
    it is written down: a typed refusal, before a template sees it."""
    with pytest.raises(PagedcoreError) as refused:
        Chat(QUESTION, tools)
    assert "aaa" not in str(refused.value)


def call(**function: Any) -> Any:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}


@pytest.mark.parametrize("calls", [
    "calls", [5], [{}], [call(name="a b")], [call(arguments=5)], [call(arguments="[" * 100_000)],
    [call(arguments='{"a": ' * 50 + "1" + "}" * 50)], [{**call(), "id": 5}], [{**call(), "type": "custom"}],
    [call()] * 129, [call(arguments='{"a": "\ud800"}')],
], ids=range(11))
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    """The calls in messages are checked like all else."""
    with scripted_engine("") as engine, pytest.raises(PagedcoreError):
        engine.encode(Chat([*QUESTION, {"role": "assistant", "tool_calls": calls}]))


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("arguments", ['{"a": 1', "[]", '{"a": 1, "a": 2}', '{"a": NaN}', "none", None, ""])
def test_arguments_in_a_history_may_be_malformed(arguments: str | None, form: str) -> None:
    """A model wrote them, and one that was cut off is of our own making: the chat goes on, with their text."""
    message = {"role": "assistant", "tool_calls": [call(arguments=arguments)]}
    chat = Chat([*QUESTION, message, {"role": "tool", "tool_call_id": "1", "content": "an error"}])
    prompts = list[str]()
    with scripted_engine(lambda prompt: prompts.append(prompt) or "3.", form) as engine:
        assert engine.submit(chat, SamplingParams(max_tokens=20)).result(60).outputs[0].text == "3."
    assert json.dumps(arguments) in prompts[0] if arguments else "{}" in prompts[0]


def test_tools_count_as_text_of_the_chat() -> None:
    """Tools that could not fit the context are refused before the template is rendered."""
    with scripted_engine("", max_model_len=64) as engine, pytest.raises(PromptTooLong, match="bytes of JSON"):
        engine.encode(Chat(QUESTION, [tool(description="a" * 2000)]))

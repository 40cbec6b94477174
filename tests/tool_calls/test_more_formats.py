"""Formats whose calls are no JSON object with a name: found by what a template writes, through an engine and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedcore import StructuredOutput
from pagedcore.errors import InvalidRequest, InvalidTools
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.tool_calls.chat_format import ChatFormat
from pagedcore.tool_calls.events import ParsedCompletion, collect
from pagedcore.tool_calls.harmony import HarmonyFormat
from pagedcore.tool_calls.schema_types import type_of_text, types_of
from support.scripted_model import TEMPLATES, scripted_engine, scripted_tokenizer
from tool_calls.test_chat_format import NOW, ask, calls_of
from tool_calls.test_parsers import FORMATS, events_of

SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["text", "count"], "properties": {
        "text": {"type": "string"}, "count": {"$ref": "#/$defs/count"}, "kind": {"type": "string", "enum": ["a", "b"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "parts": {"type": "array", "items": {}}},
    "$defs": {"count": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
TEXT = 'A "b"\n<c> é \\ '
CALLS = {
    "harmony": '<|channel|>commentary to=functions.note <|constrain|>json<|message|>'
               f'{json.dumps({"text": TEXT, "count": 12}, ensure_ascii=False)}',
    "glm": f"<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>{TEXT}</arg_value>\n<arg_key>count</arg_key>\n"
           "<arg_value>12</arg_value>\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n<function=note>\n<parameter=text>\n{TEXT}\n</parameter>\n<parameter=count>\n12\n"
                   "</parameter>\n</function>\n</tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">{TEXT}</parameter>\n'
                  '<parameter name="count">12</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>"
                    f'{json.dumps({"text": TEXT, "count": 12}, ensure_ascii=False)}'
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "granite": '<|tool_call|>[{"name": "note", "arguments": '
               f'{json.dumps({"text": TEXT, "count": 12}, ensure_ascii=False)}}}]',
}
ONE = [("note", {"text": TEXT, "count": 12})]
#: What published templates write for one call, and the format that reads it; "" where none here does.
WRITTEN: dict[str, tuple[str, str]] = {
    "Hermes 2 Pro, Qwen 2.5, Qwen 3, QwQ, MiMo, Bielik, Reka, Granite 4": (
        "hermes", '<tool_call>\n{"name": "note", "arguments": {"text": "x"}}\n</tool_call>'),
    "Llama 3.1 to 3.3": ("llama3", '{"name": "note", "parameters": {"text": "x"}}'),
    "Mistral Nemo": ("mistral", '[TOOL_CALLS][{"name": "note", "arguments": {"text": "x"}, "id": "abcdefghi"}]</s>'),
    "Devstral, Ministral 3": ("mistral", '[TOOL_CALLS]note[ARGS]{"text": "x"}</s>'),
    "gpt-oss": ("harmony", '<|start|>assistant to=functions.note<|channel|>commentary json<|message|>{"text": "x"}'
                           "<|call|>"),
    "GLM 4.6, Laguna XS": ("glm", "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"),
    "GLM 4.7, Spark 2.5, Laguna S": (
        "glm", "<tool_call>note<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"),
    "Ling 3": ("glm", "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>x</arg_value></tool_call>"),
    "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5": (
        "qwen3_coder", "<tool_call>\n<function=note>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"),
    "Seed-OSS": ("seed_oss", "<seed:tool_call>\n<function=note>\n<parameter=text>x</parameter>\n</function>\n"
                             "</seed:tool_call>"),
    "MiniMax-M2": ("minimax_m2", '<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">x</parameter>\n'
                                 "</invoke>\n</minimax:tool_call>"),
    "DeepSeek V3.1": ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>{"text": "x"}'
                                      "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "MiniMax-M3": ("", "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"note\">]<]minimax[>[<text>x]<]minimax[>["
                       "</text>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"),
    "DeepSeek R1": ("", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n"
                        '{"text": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    "DeepSeek V3.2": ("", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" '
                          'string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    "Gemma 4": ("", '<|tool_call>call:note{text:<|"|>x<|"|>}<tool_call|>'),
    "Kimi K2": ("", "<|tool_calls_section_begin|><|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>"
                    '{"text": "x"}<|tool_call_end|><|tool_calls_section_end|>'),
    "Apriel": ("", '<tool_calls>[{"name": "note", "arguments": {"text": "x"}}]</tool_calls>'),
    "Command R7B": ("", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "note", "parameters": '
                        '{"text": "x"}}\n]<|END_ACTION|>'),
    "Hunyuan": ("", "<tool_calls:opensource>\n<tool_call:opensource>note<tool_sep:opensource>\n<arg_key:opensource>text"
                    "</arg_key:opensource>\n<arg_value:opensource>x</arg_value:opensource>\n</tool_call:opensource>"),
}


def read(name: str, text: str) -> ParsedCompletion:
    """What a format reads in a text with calls of the tool."""
    return collect(events_of(FORMATS[name].new_parser({"note": SCHEMA}, lambda: "id"), [text]))


def recognised(text: str) -> list[str]:
    """The names of all formats that recognise a text."""
    table = create_plugin_manager().registry.tool_parsers
    return [name for name in table.names if table.load(name)().recognises(text)]


@pytest.mark.parametrize("models", WRITTEN)
def test_a_format_is_recognised_by_a_call(models: str) -> None:
    """One format and no other reads what a template writes, and reads it as the call that it is; a tag that it shares
    with others is no evidence."""
    name, text = WRITTEN[models]
    assert recognised(text) == [name] * bool(name)
    if name:
        parsed = read(name, text.removesuffix("</s>"))
        assert (calls_of(parsed), parsed.content) == ([("note", {"text": "x"})], "")


def format_of(template: str) -> Any:
    """The format that an engine finds for a template."""
    with scripted_engine("", template) as engine:
        return type(engine.chat_format.tools).__name__


def test_evidence_is_what_the_template_writes() -> None:
    """A tag in its source that it writes around other calls misleads nobody; a template that writes no call is known by
    what it tells the model."""
    misleading = TEMPLATES["qwen3_coder"].replace("{%- for tool", "{#- <tool_call>{\"name\": \"x\"} #}{%- for tool", 1)
    assert format_of(misleading) == "Qwen3CoderFormat"
    told = ("{%- for tool in tools or [] %}{{- 'Write <tool_call>\\n{\"name\": <name>, \"arguments\": <json>}"
            "\\n</tool_call> ' + tool | tojson }}{%- endfor %}" + TEMPLATES["none"])
    assert format_of(told) == "HermesFormat"
    assert format_of(TEMPLATES["hermes"].replace("<tool_call>", "<other>")) == "NoneType"


@pytest.mark.parametrize("form", CALLS)
def test_a_model_calls_tools(form: str) -> None:
    """A call that the model writes passes the grammar and is read, text and numbers as the schema has them, whole and
    piece by piece; so is one that it is made to write."""
    with scripted_engine(CALLS[form], form) as engine:
        parsed, output = ask(engine, tools=(TOOL, NOW), max_tokens=300)
        assert (calls_of(parsed), parsed.content, output.finish_reason) == (ONE, "", "stop")
        for choice in ("required", {"type": "function", "function": {"name": "note"}}):
            assert calls_of(ask(engine, tools=(TOOL,), choice=choice, is_parallel=False, max_tokens=300)[0]) == ONE
        assert not ask(engine, tools=(TOOL,), choice="none")[0].tool_calls
    with scripted_engine("Text.", form) as engine:
        parsed, _ = ask(engine, tools=(NOW,), choice="required", is_parallel=False)
        assert calls_of(parsed) == [("now", {})]


@pytest.mark.parametrize("form", sorted(CALLS.keys() - {"harmony"}))
def test_text_and_several_calls(form: str) -> None:
    """Text may come before calls, and after one another."""
    second = {"glm": "<tool_call>now\n</tool_call>",
              "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>"}
    with scripted_engine("Well. " + CALLS[form] + "\n" * (form in second) + second.get(form, ""), form) as engine:
        parsed, _ = ask(engine, tools=(TOOL, NOW), max_tokens=300)
        assert (calls_of(parsed), parsed.content) == ([*ONE, *([("now", {})] if form in second else [])], "Well.")


def test_values_are_what_the_schema_says() -> None:
    """Text is text, also where it looks like a number; what is none is JSON, in Python's form too; of two values with
    one name the first counts."""
    text = ("<tool_call>\n<function=note>\n<parameter=text>\n12\n</parameter>\n<parameter=count>\n 7 \n</parameter>\n"
            "<parameter=maybe>\nNone\n</parameter>\n<parameter=parts>\n[1, {'a': True}]\n</parameter>\n"
            "<parameter=count>\n8\n</parameter>\n<parameter=other>\nx\n</parameter>\n</function>\n</tool_call>")
    parsed = read("qwen3_coder", text)
    assert calls_of(parsed) == [("note", {"text": "12", "count": 7, "maybe": None, "parts": [1, {"a": True}],
                                          "other": "x"})]
    (cut,) = read("qwen3_coder", text[:57]).tool_calls
    assert (cut.arguments, cut.is_complete) == ('{"text": "12', False)


def test_types_of_hostile_schemas() -> None:
    """References in a circle, to nothing, and schemas of other kinds say nothing, and end."""
    assert types_of({"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) is None
    assert types_of({"anyOf": [{"type": "string"}, {}]}, {}) is None
    assert types_of({"type": ["integer", "null"]}, {}) == {"number", "null"}
    assert [types_of(one, {}) for one in (True, None, [], {"type": []}, {"$ref": 5}, {"enum": ["a", 1]})] == [
        None, None, None, None, None, {"string", "number"}]
    assert [type_of_text(one) for one in ("", "NaN", "01", "[" * 99_999, " -1.5e3 ", '"a"', "{}")] == [
        "", "", "", "", "number", "string", "object"]


def test_a_pattern_of_a_text_is_refused_where_it_is_strict() -> None:
    """No rule keeps it between tags; a tool that is not strict goes without."""
    of_text = {"type": "string", "pattern": "x"}
    function = {"name": "note", "parameters": {"type": "object", "properties": {"a": of_text}}}
    with scripted_engine("", "glm") as engine:
        ask(engine, tools=({"type": "function", "function": function},))
        with pytest.raises(InvalidTools, match="strict with pattern"):
            ask(engine, tools=({"type": "function", "function": {**function, "strict": True}},))


OPEN_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=count>\n7\n</parameter>\n<parameter=other>\nx\n"
                   "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>note\n<arg_key>count</arg_key>\n<arg_value>7</arg_value>\n<arg_key>other</arg_key>\n"
           "<arg_value>x</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("form", OPEN_CALLS)
def test_a_schema_that_says_so_lets_other_arguments_come(form: str) -> None:
    """Behind those that it names; one that does not say so has none."""
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    with scripted_engine(OPEN_CALLS[form], form) as engine:
        found = []
        for more in ({"additionalProperties": True}, {"patternProperties": {"^o": {}}}, {}):
            function = {"name": "note", "parameters": {**schema, **more}}
            found += calls_of(ask(engine, tools=({"type": "function", "function": function},))[0])
    assert found == [("note", {"count": 7, "other": "x"})] * 2 + [("note", {"count": 7})]


HARMONY = TEMPLATES["reasons"] + TEMPLATES["harmony"]
THOUGHT = "<|channel|>analysis<|message|>Hm, stop.<|end|><|start|>assistant"


@pytest.mark.parametrize(("text", "wanted"), [
    (THOUGHT + "<|channel|>final<|message|>Five.", ("Five.", "Hm, stop.")),
    ("<|channel|>final<|message|>Five.", ("Five.", "")), ("Five.", ("Five.", "")),
    (THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>5",
     ("I look.\n\n5", "Hm, stop.")),
])
def test_harmony_has_reasoning_and_an_answer(text: str, wanted: tuple[str, str]) -> None:
    """The channel says what a message is; heads are none of its text. A stop text acts on the answer alone."""
    with scripted_engine(text, HARMONY) as engine:
        for stop in ((), ("stop",)):
            parsed, _ = ask(engine, tools=None, stop=stop)
            assert (parsed.content, parsed.reasoning) == wanted
        # Why not without a head: with tools the grammar asks for one.
        if text != "Five.":
            assert ask(engine, tools=(NOW,))[0] == ParsedCompletion(*wanted, ())


@pytest.mark.parametrize(("stop", "wanted"), [
    ("final", "The "), ("word", "The final "), *((one, "The final word.") for one in ("assistant", "Hm", "analysis")),
])
def test_stop_strings_are_looked_for_in_the_answer_of_harmony(stop: str, wanted: str) -> None:
    """Neither in reasoning, which may be several messages, nor in the heads of messages."""
    text = f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>The final word."
    with scripted_engine(text, HARMONY) as engine:
        parsed, output = ask(engine, tools=None, stop=stop)
        assert (parsed.content, parsed.reasoning) == (wanted, "Hm, stop.\n\nHm, stop.")
        assert output.stop_reason == (stop if stop in "The final word." else None)


def test_harmony_calls_after_reasoning() -> None:
    """Both are read, reasoning tokens are counted, and structured output comes in the final channel."""
    with scripted_engine(THOUGHT + CALLS["harmony"] + "<|call|>", HARMONY) as engine:
        parsed, _ = ask(engine, tools=(TOOL,))
        assert (calls_of(parsed), parsed.reasoning, parsed.content) == (ONE, "Hm, stop.", "")
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    wanted = StructuredOutput(json_schema=schema)
    with scripted_engine(THOUGHT + '<|channel|>final<|message|>{"a": 5}', HARMONY) as engine:
        for tools in (None, (NOW,)):
            parsed, _ = ask(engine, tools=tools, structured=wanted)
            assert (json.loads(parsed.content), parsed.reasoning) == ({"a": 5}, "Hm, stop.")


def test_an_effort_reaches_the_template() -> None:
    """A template that sets a default of its own reads the effort all the same; it would write any word, and gpt-oss was
    trained on three."""
    source = "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}" + HARMONY
    form = ChatFormat(scripted_tokenizer(source), lambda _: None, lambda _: HarmonyFormat())
    assert [dict(form.arguments(None, effort)) for effort in ("low", "high")] == [
        {"reasoning_effort": "low"}, {"reasoning_effort": "high"}]
    for unknown in ("none", "minimal", "max"):
        with pytest.raises(InvalidRequest, match=f"{unknown}', allowed is one of low, medium, high for"):
            form.arguments(None, unknown)

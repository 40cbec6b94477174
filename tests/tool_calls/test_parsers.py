"""The parsers of calls and reasoning: what they find, and that the cut of the text plays no part."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count, groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedcore.tool_calls.deepseek_v31 import DeepSeekV31Format
from pagedcore.tool_calls.events import (
    ArgumentsDelta,
    ChatEvent,
    ContentDelta,
    ParsedCompletion,
    ReasoningDelta,
    collect,
)
from pagedcore.tool_calls.formats import OutputParser, ReasoningFormat
from pagedcore.tool_calls.glm import GlmFormat
from pagedcore.tool_calls.granite import GraniteFormat
from pagedcore.tool_calls.harmony import HarmonyFormat
from pagedcore.tool_calls.hermes import HermesFormat
from pagedcore.tool_calls.llama3 import Llama3Format
from pagedcore.tool_calls.minimax_m2 import MiniMaxM2Format
from pagedcore.tool_calls.mistral import MistralFormat
from pagedcore.tool_calls.qwen3_coder import Qwen3CoderFormat
from pagedcore.tool_calls.reasoning import ReasoningParser
from pagedcore.tool_calls.seed_oss import SeedOssFormat

FORMATS: dict[str, Any] = {
    "hermes": HermesFormat(), "llama3": Llama3Format(), "mistral": MistralFormat(), "harmony": HarmonyFormat(),
    "glm": GlmFormat(), "qwen3_coder": Qwen3CoderFormat(), "seed_oss": SeedOssFormat(),
    "minimax_m2": MiniMaxM2Format(), "deepseek_v31": DeepSeekV31Format(), "granite": GraniteFormat(),
}
NAMES = ("add", "get_weather")
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "[", "]", "<|python_tag|>", "; ", ", ", "<think>", "</think>", "</thi", " ", "\n", "text", "a < b", "abc123def",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a": "}]<tool_call>"}}',
    '{"arguments": {"x": [1, {"y": null}]}, "name": "get_weather"}', '{"name": "add"}',
    '{"name": "other", "arguments": {}}',
    '{"name": "add", "arguments": {"a": 1}, "arguments": {"a": 2}}', '{"name": "add", "name": "add", "arguments": {}}',
    '{"name": "add", "arguments": {"a": \'x\'}}', '{"name": "add", "arguments": {"a": "\\u00e9\\n"}}', "add", "add{",
    'add[ARGS]{"a": 1}', 'add[CALL_ID]abc123def[ARGS]{"a": 1}', '{"name": "add", "arguments": {"a": 1}', '"', "\\", "{",
    "}",
    "<|channel|>", "analysis", "final", "commentary to=functions.add", " to=functions.add", "<|message|>", "<|end|>",
    "<|start|>assistant", "<|call|>", "<|tool_call|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<function=add>", "<parameter=a>", "</parameter>", "</function>", "<seed:tool_call>", "</seed:tool_call>",
    "<minimax:tool_call>", '<invoke name="add">', '<parameter name="a">', "</invoke>", "</minimax:tool_call>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    '{"name": 5}', '{"name": "add", "arguments": 5}', '{"x": 1.5e3, "name": "add", "arguments": {"é": "\U0001f600"}}',
]


def parser_of(name: str, reasoning: str = "") -> OutputParser:
    numbers = count()
    parser: OutputParser = FORMATS[name].new_parser(NAMES, lambda: f"id-{next(numbers)}")
    return ReasoningParser(ReasoningFormat(), parser, is_open=reasoning == "open") if reasoning else parser


def events_of(parser: OutputParser, pieces: Sequence[str]) -> list[ChatEvent]:
    """All events, neighbours of one kind joined."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined: list[ChatEvent] = []
    for kind, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        same: Any = list(group)
        if kind[0] in (ContentDelta, ReasoningDelta):
            same = [kind[0]("".join(one.text for one in same))]
        elif kind[0] is ArgumentsDelta:
            same = [ArgumentsDelta(same[0].index, "".join(one.text for one in same))]
        joined += same
    return joined


def parse(name: str, text: str, reasoning: str = "") -> ParsedCompletion:
    return collect(events_of(parser_of(name, reasoning), [text]))


def calls_of(parsed: ParsedCompletion) -> list[tuple[str, Any]]:
    assert all(call.is_complete for call in parsed.tool_calls)
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


@pytest.mark.parametrize("reasoning", ["", "closed", "open"])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(text=TEXTS, data=st.data())
def test_the_cut_plays_no_part(name: str, reasoning: str, text: str, data: st.DataObject) -> None:
    """Any pieces of any text give the events of the whole text, well-formed or not; nothing raises, and single
    characters do as well."""
    whole = events_of(parser_of(name, reasoning), [text])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert events_of(parser_of(name, reasoning), pieces) == whole
    assert events_of(parser_of(name, reasoning), list(text)) == whole


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), JSON_VALUES, max_size=3)), max_size=3)
BEFORE = st.text("ab .\n<[{\"'é", max_size=12).filter(lambda text: not text.lstrip().startswith("{"))
Writer = Callable[[str, Sequence[tuple[str, Any]], bool], str]


def write_hermes(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    blocks = [json.dumps({"name": name, "arguments": value}, ensure_ascii=ascii_) for name, value in calls]
    return before + "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def write_llama3(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    blocks = [json.dumps({"name": name, "parameters": value}, ensure_ascii=ascii_) for name, value in calls]
    return (before + "<|python_tag|>" if before.strip() and calls else before) + "; ".join(blocks)


def write_mistral_list(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    blocks = [json.dumps({"name": name, "arguments": value}, ensure_ascii=ascii_) for name, value in calls]
    return before + (f"[TOOL_CALLS] [{', '.join(blocks)}]" if blocks else "")


def write_mistral_names(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    return before + "".join(
        f"[TOOL_CALLS]{name}{'[CALL_ID]abc123def' * (len(value) % 2)}[ARGS]{json.dumps(value, ensure_ascii=ascii_)}"
        for name, value in calls)


def write_mistral_plainly(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    return before + "".join(f"[TOOL_CALLS]{name}{json.dumps(value, ensure_ascii=ascii_)}" for name, value in calls)


def write_granite(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    return write_mistral_list(before, calls, ascii_).replace("[TOOL_CALLS] ", "<|tool_call|>", 1)


def write_deepseek(before: str, calls: Sequence[tuple[str, Any]], ascii_: bool) -> str:
    blocks = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(value, ensure_ascii=ascii_)}<｜tool▁call▁end｜>"
              for name, value in calls]
    return before + (f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>" if blocks else "")


WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", write_hermes), "llama3": ("llama3", write_llama3), "v3": ("mistral", write_mistral_list),
    "granite": ("granite", write_granite), "deepseek_v31": ("deepseek_v31", write_deepseek),
    "v11": ("mistral", write_mistral_names), "stripped": ("mistral", write_mistral_plainly),
}


@pytest.mark.parametrize("form", WRITERS)
def test_a_call_may_come_character_by_character(form: str) -> None:
    """A tag whose beginning ends a delta is not delivered as text: the events are those of the whole text."""
    name, write = WRITERS[form]
    text = write("Well. ", [("add", {"a": [1, 2]}), ("get_weather", {"city": "Rome"})], False)
    assert events_of(parser_of(name, ""), list(text)) == events_of(parser_of(name, ""), [text])


@pytest.mark.parametrize("form", WRITERS)
@given(before=BEFORE, calls=CALLS, ascii_=st.booleans())
@example(before="", calls=[("add", {"a": "</tool_call>[TOOL_CALLS]; {"})], ascii_=False)
def test_what_was_written_is_read(form: str, before: str, calls: Any, ascii_: bool) -> None:
    """Text and calls, written as the family does, are read as they were, text alone exactly."""
    name, write = WRITERS[form]
    parsed = parse(name, write(before, calls, ascii_))
    assert calls_of(parsed) == calls
    assert parsed.content == (before.rstrip(" \n") if calls else before)


@pytest.mark.parametrize(("name", "text"), [
    ("hermes", "<tool_call>"), ("hermes", "<tool_call>\nhello\n</tool_call>"), ("hermes", '<tool_call>{"name": "add",'),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'), ("hermes", '<tool_call>{"arguments": {}}'),
    ("hermes", '<tool_call>{"name": "add", "name": "add", "arguments": {}}'), ("hermes", "</tool_call> <tool"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>["add"]</tool_call>'), ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}'),
    ("llama3", '{"answer": 5}'), ("llama3", ' {"name": "rm", "parameters": {}}'), ("llama3", 'text {"name": "add"}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'), ("llama3", "<|python"), ("llama3", '{"name": "a'),
    ("glm", "<tool_call>rm<arg_key>a</arg_key>"), ("glm", "<tool_call>add now"), ("glm", "<tool_call>add"),
    ("glm", "<tool_call>" + "a" * 99), ("qwen3_coder", "<tool_call>\n<function=rm>\n"),
    ("qwen3_coder", "<tool_call>\n<func"), ("minimax_m2", "<minimax:tool_call> tags"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}"),
    ("granite", "<|tool_call|> text"),
    ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS][]"), ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "a" * 99 + "{}"), ("mistral", "[TOOL_CALLS]add[ARG"),
    ("mistral", "[TOOL_CALLS]add(1)"),
    ("mistral", '[TOOL_CALLS][{"name": "rm", "arguments": {}}]'),
])
def test_what_is_no_call_of_an_offered_tool_is_content(name: str, text: str) -> None:
    """Malformed, unfinished before its arguments, or of a tool that was not offered: the user gets it to the letter."""
    assert parse(name, text) == ParsedCompletion(text, "", ())


@pytest.mark.parametrize("name", ["deepseek_v31", "granite", "hermes", "llama3", "mistral"])
def test_a_call_that_is_cut_off_is_incomplete(name: str) -> None:
    """Arguments that have begun are delivered as far as they came, and the call has no end."""
    text = WRITERS[{"mistral": "v11"}.get(name, name)][1]("", [("add", {"a": [1, 2]})], True)
    (call,) = parse(name, text[: text.index("[1") + 2]).tool_calls
    assert (call.name, call.arguments, call.is_complete) == ("add", '{"a": [1', False)


def test_arguments_that_are_no_json_are_delivered_as_they_are() -> None:
    """A model's slip within arguments stays the caller's to judge, up to the end of the call; the next call is read."""
    parsed = parse("hermes", "<tool_call>{\"name\": \"add\", \"arguments\": {'a': 1}}</tool_call>"
                             '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    assert [call.arguments for call in parsed.tool_calls] == ["{'a': 1}}", '{"a": 2}']
    missing_brace = parse("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2}</tool_call> done')
    assert (calls_of(missing_brace), missing_brace.content) == ([("add", {"a": 2})], "done")


def test_arguments_nested_beyond_the_limit_are_no_json() -> None:
    """Brackets without end are text of arguments, and never a deep stack."""
    (call,) = parse("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000).tool_calls
    assert (call.arguments.count("["), call.is_complete) == (100_000, False)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    """Some models leave the member out where a tool takes nothing."""
    assert calls_of(parse("hermes", '<tool_call>{"name": "add"}</tool_call>')) == [("add", {})]


def test_arguments_stream_while_they_are_written() -> None:
    """Once the name is known, each piece of the arguments is an event of its own, before the call ends."""
    parser = parser_of("hermes")
    parser.push('<tool_call>\n{"name": "add", "arguments": ')
    assert [parser.push(piece) for piece in ('{"a"', ": ", "12")][1:] == [
        [ArgumentsDelta(0, ": ")], [ArgumentsDelta(0, "12")]]


@pytest.mark.parametrize(("reasoning", "text", "wanted"), [
    ("closed", "<think>\nhm\n</think>\n\n5", ("5", "hm")), ("open", "\nhm </think> 5", ("5", "hm")),
    ("closed", "5 <think>x</think>", ("5 <think>x</think>", "")), ("closed", "<thin", ("<thin", "")),
    ("closed", "<think>hm </thi", ("", "hm </thi")), ("open", "hm", ("", "hm")), ("closed", "  5", ("  5", "")),
    ("closed", "<think></think>5", ("5", "")),
])
def test_reasoning_is_split_off(reasoning: str, text: str, wanted: tuple[str, str]) -> None:
    """What is between the tags is no content, whether the prompt has opened it or the completion does."""
    parsed = parse("hermes", text, reasoning)
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (*wanted, ())


def test_calls_within_reasoning_are_not_calls() -> None:
    """A model that thinks about a call has not made it."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = parse("hermes", f"{call}</think>{call}", "open")
    assert (parsed.reasoning, len(parsed.tool_calls)) == (call, 1)


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_random(name: str) -> None:
    """A thousand ids are all different, and those of Mistral have the nine characters that its templates demand."""
    ids = {FORMATS[name].new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {9 if name == "mistral" else 37}

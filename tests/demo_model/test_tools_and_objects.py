"""Laws of the demo model's messages with a form: how the template writes tools, which calls and objects are right."""

import json
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.demo_model.evaluation import (
    LONGEST_CALL,
    FormedQuestion,
    formed_accuracy,
    object_questions,
    tool_questions,
)
from examples.demo_model.objects import OBJECT_TASKS
from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR

_TOOLS = [
    {"type": "function", "function": {
        "name": "calculator", "description": "Works out sums.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string", "title": "E"}}}}},
    {"name": "plain"},
    {"type": "function", "function": {
        "name": "odd", "parameters": {"properties": {"a": True, "items": {"type": ["string", "null"]}}}}},
]  # fmt: skip
_LISTED = """<|im_start|>system
# Tools
<tools>
{"name": "calculator", "arguments": {"expression": "string"}}
{"name": "plain", "arguments": {}}
{"name": "odd", "arguments": {"a": "any", "items": ["string", "null"]}}
</tools><|im_end|>
"""

_KINDS = (("calculator call",), ("calculator answer",), tuple(OBJECT_TASKS))


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def _render(messages: list[dict[str, Any]], **options: Any) -> str:
    text = _tokenizer().apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_tools_stand_in_the_system_message_by_name_and_arguments() -> None:
    """Each tool, whatever its schema lacks or has besides, is a line of its name and its arguments' types."""
    asked = {"role": "user", "content": "U"}
    assert _render([asked], tools=_TOOLS) == f"{_LISTED}<|im_start|>user\nU<|im_end|>\n"
    with_system = _render([{"role": "system", "content": "S"}, asked], tools=_TOOLS)
    assert with_system == _LISTED.replace("# Tools", "S\n\n# Tools") + "<|im_start|>user\nU<|im_end|>\n"


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_the_template_writes_the_messages_alone(tools: list[Any] | None) -> None:
    """No tools, or an empty list of them, add nothing."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert _render(messages, tools=tools) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"


@pytest.mark.parametrize("arguments", [{"expression": "1 + 2"}, '{"expression": "1 + 2"}'])
@pytest.mark.parametrize(("content", "before"), [(None, ""), ("", ""), ("Now.", "Now.\n")])
def test_calls_and_results_of_a_conversation_are_rendered(arguments: Any, content: str | None, before: str) -> None:
    """Calls, whose arguments are an object or its text, are written as the model writes them, results by their role."""
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    messages = [{"role": "assistant", "content": content, "tool_calls": [call, call]},
                {"role": "tool", "content": "3", "tool_call_id": "1"}]  # fmt: skip
    written = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
    expected = f"<|im_start|>assistant\n{before}{written}\n{written}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
    assert _render(messages) == expected


def test_a_sum_is_calculated_by_the_tool_and_told() -> None:
    """Question, call, result, answer: the model calls the listed calculator, and says what it returned."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 123 * 45?"}]
    tools = _TOOLS[:1]
    with Engine.from_pretrained("demo") as engine:

        def say() -> str:
            prompt = _render(messages, tools=tools, add_generation_prompt=True)
            return engine.generate([prompt], SamplingParams(max_tokens=LONGEST_CALL))[0].outputs[0].text

        call = json.loads(say().removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call == {"name": "calculator", "arguments": {"expression": "123 * 45"}}
        messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": "5535"})
        assert say() == "123 * 45 = 5535."
        tools = []
        messages[:] = [{"role": "user", "content": "What is 12 + 30?"}]
        assert say() == "12 + 30 = 42."


def test_some_calls_and_objects_are_right() -> None:
    """Of 40 held-out questions, half of them for the calculator, at most two get another message than the right one."""
    assert _wrong(_formed(20, seed=3)) <= 2


@pytest.mark.slow
def test_calls_and_objects_are_right_95_times_in_100() -> None:
    """1,000 calls, the answers that follow, and 1,000 objects: of each at least 95 % are right in every character."""
    questions = tool_questions(1000, 4, _tokenizer()) + object_questions(1000, 4, _tokenizer())
    for kinds in _KINDS:
        asked = [question for question in questions if question.kind in kinds]
        assert len(asked) == 1000
        assert _wrong(asked) <= 50


def _formed(count: int, seed: int) -> list[FormedQuestion]:
    calls = [question for question in tool_questions(count, seed, _tokenizer()) if question.structured]
    return calls + object_questions(count, seed, _tokenizer())


def _wrong(questions: list[FormedQuestion]) -> int:
    """How many messages are not the right one, written greedily within their forms."""
    params = [SamplingParams(max_tokens=LONGEST_CALL, structured=question.structured) for question in questions]
    with Engine.from_pretrained("demo", max_num_seqs=64, max_num_waiting=len(questions)) as engine:
        outputs = engine.generate([question.prompt for question in questions], params)
    figures = formed_accuracy(lambda asked: [output.outputs[0].text for output in outputs], questions)
    return sum(figure["questions"] - figure["right"] for figure in figures.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reported_calls_and_objects_meet_the_target(dtype: str) -> None:
    """The report has 1,000 calls, answers and objects, of each at least 95 % right, in both number types."""
    figures = json.loads((DEMO_MODEL_DIR / "accuracy.json").read_text())["constrained_accuracy"][dtype]
    for kinds in _KINDS:
        right, questions = (sum(figures[kind][name] for kind in kinds) for name in ("right", "questions"))
        assert questions == 1000
        assert right >= 950

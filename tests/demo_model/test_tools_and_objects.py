"""Laws of the demo model's messages with a form: how the chat template writes tools."""

from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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

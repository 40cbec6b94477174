"""Tools at BentoML's ``/chat``."""

from __future__ import annotations

import json
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("llguidance")

from adapters.bentoml.asgi_caller import serving
from support.scripted_model import TEMPLATES, scripted_engine

TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
BODY = {"messages": [{"role": "user", "content": "Add 1."}], "tools": [TOOL]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_chat_calls_tools() -> None:
    """Calls and reasoning are beside the text, the choice is kept, and what is malformed is a 400 that names it."""
    template = "{#- </think> #}" + TEMPLATES["hermes"]
    with scripted_engine(f"<think>Hm.</think>Look: {CALL}", template) as engine:
        async with serving(engine) as app:
            exchange = await app.call("/chat", BODY)
            (output,) = json.loads(exchange.text)["outputs"]
            (call,) = output["tool_calls"]
            assert (call["name"], call["arguments"], call["is_complete"]) == ("add", '{"a": 1}', True)
            assert (output["text"], output["reasoning"], output["finish_reason"]) == ("Look:", "Hm.", "tool_calls")
            cut = json.loads((await app.call("/chat", {**BODY, "sampling": {"stop": ["a"]}})).text)["outputs"][0]
            assert (cut["finish_reason"], [one["is_complete"] for one in cut["tool_calls"]]) == ("stop", [])
            none: Any = json.loads((await app.call("/chat", {**BODY, "tool_choice": "none",
                                                             "sampling": {"max_tokens": 9}})).text)
            assert none["outputs"][0]["tool_calls"] == []
            for field, value in (("tools", [5]), ("tool_choice", "any"), ("parallel_tool_calls", "no")):
                refused = await app.call("/chat", {**BODY, field: value})
                assert (refused.status, refused.error["what"].partition("[")[0]) == (400, field)


async def test_a_grammar_that_fails_while_it_is_used_is_the_callers() -> None:
    """A 400 that names the parameter, because the same call fails again; in a stream the last event says so."""
    body = {"prompt": "Count:", "sampling": {"structured": {"regex": "a{1000000}"}, "max_tokens": 9}}
    with scripted_engine(CALL) as engine:
        async with serving(engine) as app:
            refused = await app.call("/generate", body)
            assert (refused.status, refused.error["type"]) == (400, "GrammarFailed")
            assert refused.error["what"] == "structured"
            assert '"structured"' in (await app.call("/stream", body)).text

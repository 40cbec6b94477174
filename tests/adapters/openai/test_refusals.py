"""Refusals speak of what the caller wrote: fields by their names in its body, and a context without room as such."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from pagedcore import AsyncEngine
from pagedcore_openai import openai_app

CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BASES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}, TEXTS: {"prompt": "What is 2 + 3?"},
    RESPONSES: {"input": "What is 2 + 3?"}, "/tokenize": {},
}
LONG = "2 " * 4000
LOGPROBS = {"include": ["message.output_text.logprobs"]}
LONE = "\ud800"
USER, CALL = {"role": "user", "content": "a"}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
EXCEEDED = "This model's maximum context length is exceeded: the prompt is too long. "


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """Calls the door without a network."""
    engine = AsyncEngine.from_pretrained("demo", num_kv_blocks=512)
    with engine, TestClient(openai_app(engine, name="demo")) as client:
        yield client


def error_of(client: TestClient, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({**BASES[path], **fields})
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("path", "fields", "param"), [
    (CHATS, {"max_completion_tokens": 0}, "max_completion_tokens"), (CHATS, {"max_tokens": 0}, "max_tokens"),
    (CHATS, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    (CHATS, {"max_completion_tokens": 0, "max_tokens": 0}, "max_tokens"),
    (CHATS, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHATS, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": LONE}]}, "messages[0].content"),
    (TEXTS, {"max_tokens": 10**6}, "max_tokens"), (TEXTS, {"prompt": LONG}, "prompt"),
    (TEXTS, {"logprobs": 99}, "logprobs"), (TEXTS, {"logprobs": 99, "echo": True}, "logprobs"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens"),
    (RESPONSES, {"top_logprobs": 99, **LOGPROBS}, "top_logprobs"), (RESPONSES, {"input": LONG}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    (RESPONSES, {"input": [{"role": "user", "content": LONE}], "instructions": "a"}, "input[0].content"),
    (RESPONSES, {"instructions": LONE}, "instructions"), (RESPONSES, {"input": LONE}, "input"),
    (RESPONSES, {"input": [USER, CALL, CALL, {"role": "user", "content": LONE}]}, "input[3].content"),
    (RESPONSES, {"input": [USER, CALL, CALL, {"role": "user", "content": 3}]}, "input[3].content"),
    ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
])
@pytest.mark.parametrize("is_stream", [False, True])
def test_message_and_param_have_the_name_that_the_caller_used(
    client: TestClient, path: str, fields: dict[str, Any], param: str, is_stream: bool
) -> None:
    """Never the engine's own name for it, nor a place among messages that the caller has not written."""
    streamed = {"stream": True} if is_stream and path != "/tokenize" else {}
    error = error_of(client, path, {**fields, **streamed})
    assert (error["param"], error["message"].removeprefix(EXCEEDED).partition(": got ")[0]) == (param, param)


@pytest.mark.parametrize(("path", "name"), [
    (CHATS, "max_tokens"), (CHATS, "max_completion_tokens"), (TEXTS, "max_tokens"), (RESPONSES, "max_output_tokens"),
])
def test_a_prompt_and_a_completion_that_exceed_the_context_together(client: TestClient, path: str, name: str) -> None:
    """Clients that shorten a conversation know it by OpenAI's code and words; a completion of the whole context is
    a value out of range, because no prompt is short enough for it."""
    error = error_of(client, path, {name: 2047})
    assert (error["code"], error["message"].startswith(EXCEEDED)) == ("context_length_exceeded", True)
    error = error_of(client, path, {name: 2048})
    assert (error["code"], error["message"].startswith(name)) == ("invalid_value", True)
    limit = error_of(client, path, {name: 4, "min_tokens": 5})["message"].partition("allowed is ")[2]
    assert limit == f"0 to {name}, 4 here."


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_call_that_is_required_without_tools(client: TestClient, path: str) -> None:
    """The refusal says what is missing."""
    message = error_of(client, path, {"tool_choice": "required"})["message"]
    assert message == "tool_choice: got 'required', allowed is auto or none without tools."


def test_a_conversation_that_is_continued_is_blamed_by_its_id(client: TestClient) -> None:
    """Where instructions leave no room for the messages of a stored response, these have no place in the body."""
    stored = client.post(RESPONSES, json={**BASES[RESPONSES], "max_output_tokens": 4}).json()["id"]
    instructions = "a" * (16 * 2048 - 20)
    error = error_of(client, RESPONSES, {"instructions": instructions, "previous_response_id": stored})
    assert (error["param"], error["code"]) == ("previous_response_id", "context_length_exceeded")

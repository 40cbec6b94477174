"""Conversations of other providers, and fields of the newest clients: read, without effect, or refused by name."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")

from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses
from starlette.testclient import TestClient

from architecture.sources import ROOT
from pagedcore import AsyncEngine, SamplingParams
from pagedcore_http.events import encode
from pagedcore_openai import fields as known
from pagedcore_openai import message_fields, openai_app

CHAT: Any = [{"role": "user", "content": "What is 2 + 3?"}]
GREEDY: Any = {"temperature": 0}
OF_THE_TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncEngine) -> Iterator[TestClient]:
    """Calls the door without a network."""
    with TestClient(openai_app(engine, name="demo")) as client:
        yield client


def content_of(client: TestClient, messages: Any = CHAT, **fields: Any) -> str:
    """The answer to a chat."""
    answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def refusal_of(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a call that is a 400."""
    answer = client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


NOTES: list[dict[str, Any]] = [
    {"provider_specific_fields": {"refusal": None}, "refusal": None, "audio": None, "annotations": [], "images": []},
    {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}], "reasoning": {"effort": "low"}},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}], "cache_control": {"type": "e"}},
    {"type": "text", "id": "msg_1", "timestamp": 1, "created_at": "2026-01-01T00:00:00Z", "status": "completed"},
    {"is_error": False, "model": "other", "finish_reason": "stop", "usage": {"total_tokens": 3}, "parsed": None},
]
"""What litellm, OpenRouter, Anthropic's bridge, lm-eval, and frameworks that store messages put into one."""


@pytest.mark.parametrize("notes", NOTES)
def test_notes_of_other_providers_are_no_part_of_the_prompt(client: TestClient, notes: dict[str, Any]) -> None:
    """The same tokens are computed with them and without them, in chats and in the items of responses."""
    history: Any = [*CHAT, {"role": "assistant", "content": "5"}, {"role": "user", "content": "And 4 + 4?"}]
    noted = [{**message, **notes} for message in history]
    tokens = [client.post("/tokenize", json={"messages": one}).json()["tokens"] for one in (history, noted)]
    assert tokens[0] == tokens[1]
    answers = [client.post("/v1/responses", json={"input": [{**one, "type": "message"} for one in messages], **GREEDY})
               for messages in (history, noted)]
    assert len({json.dumps(one.json()["usage"]["input_tokens"]) for one in answers}) == 1


def test_parts_of_reasoning_are_left_out_and_notes_of_parts_ignored(client: TestClient) -> None:
    """Anthropic's and Mistral's parts of an assistant's reasoning, and a mark for a cache, change no token."""
    parts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
             {"type": "text", "text": "5", "cache_control": {"type": "ephemeral"}, "citations": []}]
    tokens = [client.post("/tokenize", json={"messages": [*CHAT, {"role": "assistant", "content": one}, *CHAT]}).json()
              for one in ("5", parts)]
    assert tokens[0]["tokens"] == tokens[1]["tokens"]


@pytest.mark.parametrize(("message", "param"), [
    ({"role": "user", "content": "a", "sentiment": "x"}, "messages[1].sentiment"),
    ({"role": "assistant", "content": "a", "refusal": "I cannot"}, "messages[1].refusal"),
    ({"role": "assistant", "content": "a", "audio": {"id": "audio_1"}}, "messages[1].audio"),
    ({"role": "assistant", "content": "a", "images": [{"type": "image_url"}]}, "messages[1].images"),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}, "messages[1].content[0]"),
])
def test_what_would_change_a_prompt_is_refused_by_name(client: TestClient, message: Any, param: str) -> None:
    """A name that no table has, and audio, images and refusals, are a 400 that says what to do."""
    error = refusal_of(client, "/v1/chat/completions", messages=[*CHAT, message])
    assert error["param"] == param
    assert "allowed is" in error["message"]


@pytest.mark.parametrize(("form", "create"), [
    (known.CHAT, Completions.create), (known.COMPLETION, TextCompletions.create), (known.RESPONSE, Responses.create),
])
def test_every_parameter_of_openais_client_is_in_the_table(form: known.Form, create: Any) -> None:
    """None of them is called unknown: it is read, has no effect, or is refused unless its value asks for nothing."""
    names = set(inspect.signature(create).parameters) - OF_THE_TRANSPORT
    assert names <= form.reads | form.ignored | form.neutral.keys()


@pytest.mark.parametrize("fields", [
    {"verbosity": "low"}, {"verbosity": "high"}, {"modalities": ["text"]}, {"web_search_options": None},
    {"prediction": {"type": "content", "content": "5"}}, {"client_metadata": {"a": "b"}}, {"functions": []},
    {"prompt_cache_options": {"ttl": "30m"}}, {"seed": -1}, {"seed": -7}, {"function_call": "auto"},
    {"stream_options": None}, {"temperature": 2, "top_p": 0}, {"temperature": 2, "top_p": 0.0, "n": 2},
    {"response_format": {"type": "text", "schema": None}},
])
def test_fields_that_change_nothing_change_nothing(client: TestClient, fields: dict[str, Any]) -> None:
    """The answer is that of the body without them; ``top_p`` 0 leaves the most likely token, as temperature 0."""
    assert content_of(client, **fields) == content_of(client)


def test_negative_seeds_are_seeds_and_minus_one_is_none(client: TestClient, engine: AsyncEngine) -> None:
    """OpenAI takes any integer of 64 bits: a negative one is the seed that it is as one without a sign, and -1 is none,
    as at vLLM and llama.cpp."""
    def of(seed: int) -> str:
        return content_of(client, temperature=5, seed=seed, max_tokens=12)

    wanted = engine.submit(CHAT, SamplingParams(temperature=5, seed=2**63 - 7, max_tokens=12)).result(60)
    assert of(-7) == of(-7) == wanted.outputs[0].text
    assert len({of(-1) for _ in range(4)}) > 1
    assert refusal_of(client, "/v1/chat/completions", messages=CHAT, seed=-(2**63) - 1)["param"] == "seed"


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/chat/completions", {"messages": CHAT, "n": 2}), ("/v1/completions", {"prompt": ["2 + 3", "4 + 4 ="], "n": 2}),
])
def test_usage_in_every_chunk_counts_up_to_the_whole(client: TestClient, path: str, fields: dict[str, Any]) -> None:
    """GuideLLM's ``continuous_usage_stats``: each chunk has the tokens so far, and the last what the whole call has."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**fields, "max_tokens": 5, "seed": 1, "ignore_eos": True}
    lines = client.post(path, json={**body, "stream": True, "stream_options": options}).text.split("\n\n")
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines if line.startswith("data: {")]
    counts = [one["completion_tokens"] for one in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[-2] == counts[-1] == client.post(path, json=body).json()["usage"]["completion_tokens"]
    assert usages[-2].items() <= usages[-1].items()
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in usages)
    plain = client.post(path, json={**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}).text
    assert '"usage"' not in plain


def test_a_response_returns_what_describes_it(client: TestClient) -> None:
    """Metadata come back as they were, also from the store; ``truncation`` auto holds while the input fits."""
    metadata = {"n" * 64: "v" * 512, "run": "7"}
    body = {"input": "What is 2 + 3?", "metadata": metadata, "truncation": "auto", "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, **GREEDY}
    told = client.post("/v1/responses", json=body).json()
    assert (told["metadata"], told["truncation"]) == (metadata, "auto")
    assert client.get(f"/v1/responses/{told['id']}").json()["metadata"] == metadata
    assert told["output"][0]["content"][0]["logprobs"] == []
    error = refusal_of(client, "/v1/responses", input="word " * 3000, truncation="auto")
    assert error["code"] == "context_length_exceeded"
    assert "truncation" in error["message"]


def rows_of(forms: dict[str, known.Form]) -> set[str]:
    """The table of what is refused unless its value asks for nothing, without what to do instead."""
    found: dict[tuple[str, str], list[str]] = {}
    for door, form in forms.items():
        for name, values in form.neutral.items():
            written = ", ".join(f"`{encode(value)}`" for value in values) or "`null`"
            found.setdefault((name, written), []).append(door)
    return {f"| `{name}` | {', '.join(doors)} | {values} |" for (name, values), doors in found.items()}


def test_the_page_has_the_tables_of_the_code() -> None:
    """Every name that is accepted without effect, of a body and of a message, or refused unless its value asks for
    nothing, is on the page, and no other."""
    page = (ROOT / "docs" / "openai.md").read_text()
    for heading, names in (("Accepted without effect", known.CHAT.ignored),
                           ("Of a message without effect", message_fields.WITHOUT_EFFECT),
                           ("Of a tool without effect", message_fields.OF_TOOLS)):
        (listed,) = re.findall(rf"\*\*{heading}\*\*[^:]*:(.*?)\.\n", page, re.DOTALL)
        assert set(re.findall(r"`(\w+)`", listed)) == names, heading
    table = page.partition("### Refused unless they ask for nothing")[2].partition("\n## ")[0]
    listed_rows = set(re.findall(r"^\| `\w+` \|[^|]*\|[^|]*\|", table, re.MULTILINE))
    assert listed_rows == rows_of({"chats": known.CHAT, "texts": known.COMPLETION, "responses": known.RESPONSE})

"""Frameworks of others on the door: each does what its own quick start shows, in an environment of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx

from adapters.openai.interop import KEY, run_client, told_by
from architecture.sources import ROOT
from pagedcore import AsyncEngine, RequestOutput
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore_openai import openai_app

ANSWER = "2 + 3 = 5."
REFUSED = {"temperature": "BadRequestError", "model": "NotFoundError", "key": "AuthenticationError",
           "length": "BadRequestError"}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=512, max_num_waiting=256) as engine:
        yield engine


def check_sum(made: Any) -> None:
    """Look at the form of an object, not at its wisdom."""
    assert {name: type(value) for name, value in made.items()} == {"a": int, "b": int, "note": str}


class Ends:
    """Notes why requests ended."""

    def __init__(self) -> None:
        self.reasons: list[str | None] = []

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Note one."""
        self.reasons += [one.finish_reason for one in request.outputs]


@pytest.mark.interop
async def test_openai_js_has_its_objects_errors_and_aborts(engine: AsyncEngine, tmp_path: Path) -> None:
    """Chats and responses, whole, streamed, parsed and with tools; refusals and cut completions become the client's own
    errors, or are told as incomplete; what it aborts is aborted in the engine, before the list of models comes; its
    headers pass a browser's preflight."""
    ends = Ends()
    engine.observe(ends)
    told = told_by("openai-js", engine, tmp_path)
    assert ends.reasons.count("abort") == 2
    chats, tools, responses = told["chats"], told["tools"], told["responses"]
    whole = chats["whole"]["choices"][0]
    assert whole["message"]["content"] == chats["text"] == chats["final"]["choices"][0]["message"]["content"] == ANSWER
    assert len(whole["logprobs"]["content"]) == chats["whole"]["usage"]["completion_tokens"]
    assert chats["final"]["usage"]["total_tokens"] == chats["whole"]["usage"]["total_tokens"]
    assert chats["cut"] == ["LengthFinishReasonError", None, None]
    for made in (chats["parsed"], chats["streamed"], responses["parsed"]):
        assert set(made) == {"a", "b", "note"}
    assert tools["given"] == [{"a": 2, "b": 3}] * 2
    assert tools["ended"] == [["user", "assistant", "tool"]] * 2
    assert (tools["reason"], set(tools["parsed"])) == ("tool_calls", {"a", "b"})
    assert tools["after"] == responses["next"] == responses["again"] == ANSWER
    assert responses["text"] == responses["streamed"] == ANSWER
    assert (responses["events"][0], responses["events"][-1]) == ("response.created", "response.completed")
    assert responses["cut"] == ["incomplete", {"reason": "max_output_tokens"}]
    assert responses["cutParsed"] == ["incomplete", None]
    assert responses["gone"][:2] == ["NotFoundError", 404]
    assert {name: error[0] for name, error in told["errors"].items()} == {**REFUSED, "response": "BadRequestError"}
    assert told["errors"]["length"][2] == "context_length_exceeded"
    assert told["abort"] == ["APIUserAbortError", None, None]
    assert told["models"] == ["demo"]
    await check_preflight(engine, told["announced"])


async def check_preflight(engine: AsyncEngine, announced: list[str]) -> None:
    """All that the client announced, and every header of this kind that its source names, may come from a page."""
    package = ROOT / "build" / "interop-openai-js" / "node_modules" / "openai"
    source = "".join(path.read_text("utf-8") for path in package.rglob("*.js"))
    named = set(re.findall(r"x-stainless-[a-z-]+|openai-(?:beta|organization|project)", source.lower()))
    assert len(named) > 10
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST",
               "access-control-request-headers": ",".join(sorted(named | set(announced)))}
    app = openai_app(engine, name="demo", origins=["https://chat.example"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as http:
        reply = await http.options("/v1/chat/completions", headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.interop
def test_openai_agents_answer_call_and_hand_over(engine: AsyncEngine, tmp_path: Path) -> None:
    """Over responses and over chats: answers, streams, tools, handoffs, objects and sessions; what was cut off is no
    object, and refusals are the client's errors."""
    for told in told_by("openai-agents", engine, tmp_path).values():
        assert told["plain"][0] == ANSWER
        assert told["plain"][1] > 9
        assert told["stream"] == [ANSWER, ANSWER]
        assert (told["tool"], told["calls"]) == (ANSWER, [[2, 3], [2, 3]])
        assert told["tool events"] == ["tool_called", "tool_output", "message_output_created"]
        assert told["handoff"][1] == ["handoff_call_item", "handoff_output_item", "message_output_item"]
        check_sum(told["object"])
        assert told["session"] == [ANSWER, 4]
        assert told["errors"] == {**REFUSED, "cut": "ModelBehaviorError"}


@pytest.mark.interop
def test_langchain_openai_has_answers_calls_and_objects(engine: AsyncEngine, tmp_path: Path) -> None:
    """Over chats and over responses: texts and their usage, calls, objects of each method; a prompt that is too long is
    LangChain's ``ContextOverflowError``. What was cut off is no object; with calls LangChain makes ``None`` of it, and
    over responses an empty object of JSON without a schema."""
    told = told_by("langchain-openai", engine, tmp_path)
    assert told["asynchronous"] == [ANSWER] * 4
    assert told["text"] == [f"\n{ANSWER}"] * 2
    for name in ("chats", "responses"):
        one = told[name]
        for _, usage in (one["whole"], one["stream"]):
            # Why left out: the first call of an engine finds nothing in its cache, and later ones do.
            assert usage.pop("input_token_details").keys() == {"cache_read"}
        assert one["whole"] == one["stream"]
        assert one["whole"][0] == one["after"] == ANSWER
        assert one["whole"][1]["total_tokens"] == one["whole"][1]["input_tokens"] + one["whole"][1]["output_tokens"]
        for calls in (one["call"][0], one["streamed call"], one["strict"]):
            assert [(call["name"], set(call["args"])) for call in calls] == [("add", {"a", "b"})]
        check_sum(one["objects"]["json_schema"])
        check_sum(one["objects"]["function_calling"])
        assert type(one["objects"]["json_mode"]) is dict
        assert one["errors"] == {"temperature": "OpenAIInvalidRequestError", "model": "OpenAIModelNotFoundError",
                                 "key": "OpenAIAuthenticationError", "length": "OpenAIContextOverflowError"}
    assert told["chats"]["call"][1] == "tool_calls"
    assert told["chats"]["scored"] == told["chats"]["whole"][1]["output_tokens"]
    assert told["chats"]["cut"] == {"json_schema": "LengthFinishReasonError", "function_calling": ["result", None],
                                    "json_mode": "LengthFinishReasonError"}
    assert told["responses"]["cut"] == {"json_schema": "ValidationError", "function_calling": ["result", None],
                                        "json_mode": ["result", {}]}


@pytest.mark.interop
def test_guidellm_counts_every_token(engine: AsyncEngine, tmp_path: Path) -> None:
    """Chats, texts and responses: all requests succeed with the tokens asked for, each with a time to its first token;
    refused ones are errors."""
    run_client("guidellm", engine, KEY, str(DEMO_MODEL_DIR), str(tmp_path))
    for name in ("chats", "texts", "responses"):
        requests = report(tmp_path, name)
        assert [len(requests[kind]) for kind in ("successful", "errored", "incomplete")] == [3, 0, 0]
        for request in requests["successful"]:
            assert request["output_metrics"]["text_tokens"] == 16
            assert request["input_metrics"]["text_tokens"] >= 20
            assert request["info"]["timings"]["first_output_token_iteration"] is not None
    assert len(report(tmp_path, "refused")["errored"]) == 3


def report(folder: Path, name: str) -> Any:
    """Return the requests of a benchmark, by how they ended."""
    (benchmark,) = json.loads((folder / f"{name}.json").read_text("utf-8"))["benchmarks"]
    return benchmark["requests"]

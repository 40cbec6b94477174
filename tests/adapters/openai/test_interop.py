"""Clients of others: run in environments of their own (``make interop-NAME``), and what they send, recorded, in every
test run.

With PAGEDCORE_RECORD=1 in the environment the runs write the recorded bodies anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx

from adapters.openai.interop import CLIENTS, KEY, RECORDED, run_client
from pagedcore import AsyncEngine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore_openai import ApiKeys, openai_app

QUESTIONS = [
    {"question": f"What is {a} + {b}?", "choices": [f"\n{a} + {b} = {a + b}.", f"\n{a} + {b} = {a + b + 1}.", "\nNo."],
     "answer": 0} for a, b in ((2, 3), (4, 4), (1, 7), (12, 30), (9, 5))
]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=512, max_num_waiting=256) as engine:
        yield engine


@pytest.mark.interop
def test_lm_eval_measures_what_the_engine_says(engine: AsyncEngine, tmp_path: Path) -> None:
    """Over HTTP, with prompts as token ids: each choice's log-likelihood is the engine's, the accuracies are those of
    the engine's own answers, and generations are its text up to the stop."""
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS), "utf-8")
    run_client("lm-eval", engine, str(DEMO_MODEL_DIR), str(tmp_path))
    told = json.loads((tmp_path / "results.json").read_text("utf-8"))
    for sample in told["samples"]["pagedcore_choices"]:
        for choice, ((given, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            wanted = likelihood(engine, sample["doc"]["question"], choice)
            assert float(given) == pytest.approx(wanted, abs=1e-4)
            assert str(is_greedy) == str(answer_of(engine, sample["doc"]["question"]).startswith(choice))
    assert told["results"]["pagedcore_choices"]["acc,none"] == 1.0
    for sample in told["samples"]["pagedcore_generations"]:
        ((given,),) = sample["resps"]
        assert given == answer_of(engine, sample["doc"]["question"]).partition(".")[0]


def likelihood(engine: AsyncEngine, question: str, choice: str) -> float:
    start, whole = engine.encode(question), engine.encode(question + choice)
    output = engine.submit(whole, SamplingParams(max_tokens=1, prompt_logprobs=0)).result()
    return sum(entry.logprob for entry in (output.prompt_logprobs or ())[len(start) :] if entry is not None)


def answer_of(engine: AsyncEngine, question: str) -> str:
    return engine.submit(question, SamplingParams(max_tokens=24)).result().outputs[0].text


@pytest.mark.interop
def test_litellm_gets_completions_streams_and_its_own_errors(engine: AsyncEngine, tmp_path: Path) -> None:
    """Whole, streamed and asynchronous calls have the engine's text and usage; refusals become litellm's exceptions."""
    results = tmp_path / "results.json"
    run_client("litellm", engine, KEY, str(results))
    told = json.loads(results.read_text("utf-8"))
    (choice,) = told["whole"]["choices"]
    assert choice["message"]["content"] == "2 + 3 = 5."
    assert len(choice["logprobs"]["content"]) == told["whole"]["usage"]["completion_tokens"]
    assert {told["stream"], told["asynchronous"], told["asynchronous stream"]} == {"2 + 3 = 5."}
    assert told["text"] == answer_of(engine, "What is 2 + 3?")
    assert told["usage"]["total_tokens"] == told["whole"]["usage"]["total_tokens"]
    assert told["errors"] == {"temperature": "BadRequestError", "model": "NotFoundError", "key": "AuthenticationError",
                              "length": "ContextWindowExceededError"}
    anthropic = told["anthropic"]
    assert [part["text"] for part in anthropic["whole"]["content"]] == ["2 + 3 = 5."]
    (call,) = anthropic["called"]["content"]
    assert (anthropic["called"]["stop_reason"], call["name"], set(call["input"])) == ("tool_use", "add", {"a", "b"})
    assert anthropic["cut"]["stop_reason"] == "max_tokens"
    assert all(part["type"] == "text" for part in anthropic["cut"]["content"])
    assert anthropic["after"]["stop_reason"] == "end_turn"
    assert [part["text"] for part in anthropic["without thinking"]["content"]] == ["2 + 3 "]
    for stream, reason in zip(anthropic["streams"], ("end_turn", "tool_use"), strict=True):
        assert f'"stop_reason": "{reason}"' in stream
    assert anthropic["errors"] == told["errors"]


async def test_what_other_clients_send_is_understood(engine: AsyncEngine) -> None:
    """Every recorded body: 200 with what its client reads, or, for the calls that are to be refused, OpenAI's error; a
    prompt's log-probabilities with ``echo`` are the engine's, one entry for each token."""
    recorded = {path.stem: json.loads(path.read_text("utf-8")) for path in RECORDED.glob("*.json")}
    assert set(recorded) == {path.stem for path in (*CLIENTS.glob("*.txt"), *CLIENTS.glob("*/"))}
    assert all(len(calls) > 3 for calls in recorded.values())
    app = openai_app(engine, name="demo", api_keys=ApiKeys([KEY]))
    headers = {"authorization": f"Bearer {KEY}"}
    transport, statuses = httpx.ASGITransport(app), set[int]()
    async with httpx.AsyncClient(transport=transport, base_url="http://door", headers=headers) as http:
        calls = [call for calls in recorded.values() for call in calls]
        replies = await asyncio.gather(*(http.post(call["path"], json=call["body"]) for call in calls))
        for call, reply in zip(calls, replies, strict=True):
            statuses.add(reply.status_code)
            assert (reply.status_code == 200) != is_to_be_refused(call["body"]), (call, reply.text)
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            elif call["path"] == "/v1/responses":
                assert '"status":"' in reply.text
                assert "response.failed" not in reply.text
            elif call["body"].get("stream"):
                assert reply.text.endswith("data: [DONE]\n\n")
            elif call["body"].get("echo"):
                await check_scores(engine, call["body"], reply.json())
            else:
                assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    assert statuses >= {200, 400, 404}


def is_to_be_refused(body: dict[str, Any]) -> bool:
    """Whether a script has asked for another model, for a temperature out of range, or more than the context, or
    continues a response that is stored where it was recorded."""
    is_too_long = "2 2 2 2 2 2" in json.dumps(body) or 2040 in body.values()
    is_elsewhere = "previous_response_id" in body
    return is_too_long or is_elsewhere or body["model"] != "demo" or body.get("temperature") == 99


async def check_scores(engine: AsyncEngine, body: dict[str, Any], reply: dict[str, Any]) -> None:
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts)))
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        assert all(type(token) is int for token in prompt)
        scored = SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1)
        output = await asyncio.wrap_future(engine.submit(prompt, scored))
        entries = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
        assert choice["logprobs"]["token_logprobs"] == [None, *(one.logprob for one in entries if one is not None)]
        for place, one in enumerate(entries, start=1):
            assert one is not None
            assert max(choice["logprobs"]["top_logprobs"][place].values()) == max(one.logprob, one.top[0][1])

"""The real thing on a loopback port: ``bentoml serve``, plain HTTP, and both of BentoML's clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import bentoml
import httpx
import psutil
import pytest

from adapters.bentoml.processes import Served, bentoml_serve
from pagedcore.demo_model.questions import DemoQuestion, demo_questions, is_correct
from pagedcore_bentoml import EventParser, parse_events
from support.doubles import toy_answer

LIMIT_S = 240.0
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
LONG = {"max_tokens": 1900, "ignore_eos": True}


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP, as many connections as a test wants."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=LIMIT_S, limits=limits) as http:
        yield http


async def ask(http: httpx.AsyncClient, question: DemoQuestion) -> bool:
    """Stream one answer and say whether it is complete and right."""
    parser, texts, names = EventParser(), [], []
    async with http.stream("POST", "/stream", json={"prompt": question.prompt, "sampling": {"max_tokens": 64}}) as got:
        async for chunk in got.aiter_text():
            for event in parser.feed(chunk):
                names.append(event.name)
                texts.append(event.data.get("text", ""))
    return names[-1] == "done" and "error" not in names and is_correct(question, "".join(texts))


async def test_a_hundred_concurrent_streams_are_all_right(http: httpx.AsyncClient) -> None:
    """Every answer of the demo model is the right one for its question, none is lost, and the engine is idle after."""
    questions = demo_questions(100, seed=2)
    right = await asyncio.gather(*(ask(http, question) for question in questions))
    wrong = [question.prompt for question, is_right in zip(questions, right, strict=True) if not is_right]
    assert (len(right), wrong) == (100, [])
    await until_idle(http)


async def stats(http: httpx.AsyncClient) -> dict[str, Any]:
    counters: dict[str, Any] = (await http.post("/stats", json={})).json()
    return counters


async def until_idle(http: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until nothing runs or waits; then no block may be in use."""
    deadline = time.monotonic() + 60.0
    while (now := await stats(http))["num_running"] + now["num_waiting"]:
        assert time.monotonic() < deadline, "requests of clients that left are still there"
        await asyncio.sleep(0.01)
    assert now["num_blocks_used"] == 0
    return now


async def test_clients_that_leave_are_noticed_on_a_real_connection(http: httpx.AsyncClient) -> None:
    """Closing the connection at once, after the first delta or while waiting for a whole answer ends the request."""
    before = await until_idle(http)
    body = {"prompt": "What is 2 + 3?", "sampling": LONG}

    async def leave_mid_stream() -> None:
        async with http.stream("POST", "/stream", json=body) as got:
            async for _ in got.aiter_text():
                return

    async def leave_after(path: str, content: dict[str, Any], seconds: float) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(path, json=content, timeout=httpx.Timeout(LIMIT_S, read=seconds))

    leavers = [leave_mid_stream(), leave_after("/generate", body, 0.05),
               leave_after("/batch", {"prompts": [body["prompt"]] * 3, "sampling": LONG}, 0.05)]
    await asyncio.gather(*leavers)
    after = await until_idle(http)
    assert after["num_generated_tokens"] - before["num_generated_tokens"] < 5 * LONG["max_tokens"]


async def test_a_server_that_is_told_to_end_sends_new_calls_elsewhere_and_finishes_old_ones() -> None:
    """After SIGTERM new connections get 503 with Retry-After, the probe says not ready, and a stream is completed; one
    that outlasts the drain gets an error, and the process ends, although BentoML would wait a day for it."""
    with bentoml_serve("served:Slow", Path(__file__).parent) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=LIMIT_S) as http:
            body = {"prompt": [1], "sampling": {"max_tokens": 30, "ignore_eos": True}}
            endless = asyncio.create_task(http.post("/stream", json={"prompt": [1], "sampling": ENDLESS}))
            parser, tokens, names = EventParser(), [], []
            async with http.stream("POST", "/stream", json=body) as got:
                pieces = got.aiter_text()
                events = parser.feed(await anext(pieces))
                served.tell_to_end()
                refused = await call_until_refused(served.url)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert refused.json()["error"]["type"] == "NotServing"
                assert httpx.get(f"{served.url}/readyz", timeout=LIMIT_S).status_code == 503
                async for piece in pieces:
                    events += parser.feed(piece)
            for event in events:
                names.append(event.name)
                tokens += event.data.get("token_ids", [])
            assert (names[-1], tokens) == ("done", toy_answer([1], 30))
            assert EventParser().feed((await endless).text)[-1].data["error"]["type"] == "EngineClosed"
        await asyncio.to_thread(psutil.Process(served.pid).wait, 60.0)


@pytest.mark.slow
def test_an_idle_connection_stays_open(served: Served) -> None:
    """Longer than the five seconds for which clients keep one."""
    connection = HTTPConnection(*served.url.removeprefix("http://").split(":"))  # type: ignore[arg-type]
    for pause_s in (0.0, 7.0):
        time.sleep(pause_s)
        connection.request("GET", "/livez")
        assert connection.getresponse().read() is not None
        connection.auto_open = False
    connection.close()


async def call_until_refused(url: str) -> httpx.Response:
    """Make short calls, each on a connection of its own, until one is not answered."""
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
            answered = await http.post("/generate", json={"prompt": [2], "sampling": {"max_tokens": 1}})
        if answered.status_code != 200:
            return answered


async def test_bentomls_asynchronous_client(served: Served) -> None:
    """Names and arguments of the endpoints are in the schema; a stream arrives as text to parse."""
    question = demo_questions(1, seed=3)[0]
    async with bentoml.AsyncHTTPClient(served.url, timeout=LIMIT_S) as client:
        completion = await client.generate(prompt=question.prompt, sampling={"max_tokens": 64})
        events = [event async for event in parse_events(client.stream(prompt=question.prompt))]
        with pytest.raises(bentoml.exceptions.InvalidArgument, match="temperature"):
            await client.generate(prompt="x", sampling={"temperature": 99})
    assert is_correct(question, completion["outputs"][0]["text"])
    assert is_correct(question, "".join(event.data["text"] for event in events if not event.name))
    assert events[-1].data["usage"]["num_output_tokens"] == completion["usage"]["num_output_tokens"]


def test_bentomls_synchronous_client(served: Served) -> None:
    """Whole answers, chats, batches and streams without an event loop."""
    first, second = demo_questions(2, seed=5)
    with bentoml.SyncHTTPClient(served.url, timeout=LIMIT_S) as client:
        chat = client.chat(messages=[{"role": "user", "content": first.prompt}], sampling={"max_tokens": 64})
        batch = client.batch(prompts=[first.prompt, second.prompt], sampling={"max_tokens": 64})
        parser = EventParser()
        events = [event for chunk in client.stream(prompt=first.prompt) for event in parser.feed(chunk)]
    texts = [completion["outputs"][0]["text"] for completion in batch["completions"]]
    assert is_correct(first, chat["outputs"][0]["text"])
    assert [is_correct(first, texts[0]), is_correct(second, texts[1])] == [True, True]
    assert is_correct(first, "".join(event.data["text"] for event in events if not event.name))


async def test_probes_metrics_and_log_of_the_real_server(served: Served, http: httpx.AsyncClient) -> None:
    """Probes are green, metrics are served, pickle is refused, and before that the log has no error."""
    assert [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/healthz")] == [200, 200, 200]
    # BentoML counts from the first call on, which may be this one.
    await stats(http)
    metrics = (await http.get("/metrics")).text
    assert "bentoml_service" in metrics
    assert "pagedcore_requests_finished_total" in metrics
    before = len(served.errors())
    refused = await http.post("/generate", content=b"x", headers={"content-type": "application/vnd.bentoml+pickle"})
    assert refused.status_code == 415
    assert before == 0, served.errors()


@pytest.mark.slow
def test_a_second_service_uses_the_first_by_depends(front: Served) -> None:
    """Answers, streams and refusals pass from the engine's service through another one in a process of its own."""
    question = demo_questions(1, seed=11)[0]
    with httpx.Client(base_url=front.url, timeout=LIMIT_S) as http:
        answer = http.post("/ask", json={"prompt": question.prompt})
        assert is_correct(question, answer.text)
        events = EventParser().feed(http.post("/relay", json={"prompt": question.prompt}).text)
        assert is_correct(question, "".join(event.data["text"] for event in events if not event.name))
        assert events[-1].name == "done"
        refusal = http.post("/ask_badly", json={}).text
        assert refusal.startswith("400 ")
        told = json.loads(refusal.removeprefix("400 "))["error"]
        assert (told["type"], "temperature" in told["message"]) == ("InvalidSampling", True)
        assert http.post("/generate", json={"prompt": "x"}).status_code == 404

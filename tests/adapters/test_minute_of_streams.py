"""Two hundred concurrent streams through each HTTP door, a minute each: all tokens arrive once, at their readers."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("uvicorn")

from adapters.bentoml.processes import bentoml_serve
from adapters.openai.test_serve import serve_process
from pagedcore import Engine, SamplingParams
from pagedcore.demo_model.questions import demo_questions

NUM_STREAMS, SECONDS, MAX_TOKENS = 200, 60.0, 48
SERVICE = ('from pagedcore_bentoml import create_service\n\n'
           'LLM = create_service("demo", num_kv_blocks=1024, openai=True)\n')


@contextmanager
def bento(folder: Path) -> Iterator[str]:
    """Serve the demo model with BentoML, OpenAI's interface mounted."""
    (folder / "service.py").write_text(SERVICE, "utf-8")
    with bentoml_serve("service:LLM", folder) as served:
        yield served.url
        assert served.errors() == []


@contextmanager
def serve(_: Path) -> Iterator[str]:
    """Serve it with ``pagedcore serve``."""
    with serve_process("demo", "--blocks", "1024") as server:
        yield server.url.removesuffix("/v1")
        assert "Traceback" not in server.text


def own(question: str) -> tuple[dict[str, Any], Callable[[Any], str]]:
    """A call of ``/stream``, and how to read the text of its events."""
    return {"prompt": question, "sampling": {"max_tokens": MAX_TOKENS}}, lambda event: event.get("text", "")


def completion(question: str) -> tuple[dict[str, Any], Callable[[Any], str]]:
    """A text completion."""
    body = {"prompt": question, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    return body, lambda event: "".join(choice["text"] for choice in event["choices"])


def chat(question: str) -> tuple[dict[str, Any], Callable[[Any], str]]:
    """A chat."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    return body, lambda event: "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def response(question: str) -> tuple[dict[str, Any], Callable[[Any], str]]:
    """A response."""
    body = {"input": question, "max_output_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    return body, lambda event: event["delta"] if event["type"] == "response.output_text.delta" else ""


DOORS = {
    "BentoML": (bento, "/stream", own), "BentoML, OpenAI's chat": (bento, "/v1/chat/completions", chat),
    "completions": (serve, "/v1/completions", completion), "chat": (serve, "/v1/chat/completions", chat),
    "responses": (serve, "/v1/responses", response),
}
CHATS = (chat, response)


@pytest.fixture(scope="module")
def answers() -> dict[bool, dict[str, str]]:
    """What an engine by itself answers, asked as a chat or not."""
    questions = [one.prompt for one in demo_questions(300, seed=7)]
    with Engine.from_pretrained("demo", num_kv_blocks=512) as engine:
        params = SamplingParams(max_tokens=MAX_TOKENS)
        return {is_chat: {question: output.outputs[0].text for question, output in zip(questions, engine.generate(
            [[{"role": "user", "content": one}] for one in questions] if is_chat else questions, params), strict=True)}
            for is_chat in (False, True)}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the data of a stream's events."""
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
async def test_two_hundred_streams_for_a_minute(
    door: str, answers: dict[bool, dict[str, str]], tmp_path: Path, record_property: Callable[[str, object], None],
) -> None:
    """Each of 200 readers asks one question after another for a minute; each text is what an engine by itself answers,
    none is refused, cut off or mixed, and the server's log has no error."""
    start, path, form = DOORS[door]
    wanted = answers[form in CHATS]
    questions, num_right, wrong = itertools.cycle(wanted), 0, list[tuple[str, str]]()
    limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=NUM_STREAMS)
    with start(tmp_path) as url:
        async with httpx.AsyncClient(base_url=url, timeout=240.0, limits=limits) as http:
            deadline = time.monotonic() + SECONDS

            async def read() -> None:
                nonlocal num_right
                while time.monotonic() < deadline:
                    question = next(questions)
                    body, text_of = form(question)
                    text = "".join([text_of(event) async for event in events(http, path, body)])
                    if text == wanted[question]:
                        num_right += 1
                    else:
                        wrong.append((question, text))

            await asyncio.gather(*(read() for _ in range(NUM_STREAMS)))
    record_property("streams", num_right)
    assert wrong == []
    assert num_right >= NUM_STREAMS

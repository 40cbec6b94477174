"""Every door of pagedcore as one kind of object: ask, and get the tokens or the name of the error's class.

All doors of a ``House`` lead to one engine over a toy model, whose tokenizer has a token for every letter.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

from langchain_core.messages import ChatMessage

from adapters.bentoml.asgi_caller import App, Exchange, serving
from pagedcore import AsyncEngine, Delta, RequestOutput, SamplingParams
from pagedcore.engine.engine import Engine
from pagedcore.errors import PagedcoreError
from pagedcore_asyncgen import AsyncTextGenerator
from pagedcore_bentoml import EventParser
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_openai import openai_app
from support.doubles import ToyBackend
from support.engine_builders import make_engine
from support.letters import WritesLetters

MAX_MODEL_LEN = 64
CANARY = "canary-7f3a"


class LetterTokenizer(WritesLetters):
    """A token for every letter; text with "!" makes it fail, and so does a chat of a role that it does not know."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a token for each letter."""
        if "!" in text:
            raise ZeroDivisionError(CANARY)
        return [ord(letter) % 26 for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Join the messages."""
        return self.encode("".join({"user": "u", "assistant": "a"}[one["role"]] + one["content"] for one in messages))

    def encode_chat_turn(self, messages: Sequence[Mapping[str, Any]], known_token_ids: Sequence[int]) -> list[int]:
        """Do the same."""
        return self.encode_chat(messages)


class EndlessBackend(ToyBackend):
    """A toy model that never ends by itself, so that every token has a text."""

    eos_token_ids = frozenset()


@dataclass(frozen=True)
class Question:
    """What a caller says, valid or not."""

    prompt: Any
    sampling: Any = field(default_factory=dict)
    """A mapping, as JSON has it, or anything else."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of every door, and ``timeout_s``."""

    @property
    def params(self) -> SamplingParams:
        """The parameters, as a caller in Python makes them of a mapping."""
        return SamplingParams.from_mapping(self.sampling)


Ask = Callable[["House", Question], Awaitable[list[int]]]


@dataclass
class House:
    """One engine and all its doors."""

    inner: Engine
    """The engine itself, for looking at while its thread stands still."""
    engine: AsyncEngine
    generator: AsyncTextGenerator
    llm: PagedCoreLLM
    chat: ChatPagedCore
    app: App
    openai: App

    def figures(self) -> tuple[int, ...]:
        """What a refused request must not change."""
        stats = self.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.num_blocks_used, stats.num_prompt_tokens,
                stats.num_generated_tokens, stats.num_steps)

    def is_idle(self) -> bool:
        """Whether no request, no label, no block and no open call is left."""
        labels, requests = self.engine.send(
            lambda engine: (set(engine.requests._labels), len(list(engine.requests)))).result(60)
        num_open = self.app.runner.open_calls.num_open + self.openai.asgi.service.open_calls.num_open
        return self.figures()[:3] == (0, 0, 0) and not labels and not requests and not num_open


@asynccontextmanager
async def house(backend: Any = None, **settings: Any) -> AsyncIterator[House]:
    """Open all doors of one engine."""
    settings = {"tokenizer": LetterTokenizer(), "max_model_len": MAX_MODEL_LEN, "num_kv_blocks": 300, **settings}
    inner = make_engine(backend or EndlessBackend(), **settings)
    with AsyncEngine(inner, stream_interval_s=0.0) as engine:
        async with serving(engine) as app:
            llm, chat = (kind.from_engine(engine, wait_for_room=False) for kind in (PagedCoreLLM, ChatPagedCore))
            openai: Any = App(openai_app(engine), app.runner, engine)
            yield House(inner, engine, AsyncTextGenerator(engine, owns_engine=False), llm, chat, app, openai)


def tokens_of_output(output: RequestOutput) -> list[int]:
    """The tokens of all completions."""
    output.raise_for_error()
    return [token for one in output.outputs for token in one.token_ids]


async def tokens_of(deltas: AsyncIterator[Delta]) -> list[int]:
    """The tokens of a stream, those of each completion together."""
    tokens: dict[int, list[int]] = {}
    async for delta in deltas:
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.error is not None:
            raise delta.error
    return [token for index in sorted(tokens) for token in tokens[index]]


def without_time(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "timeout_s"}


async def by_submit(house: House, question: Question) -> list[int]:
    """``AsyncEngine.submit``."""
    future = house.engine.submit(question.prompt, question.params, **without_time(question.options))
    return tokens_of_output(await asyncio.wrap_future(future))


async def by_generate(house: House, question: Question) -> list[int]:
    """``AsyncEngine.generate``."""
    async with aclosing(house.engine.generate(question.prompt, question.params, **question.options)) as deltas:
        return await tokens_of(deltas)


async def by_generate_sync(house: House, question: Question) -> list[int]:
    """``AsyncEngine.generate_sync``, on this thread."""

    async def deltas() -> AsyncIterator[Delta]:
        for delta in house.engine.generate_sync(question.prompt, question.params, **question.options):
            yield delta

    return await tokens_of(deltas())


async def by_generator(house: House, question: Question) -> list[int]:
    """The plain async generator."""
    async with aclosing(house.generator(question.prompt, question.params, **question.options)) as deltas:
        return await tokens_of(deltas)


async def by_complete(house: House, question: Question) -> list[int]:
    """The plain async generator's whole completion."""
    options = without_time(question.options)
    return tokens_of_output(await house.generator.complete(question.prompt, question.params, **options))


def for_langchain(question: Question) -> dict[str, Any]:
    options = dict(question.options)
    if "timeout_s" in options:
        options["timeout"] = options.pop("timeout_s")
    return {**question.sampling, **options}


async def by_chain(house: House, question: Question) -> list[int]:
    """LangChain's completion model, whole; its text is the tokens."""
    result = await house.llm.agenerate([question.prompt], **for_langchain(question))
    return letters("".join(one.text for one in result.generations[0]))


async def by_chain_stream(house: House, question: Question) -> list[int]:
    """LangChain's completion model, streamed."""
    return letters("".join([chunk async for chunk in house.llm.astream(question.prompt, **for_langchain(question))]))


async def by_chat(house: House, question: Question) -> list[int]:
    """LangChain's chat model."""
    messages = [ChatMessage(role="user", content=question.prompt)]
    result = await house.chat.agenerate([messages], **for_langchain(question))
    return letters("".join(one.text for one in result.generations[0]))


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


class Refused(Exception):
    """A response with an error; its first argument is the class's name."""


def body_of(question: Question, *, is_batch: bool = False) -> dict[str, Any]:
    """The body of a call."""
    prompt = {"prompts": [question.prompt]} if is_batch else {"prompt": question.prompt}
    return {**prompt, "sampling": question.sampling, **question.options}


def openai_body_of(question: Question, path: str, *, is_stream: bool, is_batch: bool = False) -> dict[str, Any]:
    """The body of a call of the OpenAI door; a batch has another prompt besides."""
    match path:
        case "/v1/chat/completions":
            prompt = {"messages": [{"role": "user", "content": question.prompt}]}
        case "/v1/responses":
            prompt = {"input": question.prompt}
        case _:
            prompt = {"prompt": [question.prompt, "j"] if is_batch else question.prompt}
    sampling = {"temperature": 0, **question.sampling}
    if path == "/v1/responses":
        sampling["max_output_tokens"] = sampling.pop("max_tokens")
    return {**prompt, "stream": is_stream, **sampling, **question.options}


def raise_refusal(exchange: Exchange) -> None:
    """Raise the error of a response; only statuses that the documentation names may come."""
    if exchange.status != 200:
        assert exchange.status in (400, 413, 429, 500, 503, 504), exchange.status
        assert CANARY not in exchange.text
        error = exchange.error
        raise Refused(error["type"], error["message"])


async def by_http(house: House, question: Question) -> list[int]:
    """``/generate``."""
    exchange = await house.app.call("/generate", body_of(question))
    raise_refusal(exchange)
    return [token for one in json.loads(exchange.text)["outputs"] for token in one["token_ids"]]


async def by_http_batch(house: House, question: Question) -> list[int]:
    """``/batch``."""
    exchange = await house.app.call("/batch", body_of(question, is_batch=True))
    raise_refusal(exchange)
    (completion,) = json.loads(exchange.text)["completions"]
    return [token for one in completion["outputs"] for token in one["token_ids"]]


async def by_http_stream(house: House, question: Question) -> list[int]:
    """``/stream``."""
    exchange = await house.app.call("/stream", body_of(question))
    raise_refusal(exchange)
    tokens: dict[int, list[int]] = {}
    for event in EventParser().feed(exchange.text):
        if event.name == "error":
            raise Refused(event.data["error"]["type"], event.data["error"]["message"])
        if not event.name:
            tokens.setdefault(event.data["index"], []).extend(event.data["token_ids"])
    return [token for index in sorted(tokens) for token in tokens[index]]


ASYNC_ENGINE: tuple[Ask, ...] = (by_submit, by_generate, by_generate_sync)
GENERATOR: tuple[Ask, ...] = (by_generator, by_complete)
LANGCHAIN: tuple[Ask, ...] = (by_chain, by_chain_stream, by_chat)
HTTP: tuple[Ask, ...] = (by_http, by_http_batch, by_http_stream)
STREAMS = (by_generate, by_generate_sync, by_generator, by_http_stream)


async def outcome_of(asking: Awaitable[list[int]]) -> list[int] | str:
    """The tokens, or the name of the error's class; any error that pagedcore does not document fails the test."""
    try:
        return await asking
    except Refused as refused:
        return str(refused.args[0])
    except PagedcoreError as error:
        message, kind = str(error), type(error).__name__
    assert CANARY not in message
    assert len(message) < 700
    return kind


def is_json(value: Any) -> bool:
    """Whether JSON of another program can say this."""
    if isinstance(value, dict):
        return all(type(key) is str and is_json(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(is_json, value[:1000]))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (str, bool) or (type(value) is int and abs(value) < 10**4000)

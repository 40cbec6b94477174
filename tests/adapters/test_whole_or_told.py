"""A law over all doors: a completion that did not end by itself is never handed on as a complete one.

Whatever cuts it, and wherever, the caller gets the reason or an error, and no object and no call that was parsed of it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")
pytest.importorskip("llguidance")

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage

from adapters.bentoml.asgi_caller import App, Exchange
from adapters.bentoml.asgi_caller import serving as serving_bentoml
from pagedcore import AsyncEngine, Chat, ChatReply, RequestOutput, SamplingParams
from pagedcore.errors import PagedcoreError
from pagedcore_asyncgen import AsyncTextGenerator
from pagedcore_bentoml import EventParser
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_openai import openai_app
from support.engine_builders import make_engine
from support.scripted_model import TEMPLATES, ScriptedBackend, scripted_tokenizer

LABEL, QUESTION = "mine", [{"role": "user", "content": "Pay!"}]
SCHEMA = {"title": "pay", "type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"],
          "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pay", "parameters": SCHEMA}}]
OBJECT = '{"amount": 123456}'
SCRIPTS = {
    "content": OBJECT,
    "reasoning": f"<think>\nIt may be 123456 today.\n</think>\n\n{OBJECT}",
    "call": f'<tool_call>\n{{"name": "pay", "arguments": {OBJECT}}}\n</tool_call>',
}
PLACE, STOP = "123", "45"
"""A completion is cut behind the first text, for one way by the second."""


class Stalling(ScriptedBackend):
    """Writes a script, and stands still at a step until the test has done something."""

    def hold(self, step: int | None) -> None:
        """Stand still at this step from now on."""
        self.step, self.num_left, self.is_broken = step, step, False
        self.arrived, self.opened = threading.Event(), threading.Event()

    def forward(self, batch: Any) -> Any:
        """Wait, and fail if it is broken."""
        if self.step is not None:
            self.num_left = (self.num_left or 0) - 1
            if self.num_left == 0:
                self.arrived.set()
                assert self.opened.wait(60)
        if self.is_broken:
            raise RuntimeError("broken")
        return super().forward(batch)


@dataclass
class House:
    """One engine with its doors."""

    engine: AsyncEngine
    backend: Stalling
    app: App
    openai: App
    chat: ChatPagedCore
    llm: PagedCoreLLM


@asynccontextmanager
async def house(cut: str) -> AsyncIterator[House]:
    tokenizer = scripted_tokenizer(TEMPLATES["hermes"] + "{#- <think> </think> #}")
    backend = Stalling(tokenizer, lambda _: SCRIPTS[cut])
    backend.hold(None)
    inner = make_engine(backend, tokenizer=tokenizer, num_kv_blocks=512, block_size=16, max_model_len=2048,
                        max_num_batched_tokens=2048, check_invariants=False)
    with AsyncEngine(inner, stream_interval_s=0.0) as engine:
        async with serving_bentoml(engine) as app:
            chat, llm = ChatPagedCore.from_engine(engine), PagedCoreLLM.from_engine(engine)
            openai: Any = App(openai_app(engine, name="m"), app.runner, engine)
            try:
                yield House(engine, backend, app, openai, chat, llm)
            finally:
                backend.opened.set()


@dataclass(frozen=True)
class Ask:
    """What a caller asks for."""

    cut: str
    words: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that cut the completion."""
    timeout_s: float | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams.from_mapping({"max_tokens": 64, **self.words})

    @property
    def tools(self) -> list[Any] | None:
        return TOOLS if self.cut == "call" else None

    @property
    def options(self) -> dict[str, Any]:
        return {"request_id": LABEL}

    def timed(self, name: str = "timeout_s") -> dict[str, Any]:
        return {**self.options, **({} if self.timeout_s is None else {name: self.timeout_s})}

    @property
    def langchain(self) -> dict[str, Any]:
        return {"max_tokens": 64, **self.words, **self.timed("timeout")}


class Told(NamedTuple):
    """What a caller was told: why the completion ended, and what was parsed of it."""

    reason: Any
    """With the stop of the caller's own, if that is told."""
    parsed: Any = ()


Door = Callable[[House, Ask], Awaitable[Told]]


def because(reason: Any, stop: Any) -> Any:
    return reason if stop is None else (reason, stop)


def of_output(output: RequestOutput) -> Told:
    output.raise_for_error()
    return Told(because(output.outputs[0].finish_reason, output.outputs[0].stop_reason))


def of_reply(reply: ChatReply) -> Told:
    told = of_output(reply.output)
    return Told(told.reason, [one for one in reply.tool_calls if one.is_complete])


def of_message(message: AIMessage) -> Told:
    told = message.response_metadata
    return Told(because(told.get("finish_reason"), told.get("stop_reason")), message.tool_calls)


async def of_deltas(deltas: Any) -> Told:
    reason = None
    async for delta in deltas:
        if delta.error is not None:
            raise delta.error
        reason = because(delta.finish_reason, delta.stop_reason) or reason
    return Told(reason)


class Refused(Exception):
    """An error as HTTP tells it."""


def data_of(exchange: Exchange) -> Any:
    if exchange.status != 200:
        raise Refused(exchange.error["message"])
    return json.loads(exchange.text)


def of_answers(outputs: list[Any]) -> Told:
    (one,) = outputs
    if one["error"] is not None:
        raise Refused(one["error"])
    calls = [call for call in one["tool_calls"] if call["is_complete"]]
    return Told(because(one["finish_reason"], one.get("stop_reason")), calls)


def events_of(exchange: Exchange) -> list[Any]:
    if exchange.status != 200:
        raise Refused(exchange.error["message"])
    events = [json.loads(line[6:]) for line in exchange.text.splitlines() if line.startswith("data: {")]
    for event in events:
        if event.get("error") or event.get("type") == "error":
            raise Refused(event)
    return events


def whole_calls(calls: list[Any]) -> list[Any]:
    """Calls that a client would carry out: those whose arguments are JSON."""
    found = []
    for call in calls:
        try:
            found.append(json.loads(call["arguments"]))
        except ValueError:
            continue
    return found


async def engine_complete(house: House, ask: Ask) -> Told:
    return of_output(await house.engine.complete(Chat(QUESTION), ask.params, **ask.timed()))


async def engine_generate(house: House, ask: Ask) -> Told:
    return await of_deltas(house.engine.generate(Chat(QUESTION), ask.params, **ask.timed()))


async def engine_chat(house: House, ask: Ask) -> Told:
    return of_reply(await house.engine.chat(QUESTION, ask.params, tools=ask.tools, **ask.timed()))


async def generator_stream(house: House, ask: Ask) -> Told:
    generator = AsyncTextGenerator(house.engine, owns_engine=False)
    return await of_deltas(generator(Chat(QUESTION), ask.params, **ask.timed()))


async def generator_complete(house: House, ask: Ask) -> Told:
    generator = AsyncTextGenerator(house.engine, owns_engine=False)
    return of_output(await generator.complete(Chat(QUESTION), ask.params, **ask.options))


async def session_ask(house: House, ask: Ask) -> Told:
    async with house.engine.session(**ask.options) as session:
        return of_output(await session.ask(Chat(QUESTION), ask.params))


async def session_stream(house: House, ask: Ask) -> Told:
    async with house.engine.session(**ask.options) as session:
        return await of_deltas(session.stream(Chat(QUESTION), ask.params))


async def langchain_llm(house: House, ask: Ask) -> Told:
    prompt = house.engine.apply_chat_template(QUESTION)
    (generation,) = (await house.llm.agenerate([prompt], **ask.langchain)).generations[0]
    told = generation.generation_info or {}
    return Told(because(told.get("finish_reason"), told.get("stop_reason")))


async def langchain_chat(house: House, ask: Ask) -> Told:
    model = house.chat.bind_tools(TOOLS) if ask.tools else house.chat
    return of_message(await model.ainvoke([HumanMessage("Pay!")], **ask.langchain))


async def langchain_stream(house: House, ask: Ask) -> Told:
    model = house.chat.bind_tools(TOOLS) if ask.tools else house.chat
    chunks = [chunk async for chunk in model.astream([HumanMessage("Pay!")], **ask.langchain)]
    summed = chunks[0]
    for chunk in chunks[1:]:
        summed += chunk
    calls = whole_calls([{"arguments": one["args"]} for one in summed.tool_call_chunks])
    told = summed.response_metadata
    return Told(because(told.get("finish_reason"), told.get("stop_reason")), calls)


def structured(method: Any, include_raw: bool) -> Door:
    async def door(house: House, ask: Ask) -> Told:
        asked = house.chat.with_structured_output(SCHEMA, method=method, include_raw=include_raw, **ask.langchain)
        found = await asked.ainvoke([HumanMessage("Pay!")])
        if not include_raw:
            return Told(None, found)
        told = of_message(found["raw"])
        assert isinstance(found["parsing_error"], OutputParserException)
        return Told(told.reason, found["parsed"] or ())

    return door


def bentoml_door(path: str) -> Door:
    async def door(house: House, ask: Ask) -> Told:
        body: dict[str, Any] = {"sampling": {"max_tokens": 64, **ask.words}, **ask.timed()}
        if path == "/chat":
            body |= {"messages": QUESTION, "tools": ask.tools}
        elif path == "/batch":
            body |= {"prompts": [QUESTION], "request_id": [LABEL]}
        else:
            body["prompt"] = QUESTION
        exchange = await house.app.call(path, body)
        if path != "/stream":
            data = data_of(exchange)
            return of_answers(data["completions"][0]["outputs"] if path == "/batch" else data["outputs"])
        if exchange.status != 200:
            raise Refused(exchange.error["message"])
        reason = None
        for event in EventParser().feed(exchange.text):
            if event.name == "error":
                raise Refused(event.data["error"]["message"])
            reason = because(event.data.get("finish_reason"), event.data.get("stop_reason")) or reason
        return Told(reason)

    return door


def openai_body(house: House, path: str, ask: Ask, is_stream: bool) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 64, "stream": is_stream, **ask.words, **ask.timed()}
    match path:
        case "/v1/chat/completions":
            return {**body, "messages": QUESTION, **({"tools": TOOLS} if ask.tools else {})}
        case "/v1/responses":
            body["max_output_tokens"] = body.pop("max_tokens")
            tools = [{"type": "function", **TOOLS[0]["function"]}] if ask.tools else []  # type: ignore[dict-item]
            return {**body, "input": "Pay!", **({"tools": tools} if tools else {})}
    return {**body, "prompt": house.engine.apply_chat_template(QUESTION)}


def of_choice(choice: Any) -> Any:
    return because(choice["finish_reason"], choice.get("stop_reason"))


async def openai_chat(house: House, ask: Ask) -> Told:
    path = "/v1/chat/completions"
    (choice,) = data_of(await house.openai.call(path, openai_body(house, path, ask, False)))["choices"]
    calls = choice["message"].get("tool_calls") or []
    return Told(of_choice(choice), whole_calls([call["function"] for call in calls]))


async def openai_chat_stream(house: House, ask: Ask) -> Told:
    path, arguments, reason = "/v1/chat/completions", "", None
    for event in events_of(await house.openai.call(path, openai_body(house, path, ask, True))):
        for choice in event["choices"]:
            reason = of_choice(choice) or reason
            for call in choice["delta"].get("tool_calls", []):
                arguments += call["function"].get("arguments", "")
    return Told(reason, whole_calls([{"arguments": arguments}]))


async def openai_text(house: House, ask: Ask) -> Told:
    path = "/v1/completions"
    (choice,) = data_of(await house.openai.call(path, openai_body(house, path, ask, False)))["choices"]
    return Told(of_choice(choice))


async def openai_text_stream(house: House, ask: Ask) -> Told:
    path, reason = "/v1/completions", None
    for event in events_of(await house.openai.call(path, openai_body(house, path, ask, True))):
        for choice in event["choices"]:
            reason = of_choice(choice) or reason
    return Told(reason)


def of_response(response: Any) -> Told:
    calls = [item for item in response["output"] if item["type"] == "function_call" and item["status"] == "completed"]
    if response["status"] == "completed":
        return Told(because("stop", response.get("stop_reason")), calls)
    return Told(response["incomplete_details"]["reason"].replace("max_output_tokens", "length"), calls)


async def openai_response(house: House, ask: Ask) -> Told:
    path = "/v1/responses"
    return of_response(data_of(await house.openai.call(path, openai_body(house, path, ask, False))))


async def openai_response_stream(house: House, ask: Ask) -> Told:
    path = "/v1/responses"
    last = events_of(await house.openai.call(path, openai_body(house, path, ask, True)))[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    return of_response(last["response"])


TEXTS: tuple[Door, ...] = (
    engine_complete, engine_generate, generator_stream, generator_complete, session_ask, session_stream, langchain_llm,
    bentoml_door("/generate"), bentoml_door("/stream"), bentoml_door("/batch"), openai_text, openai_text_stream,
)
CHATS: tuple[Door, ...] = (
    engine_chat, langchain_chat, langchain_stream, bentoml_door("/chat"), openai_chat, openai_chat_stream,
    openai_response, openai_response_stream,
)
OBJECTS: tuple[Door, ...] = tuple(structured(method, is_raw) for method in ("json_schema", "json_mode")
                                  for is_raw in (False, True))
CALLS: tuple[Door, ...] = tuple(structured("function_calling", is_raw) for is_raw in (False, True))
DOORS = {"content": (*TEXTS, *CHATS, *OBJECTS), "reasoning": CHATS, "call": (*CHATS, *CALLS)}
TIMELESS = (generator_complete, session_ask, session_stream)
"""Doors that know no time limit of a call."""
WAYS = ("length", "stop", "abort", "timeout", "failure", "close")


def num_tokens_before(house: House, cut: str, text: str) -> int:
    script = SCRIPTS[cut]
    return len(house.backend._encode(script[: script.index(text) + len(text)]))


async def outcome(door: Door, house: House, ask: Ask) -> Told | str:
    try:
        return await door(house, ask)
    except (PagedcoreError, Refused, OutputParserException) as error:
        return type(error).__name__


async def cut_off(door: Door, house: House, cut: str, way: str) -> Told | str:
    """Call a door and cut its completion off."""
    step = num_tokens_before(house, cut, PLACE)
    ask, backend = Ask(cut), house.backend
    if way in ("length", "stop"):
        backend.hold(None)
        words = {"max_tokens": step} if way == "length" else {"stop": [STOP]}
        return await outcome(door, house, replace(ask, words=words))
    backend.hold(step)
    calling = asyncio.ensure_future(outcome(door, house, replace(ask, timeout_s=0.05) if way == "timeout" else ask))
    doing: Any = None
    if way == "timeout":
        # Why no longer: its time may be over before the step.
        await asyncio.wait({calling})
    else:
        assert await asyncio.to_thread(backend.arrived.wait, 60)
    asked = house.engine._commands._queue._items
    num_asked = len(asked)
    match way:
        case "abort":
            doing = asyncio.ensure_future(house.engine.abort(LABEL))
        case "close":
            doing = asyncio.ensure_future(house.engine.aclose())
        case "failure":
            backend.is_broken = True
    while doing is not None and len(asked) == num_asked:
        # Why: else the completion ends on a busy machine before the engine is asked to end it.
        await asyncio.sleep(0.001)
    backend.opened.set()
    told = await calling
    if doing is not None:
        await doing
    return told


REASONS = {"length": "length", "stop": ("stop", STOP), "abort": "abort"}
"""What is told of a completion that is handed on; of other ways there is an error."""


def cells() -> list[tuple[str, str]]:
    # Why not: a stop text does not act within reasoning.
    return [(cut, way) for cut in SCRIPTS for way in WAYS if (cut, way) != ("reasoning", "stop")]


@pytest.mark.parametrize(("cut", "way"), cells())
async def test_what_was_cut_off_is_never_handed_on_as_complete(cut: str, way: str) -> None:
    """By every door; texts and messages say why they ended, and nothing that was parsed comes out."""
    doors = [door for door in DOORS[cut] if way != "timeout" or door not in TIMELESS]
    for some in [[door] for door in doors] if way == "close" else [doors]:
        async with house(cut) as opened:
            for door in some:
                told = await cut_off(door, opened, cut, way)
                if isinstance(told, Told):
                    assert told.reason == REASONS.get(way), (door, told)
                    assert not told.parsed, (door, told)
                else:
                    assert way not in REASONS or told == "OutputParserException", (door, told)

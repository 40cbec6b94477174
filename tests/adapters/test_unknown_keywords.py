"""A keyword that does not exist, at every door of Python: a typed error that says which one was meant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.
from pagedcore import AsyncEngine, Engine, EngineConfig, SamplingParams, expose
from pagedcore.errors import InvalidConfig, InvalidGrammar, UnknownParameter
from pagedcore.request_options import RequestOptions
from pagedcore.structured_output import StructuredOutput
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from support.async_helpers import params
from support.engine_builders import make_engine


class Doors(NamedTuple):
    """An engine, and one on a thread of its own."""

    engine: Engine
    served: AsyncEngine


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    """The same two for all calls, which change nothing."""
    with make_engine() as engine, AsyncEngine(make_engine()) as served:
        yield Doors(engine, served)


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def open_session(doors: Doors, **options: Any) -> None:
    async with doors.served.session(**options):
        pass


Call = Callable[[Doors], object]
REQUESTS: dict[str, tuple[Call, str, str]] = {
    "SamplingParams": (lambda doors: SamplingParams(temprature=1), "temprature", "Did you mean temperature?"),
    "RequestOptions": (lambda doors: RequestOptions(tenat="a"), "tenat", "Did you mean tenant?"),
    "StructuredOutput": (lambda doors: StructuredOutput(json_shema={}), "json_shema", "Did you mean json_schema?"),
    "add_request": (lambda doors: doors.engine.add_request([1], prioritty=1), "prioritty", "Did you mean priority?"),
    "another name": (lambda doors: doors.engine.add_request([1], foo=1), "foo", "tpot_ms, speculate, lora."),
    "sampling": (lambda doors: doors.engine.add_request([1], top_p=1), "top_p", "params=SamplingParams(top_p=...)."),
    "Engine.generate": (lambda doors: doors.engine.generate([[1]], show_progres=True), "show_progres",
                        "Did you mean show_progress?"),
    "sampling at generate": (lambda doors: doors.engine.generate([[1]], max_tokens=3), "max_tokens",
                             "params=SamplingParams(max_tokens=...)."),
    "quote": (lambda doors: doors.engine.quote([1], exakt=True), "exakt", "Did you mean exact?"),
    "session": (lambda doors: doors.engine.session(tenantt="a"), "tenantt", "Did you mean tenant?"),
    "generate": (lambda doors: asyncio.run(read(doors.served.generate([1], timeout=1))), "timeout",
                 "Did you mean timeout_s?"),
    "generate_sync": (lambda doors: list(doors.served.generate_sync([1], timeout=1)), "timeout",
                      "Did you mean timeout_s?"),
    "submit": (lambda doors: doors.served.submit([1], wait_for_rom=True), "wait_for_rom",
               "Did you mean wait_for_room?"),
    "extend": (lambda doors: doors.served.extend(doors.served.submit([1], params(1)).result(), [1], indx=0), "indx",
               "Did you mean index?"),
    "AsyncEngine.quote": (lambda doors: asyncio.run(doors.served.quote([1], exakt=True)), "exakt",
                          "Did you mean exact?"),
    "AsyncEngine.session": (lambda doors: asyncio.run(open_session(doors, weigth=1)), "weigth", "Did you mean weight?"),
    "async-generator": (lambda doors: asyncio.run(read(expose("async-generator", model=doors.served)([1], timeout=1))),
                        "timeout", "Did you mean timeout_s?"),
    "LangChain call": (lambda doors: ChatPagedCore.from_engine(doors.served).invoke("a", temprature=1), "temprature",
                       "Did you mean temperature?"),
    "LangChain bind": (lambda doors: PagedCoreLLM.from_engine(doors.served).bind(temprature=1).invoke("a"),
                       "temprature", "Did you mean temperature?"),
}
SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "EngineConfig": (lambda: EngineConfig(max_num_seq=1), "max_num_seqs"),
    "Engine": (lambda: Engine.from_pretrained("no-such", max_num_seq=1), "max_num_seqs"),
    "AsyncEngine": (lambda: AsyncEngine.from_pretrained("no-such", stream_intervall_s=1), "stream_interval_s"),
    "async-generator": (lambda: expose("async-generator", model="no-such", max_num_seq=1), "max_num_seqs"),
    "bentoml": (lambda: expose("bentoml", model="no-such", max_num_seq=1), "max_num_seqs"),
    "openai": (lambda: expose("openai", model="no-such", max_num_seq=1), "max_num_seqs"),
    "langchain": (lambda: expose("langchain", model="no-such", temprature=1), "temperature"),
    "langchain-llm": (lambda: expose("langchain-llm", model="no-such", max_num_seq=1), "max_num_seqs"),
    "langchain-embeddings": (lambda: expose("langchain-embeddings", model="no-such", max_num_seq=1), "max_num_seqs"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_unknown_keyword_of_a_call(name: str, doors: Doors) -> None:
    """It is an UnknownParameter, which is a TypeError too; nothing was accepted."""
    call, given, advice = REQUESTS[name]
    with pytest.raises(UnknownParameter, match=f"got '{given}', allowed is one of ") as raised:
        call(doors)
    assert str(raised.value).endswith(advice)
    assert isinstance(raised.value, TypeError)
    assert not doors.engine.has_pending_requests()


@pytest.mark.parametrize("name", SETTINGS)
def test_an_unknown_setting(name: str) -> None:
    """It is an InvalidConfig before anything is loaded; the nearest may be a field of the adapter's own."""
    call, meant = SETTINGS[name]
    with pytest.raises(InvalidConfig, match=rf"unknown setting .* Did you mean {meant}\?$"):
        call()


def test_a_field_of_a_langchain_model() -> None:
    """pydantic's error says what was meant, and repeats no value."""
    with pytest.raises(ValueError, match=r"got 'temprature', .* Did you mean temperature\?") as raised:
        ChatPagedCore(model="demo", temprature=1, cache_salt="canary")
    assert "canary" not in str(raised.value)


def test_a_field_of_structured_output() -> None:
    """A mapping's fields are those of the class."""
    with pytest.raises(InvalidGrammar, match=r"got the field 'regx', .* Did you mean regex\?$"):
        SamplingParams(structured={"regx": "a"})

"""Which model a LangChain model is: for response caches, and for pickles that another process reads."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser

from pagedcore import AsyncEngine
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import NotPicklable
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM, create_chat
from pagedcore_langchain.host import EngineHost
from support.engine_builders import make_engine
from support.scripted_model import scripted_engine

MODELS = [ChatPagedCore, PagedCoreLLM]
PROMPT = "What is 2 + 3?"
SHORT: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[AsyncEngine]]:
    """Two engines with the same weights in two formats, one like the first, one with a shorter context."""
    settings = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32"},
                {"dtype": "float32", "max_model_len": 64}]
    made = [AsyncEngine.from_pretrained("demo", **SHORT, **one) for one in settings]
    yield made
    for engine in made:
        engine.close()


def num_asked(engine: AsyncEngine) -> int:
    return engine.stats().num_finished


@pytest.mark.parametrize("kind", MODELS)
def test_a_cached_response_is_given_for_its_own_engine_only(engines: list[AsyncEngine], kind: Any) -> None:
    """With one cache, each engine answers for itself, and an engine whose completions are the same shares them."""
    cache = InMemoryCache()
    before = [num_asked(engine) for engine in engines]
    for _ in range(2):
        for engine in engines:
            kind.from_engine(engine, cache=cache, max_tokens=4).invoke(PROMPT)
    assert [num_asked(engine) - old for engine, old in zip(engines, before, strict=True)] == [1, 1, 0, 1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_cached_response_is_given_for_its_own_parameters_only(engines: list[AsyncEngine], kind: Any) -> None:
    """Whatever changes a completion, as a field or per call, is a miss; the same again is a hit."""
    cache, engine = InMemoryCache(), engines[0]
    before, fields = num_asked(engine), ({}, {"max_tokens": 3}, {"stop": ["5"]}, {"temperature": 2.0, "seed": 1},
                                         {"temperature": 2.0, "seed": 2}, {"sampling": {"ignore_eos": True}})
    for _ in range(2):
        for some in fields:
            kind.from_engine(engine, cache=cache, **{"max_tokens": 4, **some}).invoke(PROMPT)
        kind.from_engine(engine, cache=cache, max_tokens=4).invoke(PROMPT, top_k=3)
    assert num_asked(engine) - before == len(fields) + 1


def test_a_cached_response_is_given_for_its_own_tools_only() -> None:
    """Tools, their schemas, the choice among them and a form of the output are parts of the question."""

    def tool(name: str, kind: str = "integer") -> dict[str, Any]:
        schema = {"type": "object", "properties": {"a": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    with scripted_engine("Hello.") as engine:
        chat = ChatPagedCore.from_engine(engine, cache=InMemoryCache())
        asked = num_asked(engine)
        for _ in range(2):
            for one in (chat.bind_tools([tool("f")]), chat.bind_tools([tool("g")]), chat,
                        chat.bind_tools([tool("f", "string")]), chat.bind_tools([tool("f")], tool_choice="none"),
                        chat.bind(structured={"choice": ["Hello."]})):
                assert one.invoke("Hi").content == "Hello."
        assert num_asked(engine) - asked == 6


def test_bound_tools_are_pickled_with_their_model() -> None:
    """What ``bind_tools`` returns is read in another process as it was; one of an engine of this process refuses."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    bound = ChatPagedCore(model="demo", engine_settings=SHORT).bind_tools([tool], tool_choice="any")
    read = pickle.loads(pickle.dumps(bound))
    assert (read.kwargs, read.bound.host.identity) == (bound.kwargs, bound.bound.host.identity)
    with scripted_engine("") as engine, pytest.raises(NotPicklable):
        pickle.dumps(ChatPagedCore.from_engine(engine).bind_tools([tool]))


def test_backends_that_do_not_describe_their_weights_are_not_taken_for_each_other() -> None:
    """Two toy engines are different models for all that can be known."""
    with AsyncEngine(make_engine()) as first, AsyncEngine(make_engine()) as second:
        chats = [ChatPagedCore.from_engine(engine) for engine in (first, second, first)]
        strings = [chat._get_llm_string() for chat in chats]
    assert strings[0] == strings[2] != strings[1]


def test_a_name_is_not_loaded_to_be_identified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and the files of a directory count, not the secret, and nothing is built for it."""
    monkeypatch.setattr(EngineHost, "engine", property(lambda _: pytest.fail("it was built")))
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, directory)

    def identity(**settings: Any) -> str:
        return ChatPagedCore(model=str(directory), engine_settings=settings)._get_llm_string()

    seen = [identity(), identity(seed=1), identity(session_key="0123456789abcdef")]
    os.utime(directory / "config.json", ns=(1, 1))
    seen += [identity(), identity(), ChatPagedCore(model="demo")._get_llm_string()]
    assert (seen[0] == seen[2], seen[3] == seen[4]) == (True, True)
    assert len(set(seen)) == 4


def test_used_models_are_pickled_by_their_settings() -> None:
    """What is read again builds engines of its own, one for a model and its copies, and gives the same answers."""
    models = [kind(model="demo", max_tokens=12, stop=["\n\n"], cache_salt="tenant", engine_settings=SHORT)
              for kind in MODELS]
    answers = [StrOutputParser().invoke(model.invoke(PROMPT)) for model in models]
    written = pickle.dumps([*models, models[0].model_copy(update={"max_tokens": 3})])
    for model in models:
        model.close()
    chat, llm, copy = pickle.loads(written)
    assert [chat.invoke(PROMPT).content, llm.invoke(PROMPT)] == answers
    assert (chat.host is copy.host, copy.max_tokens, chat.engine.stats().num_blocks) == (True, 3, 64)
    assert llm.cache_salt.get_secret_value() == "tenant"
    for model in (chat, llm):
        model.close()


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_on_an_engine_of_this_process_is_not_pickled(engines: list[AsyncEngine], kind: Any) -> None:
    """The refusal says what to do; a model that ``create_chat`` built by name is pickled like any other."""
    with pytest.raises(NotPicklable, match="from_engine") as refused:
        pickle.dumps(kind.from_engine(engines[0]))
    assert isinstance(refused.value, TypeError)


def test_a_model_built_at_once_is_pickled_with_its_engines_settings() -> None:
    """What ``create_chat`` gives to the engine is in the pickle, and so is the name."""
    chat = create_chat("demo", max_tokens=4, **SHORT)
    read = pickle.loads(pickle.dumps(chat))
    assert read.host.identity == chat.host.identity
    with read.engine as engine:
        assert engine.stats().num_blocks == 64
        assert read.invoke([HumanMessage(PROMPT)]).content == chat.invoke([HumanMessage(PROMPT)]).content
    chat.close()

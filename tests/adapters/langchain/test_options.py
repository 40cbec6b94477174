"""Salts, priorities and labels through the two LangChain models: they reach the engine, and a salt reaches only it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumps
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from pydantic import SecretStr, ValidationError

from pagedcore import AsyncEngine
from pagedcore.errors import InvalidRequest, InvalidSalt, UnknownParameter
from pagedcore.request_options import RequestOptions
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from support.accepted import note_accepted

MODELS = [ChatPagedCore, PagedCoreLLM]
SECRET = "canary-of-tenant-a"
PROMPT = "What is 2 + 3? Please say it in one short sentence."


class Accepted:
    """Notes the options of every request that an engine accepted."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def note(self, options: RequestOptions) -> None:
        """Note one."""
        self.options.append((options.cache_salt, options.priority, options.request_id))


@pytest.fixture
def observed(priority_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[AsyncEngine, Accepted]:
    """An engine with priorities, and the options that it accepts."""
    accepted = Accepted()
    note_accepted(monkeypatch, lambda one: accepted.note(one.options))
    return priority_engine, accepted


@pytest.fixture(scope="module")
def priority_engine() -> Iterator[AsyncEngine]:
    """One engine for the module's tests."""
    with AsyncEngine.from_pretrained(
        "demo", num_kv_blocks=64, block_size=16, max_num_seqs=4, scheduling_policy="priority"
    ) as engine:
        yield engine


class Everything(BaseCallbackHandler):
    """Writes down all that a model tells its callbacks."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def _note(self, *what: Any, **more: Any) -> None:
        self.said.append((what, more))

    on_llm_start = on_chat_model_start = on_llm_end = on_llm_error = on_chain_start = _note


def build(kind: Any, engine: AsyncEngine, **fields: Any) -> Any:
    return kind.from_engine(engine, model="demo", max_tokens=3, **fields)


def paths(model: Any, **keywords: Any) -> list[Callable[[], Any]]:
    """Every way of asking one prompt."""

    async def read() -> list[Any]:
        return [chunk async for chunk in model.astream(PROMPT, **keywords)]

    one = [HumanMessage(PROMPT)] if isinstance(model, ChatPagedCore) else PROMPT
    return [
        lambda: model.invoke(PROMPT, **keywords), lambda: asyncio.run(model.ainvoke(PROMPT, **keywords)),
        lambda: list(model.stream(PROMPT, **keywords)), lambda: asyncio.run(read()),
        lambda: model.batch([PROMPT], **keywords), lambda: asyncio.run(model.abatch([PROMPT], **keywords)),
        lambda: model.generate([one], **keywords), lambda: asyncio.run(model.agenerate([one], **keywords)),
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_options_reach_the_engine_on_every_path(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """Fields are for every call; a call's own salt, priority and label win."""
    engine, accepted = observed
    model = build(kind, engine, cache_salt=b"field", priority=1)
    for keywords, expected in (({}, (b"field", 1, None)),
                               ({"cache_salt": "call", "priority": 2, "request_id": "mine"}, ("call", 2, "mine")),
                               ({"cache_salt": None}, (b"field", 1, None))):
        accepted.options.clear()
        for call in paths(model, **keywords):
            call()
        assert accepted.options == [expected] * 8


@pytest.mark.parametrize("kind", MODELS)
def test_bound_options_and_batches_reach_the_engine(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """Bindings of a model and of a chain, blocking and not, give all prompts of a batch the salt."""
    engine, accepted = observed
    bound = build(kind, engine).bind(cache_salt="bound", priority=3)
    for runnable in (bound, bound | StrOutputParser()):
        accepted.options.clear()
        runnable.batch([PROMPT] * 3)
        asyncio.run(runnable.abatch([PROMPT] * 3))
        assert accepted.options == [("bound", 3, None)] * 6


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_made_of_a_binding_keeps_its_caller(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """LangChain makes tools, structured output and ``generate`` of what is bound, not of the binding."""
    engine, accepted = observed
    accepted.options.clear()
    bound = build(kind, engine).bind(cache_salt="bound", priority=3)
    if kind is ChatPagedCore:
        bound.bind_tools([{"name": "look", "parameters": {"type": "object", "properties": {}}}]).invoke(PROMPT)
        bound.with_structured_output({"type": "object"}, include_raw=True).invoke(PROMPT)
        bound.generate([[HumanMessage(PROMPT)]])
    else:
        bound.generate([PROMPT])
    assert set(accepted.options) == {("bound", 3, None)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "deadline_s"])
def test_what_is_made_of_a_binding_keeps_its_targets(engine: AsyncEngine, kind: Any, name: str) -> None:
    """As a policy that would ignore them says."""
    bound, messages = build(kind, engine).bind(**{name: 5.0}), [HumanMessage(PROMPT)]
    with pytest.raises(InvalidRequest, match=name):
        bound.generate([messages if kind is ChatPagedCore else PROMPT])


@pytest.mark.parametrize("include_raw", [False, True])
def test_structured_output_hands_on_what_a_call_says(
    observed: tuple[AsyncEngine, Accepted], include_raw: bool
) -> None:
    """A salt, or anything else, that its call gives is the model's, also where the message is returned as well."""
    engine, accepted = observed
    accepted.options.clear()
    structured = build(ChatPagedCore, engine).with_structured_output({"const": 1}, include_raw=include_raw)
    given = {"cache_salt": "call", "priority": 2, "request_id": "mine"}
    structured.invoke(PROMPT, **given)
    asyncio.run(structured.ainvoke(PROMPT, **given))
    list(structured.stream(PROMPT, **given))
    assert accepted.options == [("call", 2, "mine")] * 3


@pytest.mark.parametrize("kind", MODELS)
def test_salts_divide_the_cache(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """Between different salts nothing of a prompt is found; with the same one it is."""
    model = build(kind, observed[0])

    def cached(salt: str) -> int:
        *_, last = model.stream(PROMPT, cache_salt=salt) if kind is ChatPagedCore else [None]
        if last is not None:
            return int(last.usage_metadata["input_token_details"]["cache_read"])
        info = model.generate([PROMPT], cache_salt=salt).generations[0][0].generation_info
        return int(info["usage_metadata"]["input_token_details"]["cache_read"])

    first, other, again = f"{kind}-a"[-40:], f"{kind}-b"[-40:], f"{kind}-a"[-40:]
    assert [cached(first), cached(other)] == [0, 0]
    assert cached(again) > 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_salt_is_shown_nowhere(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """Neither repr, serialisation, parameters, callbacks nor the keys of LangChain's cache contain it."""
    engine, _ = observed
    cache, log = InMemoryCache(), Everything()
    for model, keywords in ((build(kind, engine, cache_salt=SECRET, cache=cache), {}),
                            (build(kind, engine, cache=cache), {"cache_salt": SECRET}),
                            (build(kind, engine, cache=cache), {"cache_salt": SecretStr(SECRET)})):
        for call in paths(model, config={"callbacks": [log]}, **keywords)[:6]:
            call()
        shown = [repr(model), str(model), dumps(model), repr(model._identifying_params), repr(model.asdict()),
                 model.model_dump_json(exclude={"callbacks", "cache"}), repr(vars(model))]
        bound = model.bind(**keywords)
        list(bound.stream(PROMPT, {"callbacks": [log]}))
        shown += [repr(bound), dumps(bound), repr(log.said), repr(cache._cache)]
        assert [one for one in shown if SECRET in one] == []
    assert len(log.said) >= 20
    assert "salt-" in repr(cache._cache)


@pytest.mark.parametrize("kind", MODELS)
def test_langchains_response_cache_is_divided_by_salts(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """A response that one tenant's call left in the cache is not given to another's, however the salt came."""
    engine, accepted = observed
    model = build(kind, engine, cache=InMemoryCache())
    accepted.options.clear()
    for _ in range(2):
        model.invoke(PROMPT)
        model.invoke(PROMPT, cache_salt="a")
        model.invoke(PROMPT, cache_salt="b")
        model.bind(cache_salt="a").invoke(PROMPT)
        model.model_copy(update={"cache_salt": SecretStr("b")}).invoke(PROMPT)
    assert accepted.options == [(None, 0, None), ("a", 0, None), ("b", 0, None)]


@pytest.mark.parametrize("kind", MODELS)
def test_one_label_is_for_one_prompt(observed: tuple[AsyncEngine, Accepted], kind: Any) -> None:
    """A batch with one label is refused as a whole, whichever call brings it, and nothing runs."""
    engine, accepted = observed
    model = build(kind, engine)
    several = [[HumanMessage(PROMPT)]] * 2 if kind is ChatPagedCore else [PROMPT] * 2
    accepted.options.clear()
    for call in (
        lambda: model.batch([PROMPT] * 2, request_id="x"), lambda: model.generate(several, request_id="x"),
        lambda: asyncio.run(model.abatch([PROMPT] * 2, request_id="x", return_exceptions=True)),
        lambda: asyncio.run(model.agenerate(several, request_id="x")),
        lambda: (model.bind(request_id="x") | StrOutputParser()).batch([PROMPT] * 2),
    ):
        with pytest.raises(InvalidRequest, match=r"request_id.*2 prompts"):
            call()
    assert accepted.options == []


@pytest.mark.parametrize("kind", MODELS)
def test_refused_options_are_typed_and_do_not_repeat_the_salt(engine: AsyncEngine, kind: Any) -> None:
    """A salt of a wrong type or size, a label that cannot be printed, a priority that the policy would ignore."""
    model = build(kind, engine)
    for keywords, error in (({"cache_salt": SECRET * 9}, InvalidSalt), ({"cache_salt": 123456}, InvalidSalt),
                            ({"cache_salt": ""}, InvalidSalt), ({"request_id": "a\nb"}, InvalidRequest),
                            ({"request_id": "x" * 129}, InvalidRequest), ({"priority": 1}, InvalidRequest),
                            ({"priority": "1"}, InvalidRequest), ({"priority": True}, InvalidRequest)):
        for call in paths(model, **keywords):
            with pytest.raises(error) as refused:
                call()
            assert "canary" not in str(refused.value) + repr(refused.value)
            assert "123456" not in str(refused.value)
    for fields in ({"cache_salt": [SECRET]}, {"cache_salt": 123456}, {"priority": "1"}, {"priority": True}):
        with pytest.raises(ValidationError) as invalid:
            build(kind, engine, **fields)
        assert "canary" not in str(invalid.value)
        assert "123456" not in str(invalid.value)
    with pytest.raises(UnknownParameter):
        build(kind, engine, sampling={"cache_salt": SECRET}).invoke(PROMPT)


def test_names_of_other_chat_models(engine: AsyncEngine) -> None:
    """What has another name here is understood, in the constructor and per call; what means nothing is answered."""
    chat = ChatPagedCore.from_engine(engine, max_completion_tokens=7, stop="\n\n", n=2, stream_usage=True)
    assert (chat.max_tokens, chat.stop, chat.sampling) == (7, ["\n\n"], {"n": 2})
    assert chat.invoke("What is 2 + 3?", max_completion_tokens=2, n=1).usage_metadata["output_tokens"] == 2  # type: ignore[index]
    for name, advice in (("model_kwargs", "sampling"), ("base_url", "ChatOpenAI")):
        with pytest.raises(ValidationError, match=advice):
            ChatPagedCore(model="demo", **{name: {}})


def test_a_model_has_to_be_named() -> None:
    """Without a name nothing is looked for anywhere."""
    for kind in (ChatPagedCore, PagedCoreLLM):
        with pytest.raises(ValidationError, match="demo"):
            kind()

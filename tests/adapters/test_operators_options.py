"""What only the operator says of a caller over HTTP: whose service it is, with which weight, and how urgent at most."""

from __future__ import annotations

from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

from adapters.bentoml.asgi_caller import JSON_TYPE, App, serving
from adapters.doors import LetterTokenizer
from pagedcore import AsyncEngine
from pagedcore.errors import InvalidConfig, InvalidRequest, UnknownParameter
from pagedcore.request_options import RequestOptions
from pagedcore_http.salts import Caller
from pagedcore_langchain import ChatPagedCore, PagedCoreLLM
from pagedcore_openai import ApiKeys, openai_app
from support.accepted import note_accepted
from support.engine_builders import make_engine
from support.letters import WritesLetters

ONE, TWO = "key-of-tenant-one", "key-of-tenant-two"
BODY = {"prompt": [1, 2], "max_tokens": 2}


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[RequestOptions]:
    """The options of every request that an engine accepts."""
    options = list[RequestOptions]()
    note_accepted(monkeypatch, lambda one: options.append(one.options))
    return options


def with_key(key: str) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


def test_a_tenants_name_says_nothing_of_its_salt() -> None:
    """Equal salts have equal names, different ones different names, none the empty name; a name is a short digest."""
    one, same, other = Caller("secret"), Caller(b"secret"), Caller("another")
    assert one.tenant == same.tenant != other.tenant
    assert "secret" not in one.tenant + repr(one)
    assert len(one.tenant) == 32
    assert Caller().tenant == ""


async def test_a_key_is_a_tenant_with_its_weight(accepted: list[RequestOptions]) -> None:
    """Two keys have two names and the weights of the operator; a body that names a tenant or a weight is refused."""
    keys = ApiKeys([ONE, TWO], weights={TWO: 4})
    with AsyncEngine(make_engine(tokenizer=WritesLetters(), scheduling_policy="fair")) as engine:
        asgi: Any = openai_app(engine, api_keys=keys)
        app = App(asgi, asgi, engine)  # type: ignore[arg-type]
        for key in (ONE, TWO, ONE):
            assert (await app.call("/v1/completions", BODY, headers=with_key(key))).status == 200
        for field in ({"tenant": "x"}, {"weight": 9.0}):
            refused = await app.call("/v1/completions", {**BODY, **field}, headers=with_key(ONE))
            assert refused.status == 400
            assert next(iter(field)) in refused.text
    assert [one.weight for one in accepted] == [1.0, 4.0, 1.0]
    assert accepted[0].tenant == accepted[2].tenant != accepted[1].tenant
    assert all(len(one.tenant) == 32 for one in accepted)
    with pytest.raises(InvalidConfig, match="weight"):
        ApiKeys([ONE], weights={TWO: 1})
    with pytest.raises(InvalidRequest, match="weight"):
        ApiKeys([ONE], weights={ONE: 0})


async def test_the_priority_of_a_body_is_capped(accepted: list[RequestOptions]) -> None:
    """At both HTTP doors one above ``max_priority`` is a 400 that names the limit; others, negative ones too, pass."""
    with AsyncEngine(make_engine(tokenizer=WritesLetters(), scheduling_policy="priority")) as engine:
        asgi: Any = openai_app(engine, max_priority=2)
        app = App(asgi, asgi, engine)  # type: ignore[arg-type]
        for priority, status in ((3, 400), (2, 200), (-9, 200)):
            exchange = await app.call("/v1/completions", {**BODY, "priority": priority}, headers=JSON_TYPE)
            assert exchange.status == status
            assert status == 200 or "at most 2" in exchange.text
        async with serving(engine, max_priority=2) as runner:
            for priority, status in ((3, 400), (2, 200)):
                body = {"prompt": [1], "sampling": {"max_tokens": 2}, "priority": priority}
                assert (await runner.call("/generate", body)).status == status
    assert [one.priority for one in accepted if one.priority] == [2, -9, 2]


async def test_the_salt_of_a_service_names_the_tenant(accepted: list[RequestOptions]) -> None:
    """In BentoML ``salt_of`` tells tenants apart and ``weight_of`` gives their weights; bodies may give deadlines."""
    hooks: dict[str, Any] = {
        "salt_of": lambda self, ctx: None if ctx is None else ctx.request.headers.get("x-tenant"),
        "weight_of": lambda self, ctx: 2.0,
    }
    with AsyncEngine(make_engine(scheduling_policy="fair")) as engine:
        async with serving(engine, **hooks) as app:
            accepted.clear()
            for name in (b"a", b"b"):
                headers = [*JSON_TYPE, (b"x-tenant", name)]
                body = {"prompt": [1], "sampling": {"max_tokens": 2}}
                assert (await app.call("/generate", body, headers=headers)).status == 200
                assert (await app.call("/generate", {**body, "deadline_s": 5}, headers=headers)).status == 400
    assert [one.weight for one in accepted] == [2.0, 2.0]
    assert accepted[0].tenant == Caller("a").tenant != accepted[1].tenant


async def test_targets_reach_the_engine_through_every_endpoint_of_a_service(accepted: list[RequestOptions]) -> None:
    """The latency targets of a body, under a policy that has them; one that is no time is a 400 that names it."""
    targets = {"deadline_s": 60, "ttft_ms": 250, "tpot_ms": 40.5}
    with AsyncEngine(make_engine(tokenizer=LetterTokenizer(), scheduling_policy="deadline")) as engine:
        async with serving(engine) as app:
            for path, prompt in (("/generate", {"prompt": [1]}), ("/batch", {"prompts": [[1], [2]]}),
                                 ("/stream", {"prompt": [1]}),
                                 ("/chat", {"messages": [{"role": "user", "content": "ab"}]})):
                accepted.clear()
                body = {**prompt, "sampling": {"max_tokens": 1}}
                assert (await app.call(path, {**body, **targets})).status == 200
                assert {(one.deadline_s, one.ttft_ms, one.tpot_ms) for one in accepted} == {(60.0, 250.0, 40.5)}, path
                for wrong in ({"ttft_ms": 0}, {"tpot_ms": "soon"}):
                    refused = await app.call(path, {**body, **wrong})
                    assert next(iter(wrong)) in refused.text
                    assert path == "/stream" or refused.status == 400


@pytest.mark.parametrize("name", ["tenant", "weight", "no_such_option"])
async def test_an_endpoint_of_ones_own_says_no_more_than_a_caller(name: str, accepted: list[RequestOptions]) -> None:
    """Called in Python, verbs and endpoints of a service take the options of callers only, any of them by position."""
    with AsyncEngine(make_engine(tokenizer=LetterTokenizer(), scheduling_policy="priority")) as engine:
        async with serving(engine) as app:
            accepted.clear()
            runner: Any = type(app.runner)()
            given = {name: 2}
            with pytest.raises(UnknownParameter, match=name):
                await runner.complete(None, [1], **given)
            with pytest.raises(UnknownParameter, match=name):
                await anext(runner.deltas(None, [1], **given))
            with pytest.raises(TypeError, match=name):
                await runner.generate([1], **given)
            assert accepted == []
            await runner.generate([1], {"max_tokens": 1}, 3, 60.0, "salt", "label")
    (one,) = accepted
    assert (one.priority, one.request_id, one.tenant, one.weight) == (3, "label", "", 1.0)


@pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])
def test_langchain_passes_tenants_on(kind: Any, accepted: list[RequestOptions]) -> None:
    """Fields of the model, and keywords of a call, which win."""
    settings = {"num_kv_blocks": 64, "block_size": 16, "scheduling_policy": "fair"}
    model = kind(model="demo", max_tokens=2, tenant="blue", weight=2.0, engine_settings=settings)
    try:
        model.invoke("What is 2 + 3?")
        model.invoke("What is 2 + 3?", tenant="green", weight=0.5)
        with pytest.raises(InvalidRequest, match="deadline_s"):
            model.invoke("What is 2 + 3?", deadline_s=5.0)
    finally:
        model.close()
    assert [(one.tenant, one.weight) for one in accepted] == [("blue", 2.0), ("green", 0.5)]

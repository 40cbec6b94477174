"""The OpenAI door in one process, message by message: keys, tenants, limits, drain, mounting, several models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from adapters.bentoml.asgi_caller import JSON_TYPE, App, Exchange
from adapters.doors import CANARY, EndlessBackend, LetterTokenizer
from pagedcore import AsyncEngine, RequestOutput
from pagedcore.errors import EngineClosed, InvalidConfig, MemoryBudgetExceeded
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.serving.health import Health
from pagedcore_openai import ApiKeys, create, openai_app, plugin
from pagedcore_openai.endpoints import join_metrics
from support.async_helpers import SlowBackend, wait_until
from support.doubles import FlakyBackend, ToyBackend, toy_answer
from support.engine_builders import make_engine
from support.paused_steps import paused_after

ONE, TWO, ADMIN = "key-of-tenant-one", "key-of-tenant-two", "key-of-the-operator"
TEXT, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY = {"prompt": [1, 2], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = {**BODY, "max_tokens": 4000}


class SlowEndlessBackend(SlowBackend):
    """A slow toy model that never ends by itself."""

    eos_token_ids = frozenset()


@asynccontextmanager
async def opened(backend: Any = None, engine_settings: Any = None, **options: Any) -> AsyncIterator[App]:
    """The app around a toy engine."""
    settings = {"tokenizer": LetterTokenizer(), "num_kv_blocks": 1200, **(engine_settings or {})}
    with AsyncEngine(make_engine(backend or SlowEndlessBackend(), **settings), stream_interval_s=0.0) as engine:
        asgi: Any = openai_app(engine, **options)
        yield App(asgi, asgi, engine)  # type: ignore[arg-type]


def with_key(key: str, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode()), *more]


def tokens_of(exchange: Exchange) -> list[int]:
    assert exchange.status == 200, exchange.text
    tokens: list[int] = json.loads(exchange.text)["choices"][0]["token_ids"]
    return tokens


def cached_of(exchange: Exchange) -> int:
    number: int = json.loads(exchange.text)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


async def test_only_known_keys_may_call() -> None:
    """No key, another scheme, a wrong key, a part of one: 401 before the body is read, and the key is not repeated."""
    async with opened(api_keys=ApiKeys([ONE, TWO])) as app:
        for headers in (JSON_TYPE, with_key("wrong"), with_key(ONE[:-1]), with_key(ONE + "x"),
                        [*JSON_TYPE, (b"authorization", f"Basic {ONE}".encode())]):
            exchange = await app.call(TEXT, BODY, headers=headers, is_whole=False)
            assert (exchange.status, exchange.error["code"]) == (401, "invalid_api_key")
            assert ONE[:-1] not in exchange.text
        assert tokens_of(await app.call(TEXT, BODY, headers=with_key(TWO))) == toy_answer([1, 2], 4)
        assert (await app.call("/v1/models", headers=JSON_TYPE)).status == 401
        assert (await app.call("/health", headers=JSON_TYPE)).status == 200


async def test_two_keys_are_two_tenants() -> None:
    """A prompt is cached for the key that sent it and for no other; a salt in the body divides a tenant's own cache and
    does not lead into another one's."""
    prompt = list(range(1, 13))
    async with opened(api_keys=ApiKeys([ONE, TWO])) as app:

        async def num_cached(key: str, **fields: Any) -> int:
            return cached_of(await app.call(TEXT, {**BODY, "prompt": prompt, **fields}, headers=with_key(key)))

        assert await num_cached(ONE) == 0 < await num_cached(ONE)
        assert await num_cached(TWO) == 0 < await num_cached(TWO)
        assert await num_cached(ONE, cache_salt="a") == 0 < await num_cached(ONE, cache_salt="a")
        assert await num_cached(TWO, cache_salt="a") == 0


async def test_the_hosts_own_salt_of_replaces_keys() -> None:
    """A mounted app takes the tenant from its host; a hook that fails refuses the call and never falls back."""

    def salt_of(request: Any) -> Any:
        tenant = request.headers["x-tenant"]
        if tenant == "forbidden":
            raise HTTPException(403, "not you")
        return {"bad": 5}.get(tenant, tenant)

    async with opened(salt_of=salt_of) as app:

        async def call(*headers: tuple[bytes, bytes]) -> Exchange:
            return await app.call(TEXT, {**BODY, "prompt": list(range(12))}, headers=[*JSON_TYPE, *headers])

        cached = [cached_of(await call((b"x-tenant", tenant))) for tenant in (b"a", b"b", b"a", b"b")]
        assert cached[:2] == [0, 0]
        assert min(cached[2:]) > 0
        assert [(await call((b"x-tenant", tenant))).status for tenant in (b"bad", b"forbidden")] == [500, 403]
        assert (await call()).status == 500


async def test_metrics_are_the_operators() -> None:
    """``/metrics`` exists where it is asked for; with keys it needs the admin key, which may call as well."""
    async with opened() as app:
        assert (await app.call("/metrics")).status == 404
    async with opened(metrics=True, api_keys=ApiKeys([ONE], ADMIN)) as app:
        statuses = [(await app.call("/metrics", headers=headers)).status
                    for headers in (JSON_TYPE, with_key(ONE), with_key(ADMIN))]
        assert statuses == [401, 403, 200]
        assert tokens_of(await app.call(TEXT, BODY, headers=with_key(ADMIN))) == toy_answer([1, 2], 4)


@pytest.mark.parametrize("keys", [[], ["short"], ["a key with spaces"], ["k" * 513], ["\u00e9" * 20], [ONE, ""]])
def test_keys_that_are_none_are_refused_at_the_start(keys: list[str]) -> None:
    """Too short, too long, not plain ASCII, or no key at all: InvalidConfig, which repeats nothing of it."""
    with pytest.raises(InvalidConfig) as refused:
        ApiKeys(keys)
    assert not any(key and key in str(refused.value) for key in keys)


async def test_a_page_of_another_site_cannot_call() -> None:
    """Where the hosts are known, another Host (a name rebound to loopback) or Origin is 403; an own one is not."""
    async with opened(hosts={"localhost", "127.0.0.1", "::1"}) as app:
        for host, origin, status in ((b"evil.example:8000", None, 403), (b"", None, 403),
                                     (b"localhost:8000", None, 200), (b"[::1]:8000", None, 200),
                                     (b"127.0.0.1", b"https://evil.example", 403),
                                     (b"127.0.0.1", b"null", 403), (b"127.0.0.1", b"http://[", 403),
                                     (b"127.0.0.1:8000", b"http://localhost:3000", 403),
                                     (b"127.0.0.1:8000", b"http://localhost:8000", 200)):
            headers = [*JSON_TYPE, (b"host", host), *([(b"origin", origin)] if origin else [])]
            assert (await app.call(TEXT, BODY, headers=headers)).status == status, (host, origin)


@pytest.mark.parametrize(("body", "headers", "status", "words"), [
    (b"\xef\xbb\xbf{}", [], 400, "a byte order mark"),
    (b'{"prompt": "a"}}', [], 400, "something after the JSON text, at character 16 of 16"),
    (b'{"prompt": secret}', [], 400, "no JSON, at character 12 of 18"),
    (b'{"prompt": NaN}', [], 400, "no JSON"),
    (b'{"prompt": "a", "user": {"b": 1, "b": 2}}', [], 400, "two members of one name"),
    (b"\xff{}", [], 400, "no UTF-8"),
    (b"[" * 80 + b"]" * 80, [], 400, "a JSON object"),
    (b'{"prompt": ' + b"[" * 80 + b"]" * 80 + b"}", [], 400, "nested deeper, allowed is at most 64 levels"),
    (b"\x1f\x8b\x08", [(b"content-encoding", b"gzip")], 415, "content encoding: got 'gzip', allowed is identity"),
    (BODY, [(b"host", b"llm.internal")], 403, "--allow-host"),
    (BODY, [(b"host", b"localhost"), (b"origin", b"https://chat.example")], 403, "--allow-origin"),
    ({"prompt": "a" * 100_000}, [], 400, "maximum context length is exceeded: the prompt is too long."),
])
async def test_refusals_before_the_engine_say_what_is_wrong(
    body: Any, headers: list[tuple[bytes, bytes]], status: int, words: str
) -> None:
    """The flaw of a body and its place, the encoding, and the option of the operator who may allow it; no text of the
    body, no length that stands for it."""
    async with opened(hosts={"localhost"}) as app:
        host = [] if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost")]
        refused = await app.call(TEXT, body, headers=[*JSON_TYPE, *host, *headers])
        assert refused.status == status
        assert words in refused.error["message"]
        assert "secret" not in refused.text


async def test_hostile_bodies_hurt_only_themselves() -> None:
    """Too large, no JSON, too deep, too many values, another type: refused with OpenAI's body, repeating nothing; a
    stream beside them gets its tokens."""
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    hostile: list[tuple[bytes, int]] = [
        (b"x" * 3_000_000, 413), (b'{"prompt": "' + CANARY.encode() + b'"', 400), (b"\xff\xfe", 400), (b"[]", 400),
        (deep, 400), (b'{"prompt": [' + b"1," * 200_000 + b"1]}", 413), (b'{"prompt": NaN}', 400),
        (b'{"' + CANARY.encode() * 20 + b'": 1}', 400), (b'{"prompt": "a", "' + b"\\u00e9 x" + b'": 1}', 400),
    ]
    async with opened() as app:
        neighbour = asyncio.create_task(app.call(TEXT, {**BODY, "max_tokens": 60, "prompt": [3]}))
        for content, status in hostile:
            for path in (TEXT, CHATS, RESPONSES, "/tokenize", "/detokenize"):
                exchange = await app.call(path, content)
                assert exchange.status == status, (content[:40], exchange.text)
                assert set(exchange.error) == {"message", "type", "param", "code"}
                assert CANARY not in exchange.text
        refused = await app.call(TEXT, b"{}", headers=[(b"content-type", b"text/plain")])
        assert refused.status == 415
        assert tokens_of(await neighbour) == toy_answer([3], 60)
        assert app.is_idle()


async def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    """A client that keeps back the rest of its body is answered 408 and holds no place any more."""
    async with opened(body_s=0.05) as app:
        exchange = await app.call(TEXT, b'{"prompt": ', is_whole=False)
        assert (exchange.status, app.asgi.service.open_calls.num_open) == (408, 0)


async def test_a_client_that_leaves_during_its_body_is_forgotten() -> None:
    """Its call ends, whatever it was to ask."""
    async with opened() as app:
        exchange = app.begin(CHATS, b'{"messages": ', is_whole=False)
        await asyncio.sleep(0.01)
        await exchange.leave()
        assert (exchange.status, app.asgi.service.open_calls.num_open) == (499, 0)


async def test_more_calls_than_allowed_and_a_full_queue_are_429() -> None:
    """Both say when to try again, and nothing of them is left."""
    async with opened(max_open_calls=2) as app:
        streams = [app.begin(TEXT, {**LONG, "stream": True}) for _ in range(2)]
        for stream in streams:
            await stream.until_text("data: {")
        exchange = await app.call(TEXT, BODY)
        assert (exchange.status, exchange.error["code"]) == (429, "rate_limit_exceeded")
        assert exchange.headers["retry-after"] == "1"
        for stream in streams:
            await stream.leave()
        assert tokens_of(await app.call(TEXT, BODY)) == toy_answer([1, 2], 4)
    async with opened(engine_settings={"max_num_seqs": 1, "max_num_waiting": 1}) as app:
        streams = [app.begin(TEXT, {**LONG, "stream": True})]
        await streams[0].until_text("data: {")
        streams.append(app.begin(TEXT, {**LONG, "stream": True}))
        while not app.engine.stats().num_waiting:
            await asyncio.sleep(0.001)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in ((TEXT, {**BODY, "stream": True}), (TEXT, BODY), (CHATS, chat), (RESPONSES, {"input": "a"})):
            exchange = await app.call(path, body)
            assert (exchange.status, exchange.error["code"]) == (429, "rate_limit_exceeded")
            assert exchange.headers["retry-after"] == "1"
        for stream in streams:
            await stream.leave()


async def test_a_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    """Streams in flight get all their tokens; new calls are 503 with Retry-After, and so is ``/health``."""
    async with opened() as app:
        stream = app.begin(TEXT, {**BODY, "max_tokens": 60, "stream": True})
        await stream.until_text("data: {")
        draining = asyncio.create_task(app.asgi.drain())
        await asyncio.sleep(0)
        exchange = await app.call(TEXT, BODY)
        assert (exchange.status, exchange.error["type"]) == (503, "server_error")
        assert exchange.headers["retry-after"] == "5"
        assert json.loads((await app.call("/health")).text) == {"status": "draining"}
        assert await draining == 0
        await stream.task
        assert stream.text.endswith("data: [DONE]\n\n")
        assert app.engine.is_alive


async def test_what_outlasts_the_drain_ends_with_an_error() -> None:
    """An app that owns its engine closes it then: the stream's last event is OpenAI's error, which clients raise."""
    with AsyncEngine(make_engine(SlowEndlessBackend(), tokenizer=LetterTokenizer(), num_kv_blocks=1200)) as engine:
        asgi: Any = openai_app(engine, owned=[engine], drain_s=0.05)
        app = App(asgi, asgi, engine)
        streams = [app.begin(TEXT, {**LONG, "stream": True}),
                   app.begin(RESPONSES, {"input": "a", "stream": True, "ignore_eos": True})]
        for stream in streams:
            await stream.until_text("data: {")
        assert await asgi.drain() == 2
        for stream in streams:
            await stream.task
        text, response = (json.loads(stream.text.split("data: ")[-1]) for stream in streams)
        assert text["error"]["type"] == "server_error"
        assert (response["type"], "message" in response) == ("error", True)
        assert not engine.is_alive


async def test_an_engine_that_hangs_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine's calls are refused with advice to ask elsewhere, and ``/health`` says so."""
    async with opened() as app:
        monkeypatch.setattr(AsyncEngine, "health", lambda *_: Health("dead", 100.0, 100.0, 0))
        exchange = await app.call(TEXT, BODY)
        assert (exchange.status, exchange.headers["retry-after"]) == (503, "5")
        assert (await app.call("/health")).status == 503


async def test_a_failure_of_the_model_is_a_500_of_its_request() -> None:
    """Before a stream begins it has the status, afterwards the error event; its words are not the model's."""
    async with opened(FlakyBackend(nan_on=(1, 0))) as app:
        exchange = await app.call(TEXT, {**BODY, "stream": True})
        assert (exchange.status, exchange.error["type"], exchange.error["param"]) == (500, "server_error", None)
    async with opened(FlakyBackend(nan_on=(3, 0))) as app:
        with paused_after(app.engine, 1) as pause:
            exchange = app.begin(TEXT, {**BODY, "stream": True})
            await exchange.until_text('"choices"')
            pause.end()
            await exchange.task
        assert exchange.status == 200
        assert json.loads(exchange.text.split("data: ")[-1])["error"]["type"] == "server_error"


async def test_an_aborted_completion_says_so() -> None:
    """What the operator aborts ends with the reason "abort", and the stream with [DONE]."""
    async with opened() as app:
        stream = app.begin(TEXT, {**LONG, "stream": True})
        await stream.until_text("data: {")
        await app.engine.call(lambda engine: [engine.abort_request(one.request_id) for one in list(engine.requests)])
        await stream.task
        assert '"finish_reason":"abort"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")


async def test_time_limits_end_the_call() -> None:
    """``timeout_s`` ends it: 504 for a whole completion, an error event in a stream; no request is left."""
    async with opened() as app:
        whole = await app.call(TEXT, {**LONG, "timeout_s": 0.05})
        stream = await app.call(TEXT, {**LONG, "timeout_s": 0.05, "stream": True})
        assert (whole.status, whole.error["type"]) == (504, "server_error")
        assert json.loads(stream.text.split("data: ")[-1])["error"]["message"].startswith("timeout")
        await asyncio.sleep(0.02)
        assert app.is_idle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refused_prompt_ends_the_others_of_its_call(is_stream: bool) -> None:
    """One of several prompts that is refused refuses the call; what had begun is aborted."""
    async with opened() as app:
        exchange = await app.call(TEXT, {**LONG, "prompt": [[1], [2], [10**6]], "stream": is_stream})
        assert (exchange.status, exchange.error["param"]) == (400, "prompt")
        await asyncio.sleep(0.02)
        assert app.is_idle()


class Labels:
    """Notes the labels of finished requests."""

    def __init__(self) -> None:
        self.found: list[str | None] = []

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Note one."""
        self.found.append(request.client_request_id)


async def test_hooks_see_the_id_of_the_response() -> None:
    """A request's label is the id that its caller has, or the caller's own; prompts after the first are numbered."""
    async with opened() as app:
        labels = Labels()
        app.engine.observe(labels)
        first = json.loads((await app.call(TEXT, BODY)).text)
        await app.call(TEXT, {**BODY, "request_id": "mine", "prompt": [[1], [2]]})
        app.engine.stats()
        assert labels.found[0] == first["id"]
        assert sorted(map(str, labels.found[1:])) == ["mine", "mine-1"]


async def test_several_models_are_chosen_by_name() -> None:
    """``model`` chooses the engine, without a name the call is refused; each is listed, and metrics have one head."""
    engines = {name: AsyncEngine(make_engine(EndlessBackend())) for name in ("a", "b")}
    with engines["a"], engines["b"]:
        asgi: Any = create(engines, metrics=True)
        app = App(asgi, asgi, engines["a"])
        before = [engine.stats().num_finished for engine in engines.values()]
        for name in ("b", "b", "a"):
            assert tokens_of(await app.call(TEXT, {**BODY, "model": name})) == toy_answer([1, 2], 4)
        assert [one.stats().num_finished - num for one, num in zip(engines.values(), before, strict=True)] == [1, 2]
        assert (await app.call(TEXT, BODY)).error["code"] == "missing_required_parameter"
        assert [one["id"] for one in json.loads((await app.call("/v1/models")).text)["data"]] == ["a", "b"]
        text = (await app.call("/metrics")).text
        assert text.count("# TYPE pagedcore_requests_running gauge") == 1
        assert text.count("\npagedcore_requests_running{") == 2
        await asgi.aclose()
        assert all(engine.is_alive for engine in engines.values())


def test_several_models_share_one_budget() -> None:
    """Equal shares of it, whatever their order; one that cannot have a block is refused, and nothing is kept."""
    block = 16 * ToyBackend.kv_bytes_per_token
    app = create({"a": ToyBackend(), "b": ToyBackend()}, kv_cache_memory=20 * block, block_size=16)
    try:
        assert [one.engine.stats().kv_bytes for one in app.service.models.values()] == [10 * block] * 2
    finally:
        asyncio.run(app.aclose())
    before = threading.active_count()
    with pytest.raises((InvalidConfig, MemoryBudgetExceeded)):
        create({"a": ToyBackend(), "b": ToyBackend()}, kv_cache_memory=block, block_size=16)
    # Why not equal: a thread of the engines above may end meanwhile.
    wait_until(lambda: threading.active_count() <= before)


def test_metrics_of_several_engines_are_one_page() -> None:
    """Families with the same head are joined in order; the text of one engine stays as it is."""
    pages = ["# HELP a x\n# TYPE a gauge\na{m=\"1\"} 1.0\n# HELP b y\n# TYPE b gauge\nb 1\n",
             "# HELP a x\n# TYPE a gauge\na{m=\"2\"} 2.0\n"]
    assert join_metrics(pages[:1]) == pages[0]
    assert join_metrics(pages) == ("# HELP a x\n# TYPE a gauge\na{m=\"1\"} 1.0\na{m=\"2\"} 2.0\n"
                                   "# HELP b y\n# TYPE b gauge\nb 1\n")


@pytest.mark.parametrize("place", ["/v1", "/llm", "/llm/v1"])
async def test_the_app_can_be_mounted_anywhere(place: str) -> None:
    """Below any path of a Starlette app the paths are there with ``/v1`` and without it."""
    async with opened() as app:
        host = App(Starlette(routes=[Mount(place, app.asgi)]), app.runner, app.engine)
        prefix = place if place.endswith("/v1") else f"{place}/v1"
        assert tokens_of(await host.call(f"{prefix}/completions", BODY)) == toy_answer([1, 2], 4)
        assert (await host.call(f"{place}/health")).status == 200


async def test_the_lifespan_ends_what_the_app_owns() -> None:
    """The adapter by its name builds an app whose engine lives as long as its server; afterwards calls are refused."""
    adapters = create_plugin_manager(plugins=[plugin], entry_points=False).registry.adapters
    asgi: Any = adapters.load("openai")(EndlessBackend(), num_kv_blocks=64, name="other")
    (served,) = asgi.service.models.values()
    assert served.name == "other"
    async with asgi.router.lifespan_context(asgi):
        app = App(asgi, asgi, served.engine)
        assert tokens_of(await app.call(TEXT, {**BODY, "model": "other"}))
    assert not served.engine.is_alive
    assert (await app.call(TEXT, BODY)).status == 503


def test_settings_are_refused_by_name() -> None:
    """No engine, a limit of nothing, a closed engine: typed, before the app exists."""
    with pytest.raises(InvalidConfig, match="models"):
        openai_app({})
    with AsyncEngine(make_engine()) as engine, pytest.raises(InvalidConfig, match="max_open_calls"):
        openai_app(engine, max_open_calls=0)
    with pytest.raises(EngineClosed):
        openai_app(engine)

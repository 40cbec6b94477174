"""Endpoints of a subclass: their tenants, refusals, disconnects and drain, under ``bentoml serve`` and in process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest
from starlette.exceptions import HTTPException

from adapters.bentoml.asgi_caller import serving
from adapters.bentoml.processes import Served, bentoml_serve
from adapters.bentoml.served import Tenants
from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import InvalidSampling, PagedcoreError
from pagedcore_bentoml import EventParser, PagedCoreRunner
from pagedcore_bentoml.wire import EventText
from pagedcore_http.refusals import SaltNotDerived
from support.async_helpers import SlowBackend
from support.doubles import toy_answer
from support.engine_builders import make_engine

HERE = Path(__file__).parent
RIGHT = ["whole", "deltas_of", "local_with_ctx"]
LOST = ["through_itself", "through_itself_in_a_thread", "local", "engine_itself", "without_ctx", "together"]
VERB = "self.complete(ctx, prompt)"


@pytest.fixture(scope="module")
def tenants() -> Iterator[Served]:
    """A service that tells tenants apart, served as its operator does it."""
    with bentoml_serve("served:Tenants", HERE) as served:
        yield served


@asynccontextmanager
async def client_of(where: str, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same service under ``bentoml serve``, or of one in this process."""
    if where == "served":
        async with httpx.AsyncClient(base_url=request.getfixturevalue("tenants").url, timeout=240.0) as http:
            yield http
        return
    with AsyncEngine(make_engine(block_size=4, num_kv_blocks=512), stream_interval_s=0.0) as engine:
        async with serving(engine, base=Tenants.inner) as app, httpx.AsyncClient(
                base_url="http://llm", transport=httpx.ASGITransport(app.asgi)) as http:
            yield http


def prompts_of(name: str) -> dict[str, Any]:
    """The body of a call with a long prompt of this name; two names with one first letter share a first token."""
    prompt = [1 + ord(letter) % 20 for letter in (name * 40)[:40]]
    return {"prompts": [prompt]} if name == "together" else {"prompt": prompt}


@pytest.mark.parametrize("where", [pytest.param("served", marks=pytest.mark.slow), "in process"])
async def test_an_endpoint_of_ones_own_keeps_its_tenants_apart(where: str, request: pytest.FixtureRequest) -> None:
    """A tenant finds its own prompt in the cache and never another's; who loses the tenant is refused, with the way
    out in the service's log and not in the answer."""
    async with client_of(where, request) as http:
        for name in RIGHT:
            found = []
            for tenant in ("blue", "green", "blue"):
                answer = await http.post(f"/{name}", json=prompts_of(name), headers={"x-tenant": tenant})
                found.append(int(answer.text))
            assert (found[:2], found[2] >= 36) == ([0, 0], True), name
        before = (await http.post("/stats", json={})).json()["num_finished"]
        for name in LOST:
            for tenant in ("blue", "green"):
                refused = await http.post(f"/{name}", json=prompts_of(name), headers={"x-tenant": tenant})
                assert refused.status_code == 500, name
        assert (await http.post("/stats", json={})).json()["num_finished"] == before
    if where == "served":
        assert request.getfixturevalue("tenants").log.read_text(encoding="utf-8").count(VERB) >= 2 * len(LOST)


@pytest.mark.slow
async def test_who_leaves_and_what_breaks_is_noticed_on_a_real_connection(tenants: Served) -> None:
    """The request of a client that left is gone long before its end, and a stream that failed is no complete body."""
    async with httpx.AsyncClient(base_url=tenants.url, timeout=240.0, headers={"x-tenant": "blue"}) as http:
        before = (await http.post("/stats", json={})).json()["num_generated_tokens"]
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/endless", json={}, timeout=httpx.Timeout(240.0, read=0.3))
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/broken", json={})
        while (now := (await http.post("/stats", json={})).json())["num_running"]:
            await asyncio.sleep(0.01)
        assert now["num_generated_tokens"] - before < 1000


@pytest.mark.slow
async def test_a_task_outlives_the_call_that_submits_it(tenants: Served) -> None:
    """It is not ended when its client has gone, and is its tenant's."""
    async with httpx.AsyncClient(base_url=tenants.url, timeout=240.0, headers={"x-tenant": "blue"}) as http:
        found = []
        for tenant in ("blue", "green", "blue"):
            submitted = await http.post("/later/submit", json=prompts_of("queue"), headers={"x-tenant": tenant})
            task = {"task_id": submitted.json()["task_id"]}
            while (state := (await http.get("/later/status", params=task)).json()["status"]) == "in_progress":
                await asyncio.sleep(0.02)
            assert state == "completed"
            found.append(int((await http.get("/later/get", params=task)).text))
        assert (found[:2], found[2] >= 36) == ([0, 0], True)


async def test_a_client_cannot_pretend_to_be_the_service(request: pytest.FixtureRequest) -> None:
    """The header by which a service knows its own calls is worth nothing without the key of its process: such a call is
    its sender's, and is not asked to name a tenant."""
    async with client_of("in process", request) as http:
        for key in (b"", b"0" * 32, b"\xe9"):
            answer = await http.post("/generate", json=prompts_of("x"), headers={b"x-pagedcore-self": key})
            assert answer.status_code == 200


@pytest.mark.slow
def test_a_service_in_front_names_the_tenant() -> None:
    """What ``depends`` sends has no headers: the salt that it names is the tenant's, and without one it is refused."""
    with bentoml_serve("served:TenantsFront", HERE) as served:
        def ask(**body: Any) -> httpx.Response:
            return httpx.post(f"{served.url}/ask", json={**prompts_of("front"), **body}, timeout=240.0)

        found = [int(ask(tenant=tenant).text) for tenant in ("blue", "green", "blue")]
        assert (found[:2], found[2] >= 36) == ([0, 0], True)
        assert ask().status_code == 500
        assert VERB in served.log.read_text(encoding="utf-8")


class Shared:
    """An endpoint that several services inherit."""

    @bentoml.api
    async def mixed_in(self, ctx: bentoml.Context) -> int:
        """Refuse."""
        raise InvalidSampling("temperature", 99, "at most 2")


class Own(Shared, PagedCoreRunner):
    """Endpoints that meet all that can happen."""

    @bentoml.api
    async def whole(self, ctx: bentoml.Context, max_tokens: int = 2, temperature: float = 0.0) -> list[int]:
        """Complete."""
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        return list((await self.complete(ctx, [1], params)).outputs[0].token_ids)

    @bentoml.api
    async def stream_of(self, ctx: bentoml.Context, max_tokens: int = 2, priority: int = 0,
                        breaks: bool = False) -> AsyncGenerator[str, None]:
        """Stream."""
        async for delta in self.deltas(ctx, [1], SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                                       priority=priority):
            yield "".join(f"{token_id}," for token_id in delta.token_ids)
            if breaks:
                raise KeyError

    @bentoml.api(output_spec=EventText)
    async def events(self, ctx: bentoml.Context, breaks: bool = False) -> AsyncGenerator[str, None]:
        """Stream as ``/stream`` does."""
        async for chunk in self.stream.local([1], {"max_tokens": 2}, ctx=ctx):  # type: ignore[attr-defined]
            yield chunk
            if breaks:
                raise InvalidSampling("temperature", 99, "at most 2")

    @bentoml.api
    def in_a_thread(self) -> str:
        """Refuse, without an event loop."""
        raise InvalidSampling("temperature", 99, "at most 2")

    @bentoml.api
    async def forbidden(self) -> str:
        """Refuse with a status of its own."""
        raise HTTPException(403, "not you")

    @bentoml.api
    async def twice(self, ctx: bentoml.Context) -> list[int]:
        """Ask twice, and begin the second time only after the drain has begun."""
        first = await self.whole.local(ctx, 2)  # type: ignore[attr-defined]
        while not self.open_calls.is_draining:
            await asyncio.sleep(0.001)
        return [*first, *await self.whole.local(ctx, 2)]  # type: ignore[attr-defined]


@asynccontextmanager
async def own(**settings: Any) -> AsyncIterator[Any]:
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=400, **settings), stream_interval_s=0.0) as engine:
        async with serving(engine, base=Own, max_priority=0) as app:
            yield app


async def test_refusals_have_the_status_and_the_body_of_the_services_own_endpoints() -> None:
    """Before a stream's first piece too; what an endpoint raises as Starlette's keeps its status."""
    async with own() as app:
        for path, body, status, kind in [
            ("/whole", {"temperature": 99}, 400, "InvalidSampling"), ("/in_a_thread", {}, 400, "InvalidSampling"),
            ("/whole", {"max_tokens": 10**6}, 400, "InvalidMaxTokens"), ("/forbidden", {}, 403, "HTTPException"),
            ("/mixed_in", {}, 400, "InvalidSampling"),
            ("/stream_of", {"max_tokens": 10**6}, 400, "InvalidMaxTokens"),
            ("/stream_of", {"priority": 5}, 400, "InvalidRequest"),
        ]:
            refused = await app.call(path, body)
            assert (refused.status, refused.error["type"]) == (status, kind), path
        runner = type(app.runner)()
        with pytest.raises(PagedcoreError):
            await runner.whole(None, max_tokens=10**6)
        assert await runner.whole(None) == toy_answer([1], 2)


async def test_a_client_that_leaves_ends_the_work_of_an_endpoint() -> None:
    """Whole and streamed, while the request runs."""
    async with own() as app:
        for path in ("/whole", "/stream_of"):
            exchange = app.begin(path, {"max_tokens": 1000})
            while not (await asyncio.to_thread(app.engine.stats)).num_running:
                assert not exchange.task.done()
                await asyncio.sleep(0.002)
            await exchange.leave()
            assert (app.is_idle(), app.runner.open_calls.num_open) == (True, 0)


async def test_a_stream_that_fails_is_not_taken_for_a_complete_one() -> None:
    """Its body does not end, where BentoML would end it as if nothing had happened; one of events has its own end."""
    async with own() as app:
        whole = await app.call("/stream_of", {"max_tokens": 4})
        assert whole.text == "".join(f"{token_id}," for token_id in toy_answer([1], 4))
        broken = app.begin("/stream_of", {"max_tokens": 4, "breaks": True})
        with pytest.raises(Exception, match="failed after its beginning"):
            await broken.task
        assert broken.messages[-1]["more_body"]
        for breaks, last in ((False, "done"), (True, "error")):
            events = EventParser().feed((await app.call("/events", {"breaks": breaks})).text)
            assert events[-1].name == last


async def test_a_call_in_flight_may_ask_again_while_the_service_drains() -> None:
    """It is counted once, from its first line to its last; new calls are refused meanwhile."""
    async with own() as app:
        running = app.begin("/twice", {})
        while not app.runner.open_calls.num_open:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(app.runner.pagedcore_stop())
        await asyncio.sleep(0)
        for path in ("/whole", "/stream_of"):
            refused = await app.call(path, {})
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        await asyncio.gather(stopping, running.task)
        assert running.text.replace(" ", "") == str([*toy_answer([1], 2)] * 2).replace(" ", "")


def test_every_method_of_the_engine_that_takes_a_request_asks_for_its_salt() -> None:
    """Of a class that overrides ``salt_of``: no way to the engine shares tenants without saying so."""
    with AsyncEngine(make_engine()) as engine:
        runner = type("LLM", (Tenants.inner,), {"model": engine})()
        for name in ("submit", "generate", "generate_sync", "session"):
            with pytest.raises(SaltNotDerived, match="cache_salt"):
                getattr(runner.engine, name)([1])
        assert runner.engine.submit([1], runner.params, cache_salt="blue").result().is_finished
        assert runner.engine.encode([1]) == [1]
        assert runner.shared_engine is engine
        assert type("LLM", (PagedCoreRunner,), {"model": engine})().engine is engine

"""The page and its live view over HTTP, message by message: headers, who sees what, limits, and leaving."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from starlette.applications import Starlette
from starlette.routing import Mount

from adapters.bentoml.asgi_caller import JSON_TYPE, App, Exchange
from adapters.openai.test_door import (
    ADMIN,
    BODY,
    LONG,
    ONE,
    TEXT,
    TWO,
    SlowEndlessBackend,
    opened,
    tokens_of,
    with_key,
)
from pagedcore.errors import InvalidConfig
from pagedcore.metrics.live import Look, Progress, Stretch, Waiting
from pagedcore_openai import ApiKeys, create, live
from pagedcore_openai.live import Scope
from pagedcore_openai.page import page_files
from pagedcore_openai.tenants import Browsers
from support.doubles import toy_answer
from support.engine_builders import make_engine
from support.letters import WritesLetters

STATS = make_engine().stats()
OF_OPENAIS_CLIENT = (
    "authorization,content-type,http-referer,idempotency-key,openai-beta,openai-organization,openai-project,user-agent,"
    "x-stainless-arch,x-stainless-helper-method,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-poll-helper,x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,"
    "x-stainless-timeout,x-title"
)
"""What a browser announces for OpenAI's client, and for programs on top of it that name themselves."""
KEYS = ApiKeys([ONE, TWO], ADMIN)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames come as often as an engine's steps."""
    monkeypatch.setattr(live, "INTERVAL_S", 0.005)
    monkeypatch.setattr(live, "QUIET_S", 0.02)


@asynccontextmanager
async def paged(**options: Any) -> AsyncIterator[App]:
    """The app with its page."""
    async with opened(page=True, **options) as app:
        yield app


def frames_of(exchange: Exchange) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(r"^data: (.*)$", exchange.text, flags=re.MULTILINE)]


async def until(exchange: Exchange, condition: Any) -> dict[str, Any]:
    """Wait for a frame; return the first that meets a condition."""
    async with asyncio.timeout(30.0):
        while not (found := [one for one in frames_of(exchange) if "rows" in one and condition(one)]):
            exchange.arrived.clear()
            await exchange.arrived.wait()
    return found[0]


async def num_observers(app: App) -> int:
    return await app.engine.call(lambda engine: len(engine.hooks._callers["pagedcore_step"]))


async def until_observers(app: App, number: int) -> None:
    """Look for so many observers of the engine's steps, which what was sent to the engine before has left."""
    async with asyncio.timeout(60):
        while await num_observers(app) != number:
            await asyncio.sleep(0.001)


async def test_the_page_lets_nothing_foreign_in() -> None:
    """Each of its files has the type that it needs and the headers that refuse all that comes from elsewhere; without
    a key as well. There is no other file, and no way out of the folder."""
    async with paged(api_keys=KEYS) as app:
        for path in ("/", *(f"/page/{name}" for name in page_files())):
            exchange = await app.call(path, headers=[])
            assert exchange.status == 200
            policy = exchange.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert exchange.headers["x-content-type-options"] == "nosniff"
            assert exchange.headers["referrer-policy"] == "no-referrer"
        assert (await app.call("/page/page.css")).headers["content-type"].startswith("text/css")
        for path in ("/page/nothing.js", "/page/..%2fapp.py", "/page/../page.py", "/page/", "/index.html"):
            assert (await app.call(path)).status == 404, path


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    """No inline script, style or handler, which its policy would refuse, no address of another host, and no way for
    text of a model to become markup."""
    files = {name: content.decode() for name, (content, _) in page_files().items()}
    assert {"index.html", "page.css", "main.js", "icon.svg"} <= set(files)
    page = files["index.html"]
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
    for name, text in files.items():
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name


async def test_there_is_no_page_unless_it_is_asked_for() -> None:
    """A mounted app has neither page nor view, and keeps its paths."""
    async with opened() as app:
        for path in ("/", "/page/main.js", "/live"):
            assert (await app.call(path)).status == 404
        assert tokens_of(await app.call(TEXT, BODY)) == toy_answer([1, 2], 4)


async def test_a_mounted_page_lives_below_its_path() -> None:
    """Asked for, it is there with its files, which it names by their places beside it, and its view."""
    async with paged() as app:
        host = App(Starlette(routes=[Mount("/llm", app.asgi)]), app.runner, app.engine)
        page = await host.call("/llm/", headers=[])
        files = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert "page/main.js" in files
        assert [(await host.call(f"/llm/{name}")).status for name in files] == [200] * len(files)
        assert (await host.call("/llm", headers=[])).headers["location"].endswith("/llm/")
        view = host.begin("/llm/live", b"GET")
        await until(view, lambda _: True)
        await view.leave()


async def test_every_model_has_a_view_of_its_own() -> None:
    """Of several models a viewer names one, and sees what this one computes."""
    backends = {name: SlowEndlessBackend() for name in ("a", "b")}
    asgi = create(backends, page=True, num_kv_blocks=1200, block_size=16, kv_cache_memory=2**22)
    engine = asgi.service.models["b"].engine
    app = App(asgi, asgi, engine)  # type: ignore[arg-type]
    assert [(await app.call(path)).status for path in ("/live", "/live?model=c")] == [400, 404]
    views = [app.begin(f"/live?model={name}", b"GET") for name in ("a", "b")]
    call = app.begin(TEXT, {**LONG, "model": "b", "stream": True})
    await until(views[1], lambda one: one["rows"])
    await until(views[0], lambda one: one["t"] > 0)
    assert not any(one["rows"] for one in frames_of(views[0]))
    for exchange in (*views, call):
        await exchange.leave()
    await asgi.aclose()


HOSTS = {"localhost", "127.0.0.1", "::1", "chat.example"}


@pytest.mark.parametrize(("host", "origin", "status"), [
    (b"localhost:8000", None, 200), (b"127.0.0.1:8000", b"http://localhost:8000", 200),
    (b"localhost:8000", b"http://localhost:8000", 200), (b"[::1]:8000", b"http://[::1]:8000", 200),
    (b"chat.example", b"https://chat.example", 200), (b"127.0.0.1:8000", b"https://chat.example", 200),
    (b"127.0.0.1:8000", b"https://friend.example", 200), (b"evil.example:8000", None, 403), (b"", None, 403),
    (b"evil.example", b"http://evil.example", 403), (b"127.0.0.1:8000", b"http://localhost:3000", 403),
    (b"127.0.0.1:8000", b"https://evil.example", 403), (b"127.0.0.1:8000", b"https://friend.example:444", 403),
    (b"127.0.0.1:8000", b"http://friend.example", 403), (b"127.0.0.1", b"null", 403), (b"127.0.0.1", b"http://[", 403),
    (b"127.0.0.1:8000", b"http://chat.example.evil.example", 403),
])
async def test_every_door_asks_where_a_browser_comes_from(host: bytes, origin: bytes | None, status: int) -> None:
    """A Host of another server and an Origin of another site are 403 at the page, the view and the calls; another port
    of this machine is another site. Names of ``hosts`` and sites of ``origins`` may call."""
    async with paged(hosts=HOSTS, origins=["https://friend.example"]) as app:
        headers = [*JSON_TYPE, (b"host", host), *([(b"origin", origin)] if origin else [])]
        for path, body in (("/", b"GET"), ("/page/main.js", b"GET"), (TEXT, BODY), ("/v1/chat/completions", b"{}")):
            given = (await app.call(path, body, headers=headers)).status
            assert given == status if status == 403 else given in (200, 400), path
        stream = app.begin("/live", b"GET", headers=headers)
        if status == 200:
            await until(stream, lambda _: True)
            await stream.leave()
        else:
            await stream.task
        assert stream.status == status


async def test_an_allowed_site_gets_the_headers_that_its_browser_wants() -> None:
    """A call that announces itself is allowed for it and for no other site, and its response names the site."""
    async with paged(hosts=HOSTS, origins=["https://friend.example"]) as app:
        friend, other = ((b"origin", b"https://friend.example"), (b"origin", b"https://other.example"))
        given = await app.call("/v1/models", headers=[(b"host", b"localhost"), friend])
        assert given.headers["access-control-allow-origin"] == "https://friend.example"
        assert (await app.call("/v1/models", headers=[(b"host", b"localhost"), other])).status == 403
    async with paged(hosts=HOSTS) as app:
        given = await app.call("/v1/models", headers=[(b"host", b"localhost")])
        assert not [name for name in given.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("method", "path"), [
    ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("DELETE", "/v1/responses/resp-1"),
])
async def test_openais_client_can_call_from_an_allowed_site(method: str, path: str) -> None:
    """Before a call a browser asks for every header that the client adds: all are allowed for the site, and no others
    for it, and nothing for another site. The page may read the id and when to try again."""
    asked = [(b"host", b"localhost"), (b"access-control-request-method", method.encode())]
    async with paged(hosts=HOSTS, origins=["https://friend.example"]) as app:

        async def preflight(site: bytes, headers: str) -> Exchange:
            more = [(b"origin", site), (b"access-control-request-headers", headers.encode())]
            return await app.call(path, b"OPTIONS", headers=[*asked, *more])

        given = await preflight(b"https://friend.example", OF_OPENAIS_CLIENT)
        assert (given.status, given.headers["access-control-allow-origin"]) == (200, "https://friend.example")
        assert method in given.headers["access-control-allow-methods"]
        allowed = given.headers["access-control-allow-headers"].lower().split(", ")
        assert set(OF_OPENAIS_CLIENT.split(",")) <= set(allowed)
        assert (await preflight(b"https://friend.example", "x-tenant")).status == 400
        assert (await preflight(b"https://other.example", "authorization")).status == 400
        answer = await app.call("/v1/models", headers=[(b"host", b"localhost"), (b"origin", b"https://friend.example")])
        assert answer.headers["access-control-expose-headers"].lower() == "retry-after, x-request-id"


async def test_without_hosts_a_host_application_decides() -> None:
    """A mounted app that knows no hosts and no origins asks nothing; with ``origins`` alone it asks for the Origin."""
    for options, status in (({}, 200), ({"origins": []}, 403), ({"origins": ["https://a.example"]}, 200)):
        async with opened(**options) as app:
            headers = [*JSON_TYPE, (b"host", b"any.example"), (b"origin", b"https://a.example")]
            assert (await app.call(TEXT, BODY, headers=headers)).status == status


@pytest.mark.parametrize(("hosts", "origins"), [
    (["http://a"], None), (["a:80"], None), ([""], None), (["a/b"], None), (None, ["a.example"]), (None, ["*"]),
    (None, ["https://a.example/"]), (None, ["ftp://a.example"]),
])
def test_hosts_and_origins_are_checked_at_the_start(hosts: Any, origins: Any) -> None:
    """What could never match, or would match everything, is refused with what is allowed."""
    with pytest.raises(InvalidConfig, match="allowed is"):
        Browsers(hosts, origins)


async def test_without_keys_everything_is_shown() -> None:
    """Rows, queue with reasons, blocks and figures of all requests, with labels of the view's own: no text, no token
    and no id of the engine or of a caller."""
    async with paged(engine_settings={"max_num_seqs": 2, "tokenizer": Spy()}) as app:
        view = app.begin("/live", b"GET")
        await until(view, lambda _: True)
        calls = [app.begin(TEXT, {**LONG, "prompt": "secretword", "stream": True, "request_id": f"label-{number}"})
                 for number in range(3)]
        frame = await until(view, lambda one: len(one["rows"]) == 2 and one["queue"])
        assert sorted((lane, label) for lane, label, *_ in frame["rows"]) == [(0, "1"), (1, "2")]
        ((label, reason, waited_s, num_prompt_tokens, is_preempted),) = frame["queue"]
        assert (label, reason, num_prompt_tokens, is_preempted) == ("3", "rows", 10, False)
        assert waited_s >= 0
        assert (frame["max_rows"], frame["num_waiting"]) == (2, 1)
        assert set(frame["blocks"]) == {"total", "running", "cached", "host", "host_used", "host_cached"}
        await until(view, lambda one: one["sampled"] > 0 and one["itl"][1] > 0)
        await calls[0].leave()
        frame = await until(view, lambda one: any(ended[6] == "abort" for ended in one["ended"]))
        assert {"1"} == {ended[1] for ended in frame["ended"] if ended[6] == "abort"}
        await until(view, lambda one: (0, "3") in [(lane, label) for lane, label, *_ in one["rows"]])
        await calls[1].until_text("cmpl-")
        for call in calls[1:]:
            await call.leave()
        await view.leave()
        ids = re.findall(r"cmpl-\w+", "".join(call.text for call in calls))
        assert ids
        assert not [word for word in ("secretword", "label-", *ids) if word in view.text]


class Spy(WritesLetters):
    """Letters as tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a token for each letter."""
        return [ord(letter) % 26 for letter in text]


async def test_a_tenant_sees_its_own_rows_and_nothing_of_others() -> None:
    """With keys a caller sees the requests of its key, whatever salts it named, in lanes and numbers of its own, and no
    count of others; another tenant sees an empty batch; the operator sees all of it."""
    async with paged(api_keys=KEYS, engine_settings={"max_num_seqs": 4}) as app:
        for headers in (JSON_TYPE, with_key("wrong")):
            assert (await app.call("/live", headers=headers)).status == 401
        views = {key: app.begin("/live", b"GET", headers=with_key(key)) for key in (ONE, TWO, ADMIN)}
        for view in views.values():
            await until(view, lambda _: True)
        calls = []
        for salt in (None, "a", "b"):
            body = {**LONG, "stream": True, **({"cache_salt": salt} if salt else {})}
            calls.append(app.begin(TEXT, body, headers=with_key(ONE)))
            await until(views[ADMIN], lambda one: len(one["rows"]) == len(calls))
        calls.append(app.begin(TEXT, {**LONG, "stream": True}, headers=with_key(ADMIN)))
        await until(views[ADMIN], lambda one: len(one["rows"]) == 4)
        await until(views[ONE], lambda one: [row[1] for row in one["rows"]] == ["1", "2", "3"])
        for frame in frames_of(views[TWO]):
            assert (frame["rows"], frame["ended"], frame["queue"], frame["num_waiting"]) == ([], [], [], 0)
            assert (frame["sampled"], frame["ttft"], frame["itl"]) == (0, [], [0, 0])
            assert frame["blocks"] == {"total": 1200, "yours": 0}
        await calls[0].leave()
        calls.append(app.begin(TEXT, {**LONG, "stream": True}, headers=with_key(TWO)))
        frame = await until(views[TWO], lambda one: one["rows"])
        assert [row[:2] for row in frame["rows"]] == [[0, "1"]]
        assert max(row[0] for one in frames_of(views[ONE]) for row in one["rows"]) == 2
        for exchange in (*calls[1:], *views.values()):
            await exchange.leave()


async def test_how_often_a_tenant_gets_frames_tells_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does nothing gets one frame at first and then nothing for a while, however busy the others are."""
    async with paged(api_keys=KEYS) as app:
        monkeypatch.setattr(live, "QUIET_S", 60.0)
        one, two = (app.begin("/live", b"GET", headers=with_key(key)) for key in (ONE, TWO))
        for view in (one, two):
            await until(view, lambda _: True)
        call = app.begin(TEXT, {**LONG, "stream": True}, headers=with_key(ONE))
        await until(one, lambda frame: len(frames_of(one)) > 20)
        assert len(frames_of(two)) == 1
        for exchange in (one, two, call):
            await exchange.leave()


def test_a_tenants_frames_are_those_of_an_engine_of_its_own() -> None:
    """Random looks with and without sequences of other tenants: a tenant's frames are equal, lanes and labels too."""
    rng = random.Random(5)
    alone, among = Scope(lambda salt: salt == b"a"), Scope(lambda salt: salt == b"a")
    running: dict[int, Stretch] = {}
    for now in range(1, 200):
        ended = []
        for number in list(running):
            running[number] = running[number]._replace(end_s=float(now))
            if rng.random() < 0.2:
                ended.append(running.pop(number)._replace(ending=rng.choice(["stop", "preempted", "abort"])))
        for _ in range(rng.randrange(4)):
            number = now * 10 + len(running)
            running[number] = Stretch(number, f"request {number // 2}", rng.choice([b"a", b"b", b"c"]), "decode",
                                      now - 1.0, float(now), 1)
        waiting = [Waiting(-number, f"waits {number}", rng.choice([b"a", b"b"]), "rows", 1.0, 3, False)
                   for number in range(rng.randrange(5))]
        progress = {salt: Progress(rng.randrange(9), 2, rng.random()) for salt in (b"a", b"b")}
        whole = Look(float(now), STATS, ended, list(running.values()), waiting, progress)
        parts = ([one for one in part if one.salt == b"a"] for part in (ended, list(running.values()), waiting))
        own = Look(float(now), STATS, *parts, {b"a": progress[b"a"]})
        frame = among.frame(whole)
        assert frame == alone.frame(own)
        lanes = [row[0] for row in frame["rows"]]
        assert len(set(lanes)) == len(lanes) == len(own.running)


async def test_a_hook_of_the_host_says_who_is_who() -> None:
    """Where the host derives salts, callers with the same one see the same, and no caller sees all."""
    async with paged(salt_of=lambda request: request.headers["x-tenant"]) as app:

        def headers(tenant: bytes) -> Any:
            return [*JSON_TYPE, (b"x-tenant", tenant)]

        one, two = (app.begin("/live", b"GET", headers=headers(tenant)) for tenant in (b"a", b"b"))
        await until(one, lambda _: True)
        call = app.begin(TEXT, {**LONG, "stream": True, "cache_salt": "more"}, headers=headers(b"a"))
        await until(one, lambda frame: frame["rows"])
        await until(two, lambda _: True)
        assert not any(frame["rows"] for frame in frames_of(two))
        assert (await app.call("/live", headers=JSON_TYPE)).status == 500
        for exchange in (one, two, call):
            await exchange.leave()


async def test_the_engine_is_observed_while_somebody_looks() -> None:
    """The first viewer brings the observer, further ones none, and it goes with the last one, however it leaves; a view
    is no call in flight."""
    async with paged() as app:
        before = await num_observers(app)
        views = [app.begin("/live", b"GET") for _ in range(3)]
        for view in views:
            await until(view, lambda _: True)
        assert await num_observers(app) == before + 1
        assert app.asgi.service.open_calls.num_open == 0
        for number, view in enumerate(views):
            assert await num_observers(app) == before + 1, number
            await view.leave()
        await until_observers(app, before)
        view = app.begin("/live", b"GET")
        await asyncio.sleep(0)
        await view.leave()
        await until_observers(app, before)
        (shown,) = app.asgi.service.live.values()
        assert (shown.num_viewers, shown._channels) == (0, {})


async def test_a_slow_viewer_misses_frames() -> None:
    """For one that does not read nothing grows: the latest frames are kept, for all viewers once, and it goes on with
    these; another viewer beside it gets every frame."""
    async with paged() as app:
        reads = asyncio.Event()
        slow, quick = app.begin("/live", b"GET", reads=reads), app.begin("/live", b"GET")
        call = app.begin(TEXT, {**LONG, "stream": True})
        await until(quick, lambda one: one["rows"])
        async with asyncio.timeout(30.0):
            while len(frames_of(quick)) < 4 * live.MAX_FRAMES:
                await asyncio.sleep(0.005)
        (channel,) = next(iter(app.asgi.service.live.values()))._channels.values()
        assert len(channel.frames) == live.MAX_FRAMES
        latest_s = frames_of(quick)[-1]["t"]
        reads.set()
        await until(slow, lambda one: one["t"] > latest_s)
        assert len(frames_of(slow)) < len(frames_of(quick)) - live.MAX_FRAMES
        for exchange in (slow, quick, call):
            await exchange.leave()


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is 429 and changes nothing; a place that was left is free. A tenant cannot take all places."""
    monkeypatch.setattr(live, "MAX_VIEWERS", 2)
    async with paged() as app:
        views = [app.begin("/live", b"GET") for _ in range(2)]
        for view in views:
            await until(view, lambda _: True)
        assert (await app.call("/live")).status == 429
        await views.pop().leave()
        views.append(app.begin("/live", b"GET"))
        await until(views[-1], lambda _: True)
        for view in views:
            await view.leave()
    monkeypatch.setattr(live, "MAX_TENANTS_VIEWERS", 1)
    async with paged(api_keys=KEYS) as app:
        views = [app.begin("/live", b"GET", headers=with_key(ONE))]
        await until(views[0], lambda _: True)
        assert (await app.call("/live", headers=with_key(ONE))).status == 429
        views.append(app.begin("/live", b"GET", headers=with_key(TWO)))
        await until(views[1], lambda _: True)
        for view in views:
            await view.leave()


async def test_views_end_with_the_server() -> None:
    """A drain ends them at once, also one that comes then, and the observer goes; a closed engine ends them with an
    error."""
    async with paged() as app:
        before = await num_observers(app)
        view = app.begin("/live", b"GET")
        await until(view, lambda _: True)
        assert await app.asgi.drain() == 0
        await view.task
        assert view.text.endswith("event: done\ndata: {}\n\n")
        assert (await app.call("/live")).text == "event: done\ndata: {}\n\n"
        await until_observers(app, before)
    async with paged() as app:
        view = app.begin("/live", b"GET")
        await until(view, lambda _: True)
        await app.engine.aclose()
        await view.task
        assert "event: error" in view.text

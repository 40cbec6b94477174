"""The parts of the BentoML adapter that need no server: events, the service factory, lazy imports, the plugin."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import bentoml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from adapters.bentoml.asgi_caller import serving
from adapters.bentoml.processes import environment
from pagedcore import AsyncEngine, CompletionOutput, RequestOutput, TokenLogprobs, expose
from pagedcore.errors import InvalidConfig
from pagedcore.outputs import RequestMetrics
from pagedcore_bentoml import EventParser, PagedCoreRunner, create_service
from pagedcore_bentoml.body import MAX_JSON_DEPTH, read_fields
from pagedcore_bentoml.doorkeeper import Doorkeeper
from pagedcore_bentoml.events import WAITING, frame
from pagedcore_bentoml.farewell import Farewell
from pagedcore_bentoml.pieces import AT_ONCE
from pagedcore_bentoml.refusals import NotServing, RefusedAtTheDoor, refusal_of
from pagedcore_bentoml.responses import EventStream
from pagedcore_bentoml.wire import BatchCompletion, completion_of
from support.engine_builders import make_engine


async def test_a_signal_waits_for_the_drain_and_a_second_one_does_not() -> None:
    """The handler that was there hears the first signal when all have left, a further one at once; then it is back."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        everybody_left, told = asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            told.set()
            await everybody_left.wait()

        farewell = Farewell(drain)
        farewell.install()
        signal.raise_signal(signal.SIGTERM)
        await told.wait()
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        everybody_left.set()
        while len(heard) < 2:
            await asyncio.sleep(0)
        farewell.remove()
        assert signal.getsignal(signal.SIGTERM) is hear
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_process_that_has_no_handler_ends_as_it_would_have() -> None:
    """Where nobody is to be told afterwards, and on threads that get no signals, the signal is left alone."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        Farewell(asyncio.Event().wait).install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, print)
        await asyncio.to_thread(Farewell(asyncio.Event().wait).install)
        assert signal.getsignal(signal.SIGTERM) is print
    finally:
        signal.signal(signal.SIGTERM, before)


@given(st.lists(st.tuples(st.sampled_from(["", "done", "error"]), st.text()), max_size=8), st.integers(1, 7))
def test_events_survive_any_cut(events: list[tuple[str, str]], size: int) -> None:
    """Whatever the text, and wherever the bytes are cut, the reader gets the events that were written."""
    data = WAITING.join(frame({"text": text}, name) for name, text in events).encode("ascii")
    parser = EventParser()
    pieces = [data[start : start + size].decode("ascii") for start in range(0, len(data), size)]
    found = [(event.name, event.data["text"]) for piece in pieces for event in parser.feed(piece)]
    assert found == events


async def sent_for(*pieces: str) -> list[tuple[str, bool]]:
    """What an event stream of these pieces sends: bodies, and whether more is said to come."""
    messages: list[dict[str, Any]] = []

    async def events() -> AsyncGenerator[str, None]:
        for piece in pieces:
            yield piece

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    await EventStream(events())({"type": "http"}, receive, send)
    assert [message["type"] for message in messages] == ["http.response.start"] + ["http.response.body"] * (
        len(messages) - 1)
    return [(message["body"].decode(), message["more_body"]) for message in messages[1:]]


async def test_the_end_comes_with_the_last_piece() -> None:
    """Nothing is sent after "done", and the text of an answer cannot be taken for it."""
    treacherous, done = frame({"text": "event: done\n\nevent: error\n"}), frame({"usage": None}, "done")
    assert await sent_for(treacherous, frame({"text": "b"}) + done) == [
        (treacherous, True), (frame({"text": "b"}) + done, False)]


async def test_a_stream_of_other_events_ends_too() -> None:
    """An endpoint of somebody's own that knows no "done" gets its end, empty."""
    mine = frame({"mine": 1}, "progress") + "data: event: done\n\n"
    assert await sent_for(mine, mine) == [(mine, True), (mine, True), ("", False)]


async def test_what_is_there_at_the_start_is_not_searched_for_garbage() -> None:
    """While the service runs the collector leaves it alone, afterwards no more."""
    gc.unfreeze()
    with AsyncEngine(make_engine()) as engine:
        async with serving(engine):
            assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("workers", [2, "cpu_count", 0, None])
def test_more_than_one_worker_is_refused(workers: object) -> None:
    """Workers would each load the model and divide the batch."""
    with pytest.raises(InvalidConfig, match="workers"):
        create_service("demo", service={"workers": workers})


def test_the_factory_makes_services_apart_from_each_other() -> None:
    """Two services have their own model and settings, and belong to the module that asked for them."""
    first, second = create_service("demo", name="first"), expose("bentoml", model="other", name="second", seed=3)
    assert isinstance(second, bentoml.Service)
    assert (first.inner.model, first.inner.settings) == ("demo", {})
    assert (second.inner.model, second.inner.settings) == ("other", {"seed": 3})
    assert (first._caller_module, second._caller_module) == (__name__, __name__)
    assert first.config["traffic"] == {"timeout": 300}


def test_streams_are_traced_for_those_who_ask() -> None:
    """Without a word about tracing, streams and nothing else are left out; whoever configures it gets all of it."""
    (pattern,) = create_service("demo").config["tracing"].values()
    paths = ("stream", "v1/stream", "generate", "streams", "stream/x")
    addresses = [f"http://streams.example/{path}" for path in paths]
    assert [address for address in addresses if re.search(pattern, address)] == addresses[:2]
    asked = {"exporter_type": "in_memory", "sample_rate": 1.0}
    assert create_service("demo", service={"tracing": asked}).config["tracing"] == asked


def test_a_runner_without_a_model_says_so() -> None:
    """The class form needs a model; the message names it."""
    with pytest.raises(InvalidConfig, match="model"):
        _ = PagedCoreRunner().engine


async def test_a_doorkeeper_waits_for_those_inside_and_no_longer_than_told() -> None:
    """Draining lets nobody in, ends when all have left, and gives up after its time."""
    door = Doorkeeper()
    with door.call():
        assert await door.drain(timeout_s=0.01) == 1
        with pytest.raises(NotServing), door.call():
            pass
        waiting = asyncio.create_task(door.drain(timeout_s=60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 0


def test_an_unforeseen_error_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """What a library raises may hold anything; the caller gets a status, the log the rest."""
    refusal = refusal_of(RuntimeError("a path, a prompt"))
    assert refusal.status == 500
    assert "prompt" not in str(refusal.body)
    assert "unforeseen" in caplog.text


def printed_by(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True,
                          text=True).stdout


def test_the_plugin_is_listed_without_importing_bentoml() -> None:
    """Listing adapters imports none of their frameworks; importing the package does not either."""
    code = ("import sys, pagedcore_bentoml, pagedcore_bentoml.plugin as plugin\n"
            "from pagedcore.plugins.manager import create_plugin_manager\n"
            "manager = create_plugin_manager([plugin], entry_points=False)\n"
            "print('bentoml' in manager.registry.adapters, 'bentoml' in sys.modules, 'starlette' in sys.modules)")
    assert printed_by(code).split() == ["True", "False", "False"]


def test_without_bentoml_the_extra_is_named() -> None:
    """Importing a name where BentoML is missing says what to install."""
    code = ("import sys; sys.modules['bentoml'] = None; sys.modules['starlette'] = None\n"
            "import pagedcore_bentoml\n"
            "try: pagedcore_bentoml.PagedCoreRunner\n"
            "except Exception as error: print(type(error).__name__, error)")
    printed = printed_by(code)
    assert printed.startswith("MissingDependency")
    assert "pagedcore[bentoml]" in printed


@pytest.mark.parametrize("num_entries", [0, 1, AT_ONCE, 2 * AT_ONCE + 1])
async def test_long_lists_are_written_in_pieces_as_a_whole(num_entries: int) -> None:
    """The JSON is pydantic's, whatever the values, and the loop runs between two pieces."""
    entries = [TokenLogprobs(number, -math.inf if number == 3 else -0.1 * number, ((number, -1e-9), (7, -2.5)))
               for number in range(num_entries)]
    answer = CompletionOutput(0, 'a "word"\n\u20ac', (1, 2), "stop", tuple(entries))
    output = RequestOutput("r", (1,), [answer, answer], True, 0, RequestMetrics(0.0), (None, *entries))
    turns = itertools.count()

    async def count() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    completion = await completion_of(output)
    batch = BatchCompletion(completions=[completion, completion])
    written = await batch.json_in_pieces()
    counting.cancel()
    assert json.loads(written) == json.loads(batch.model_dump_json())
    assert next(turns) >= 9 * (max(1, math.ceil(num_entries / AT_ONCE)) - 1)


def nested(depth: int) -> Any:
    return {} if depth == 1 else {"a": nested(depth - 1)} if depth % 2 else [1, nested(depth - 1)]


@pytest.mark.parametrize("filler", [[], [7] * 40_000, [{"role": "user", "content": "a [ { text"}] * 1000,
                                    [None, True, 1.5, "x", -0, 10**30] * 1000, {str(n): n for n in range(5000)}])
async def test_a_long_body_is_read_as_a_short_one(filler: Any) -> None:
    """On another thread where it is long: the same values, the same refusals of what is too deep or no JSON."""
    for depth, is_refused in ((MAX_JSON_DEPTH - 1, False), (MAX_JSON_DEPTH, True)):
        fields = {"prompt": filler, "sampling": nested(depth)}
        reading = read_fields(request_with(json.dumps(fields).encode()), ["prompt", "sampling"], [], 2**20)
        if is_refused:
            with pytest.raises(RefusedAtTheDoor, match="64 levels"):
                await reading
        else:
            assert await reading == fields
    for ending in (b"", b"}}", b',"a":NaN}'):
        broken = b'{"prompt":' + json.dumps(filler).encode() + ending
        with pytest.raises(RefusedAtTheDoor, match="JSON text"):
            await read_fields(request_with(broken), ["prompt"], [], 2**20)


def request_with(body: bytes) -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": []}, receive)

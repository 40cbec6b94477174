"""More models than there is memory for, in one server: calls wake what they name."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")
pytest.importorskip("openai")

import openai
from openai import OpenAI

from adapters.bentoml.asgi_caller import JSON_TYPE, App
from adapters.openai.test_serve import serve_process
from pagedcore import AsyncEngine, SharedEngines
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.engine.sleeping import Wake
from pagedcore.errors import DeadlineMissed, InvalidConfig, InvalidWeights, RequestTimeout
from pagedcore.serving.async_sleep import AsyncSleep
from pagedcore_openai import ApiKeys, openai_app
from pagedcore_openai.app import create
from pagedcore_openai.times import Timed
from support.paused_steps import slowed
from support.runner import try_invoke

ONE, LIMITED, ADMIN = "key-of-tenant-one", "key-of-tenant-two", "key-of-the-operator"
TEN = [f"model-{number}" for number in range(10)]
SLOW_WAKE = """
import sys, time
from pathlib import Path
from pagedcore.cli.main import main
from pagedcore.engine.sleeping import Wake
read = Wake.read
def slow(wake):
    print("waking", file=sys.stderr, flush=True)
    while not Path(__file__).with_name("go on").exists():
        time.sleep(0.01)
    read(wake)
Wake.read = slow
main()
"""


def asked(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "What is 2 + 3?", "max_tokens": 4, "temperature": 0, **more}


@asynccontextmanager
async def two_of_three(**settings: Any) -> AsyncIterator[tuple[App, SharedEngines]]:
    """Three models where there is room for two."""
    shared = SharedEngines.from_pretrained(
        dict.fromkeys("abc", "demo"), memory="14MiB", kv_cache_memory="6MiB", max_num_seqs=4, **settings)
    async with shared:
        app: Any = openai_app(shared, api_keys=ApiKeys([ONE, LIMITED], ADMIN, models={LIMITED: ["b"]}), metrics=True,
                              weights_dir=DEMO_MODEL_DIR.parent)
        yield App(app, app, shared), shared  # type: ignore[arg-type]


def awake(shared: SharedEngines) -> str:
    return "".join(name for name, engine in shared.engines.items() if not engine.sleep_level)


def with_key(key: str = ONE) -> list[tuple[bytes, bytes]]:
    return [*JSON_TYPE, (b"authorization", f"Bearer {key}".encode())]


async def test_calls_wake_and_looks_do_not() -> None:
    """Completions, whole and streamed, wake their model; lists, health, metrics, tokens and refused calls do not."""
    async with two_of_three() as (app, shared):
        assert awake(shared) == "bc"
        for path, content in (
            ("/v1/models", b"GET"), ("/v1/models/a", b"GET"), ("/health", b"GET"), ("/metrics", b"GET"),
            ("/tokenize", {"model": "a", "prompt": "x"}), ("/v1/completions", asked("a", max_tokens=-1)),
            ("/v1/completions", asked("other")), ("/is_sleeping?model=a", b"GET"),
            ("/v1/completions", asked("a", deadline_s=9)),
            ("/v1/embeddings", {"model": "a", "input": "x", "deadline_s": 9}),
        ):
            await app.call(path, content, headers=with_key(ADMIN))
            assert awake(shared) == "bc", path
        assert (await app.call("/v1/completions", asked("a"), headers=with_key(LIMITED))).status == 404
        assert awake(shared) == "bc"
        answers = [json.loads((await app.call("/v1/completions", asked(name), headers=with_key())).text)["choices"]
                   for name in ("b", "a")]
        assert (answers[0], awake(shared)) == (answers[1], "ab")
        stream = await app.call("/v1/completions", asked("c", stream=True), headers=with_key())
        assert ("data: [DONE]" in stream.text, awake(shared)) == (True, "ac")
        slept = await app.call("/sleep?model=c&level=2", b"", headers=with_key(ADMIN))
        assert (slept.status, awake(shared)) == (200, "a")
        woken = await app.call("/wake_up?model=b", b"", headers=with_key(ADMIN))
        assert (woken.status, awake(shared)) == (200, "ab")
        # Rule: a second copy of weights is staged where others sleep.
        loaded = await app.call("/update_weights", {"model": "a", "weights": DEMO_MODEL_DIR.name},
                                headers=with_key(ADMIN))
        assert (loaded.status, awake(shared)) == (200, "a")


async def test_the_time_of_a_wake_is_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose time passes meanwhile is told so, whole, streamed or for vectors; the wake goes on, and another call
    finds the model awake. What is left of the time is the engine's to keep.
    """
    may_read, read = threading.Event(), Wake.read
    monkeypatch.setattr(Wake, "read", lambda wake: (may_read.wait(20), read(wake)))
    async with two_of_three(scheduling_policy="deadline") as (app, shared):
        for path, fields, status in (
            ("/v1/completions", asked("a", timeout_s=0.05), 504), ("/v1/completions", asked("a", deadline_s=0.05), 503),
            ("/v1/completions", asked("a", stream=True, timeout_s=0.05, deadline_s=9), 504),
            ("/v1/embeddings", {"model": "a", "input": "x", "timeout_s": 0.05}, 504),
        ):
            late = await app.call(path, fields, headers=with_key())
            message = late.error["message"]
            assert (late.status, "its model, which sleeps" in message, "0.05" in message) == (status, True, True)
        patient = app.begin("/v1/completions", asked("a", timeout_s=30), headers=with_key())
        may_read.set()
        await patient.task
        assert (patient.status, "a" in awake(shared)) == (200, True)


async def test_what_a_wake_has_taken_is_taken_off() -> None:
    """Of the time limit, the deadline and the target; errors name what was asked for."""
    call = Timed()
    call.timeout_s, call.options = 500.0, {"deadline_s": 400.0, "ttft_ms": 300_000.0, "priority": 2}
    await call.after(asyncio.sleep(0.1))
    left, told = call.left_s, call.options_left
    assert left is not None
    assert 400.0 < left <= 499.9
    assert (told["deadline_s"], told["ttft_ms"], told["priority"]) == (
        pytest.approx(left - 100), pytest.approx(1000 * (left - 200)), 2)
    assert str(call.as_asked(RequestTimeout(left))) == str(RequestTimeout(500.0))
    assert str(call.as_asked(DeadlineMissed(399.9, waits_for="its adapter"))) == str(
        DeadlineMissed(400.0, waits_for="its adapter"))


async def test_without_room_the_refusal_names_the_model() -> None:
    """503, with a time to try again; a stream keeps its model until its last chunk was sent."""
    async with two_of_three() as (app, shared):
        with slowed(shared.engines["b"]), slowed(shared.engines["c"]):
            streams = [app.begin("/v1/completions", asked(name, stream=True, max_tokens=900, ignore_eos=True),
                                 headers=with_key()) for name in "bc"]
            for stream in streams:
                await stream.until_text("data: ")
            refused = await app.call("/v1/completions", asked("a"), headers=with_key())
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert "a, which sleeps" in json.loads(refused.text)["error"]["message"]
            for stream in streams:
                await stream.leave()
        assert (await app.call("/v1/completions", asked("a"), headers=with_key())).status == 200


async def test_a_wake_that_fails_tells_no_tenant_of_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers get 503 and the operator's log has the reason."""
    async def fail(_: AsyncSleep) -> None:
        raise InvalidWeights("weights", "/home/secret/file", "others", is_described=True)

    async with two_of_three() as (app, _):
        monkeypatch.setattr(AsyncEngine, "wake", fail)
        refused = await app.call("/v1/completions", asked("a"), headers=with_key())
    assert (refused.status, "secret" in refused.text, "secret" in caplog.text) == (503, False, True)


@pytest.mark.slow
def test_ten_models_are_served_where_three_fit() -> None:
    """Each answers when it is called, callers of one at a time share its wake, and SIGTERM ends the process with 0."""
    models = [word for name in TEN for word in ("--model", f"{name}=demo")]
    with serve_process(*models, "--memory", "20MiB", "--kv-memory", "20MiB", "--max-num-seqs", "4", "--idle-unload",
                       "1h", PAGEDCORE_API_KEYS=ONE, PAGEDCORE_ADMIN_KEY=ADMIN) as server:

        def num_awake() -> int:
            told = []
            for name in TEN:
                asking = urllib.request.Request(f"{server.url.removesuffix('/v1')}/is_sleeping?model={name}",
                                                headers={"Authorization": f"Bearer {ADMIN}"})
                with urllib.request.urlopen(asking) as answer:
                    told.append(json.load(answer)["is_sleeping"])
            return told.count(False)

        with OpenAI(base_url=server.url, api_key=ONE, max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == TEN
            assert num_awake() == 3
            said = [client.completions.create(**asked(name)).choices[0].text for name in TEN]
            assert (set(said), num_awake()) == ({said[0]}, 3)
            answers = list[str]()
            threads = [threading.Thread(target=lambda: answers.append(
                client.completions.create(**asked(TEN[0])).choices[0].text)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert answers == said[:1] * 8
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.text


@pytest.mark.parametrize("drain_s", [pytest.param("20", marks=pytest.mark.slow), "0.1"])
def test_a_server_that_is_ended_in_a_wake_ends_with_0(drain_s: str, tmp_path: Path) -> None:
    """The call that waits for it is answered within the drain, and told of the end behind it."""
    (program := tmp_path / "slow_wake.py").write_text(SLOW_WAKE)
    with serve_process("-m", "a=demo", "-m", "b=demo", "--memory", "7MiB", "--kv-memory", "4MiB", "--max-num-seqs", "4",
                       "--drain-s", drain_s, program=(str(program),)) as server:
        ends = list[Any]()

        def call() -> None:
            with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
                try:
                    ends.append(client.completions.create(**asked("a")).choices[0].finish_reason)
                except openai.OpenAIError as error:
                    ends.append(type(error))

        thread = threading.Thread(target=call)
        thread.start()
        while "waking" not in server.text:
            assert thread.is_alive()
        server.process.send_signal(signal.SIGTERM)
        if drain_s == "0.1":
            # Why: the wake ends only after that.
            thread.join(60)
        program.with_name("go on").touch()
        assert server.process.wait(60) == 0
        thread.join()
        assert ends == (["length"] if drain_s == "20" else [openai.InternalServerError])
        assert "Traceback" not in server.text


@pytest.mark.parametrize(("words", "said"), [
    (("demo", "--idle-unload", "ten"), "--idle-unload: got 'ten'"), (("demo", "--idle-unload", "0s"), "idle_s: got 0"),
    (("demo", "--memory", "8G"), "total: got '8G'"), (("demo", "--memory", "1MiB"), "memory budget: asked for"),
])
def test_sizes_and_times_are_read(words: tuple[str, ...], said: str) -> None:
    """What is none is refused, with what is needed."""
    with pytest.raises(InvalidConfig, match=said):
        try_invoke("serve", *words, "--port", "0")


def test_an_engine_of_a_callers_own_is_not_taken() -> None:
    """It would be closed and put to sleep by another."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=16) as engine, \
            pytest.raises(InvalidConfig, match="models: got an engine"):
        create({"a": engine}, memory="64MiB")

"""The door of the BentoML service, in one process: what is answered, what is refused and how, who may leave when."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from adapters.bentoml.asgi_caller import App, serving
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.health import Health
from pagedcore_bentoml import EventParser, PagedCoreRunner
from support.async_helpers import SlowBackend
from support.doubles import FakeClock, FlakyBackend, toy_answer
from support.engine_builders import make_engine
from support.paused_steps import paused_after

LONG = {"max_tokens": 4000, "ignore_eos": True}


def short(max_tokens: int = 4) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


def tokens_of(text: str) -> list[int]:
    return [token for event in EventParser().feed(text) if not event.name for token in event.data["token_ids"]]


async def test_a_whole_answer_a_batch_and_a_stream_say_the_same(app: App) -> None:
    """The three forms give the engine's answer, and the stream ends with its usage."""
    expected = toy_answer([1, 2], 4)
    whole = await app.call("/generate", {"prompt": [1, 2], "sampling": short()})
    batch = await app.call("/batch", {"prompts": [[1, 2], [3]], "sampling": [short(), short(2)]})
    stream = await app.call("/stream", {"prompt": [1, 2], "sampling": short()})
    assert json.loads(whole.text)["outputs"][0]["token_ids"] == expected
    answers = [completion["outputs"][0]["token_ids"] for completion in json.loads(batch.text)["completions"]]
    assert answers == [expected, toy_answer([3], 2)]
    assert tokens_of(stream.text) == expected
    done = EventParser().feed(stream.text)[-1]
    assert (done.name, done.data["usage"]["num_output_tokens"]) == ("done", 4)
    assert stream.headers["content-type"].startswith("text/event-stream")


async def test_streams_have_no_trace(app: App) -> None:
    """The default of ``create_service`` reaches BentoML: only what is traced has the id of a trace's span."""
    whole = await app.call("/generate", {"prompt": [1, 2], "sampling": short()})
    stream = await app.call("/stream", {"prompt": [1, 2], "sampling": short()})
    assert ("x-bentoml-request-id" in whole.headers, "x-bentoml-request-id" in stream.headers) == (True, False)


async def test_several_answers_and_logprobs_pass_the_stream(app: App) -> None:
    """With n answers every delta has its index, and log-probabilities come when they are asked for."""
    several = {**short(), "n": 2, "temperature": 1.0, "logprobs": 2}
    stream = await app.call("/stream", {"prompt": [1], "sampling": several})
    deltas = [event.data for event in EventParser().feed(stream.text) if not event.name]
    assert {delta["index"] for delta in deltas if "finish_reason" in delta} == {0, 1}
    assert all(len(entry["top"]) == 2 for delta in deltas for entry in delta["logprobs"])


async def test_prompt_logprobs_pass_every_door_and_a_prompt_counts_once(app: App) -> None:
    """Whole, in a batch and at the end of a stream: an entry per token of the prompt, which usage counts once for n."""
    several = {**short(), "n": 3, "temperature": 1.0, "prompt_logprobs": 1}
    whole = json.loads((await app.call("/generate", {"prompt": [1, 2, 3], "sampling": several})).text)
    batch = json.loads((await app.call("/batch", {"prompts": [[1, 2, 3]], "sampling": several})).text)
    stream = await app.call("/stream", {"prompt": [1, 2, 3], "sampling": several})
    done = EventParser().feed(stream.text)[-1].data
    for answered in (whole, batch["completions"][0], done):
        assert answered["usage"]["num_prompt_tokens"] == 3
        assert answered["usage"]["num_output_tokens"] == 12
        first, *others = answered["prompt_logprobs"]
        assert (first, [entry["token_id"] for entry in others]) == (None, [2, 3])
        assert [len(entry["top"]) for entry in others] == [1, 1]
    assert whole["prompt_logprobs"] == done["prompt_logprobs"]
    plain = json.loads((await app.call("/generate", {"prompt": [1, 2, 3], "sampling": short()})).text)
    assert "prompt_logprobs" not in plain


REFUSED = [
    ({"prompt": []}, "PromptEmpty", "prompt"),
    ({"prompt": "no tokenizer here"}, "InvalidPrompt", "prompt"),
    ({"prompt": [1, True]}, "InvalidPrompt", "prompt"),
    ({"prompt": [10**30]}, "InvalidToken", "prompt"),
    ({"prompt": None}, "InvalidPrompt", "prompt"),
    ({}, "InvalidPrompt", "prompt"),
    ({"prompt": [1], "sampling": {"temperature": "hot"}}, "InvalidSampling", "temperature"),
    ({"prompt": [1], "sampling": {"temprature": 1}}, "UnknownParameter", "parameter name"),
    ({"prompt": [1], "sampling": []}, "UnknownParameter", "sampling parameters"),
    ({"prompt": [1], "priority": "high"}, None, "priority"),
    ({"prompt": [1], "timeout_s": -1}, None, "timeout_s"),
    ({"prompt": [1], "timeout_s": 1e10}, None, "timeout_s"),
    ({"prompt": [1], "timeout_s": 10**400}, None, "timeout_s"),
    ({"prompt": [1], "max_tokens": 3}, "UnknownParameter", "field name"),
    ([], "RefusedAtTheDoor", "body"),
    (b"{", "RefusedAtTheDoor", "body"),
    (b'{"prompt": NaN}', "RefusedAtTheDoor", "body"),
    (b"\xff\xfe", "RefusedAtTheDoor", "body"),
    (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "RefusedAtTheDoor", "body"),
    (b"[" * 16_000, "RefusedAtTheDoor", "body"),
]


@pytest.mark.parametrize("path", ["/generate", "/stream"])
async def test_what_is_refused_says_what_the_value_and_the_limit(app: App, path: str) -> None:
    """Whole or streamed, a refusal is a 400 with the input, the given value and the limit, and takes nothing."""
    for body, kind, what in REFUSED:
        refused = await app.call(path, body)
        assert (refused.status, refused.error["what"]) == (400, what), body
        assert kind is None or refused.error["type"] == kind, body
        assert refused.error["given"], body
        assert refused.error["limit"] in refused.error["message"], body
        assert app.is_idle(), body


async def test_chat_takes_messages_only(app: App) -> None:
    """What is not a list of messages is refused by its name."""
    wrong: list[Any] = ["text", [], [1, 2], None, [{"role": "user"}], [{"content": 1, "role": "user"}]]
    for messages in wrong:
        refused = await app.call("/chat", {"messages": messages})
        assert (refused.status, app.is_idle()) == (400, True), messages
        assert refused.error["what"].startswith("messages"), messages
        if messages == []:
            assert refused.error["message"] == "messages: got 0, allowed is at least 1 message."


def texts(*words: str) -> list[dict[str, str]]:
    """OpenAI's form of a content."""
    return [{"type": "text", "text": word} for word in words]


async def test_text_parts_are_the_text_that_they_make() -> None:
    """Chats whose contents are lists of text parts get the answers of plain texts, on every endpoint."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=64) as engine:
        async with serving(engine) as app:
            short = {"max_tokens": 24}
            plain = [{"role": "user", "content": "What is 2 + 3?"}]
            parts = [{"role": "user", "content": texts("What is ", "2 + 3?")}]
            answers = [await app.call(path, {name: chat, "sampling": short}) for chat in (plain, parts)
                       for path, name in (("/chat", "messages"), ("/generate", "prompt"))]
            batch = await app.call("/batch", {"prompts": [plain, parts], "sampling": short})
            stream = await app.call("/stream", {"prompt": parts, "sampling": short})
            found = [json.loads(one.text)["outputs"][0]["text"] for one in answers]
            found += [one["outputs"][0]["text"] for one in json.loads(batch.text)["completions"]]
            found.append("".join(e.data["text"] for e in EventParser().feed(stream.text) if not e.name))
            assert found == [found[0]] * 7
            assert "5" in found[0]


NO_TEXTS: list[Any] = [
    [{"type": "image_url", "image_url": {"url": "http://canary"}}], [{"type": "text"}], [{"type": "text", "text": 5}],
    [{"type": "refusal", "text": "canary"}], ["canary"], [None], [[]],
    [*texts("a"), {"type": "input_audio", "data": "canary"}],
]


async def test_parts_that_are_no_text_are_refused_by_their_place(app: App) -> None:
    """Nothing is fetched or left out; the refusal names the part and repeats nothing of it."""
    for content in NO_TEXTS:
        chat = [{"role": "system", "content": "a"}, {"role": "user", "content": content}]
        for path, body in (("/chat", {"messages": chat}), ("/generate", {"prompt": chat}),
                           ("/stream", {"prompt": chat}), ("/batch", {"prompts": [[1], chat]})):
            refused = await app.call(path, body)
            place = "prompts[1]." if path == "/batch" else ""
            assert (refused.status, refused.error["what"]) == (400, f"{place}messages[1].content[{len(content) - 1}]")
            assert "canary" not in refused.text
            assert app.is_idle(), content


async def test_unknown_names_are_shown_with_the_nearest_known_one(app: App) -> None:
    """A misspelt field is repeated if it looks like a name, and no other text is."""
    refused = await app.call("/generate", {"prompt": [1], "prioritty": 3})
    assert refused.error["given"] == "'prioritty'"
    assert refused.error["message"].endswith("Did you mean priority?")
    refused = await app.call("/generate", {"prompt": [1], "my secret": 3})
    assert "secret" not in refused.text


async def test_a_batch_is_refused_as_a_whole(app: App) -> None:
    """Too many prompts, none, or one bad one among them: nothing of the batch is left behind."""
    bodies: list[Any] = [
        {"prompts": [[1]] * 257}, {"prompts": []}, {"prompts": [1]}, {"prompts": [[1], []]}, {"prompts": "text"},
        {"prompts": [[1], [2]], "sampling": [{}]}, {"prompts": [[1]], "sampling": [{"temperature": -1}]},
    ]
    for body in bodies:
        assert ((await app.call("/batch", body)).status, app.is_idle()) == (400, True), body


@pytest.mark.parametrize("app", [{"max_num_waiting": 1, "max_num_seqs": 1}], indirect=True)
async def test_overload_is_429_with_a_hint(app: App) -> None:
    """When the queue is full a refused call learns when to try again; accepted ones are completed."""
    with paused_after(app.engine, 3) as pause:
        first = app.begin("/stream", {"prompt": [1], "sampling": short(60)})
        await first.until_text("data:")
        second = app.begin("/generate", {"prompt": [2], "sampling": short()})
        places = app.engine._commands.places
        while not (places.sinks() or places._count_in_engine()):
            await asyncio.sleep(0.002)
        for path, body in (("/generate", {"prompt": [3]}), ("/stream", {"prompt": [3]}),
                           ("/batch", {"prompts": [[3]]})):
            refused = await app.call(path, body)
            assert (refused.status, refused.headers["retry-after"], refused.error["limit"]) == (429, "1", "1")
        pause.end()
        await asyncio.gather(first.task, second.task)
    assert tokens_of(first.text) == toy_answer([1], 60)
    assert json.loads(second.text)["outputs"][0]["token_ids"] == toy_answer([2], 4)


async def test_a_batch_larger_than_the_queue_waits_for_its_own_room(app: App) -> None:
    """Once its first prompt is in, the rest of a batch waits instead of being refused."""
    prompts = [[value % 20 + 1, value // 20] for value in range(60)]
    batch = await app.call("/batch", {"prompts": prompts, "sampling": short(2)})
    answers = [completion["outputs"][0]["token_ids"] for completion in json.loads(batch.text)["completions"]]
    assert answers == [toy_answer(prompt, 2) for prompt in prompts]


async def test_the_loop_runs_between_the_prompts_of_a_batch(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt may take a millisecond to tokenise: others are served after every one, not after all of them."""
    turns, seen, submit = 0, list[int](), AsyncEngine.submit

    def note(*arguments: Any, **options: Any) -> Any:
        seen.append(turns)
        return submit(*arguments, **options)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(AsyncEngine, "submit", note)
    counting = asyncio.create_task(count())
    await app.call("/batch", {"prompts": [[1], [2], [3], [4]], "sampling": short(2)})
    counting.cancel()
    assert len(set(seen)) == len(seen) == 4


PATHS = [("/generate", {"prompt": [1], "sampling": LONG}), ("/stream", {"prompt": [1], "sampling": LONG}),
         ("/batch", {"prompts": [[1], [2]], "sampling": LONG})]


@pytest.mark.parametrize("moment", ["at once", "in the queue", "while it runs"])
@pytest.mark.parametrize("app", [{"max_num_seqs": 1, "max_num_waiting": 8}], indirect=True)
async def test_a_client_that_leaves_gives_its_blocks_back(app: App, moment: str) -> None:
    """Before the first token, mid-stream or without a stream: by the end of the step in flight nothing is held."""
    for path, body in PATHS:
        generated = app.engine.stats().num_generated_tokens
        neighbour = app.begin("/stream", {"prompt": [9], "sampling": LONG}) if moment == "in the queue" else None
        if neighbour is not None:
            await neighbour.until_text("data:")
        exchange = app.begin(path, body)
        if moment != "at once":
            await reach(app, exchange, path, moment)
        await exchange.leave()
        if neighbour is not None:
            assert app.engine.stats().num_running + app.engine.stats().num_waiting == 1, path
            await neighbour.leave()
        assert app.is_idle(), path
        assert app.engine.stats().num_generated_tokens < generated + 4000, path


SIBLING = {"client": None, "headers": [(b"content-type", b"application/vnd.bentoml+pickle")]}


@pytest.mark.parametrize("how", [{}, SIBLING])
async def test_a_client_that_leaves_before_its_bodys_end_is_no_error(
    caplog: pytest.LogCaptureFixture, how: dict[str, Any]
) -> None:
    """At every endpoint, and from a sibling process: nothing above the access log, no open call, the next answered."""
    with AsyncEngine(make_engine()) as engine:
        async with serving(engine, is_main=not how) as app:
            for path in ("/generate", "/stream", "/batch", "/chat"):
                exchange = app.begin(path, b'{"prompt": [1', is_whole=False, **how)
                await asyncio.sleep(0.01)
                assert not exchange.task.done()
                await exchange.leave()
                assert [message["status"] for message in exchange.messages[:1]] == [499]
            assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []
            assert (app.is_idle(), app.runner.open_calls.num_open) == (True, 0)
            assert (await app.call("/generate", {"prompt": [1], "sampling": short()})).status == 200


async def reach(app: App, exchange: Any, path: str, moment: str) -> None:
    if moment == "while it runs" and path == "/stream":
        await exchange.until_text("data:")
    while not exchange.task.done():
        stats = await asyncio.to_thread(app.engine.stats)
        if stats.num_waiting if moment == "in the queue" else stats.num_blocks_used:
            return
        await asyncio.sleep(0.002)


async def test_a_time_limit_is_504_or_an_error_event(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's time limit ends a whole answer with a status and a stream that has begun with an event."""
    whole = await app.call("/generate", {"prompt": [1], "sampling": LONG, "timeout_s": 0.1})
    clock = FakeClock()
    monkeypatch.setattr("pagedcore.serving.stream.MonotonicClock", lambda: clock)
    stream = app.begin("/stream", {"prompt": [1], "sampling": LONG, "timeout_s": 60})
    await stream.until_text("data:")
    clock.advance(61)
    await stream.task
    assert (whole.status, whole.error["type"]) == (504, "RequestTimeout")
    assert (EventParser().feed(stream.text)[-1].name, app.is_idle()) == ("error", True)


@dataclass
class Failing:
    """A service, and the model that fails in it."""

    app: App
    backend: FlakyBackend


@pytest.fixture
async def failing() -> AsyncIterator[Failing]:
    """A service whose model fails in its fourth step, the first after the warm-up's and two more."""
    backend = FlakyBackend(raise_on_step=4)
    with AsyncEngine(make_engine(backend), stream_interval_s=0.0) as engine:
        async with serving(engine) as app:
            yield Failing(app, backend)


async def test_a_failure_in_mid_stream_is_an_explicit_event(failing: Failing) -> None:
    """A stream that broke off says so; the next call is answered."""
    failing.backend.may_fail.clear()
    stream = failing.app.begin("/stream", {"prompt": [1], "sampling": short(8)})
    await stream.until_text("data:")
    failing.backend.may_fail.set()
    await stream.task
    last = EventParser().feed(stream.text)[-1]
    assert (stream.status, last.name, last.data["error"]["type"]) == (200, "error", "StepFailed")
    again = await failing.app.call("/generate", {"prompt": [1], "sampling": short()})
    assert json.loads(again.text)["outputs"][0]["token_ids"] == toy_answer([1], 4)


async def test_a_failure_of_a_whole_answer_is_500(failing: Failing) -> None:
    """A request that failed is an error of the server, with its type and without a trace."""
    failed = await failing.app.call("/generate", {"prompt": [1], "sampling": short(8)})
    assert (failed.status, failed.error["type"]) == (500, "StepFailed")


async def test_draining_refuses_new_calls_and_finishes_old_ones() -> None:
    """From the stop hook on new calls get 503 with a hint, those in flight their whole answer; then all is closed."""
    engine = AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=200), stream_interval_s=0.0)
    async with serving(engine) as app:
        running = app.begin("/stream", {"prompt": [1], "sampling": short(40)})
        await running.until_text("data:")
        stopping = asyncio.create_task(app.runner.pagedcore_stop())
        await asyncio.sleep(0)
        for path in ("/generate", "/stream"):
            refused = await app.call(path, {"prompt": [2], "sampling": short()})
            assert (refused.status, refused.headers["retry-after"], refused.error["type"]) == (503, "5", "NotServing")
        assert (await app.call("/readyz")).status == 503
        assert (await app.call("/livez")).status == 200
        await asyncio.gather(stopping, running.task)
        assert tokens_of(running.text) == toy_answer([1], 40)
    engine.close()


async def test_a_closed_engine_is_503_and_dead(app: App) -> None:
    """When the engine is gone calls are sent elsewhere and both probes say so."""
    await app.engine.aclose()
    for path in ("/generate", "/stream"):
        refused = await app.call(path, {"prompt": [2], "sampling": short()})
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert [(await app.call(probe)).status for probe in ("/readyz", "/livez")] == [503, 503]


@pytest.mark.parametrize(("status", "probes"), [("ready", [200, 200]), ("degraded", [503, 200]), ("dead", [503, 503])])
async def test_probes_follow_the_engines_progress(app: App, monkeypatch: pytest.MonkeyPatch, status: Any,
                                                  probes: list[int]) -> None:
    """Ready means send calls here, degraded means elsewhere, dead means restart; a standing engine refuses calls."""
    monkeypatch.setattr(app.engine, "health", lambda **_: Health(status, "so it is", 0.0, 0))
    assert [(await app.call(probe)).status for probe in ("/readyz", "/livez")] == probes
    answered = await app.call("/generate", {"prompt": [2], "sampling": short()})
    assert answered.status == (503 if status == "dead" else 200)


async def test_the_body_is_limited_before_it_is_parsed() -> None:
    """More bytes than the service's limit are refused, announced or not."""
    with AsyncEngine(make_engine()) as engine:
        async with serving(engine, max_body_bytes=100) as app:
            announced = [(b"content-type", b"application/json"), (b"content-length", b"99999999")]
            assert (await app.call("/generate", b"{}", headers=announced)).status == 413
            assert (await app.call("/stream", b" " * 101)).status == 413
            assert (await app.call("/generate", b" " * 100)).status == 400
            assert (app.runner.body_limit, (await app.call("/generate", b"9" * 100)).status) == (100, 400)


async def test_the_limit_of_a_body_follows_from_the_models_context(app: App) -> None:
    """Unless the service sets another: what one prompt as long as the context may take, and 256 KiB."""
    limit = 16 * app.engine.stats().max_model_len + 2**18
    for path in ("/generate", "/stream", "/batch", "/chat"):
        assert (await app.call(path, b" " * (limit + 1))).status == 413
        refused = await app.call(path, b" " * limit)
        assert (refused.status, refused.error["type"]) == (400, "RefusedAtTheDoor")
    many = await app.call("/generate", b'{"prompt":' + b"[" * (limit - 20))
    assert (many.status, many.error["limit"]) == (413, "at most 16384 lists")


@pytest.mark.parametrize("is_main", [True, False])
async def test_bentoml_refuses_pickle_content_type(tmp_path: Any, is_main: bool) -> None:
    """No door that a network can reach reads anything but JSON: the payload's marker file is never made."""
    marker = tmp_path / "marker"
    payload = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    with AsyncEngine(make_engine()) as engine:
        async with serving(engine, is_main=is_main) as app:
            for media_type in (b"application/vnd.bentoml+pickle", b"multipart/form-data",
                               b"application/x-www-form-urlencoded", b"text/plain"):
                for path in ("/generate", "/chat", "/stream", "/batch"):
                    refused = await app.call(path, payload, headers=[(b"content-type", media_type)])
                    assert refused.status == 415, media_type
    assert not marker.exists()


async def test_bentoml_schema_has_no_file_types(app: App) -> None:
    """Nothing in the schema would make BentoML fetch or unpack what a caller names."""
    schema = (await app.call("/schema.json")).text
    assert {route["name"] for route in json.loads(schema)["routes"]} == {
        "generate", "chat", "stream", "batch", "embed", "rerank"}
    assert not [word for word in ("file", "image", "tensor", "dataframe", "binary") if f'"{word}"' in schema]


async def test_a_secret_prompt_is_in_no_log_and_in_no_refusal(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong with it, the text of a prompt is not repeated."""
    caplog.set_level("DEBUG")
    secret = "canary-of-the-test"
    bodies = [{"prompt": secret}, {"prompt": [secret]}, {"promt": secret}, {secret: 1},
              {"prompt": [1], "sampling": {secret: secret}}, f'{{"prompt": "{secret}'.encode()]
    for body in bodies:
        for path in ("/generate", "/stream"):
            refused = await app.call(path, body)
            assert (refused.status, secret in refused.text) == (400, False)
    assert secret not in caplog.text


async def test_python_callers_get_models_and_typed_errors(app: App) -> None:
    """Without HTTP the same endpoints return models, yield events and raise pagedcore's own errors."""
    runner = type(app.runner)()
    completion = await runner.generate([1, 2], short())
    assert completion.outputs[0].token_ids == toy_answer([1, 2], 4)
    chunks = [chunk async for chunk in runner.stream([1, 2], short())]
    assert tokens_of("".join(chunks)) == toy_answer([1, 2], 4)
    with pytest.raises(ValueError, match="temperature"):
        await runner.generate([1], {"temperature": 99})


async def test_the_engines_metrics_are_appended(app: App) -> None:
    """BentoML's metrics stay as they are; the engine's follow, and count what was answered."""
    await app.call("/generate", {"prompt": [1], "sampling": short()})
    text = await app.runner.__metrics__("theirs 1\n")
    assert text.startswith("theirs 1\n")
    assert re.search(r'^pagedcore_requests_finished_total\{.*"length".*\} 1\.0$', text, flags=re.MULTILINE)
    assert await PagedCoreRunner().__metrics__("theirs 1\n") == "theirs 1\n"


REFUSED_BATCHES: list[tuple[Any, Any, str]] = [
    ([[1], []], None, "prompts[1]"), ([[1], [2], [3, -1]], None, "prompts[2]"), ([[1], "text"], None, "prompts[1]"),
    ([[1], [{"role": "user", "content": [{"type": "image"}]}]], None, "prompts[1].messages[0].content[0]"),
    ([[1], [2]], [{}, {"temperature": 99}], "sampling[1].temperature"),
    ([[1], [2]], {"temperature": 99}, "temperature"), ([[1], [2]], [{}, 5], "sampling[1]"),
    ([[1], "a" * 40_000], None, "prompts[1]"),
]


async def test_a_refused_batch_names_the_prompt(app: App) -> None:
    """``what`` and the message have the place of the prompt, or of its parameters, in the lists of the body."""
    for prompts, sampling, what in REFUSED_BATCHES:
        refused = await app.call("/batch", {"prompts": prompts, "sampling": sampling})
        assert (refused.status, refused.error["what"]) == (400, what)
        assert refused.error["message"].startswith(f"{what}: "), what

"""Stored responses: conversations that continue by an id, for their own tenant, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("openai")
pytest.importorskip("bentoml")

import openai
from openai import OpenAI

from adapters.openai.loopback import serving
from adapters.openai.test_door import ONE, TWO, opened, with_key
from pagedcore import AsyncEngine, SamplingParams
from pagedcore_openai import ApiKeys, openai_app
from pagedcore_openai.stored import ResponseNotFound, StoredResponses

GREEDY: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 32}
FIRST, SECOND = "What is 2 + 3?", "And what is 9 - 5?"


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """The demo model."""
    with AsyncEngine.from_pretrained("demo", num_kv_blocks=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: AsyncEngine) -> Iterator[OpenAI]:
    """The official client."""
    with serving(openai_app(engine, name="demo")) as url, OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_continues_its_predecessor(client: OpenAI, engine: AsyncEngine) -> None:
    """Whole and streamed: the prompt is the whole conversation, found in the cache, without the instructions of before;
    from one response two may continue."""
    first = client.responses.create(input=FIRST, instructions="Be brief.", **GREEDY)
    chat = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": SECOND}]
    wanted = engine.submit(chat, SamplingParams(max_tokens=32)).result()
    second = client.responses.create(input=SECOND, previous_response_id=first.id, **GREEDY)
    *_, last = client.responses.create(input=SECOND, previous_response_id=first.id, stream=True, **GREEDY)
    assert last.type == "response.completed"
    for response in (second, last.response):
        assert (response.output_text, response.previous_response_id) == (wanted.outputs[0].text, first.id)
        assert response.usage is not None
        assert response.usage.input_tokens == len(wanted.prompt_token_ids)
        assert response.usage.input_tokens_details.cached_tokens > 0
    third = client.responses.create(input=FIRST, previous_response_id=last.response.id, **GREEDY)
    chat += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": FIRST}]
    assert third.usage is not None
    assert third.usage.input_tokens == len(engine.encode(chat))


def test_a_response_can_be_shown_and_removed(client: OpenAI) -> None:
    """By its id, until it is removed; what continues it stays. With ``store=False`` nothing is kept."""
    first = client.responses.create(input=FIRST, **GREEDY)
    second = client.responses.create(input=SECOND, previous_response_id=first.id, **GREEDY)
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=SECOND, previous_response_id=first.id, **GREEDY)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client.responses.create(input=FIRST, previous_response_id=second.id, **GREEDY).store is True
    unkept = client.responses.create(input=FIRST, store=False, **GREEDY)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


async def test_a_response_is_its_tenants_own() -> None:
    """Another key finds nothing, with the same words as for an id that never was, and removes nothing."""
    async with opened(api_keys=ApiKeys([ONE, TWO])) as app:
        body = {"input": "ab", "max_output_tokens": 2, "temperature": 0}
        first = json.loads((await app.call("/v1/responses", body, headers=with_key(ONE))).text)["id"]
        replies = [(await app.call("/v1/responses", {**body, "previous_response_id": one}, headers=with_key(TWO))).text
                   for one in (first, first[::-1])]
        assert replies[0] == replies[1]
        assert first not in replies[0]
        shown = [await app.call(f"/v1/responses/{first}", headers=with_key(key)) for key in (TWO, ONE, "no-key-at-all")]
        assert [one.status for one in shown] == [404, 200, 401]
        assert (await app.call("/v1/responses", {**body, "previous_response_id": first},
                               headers=with_key(ONE))).status == 200


def test_stored_responses_take_bounded_memory() -> None:
    """The oldest go first; a turn counts with the conversation before it, which it keeps alive; one that is too large
    by itself is not kept; removed ones give their room back."""
    stored = StoredResponses(10_000)
    messages: list[dict[str, Any]] = []
    for turn in range(100):
        messages = [*messages[-5:], {"role": "user", "content": f"{turn}" * 100}]
        stored.keep(str(turn), b"owner", messages, "b" * 100)
        alive = {one["content"] for other in stored._by_id.values() for one in other.messages}
        assert sum(map(len, alive)) <= stored.num_bytes <= 10_000
    kept = [turn for turn in range(100) if str(turn) in stored]
    assert kept == list(range(100 - len(kept), 100)) != []
    for turn in kept:
        stored.forget(str(turn), b"owner")
    assert stored.num_bytes == 0
    stored.keep("large", None, [{"role": "user", "content": "a" * 10_000}], "")
    assert "large" not in stored
    stored.keep("mine", b"one", [], "")
    for owner in (b"two", None, "one"):
        with pytest.raises(ResponseNotFound):
            stored.messages_of("mine", owner)


def test_a_tenant_that_stores_much_loses_its_own() -> None:
    """However much one stores, in however many pieces, a tenant that stores less keeps all; one that is too large by
    itself costs nobody anything."""
    stored = StoredResponses(10_000)
    stored.keep("small", b"quiet", [{"role": "user", "content": "a" * 100}], "")
    for turn in range(100):
        stored.keep(str(turn), b"loud", [{"role": "user", "content": "b" * (turn * 7 % 400)}], "")
        assert stored.body_of("small", b"quiet") == ""
        assert stored.num_bytes <= 10_000
    before = [turn for turn in range(100) if str(turn) in stored]
    assert before[-1] == 99
    stored.keep("large", b"loud", [{"role": "user", "content": "b" * 10_000}], "")
    assert [turn for turn in range(100) if str(turn) in stored] == before
    for turn in before:
        stored.forget(str(turn), b"loud")
    stored.forget("small", b"quiet")
    assert (stored.num_bytes, stored._ids, +stored._held) == (0, {}, {})

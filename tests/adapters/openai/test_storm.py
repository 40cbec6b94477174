"""A tenant that sends random and broken calls and leaves at any moment, beside one whose completions are checked."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import adapters.bentoml.home  # noqa: F401  # Why first: BentoML reads its home when it is imported.

pytest.importorskip("bentoml")

from adapters.bentoml.asgi_caller import App
from adapters.openai.test_door import CHATS, ONE, RESPONSES, TEXT, TWO, opened, tokens_of, with_key
from pagedcore_openai import ApiKeys
from support.async_helpers import SlowBackend
from support.doubles import toy_answer
from support.torture import first_seed, scaled

PATHS = (
    *[TEXT] * 5, *[CHATS] * 5, RESPONSES, RESPONSES, "/tokenize", "/detokenize", "/v1/models", "/v1/models/a/b",
    "/v1/nothing", "/metrics",
)
FIELDS = (
    "prompt", "messages", "input", "tokens", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "n", "best_of", "stop", "stop_token_ids", "seed", "logit_bias", "logprobs", "top_logprobs", "echo", "stream",
    "stream_options", "priority", "cache_salt", "request_id", "timeout_s", "use_beam_search", "min_tokens", "model",
    "tools", "response_format", "user", "nonsense",
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 10**400, -(10**30), 0.5, 1e308, -0.0, "", "a", "x" * 3000, "\0", "\ud83d",
    [], [[]], [1], [1, 2, 3], [10**9], ["a", "b"], [[1], [2]], ["a", 1], [None], {}, {"a": 1}, {"1": 5, "2": -100},
    {"include_usage": True}, {"type": "json_object"}, [{"role": "user", "content": "a"}], [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "b"}]}], [{"role": 1, "content": {}}],
)
SECRET = [3, 1, 4, 1, 5, 9, 2, 6]


def body_of(rng: random.Random, path: str) -> Any:
    """Return some object, mostly one that could be a call, or bytes that are none."""
    if rng.random() < 0.1:
        return rng.choice([b"", b"{", b"[]", b"null", b'{"prompt": ', b"\xff\xfe{}", b'{"a":1,"a":2}', b"[" * 500])
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": rng.randint(1, 30), "temperature": 0}
    if path == CHATS or rng.random() < 0.1:
        body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": rng.randint(1, 30)}
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    # Why as text: json writes lone surrogates, which a client may send.
    return json.dumps(body).encode()


async def attack(app: App, rng: random.Random) -> int:
    """Send one call, and leave before its end or not; return the status, 0 of a call that was left."""
    headers = with_key(TWO) if rng.random() < 0.9 else with_key("another-key-of-nobody")
    path = rng.choice(PATHS)
    exchange = app.begin(path, body_of(rng, path), headers=headers, is_whole=rng.random() < 0.97)
    if rng.random() < 0.4:
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
        await exchange.leave()
        return 0
    async with asyncio.timeout(60):
        await exchange.task
    if exchange.status >= 400:
        error = exchange.error
        assert set(error) == {"message", "type", "param", "code"}
        assert "x" * 40 not in exchange.text
    return exchange.status


async def ask(app: App, rng: random.Random) -> None:
    """Ask as the other tenant, and check the completion."""
    prompt, number = [*SECRET, rng.randrange(20)], rng.randint(1, 12)
    body = {"prompt": prompt, "max_tokens": number, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    exchange = await app.call(TEXT, body, headers=with_key(ONE))
    while exchange.status == 429:
        await asyncio.sleep(0.01)
        exchange = await app.call(TEXT, body, headers=with_key(ONE))
    assert tokens_of(exchange) == toy_answer(prompt, number)


@pytest.mark.torture
async def test_random_calls_harm_nobody_else(record_property: Callable[[str, object], None]) -> None:
    """No call of the one tenant ends in a 500, repeats what it was sent, or changes a completion of the other one; in
    the end nothing runs, and no task is left."""
    seen = dict.fromkeys((0, 200, 400), 0)
    for seed in range(first_seed(), first_seed() + (number := scaled(4))):
        rng = random.Random(seed)
        num_tasks = len(asyncio.all_tasks())
        async with opened(SlowBackend(), {"num_kv_blocks": 64, "max_num_waiting": 8}, body_s=0.5,
                          api_keys=ApiKeys([ONE, TWO])) as app:
            calls = [attack(app, random.Random(rng.random())) for _ in range(60)]
            calls += [ask(app, random.Random(rng.random())) for _ in range(12)]
            rng.shuffle(calls)
            for status in await asyncio.gather(*calls):
                assert status in (None, 0, 200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 504), status
                seen[status or 0] = seen.get(status or 0, 0) + 1
            async with asyncio.timeout(60):
                while not app.is_idle() or len(asyncio.all_tasks()) > num_tasks + 1:
                    await asyncio.sleep(0.01)
            assert app.runner.service.open_calls.num_open == 0  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= num_tasks
    record_property("seeds", number)
    assert all(seen[status] > number for status in (200, 400)), seen

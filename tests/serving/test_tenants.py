"""Tenants of one ``AsyncEngine``, kept apart by their salts: caches, labels, priorities."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedcore import AsyncEngine, RequestOutput, SamplingParams
from pagedcore.errors import InvalidRequest, InvalidSalt, RequestTimeout
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.scheduler import policies
from pagedcore.scheduler.policies import Policy
from pagedcore_asyncgen import create
from support.async_helpers import SlowBackend
from support.doubles import VOCAB_SIZE, FlakyBackend
from support.engine_builders import make_engine
from support.tenants import (
    BLOCK_SIZE,
    MAX_TOKENS,
    OTHER_SECRET,
    SECRET,
    PacedBackend,
    digits_found,
    guess_all,
    prompt_with,
)

PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
SCORED = dataclasses.replace(PARAMS, logprobs=3, prompt_logprobs=2)
POOLS = [128, 12]
"""Blocks: room for everything, and so few that blocks are evicted from the first guesses on."""
SALTS = [("a", "b"), ("a", None), (None, "b"), (b"a", b"A"), ("a", "salt a")]


def figures_of(given: Any) -> dict[str, Any]:
    """All fields of a delta or an output, without its random id and its times, whose form is checked."""
    fields = dataclasses.asdict(given)
    assert re.fullmatch(r"[0-9a-f]{32}", fields.pop("request_id"))
    for completion in fields.get("outputs", (fields,)):
        completion["itl_s"] = len(completion["itl_s"])
    if (metrics := fields.pop("metrics")) is not None:
        fields["num_preemptions"] = metrics.pop("num_preemptions")
        fields["times"] = {name: type(time) for name, time in metrics.items()}
    return fields


async def look(engine: AsyncEngine, backend: PacedBackend, prompt: list[int], salt: Any) -> dict[str, Any]:
    """Ask for a stream and for a whole output with all figures; return everything, and what the engine did for it."""
    before, deltas, received = engine.stats(), [], [0]
    backend.pace(lambda: received[0])
    async for delta in engine.generate(prompt, PARAMS, cache_salt=salt):
        deltas.append(delta)
        received[0] += len(delta.token_ids)
    backend.pace(None)
    middle = engine.stats()
    output = await wrap(engine, prompt, SCORED, salt)
    after = engine.stats()
    return {
        "deltas": [figures_of(delta) for delta in deltas], "output": figures_of(output), "usage": output.usage,
        "steps": [(one.num_steps - two.num_steps, one.num_computed_tokens - two.num_computed_tokens,
                   one.num_preemptions - two.num_preemptions) for one, two in ((middle, before), (after, middle))],
    }


async def wrap(engine: AsyncEngine, prompt: list[int], params: SamplingParams, salt: Any) -> RequestOutput:
    return await asyncio.wrap_future(engine.submit(prompt, params, cache_salt=salt))


async def transcript(secret: tuple[int, ...], salts: tuple[Any, Any], num_kv_blocks: int) -> list[dict[str, Any]]:
    """What the second tenant sees of all its guesses, after the first has asked with its secret."""
    backend = PacedBackend()
    engine = make_engine(backend, num_kv_blocks=num_kv_blocks, block_size=BLOCK_SIZE)
    with AsyncEngine(engine, stream_interval_s=0.0) as served:
        await wrap(served, prompt_with(secret), PARAMS, salts[0])
        return await guess_all(lambda prompt: look(served, backend, prompt, salts[1]))


@pytest.mark.parametrize(("salts", "num_kv_blocks"), [
    pytest.param(salts, num_kv_blocks, marks=[pytest.mark.slow] if (row + column) % 2 else [])
    for row, salts in enumerate(SALTS) for column, num_kv_blocks in enumerate(POOLS)
])
async def test_a_guess_of_another_tenants_prompt_shows_nothing(salts: tuple[Any, Any], num_kv_blocks: int) -> None:
    """Every figure of every output, the number of deltas, and the steps taken are the same whatever the secret was."""
    seen = await transcript(SECRET, salts, num_kv_blocks)
    assert seen == await transcript(OTHER_SECRET, salts, num_kv_blocks)
    assert seen[0]["deltas"][-1]["usage"]["num_cached_tokens"] == 0
    assert [len(one["deltas"]) for one in seen] == [MAX_TOKENS] * len(seen)


async def test_with_the_same_salt_the_same_guesses_find_the_secret() -> None:
    """The test above can fail: within one salt the cached tokens, the steps and the usage betray every digit."""
    for salt in ("a", None):
        seen = await transcript(SECRET, (salt, salt), POOLS[0])
        assert seen != await transcript(OTHER_SECRET, (salt, salt), POOLS[0])
        assert digits_found(seen, lambda one: one["deltas"][-1]["usage"]["num_cached_tokens"]) == SECRET
        assert digits_found(seen, lambda one: -one["steps"][0][1]) == SECRET


class Finished:
    """Notes every request that ended, as a plugin sees it."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Note one."""
        self.outputs.append(request)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(make_engine(num_kv_blocks=2000), stream_interval_s=0.0) as engine:
        yield engine


LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture
def slow() -> Iterator[AsyncEngine]:
    """One whose long completions outlast a caller that a busy machine stops for seconds."""
    with AsyncEngine(make_engine(SlowBackend(), num_kv_blocks=2500), stream_interval_s=0.0) as engine:
        yield engine


async def test_a_label_is_taken_within_its_salt_until_its_request_ends(slow: AsyncEngine) -> None:
    """The same label is refused to the same tenant, accepted from another and from one without salt, and free later."""
    running = [slow.generate([1], LONG, cache_salt=salt, request_id="mine") for salt in ("a", "b", None)]
    for stream in running:
        await anext(stream)
    for salt in ("a", "b", None):
        with pytest.raises(InvalidRequest, match="request_id") as refused:
            await asyncio.wrap_future(slow.submit([1], PARAMS, cache_salt=salt, request_id="mine"))
        assert "mine" not in str(refused.value)
        with pytest.raises(InvalidRequest, match="request_id"):
            await anext(slow.generate([1], PARAMS, cache_salt=salt, request_id="mine"))
    assert await wrap(slow, [1], PARAMS, "a")
    for stream in running:
        await stream.aclose()
    for salt in ("a", "b", None):
        output = await asyncio.wrap_future(slow.submit([1], PARAMS, cache_salt=salt, request_id="mine"))
        assert output.client_request_id == "mine"


class SlowFlaky(SlowBackend, FlakyBackend):
    """Slow, and fails once."""


async def test_a_label_is_free_again_however_its_request_ends() -> None:
    """Refused, cancelled, failed, out of time, or left by its reader: only a live request keeps a label."""
    with AsyncEngine(make_engine(SlowFlaky(raise_on_step=3), num_kv_blocks=800, max_num_seqs=1,
                                 max_num_waiting=1)) as engine:
        endless = LONG
        failed = await asyncio.wrap_future(engine.submit([1], PARAMS, request_id="a"))
        assert failed.outputs[0].finish_reason == "error"
        with pytest.raises(InvalidRequest):
            engine.submit([VOCAB_SIZE], PARAMS, request_id="a")
        async with contextlib.aclosing(engine.generate([1], endless, request_id="a")) as deltas:
            await anext(deltas)
        with pytest.raises(RequestTimeout):
            async for _ in engine.generate([1], endless, request_id="a", timeout_s=1e-6):
                pass
        cancelled = engine.submit([1], endless, request_id="a", wait_for_room=True)
        cancelled.cancel()
        output = await asyncio.wrap_future(engine.submit([1], PARAMS, request_id="a", wait_for_room=True))
        assert (output.client_request_id, output.outputs[0].finish_reason) == ("a", "length")
        assert await engine.call(lambda inner: inner.requests._labels) == set()


async def test_a_label_is_in_outputs_and_hooks_and_salts_are_not(engine: AsyncEngine) -> None:
    """What a plugin gets has the caller's label and the engine's own id, and nothing of the salt."""
    finished = Finished()
    engine.observe(finished)
    output = await asyncio.wrap_future(engine.submit([1], PARAMS, cache_salt="canary", request_id="mine"))
    engine.stats()
    assert [one.client_request_id for one in finished.outputs] == ["mine"]
    assert finished.outputs[0].request_id == output.request_id != "mine"
    assert "canary" not in repr(finished.outputs) + repr(output)


def test_no_request_is_aborted_by_its_label() -> None:
    """Only the engine's id aborts, so that a label that was guessed is of no use."""
    engine = make_engine()
    request = engine.add_request([1], PARAMS, cache_salt="a", request_id="mine")
    assert not engine.abort_request("mine")
    assert not request.is_done
    assert engine.abort_request(request.request_id)


@pytest.mark.parametrize("keywords", [
    {"request_id": "x" * 129}, {"request_id": ""}, {"request_id": "a\nb"}, {"request_id": "\x1b[2J"},
    {"request_id": "\u202e"}, {"request_id": 5}, {"request_id": b"x"}, {"cache_salt": ""}, {"cache_salt": "x" * 65},
    {"cache_salt": 5}, {"cache_salt": ["canary"]}, {"priority": 1}, {"priority": -1}, {"priority": True},
    {"priority": 0.5}, {"priority": "canary"}, {"weight": 2.0}, {"deadline_s": 5.0}, {"tenant": "canary\n"},
])
async def test_refused_options_are_typed_at_every_door(engine: AsyncEngine, keywords: dict[str, Any]) -> None:
    """Labels beyond 128 printable characters, salts beyond 64 bytes, and priorities, weights and deadlines under a
    policy that looks at none."""
    kind = InvalidSalt if "cache_salt" in keywords else InvalidRequest
    for call in (lambda: engine.submit([1], PARAMS, **keywords),
                 lambda: next(engine.generate_sync([1], PARAMS, **keywords))):
        with pytest.raises(kind) as refused:
            call()
        assert refused.value.what in keywords
        assert "canary" not in str(refused.value)
    with pytest.raises(kind):
        await anext(engine.generate([1], PARAMS, **keywords))
    with pytest.raises(kind):
        await engine.session(PARAMS, **keywords).open()
    assert engine.stats().num_prompt_tokens == 0


async def test_the_plain_generator_takes_the_same_options() -> None:
    """Its three ways of asking pass salt, label and priority on."""
    finished, prompt = Finished(), prompt_with(SECRET)
    with AsyncEngine(make_engine(num_kv_blocks=POOLS[0], scheduling_policy="priority")) as engine:
        engine.observe(finished)
        generate, options = create(engine), {"priority": 1, "request_id": "mine"}
        for salt in ("a", "b"):
            async for _ in generate(prompt, PARAMS, cache_salt=salt, **options):
                pass
            assert list(generate.sync(prompt, PARAMS, cache_salt=salt, **options))
            await generate.complete(prompt, PARAMS, cache_salt=salt, **options)
        engine.stats()
    assert [one.num_cached_tokens > 0 for one in finished.outputs] == [False, True, True] * 2
    assert {one.client_request_id for one in finished.outputs} == {"mine"}


async def test_priorities_are_accepted_where_the_policy_has_them() -> None:
    """Under the "priority" policy every door takes one."""
    with AsyncEngine(make_engine(scheduling_policy="priority")) as engine:
        assert len([delta async for delta in engine.generate([1], PARAMS, priority=5)]) >= 1
        assert list(engine.generate_sync([1], PARAMS, priority=-5))
        assert engine.submit([1], PARAMS, priority=1).result(timeout=60).is_finished


async def test_tenant_weight_and_deadline_reach_the_policy_from_every_door(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sequence has what its caller said, and no salt, from streams, futures and sessions, imported ones too."""
    seen: set[tuple[Any, ...]] = set()

    def order(sequence: Any, view: Any) -> int:
        one = sequence.options
        seen.add((one.tenant, one.weight, one.deadline_s, sequence.deadline_s < 1e9, one.cache_salt))
        return int(sequence.arrival)

    monkeypatch.setattr(policies, "priority", lambda: Policy(
        "mine", order, is_dynamic=True, has_tenants=True, has_deadlines=True
    ))
    options: dict[str, Any] = {"weight": 2.0, "deadline_s": 60.0, "cache_salt": "canary"}
    with AsyncEngine(make_engine(scheduling_policy="priority")) as engine:
        assert [delta async for delta in engine.generate([1], PARAMS, tenant="stream", **options)]
        assert list(engine.generate_sync([1], PARAMS, tenant="sync", **options))
        assert engine.submit([1], PARAMS, tenant="future", **options).result(timeout=60).is_finished
        async with engine.session(PARAMS, tenant="session", **options) as session:
            await session.ask([1])
            await session.export(tmp_path / "file")
        async with await engine.import_session(tmp_path / "file", tenant="imported", **options) as session:
            await session.ask([1])
    names = ("stream", "sync", "future", "session", "imported")
    assert seen == {(name, 2.0, 60.0, True, None) for name in names}

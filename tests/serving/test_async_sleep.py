"""An ``AsyncEngine`` that sleeps under its callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore.errors import EngineAsleep, EngineClosed, EngineOverloaded, InvalidRequest, QueueTimeout
from pagedcore.models import new_weights
from support.paused_steps import slowed

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = [20, 30, 40]


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """What an engine that never sleeps answers."""
    with Engine.from_pretrained("demo") as engine:
        return engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine.from_pretrained("demo", max_num_waiting=4) as one:
        yield one


def tokens(output: Any) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = output.outputs[0].token_ids
    return token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_requests_before_and_behind_a_sleep_get_their_answers(
    level: Any, engine: AsyncEngine, expected: tuple[int, ...]
) -> None:
    """Those before are waited for, those behind it are held, as many as may wait; a session's turn is refused."""

    async def go() -> None:
        before = engine.submit(PROMPT, PARAMS)
        await engine.sleep(level)
        assert before.done()
        assert engine.sleep_level == level
        held = [engine.submit(PROMPT, PARAMS) for _ in range(4)]
        with pytest.raises(EngineOverloaded):
            engine.submit(PROMPT, PARAMS)
        async with engine.session(PARAMS) as session:
            with pytest.raises(EngineAsleep):
                await session.ask(PROMPT)
            assert not any(one.done() for one in held)
            await engine.wake()
            assert [tokens(one) for one in await asyncio.gather(before, *held)] == [expected] * 5
            assert tokens(await session.ask(PROMPT)) == expected
        assert engine.sleep_level == 0

    asyncio.run(go())


def test_what_is_refused_is_not_waited_for(engine: AsyncEngine) -> None:
    """A level that is none, while a request runs."""

    async def go() -> None:
        running = engine.submit(PROMPT, SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
        for wrong in ("2", 3):
            with pytest.raises(InvalidRequest, match="level"):
                await engine.sleep(wrong)  # type: ignore[arg-type]
        assert not running.done()
        await engine.sleep(running="abort")
        assert (await running).outputs[0].finish_reason == "abort"

    with slowed(engine):
        asyncio.run(go())


def test_held_requests_have_their_limits(engine: AsyncEngine) -> None:
    """A place in the queue does not last for ever, and a closed engine ends them."""

    async def go() -> None:
        await engine.sleep()
        await engine.call(lambda one: setattr(one.turn_rules, "queue_timeout_s", 0.05))
        with pytest.raises(QueueTimeout):
            await engine.submit(PROMPT, PARAMS)
        await engine.call(lambda one: setattr(one.turn_rules, "queue_timeout_s", 60.0))
        held = engine.submit(PROMPT, PARAMS)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await held

    asyncio.run(go())


def test_what_is_cancelled_changes_nothing(
    engine: AsyncEngine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep that waits leaves the engine awake, a wake that reads leaves it asleep; both can be asked for again."""

    async def cancel(task: asyncio.Task[None]) -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def go() -> None:
        with slowed(engine):
            endless = engine.submit(PROMPT, SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
            sleep = asyncio.create_task(engine.sleep(2))
            await asyncio.sleep(0.02)
            await cancel(sleep)
            endless.cancel()
        assert tokens(await engine.complete(PROMPT, PARAMS)) == expected
        assert engine.sleep_level == 0
        await engine.sleep(2)
        reads, goes_on = threading.Event(), threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(new_weights, "require_same_form", lambda *_: (reads.set(), goes_on.wait(60)))
            wake = asyncio.create_task(engine.wake())
            await asyncio.to_thread(reads.wait, 60)
            await cancel(wake)
            assert engine.sleep_level == 2
            goes_on.set()
        await engine.wake()
        assert tokens(await engine.complete(PROMPT, PARAMS)) == expected

    asyncio.run(go())

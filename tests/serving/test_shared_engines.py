"""Several engines within one budget of memory: callers wake what they use, and what nobody uses makes room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine, MemoryBudget, SamplingParams, SharedEngines
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.engine.sleeping import Wake
from pagedcore.errors import EngineClosed, InvalidConfig, InvalidRequest, MemoryBudgetExceeded
from pagedcore.models import new_weights
from support.changed_demo import changed_weights
from support.doubles import FakeClock
from support.engine_builders import make_engine
from support.paused_steps import slowed

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [20, 30, 40]
NAMES = ("a", "b", "c", "d")
SMALL: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory": "8MiB"}


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    """What an engine that never sleeps answers."""
    with Engine.from_pretrained("demo") as engine:
        return engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def built() -> Iterator[SharedEngines]:
    """Four models where there is room for two."""
    shared = SharedEngines.from_pretrained(dict.fromkeys(NAMES, "demo"), memory="14MiB", **SMALL)
    assert awake(shared) == {"c", "d"}
    yield shared
    shared.close()


@pytest.fixture
async def four(built: SharedEngines) -> SharedEngines:
    """The same engines, of which the last two are awake."""
    for name in NAMES:
        await built.engines[name].sleep(2, running="abort")
    for name in ("c", "d"):
        await built.engines[name].wake()
    return SharedEngines(built.engines)


def awake(shared: SharedEngines) -> set[str]:
    return {name for name, engine in shared.engines.items() if engine.sleep_level == 0}


async def ask(shared: SharedEngines, name: str) -> tuple[int, ...]:
    async with shared.use(name) as engine:
        return (await engine.complete(PROMPT, PARAMS)).outputs[0].token_ids


async def test_the_one_that_was_not_used_for_longest_makes_room(
    four: SharedEngines, expected: tuple[int, ...]
) -> None:
    """As many are awake as the budget has room for, and every one answers as if it were alone."""
    assert awake(four) == {"c", "d"}
    for name, after in (("c", "cd"), ("a", "ac"), ("c", "ac"), ("b", "bc"), ("d", "bd")):
        assert await ask(four, name) == expected
        assert awake(four) == set(after)


async def test_callers_share_a_wake_and_may_leave_it(
    four: SharedEngines, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve callers of one model wake it once, also if the first one leaves meanwhile."""
    wakes, read = list[Wake](), Wake.read
    monkeypatch.setattr(Wake, "read", lambda wake: (wakes.append(wake), read(wake)))
    calls = [asyncio.create_task(ask(four, "a")) for _ in range(12)]
    await asyncio.sleep(0)
    calls[0].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [expected] * 11
    assert [wake.engine.sleep_level for wake in wakes] == [0]


async def test_a_wake_that_waits_for_its_turn_is_left_if_nobody_waits_for_it(
    four: SharedEngines, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine sleeps for it; one that has begun goes on without callers."""
    is_reading, may_read, read = threading.Event(), threading.Event(), Wake.read
    monkeypatch.setattr(Wake, "read", lambda wake: (is_reading.set(), may_read.wait(60), read(wake)))
    for name in ("a", "b"):
        asking = asyncio.create_task(ask(four, name))
        await asyncio.to_thread(is_reading.wait, 60)
        while four._members[name].waking is None:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    may_read.set()
    waking = [one.waking for one in four._members.values() if one.waking is not None]
    assert len(waking) == 2
    await asyncio.gather(*waking)
    assert awake(four) == {"a", "d"}
    assert await ask(four, "b") == expected


async def test_what_is_used_does_not_sleep(four: SharedEngines, expected: tuple[int, ...]) -> None:
    """With all others in use a caller is refused, the ledger stays whole, and there is room as soon as one leaves."""
    async with AsyncExitStack() as stack:
        for name in ("c", "d"):
            await stack.enter_async_context(four.use(name))
        for _ in range(2):
            with pytest.raises(MemoryBudgetExceeded):
                await ask(four, "a")
        assert awake(four) == {"c", "d"}
    assert await ask(four, "a") == expected


async def test_one_that_is_put_to_sleep_in_use_is_woken_by_what_is_asked_of_it(
    four: SharedEngines, expected: tuple[int, ...]
) -> None:
    """A request that came between would be held until somebody else comes; users who ask nothing more wake nothing."""
    async with four.use("c") as engine:
        await four.sleep("c", 1)
        assert (await asyncio.wait_for(engine.complete(PROMPT, PARAMS), 20)).outputs[0].token_ids == expected
        assert engine.sleep_level == 0
        await four.sleep("c")
        await asyncio.sleep(0.1)
        assert engine.sleep_level == 2
    with pytest.raises(InvalidRequest, match="one of a, b, c, d"):
        await four.sleep("e")


async def test_what_works_does_not_sleep(four: SharedEngines, expected: tuple[int, ...]) -> None:
    """A request that nobody uses its engine for any more is not broken off, and another engine makes room."""
    with slowed(four.engines["c"]):
        async with four.use("c") as engine:
            running = engine.submit(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
            await engine.call(lambda engine: None)
        assert [await ask(four, name) for name in ("d", "a")] == [expected] * 2
        assert awake(four) == {"a", "c"}
        assert not running.done()
        running.cancel()


async def test_idle_ones_sleep_and_lookers_on_do_not_count(expected: tuple[int, ...]) -> None:
    """After ``idle_s`` without a use; ``stats`` and ``health`` are no use. Whoever comes while it goes is served."""
    clock = FakeClock()
    with Engine.from_pretrained("demo") as one, Engine.from_pretrained("demo") as other:
        shared = SharedEngines({"a": AsyncEngine(one), "b": AsyncEngine(other)}, idle_s=60, clock=clock)
        clock.advance(50)
        assert await ask(shared, "b") == expected
        clock.advance(20)
        shared.engines["a"].stats()
        shared.engines["a"].health()
        assert await shared.put_idle_to_sleep() == pytest.approx(40)
        assert awake(shared) == {"b"}
        clock.advance(40)
        async with shared.use("b") as engine:
            await shared.put_idle_to_sleep()
            assert engine.sleep_level == 0
        clock.advance(60)
        going = asyncio.create_task(shared.put_idle_to_sleep())
        while not shared._members["b"].is_leaving:
            await asyncio.sleep(0)
        assert await ask(shared, "b") == expected
        await going
        await shared.aclose()


async def test_the_owner_need_not_look_after_it(expected: tuple[int, ...]) -> None:
    """In ``async with`` idle ones go by themselves, and all are closed at its end."""
    async with SharedEngines.from_pretrained({"a": "demo"}, idle_s=0.01, **SMALL) as shared:
        for _ in range(2):
            assert await ask(shared, "a") == expected
            async with asyncio.timeout(20):
                while awake(shared):
                    await asyncio.sleep(0.005)
    assert not shared.engines["a"].is_alive


async def test_an_end_breaks_a_wake_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for it are told, and the thread that reads weights goes no further."""
    shared = SharedEngines({"a": AsyncEngine.from_pretrained("demo", num_kv_blocks=64)})
    await shared.engines["a"].sleep(2)
    reached, may_go, load = threading.Event(), threading.Event(), new_weights.require_same_form

    def wait(*given: Any) -> None:
        reached.set()
        may_go.wait(20)
        load(*given)

    monkeypatch.setattr(new_weights, "require_same_form", wait)
    calls = [asyncio.create_task(ask(shared, "a")) for _ in range(3)]
    await asyncio.to_thread(reached.wait, 20)
    await shared.aclose()
    may_go.set()
    for call in calls:
        with pytest.raises(EngineClosed):
            await call
    with pytest.raises(EngineClosed):
        await ask(shared, "a")


def test_reading_ends_with_its_wake() -> None:
    """A wake that is closed while weights are packed reads no further one."""
    with Engine.from_pretrained("demo") as engine:
        engine.sleep(2)
        wake = engine.begin_wake()
        wake.begin()
        wake.close()
        with pytest.raises(EngineClosed, match="broken off"):
            wake.read()
        engine.wake()
        assert engine.sleep_level == 0


async def test_an_engine_that_cannot_sleep_any_more_stays(four: SharedEngines) -> None:
    """Weights that were given in memory have no files to be read from; another engine makes room."""
    async with four.use("c") as engine:
        with pytest.raises(MemoryBudgetExceeded, match="second copy"):
            async with engine.new_weights() as weights:
                await weights.load(changed_weights())
        assert await four.make_room()
        assert awake(four) == {"c"}
        async with engine.new_weights() as weights:
            await weights.load(changed_weights())
        assert not await four.make_room()
    for name in ("d", "a"):
        await ask(four, name)
    assert awake(four) == {"a", "c"}
    # Why again: those who come next want one that sleeps.
    async with four.use("c") as engine, engine.new_weights(way="in_place") as weights:
        await weights.load(DEMO_MODEL_DIR)


def left_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that have come since and do not end; the one that watches an engine ends a little after it."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(60.0)
    return [thread for thread in new if thread.is_alive()]


@pytest.mark.parametrize(("given", "said"), [
    ({"memory": "3MiB"}, "memory budget: asked for"), ({"memory": "none"}, "total: got 'none'"),
    ({"memory": "64MiB", "kv_cache_memory": "none"}, "kv_cache_memory: got 'none'"),
    ({"memory": "64MiB", "kv_cache_memory": MemoryBudget("1MiB")}, "kv_cache_memory: got a budget"),
    ({"idle_s": 0}, "idle_s: got 0"), ({"models": {}}, "engines: got none"),
    ({"models": {"a": make_engine().components.runner.backend}, "idle_s": 9},
     "engines, a: sleep: got a backend of your own"),
    ({"models": {"a": make_engine().components.runner.backend}, "memory": "64MiB"}, "a budget that counts weights"),
], ids=["small", "no size", "no size of pools", "budget", "idle", "none", "toy", "toy in a budget"])
def test_what_cannot_be_shared_is_refused(given: dict[str, Any], said: str) -> None:
    """With the name of what is wrong, and nothing is left drawn or running."""
    before = set(threading.enumerate())
    with pytest.raises(InvalidConfig, match=said):
        SharedEngines.from_pretrained(given.pop("models", {"a": "demo"}), **given)
    assert left_since(before) == []


async def test_an_unknown_name_is_refused(four: SharedEngines) -> None:
    """With the names that there are."""
    with pytest.raises(InvalidRequest, match="one of a, b, c, d"):
        await ask(four, "e")


def test_a_budget_counts_weights(tmp_path: Path) -> None:
    """Beside the pool, before they are read; level 2 gives them back; those of a model that guesses once."""
    budget = MemoryBudget("64MiB", counts_weights=True)
    with Engine.from_pretrained("demo", kv_cache_memory=budget.share("8MiB")) as engine:
        alone = budget.total_bytes - budget.left_bytes
        num_weights = alone - engine.stats().kv_bytes
        assert num_weights > 2**21
        engine.sleep(1)
        assert budget.total_bytes - budget.left_bytes == num_weights
        engine.sleep(2)
        assert budget.left_bytes == budget.total_bytes
        engine.wake()
        assert budget.total_bytes - budget.left_bytes == alone
    assert budget.left_bytes == budget.total_bytes
    with pytest.raises(InvalidConfig):
        Engine.from_pretrained(tmp_path, kv_cache_memory=budget)
    assert budget.left_bytes == budget.total_bytes
    with Engine.from_pretrained("demo", kv_cache_memory=budget, speculative_model="demo", num_kv_blocks=8) as engine:
        drawn = budget.total_bytes - budget.left_bytes
        assert drawn == 2 * num_weights + 2 * engine.stats().kv_bytes
        engine.sleep(2)
        assert budget.left_bytes == budget.total_bytes


def test_what_has_no_room_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a budget has no room for, with its pool, is refused before its weights are read."""
    monkeypatch.setattr("pagedcore.engine.builder.resolve_backend", None)
    budget = MemoryBudget("10MiB", counts_weights=True)
    with pytest.raises(MemoryBudgetExceeded):
        Engine.from_pretrained("demo", kv_cache_memory=budget.share("8MiB"))
    assert budget.left_bytes == budget.total_bytes


def test_nothing_is_left_when_a_later_model_fails(tmp_path: Path) -> None:
    """Engines that were built before it are closed, those that sleep too."""
    before = set(threading.enumerate())
    with pytest.raises(InvalidConfig):
        SharedEngines.from_pretrained({"a": "demo", "b": "demo", "c": tmp_path}, memory="10MiB", **SMALL)
    assert left_since(before) == []

"""The end of an engine thread is total: whatever raises on it, every caller is told, and later calls are refused."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed
from pagedcore.requests.request import Request
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.engine_loop import EngineLoop, StreamFlusher
from pagedcore.serving.stream import CompletionFuture, wake
from support.async_helpers import broken_step, complete, is_told_to_end, params, wait_until
from support.doubles import GatedBackend, toy_answer
from support.engine_builders import make_engine

WAYS_TO_BREAK: dict[str, list[tuple[type, str]]] = {
    "close": [(Engine, "close")],
    "flusher": [(StreamFlusher, "take")],
    "step and close": [(Engine, "step_pending"), (Engine, "close")],
    "output": [(Request, "output"), (Engine, "close")],
    "remove": [(Engine, "remove_request"), (Engine, "close")],
}


def fail(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("way", WAYS_TO_BREAK)
async def test_whatever_raises_everybody_is_told_and_later_calls_are_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running, waiting and held requests, calls, and what comes when the engine is closed: an answer or EngineClosed,
    never silence."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    backend = GatedBackend()
    engine = AsyncEngine(make_engine(backend, max_num_seqs=2, max_num_waiting=2))
    streams = [asyncio.create_task(complete(engine, [value], 2)) for value in range(2)]
    await asyncio.to_thread(backend.is_entered.wait)
    futures = [engine.submit([value], params(60), wait_for_room=True) for value in range(4)]
    call = asyncio.create_task(engine.call(lambda inner: inner.is_stalled))
    await asyncio.sleep(0)
    for owner, name in WAYS_TO_BREAK[way]:
        monkeypatch.setattr(owner, name, fail)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.to_thread(wait_until, lambda: is_told_to_end(engine))
    backend.gate.set()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*streams, *map(asyncio.wrap_future, futures), call, return_exceptions=True)
        await closing
    answers = [*(toy_answer([value], 2) for value in range(2)), False]
    assert all(isinstance(end, EngineClosed) or end in answers for end in ends), ends
    assert all(isinstance(end, EngineClosed) for end in ends[2:6])
    for refused in (lambda: engine.submit([1]), lambda: list(engine.generate_sync([1])), lambda: engine.stats(),
                    lambda: engine.observe(object())):
        with pytest.raises(EngineClosed):
            refused()
    with pytest.raises(EngineClosed):
        await engine.session().open()
    assert engine.health().status == "dead"


async def test_a_command_between_the_last_look_and_the_closing_is_refused() -> None:
    """A caller that has looked whether the engine is open, and comes when it is not any more, is told."""
    engine = AsyncEngine(make_engine())
    commands = engine._commands
    commands.require_open = engine.close  # type: ignore[method-assign]  # Why: it closes right after the look
    late = engine.send(lambda _: 1)
    assert isinstance(late.exception(10), EngineClosed)


async def test_readers_that_leave_during_the_last_step_are_not_kept() -> None:
    """The program may keep a closed engine; it must not keep what was on its way to readers."""
    backend = GatedBackend()
    engine = AsyncEngine(make_engine(backend))
    reading = asyncio.create_task(complete(engine, [1], 20))
    await asyncio.to_thread(backend.is_entered.wait)

    def stop(worker: EngineLoop) -> None:
        backend.is_entered.clear()
        backend.gate.clear()
        worker.stop()

    engine._commands.put(stop, CompletionFuture())
    backend.gate.set()
    await asyncio.to_thread(wait_until, lambda: not backend.gate.is_set())
    await asyncio.to_thread(backend.is_entered.wait)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert engine._commands.aborts
    backend.gate.set()
    await engine.aclose()
    assert not engine._commands.aborts


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_what_a_callback_raises_ends_nothing_else(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the engine, nor the callbacks after it, nor other requests; it is logged once."""

    def end(_: Future[Any]) -> None:
        raise error

    backend, called = GatedBackend(), list[object]()
    with AsyncEngine(make_engine(backend)) as engine, caplog.at_level(logging.ERROR):
        future, other = engine.submit([1], params(2)), engine.submit([2], params(9))
        future.add_done_callback(end)
        future.add_done_callback(called.append)
        backend.gate.set()
        assert list(other.result(10).outputs[0].token_ids) == toy_answer([2], 9)
        assert called == [future]
        assert engine.health().status == "ready"
    assert len(caplog.records) == 1


def test_a_callback_on_the_thread_of_its_owner_is_the_owners(caplog: pytest.LogCaptureFixture) -> None:
    """What is added after the end, or runs because of ``cancel``, runs on the main thread, where Ctrl-C is real."""
    with AsyncEngine(make_engine()) as engine:
        future = engine.submit([1], params(2))
        future.result(10)
        with pytest.raises(KeyboardInterrupt):
            future.add_done_callback(lambda _: (_ for _ in ()).throw(KeyboardInterrupt))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError, ValueError])
async def test_what_a_called_function_raises_is_its_callers(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on, and so does the caller's event loop, whose task gets an error that ends nothing else."""

    def end(_: Engine) -> None:
        raise error

    async with AsyncEngine(make_engine()) as engine:
        with pytest.raises(ValueError if error is ValueError else RuntimeError) as raised:
            await asyncio.wait_for(engine.call(end), 10)
        assert error in (type(raised.value), type(raised.value.__cause__))
        assert await complete(engine, [1], 3) == toy_answer([1], 3)
    assert len(caplog.records) == (error is not ValueError)


async def test_a_turn_that_cannot_begin_is_its_readers() -> None:
    """Whatever ``begin`` raises, the reader gets it and the engine goes on."""

    def begin() -> Request:
        raise OSError("no disk")

    async with AsyncEngine(make_engine()) as engine:
        with pytest.raises(OSError, match="no disk"):
            await engine.read_turn(begin).next()
        assert await complete(engine, [1], 3) == toy_answer([1], 3)


async def test_a_broken_step_wakes_those_whose_output_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that fails half-way still wakes the readers before it."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    backend = GatedBackend()
    engine = AsyncEngine(make_engine(backend))
    first = asyncio.create_task(complete(engine, [1], 1))
    await asyncio.sleep(0)
    second = engine.submit([2], params(1))
    await asyncio.to_thread(backend.is_entered.wait)
    monkeypatch.setattr(Request, "output", broken_step)
    backend.gate.set()
    async with asyncio.timeout(10):
        assert await first == toy_answer([1], 1)
        with pytest.raises(EngineClosed):
            await asyncio.wrap_future(second)


def wakes_of(raised: Callable[[], Exception]) -> Any:
    """A sleeping reader whose loop cannot be called."""

    class Loop:
        def call_soon_threadsafe(self, *_: object) -> None:
            raise raised()

    class Waiter:
        def get_loop(self) -> Loop:
            return Loop()

    return Waiter()


@pytest.mark.parametrize("error", [RuntimeError, OSError, AttributeError])
def test_a_loop_that_cannot_be_called_is_a_closed_one(error: type[Exception]) -> None:
    """Loops of other libraries say so in other ways; the readers on other loops are woken."""
    lost, other = wakes_of(error), threading.Event()
    assert wake([lost, other]) == [lost]
    assert other.is_set()

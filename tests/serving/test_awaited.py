"""Whole completions that are awaited, and requests that are ended by their id or by Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from pagedcore.errors import InvalidRequest, PromptEmpty, RequestAborted, RequestTimeout, UnknownParameter
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.stream import AwaitableFuture, awaitable
from support.async_helpers import wait_until
from support.doubles import GatedBackend, toy_answer
from support.engine_builders import make_engine

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def engine(backend: GatedBackend) -> Iterator[AsyncEngine]:
    """An engine whose first step waits for the test, with one row and room for one request that waits."""
    with AsyncEngine(make_engine(backend, max_num_seqs=1, max_num_waiting=1)) as engine:
        yield engine
        backend.gate.set()


def in_flight(engine: AsyncEngine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.num_running, stats.num_waiting, stats.num_blocks_used


def test_what_submit_returns_is_awaited_on_any_loop(engine: AsyncEngine, backend: GatedBackend) -> None:
    """Two loops in two threads await the same future, alone and in a group; it is a concurrent future all the same."""
    backend.gate.set()
    future = engine.submit([1], LONG)
    assert isinstance(future, Future)

    async def wait() -> list[tuple[int, ...]]:
        return [one.outputs[0].token_ids for one in (await future, *await asyncio.gather(future, future))]

    found = list[list[tuple[int, ...]]]()
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(wait()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[tuple(toy_answer([1], 40))] * 3] * 2
    assert list(future.result(60).outputs[0].token_ids) == toy_answer([1], 40)


async def test_cancelling_what_awaits_ends_the_request(engine: AsyncEngine, backend: GatedBackend) -> None:
    """Of a bare future and of ``complete`` alike: nothing runs on, and ``complete`` has a limit of its own."""
    async def wait() -> object:
        return await engine.submit([1], LONG)

    for waiting in (wait(), engine.complete([1], LONG)):
        task = asyncio.ensure_future(waiting)
        await asyncio.to_thread(backend.is_entered.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(RequestTimeout):
        await engine.complete([2], LONG, timeout_s=0.01, wait_for_room=True)
    backend.gate.set()
    output = await engine.complete([3], LONG, wait_for_room=True)
    assert list(output.outputs[0].token_ids) == toy_answer([3], 40)
    assert await asyncio.to_thread(in_flight, engine) == (0, 0, 0)
    with pytest.raises(PromptEmpty):
        await engine.complete([])
    with pytest.raises(UnknownParameter):
        await engine.complete([1], LONG, temperature=1)  # type: ignore[call-arg]


async def test_a_request_is_aborted_wherever_it_is(engine: AsyncEngine, backend: GatedBackend) -> None:
    """Running, waiting, and held back for want of room: readers and futures get their end, and no one else's."""
    stream = engine.generate([1], LONG, request_id="a", cache_salt="s")
    first = asyncio.ensure_future(anext(stream))
    await asyncio.to_thread(backend.is_entered.wait, 30)
    waiting = engine.submit([2], LONG, request_id="b")
    held = engine.submit([3], LONG, request_id="c", wait_for_room=True)
    other = engine.submit([4], LONG, request_id="d", wait_for_room=True)
    answers = [asyncio.ensure_future(engine.abort(name, cache_salt=salt))
               for name, salt in (("b", None), ("c", None), ("a", None), ("a", "s"), ("e", None))]
    await asyncio.sleep(0)
    backend.gate.set()
    assert await asyncio.gather(*answers) == [True, True, False, True, False]
    deltas = [await first, *[delta async for delta in stream]]
    assert deltas[-1].finish_reason == "abort"
    assert (await waiting).outputs[0].finish_reason == "abort"
    with pytest.raises(RequestAborted):
        await held
    assert list((await other).outputs[0].token_ids) == toy_answer([4], 40)
    with pytest.raises(InvalidRequest):
        await engine.abort(5)  # type: ignore[arg-type]


def test_ctrl_c_in_a_wait_ends_the_request(engine: AsyncEngine, backend: GatedBackend) -> None:
    """The interrupt comes out of ``result``, and nothing runs on; a limit on the wait alone ends no request."""
    future, main = engine.submit([1], LONG), threading.main_thread().ident or 0
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert not future.cancelled()

    def is_waiting() -> bool:
        callers = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return AwaitableFuture.result.__code__ in callers and threading.Condition.wait.__code__ in callers

    def interrupt() -> None:
        # Why not earlier: the interrupt would end the tests.
        wait_until(lambda: backend.is_entered.is_set() and is_waiting())
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        future.result(60)
    assert future.cancelled()
    backend.gate.set()
    assert in_flight(engine) == (0, 0, 0)


def test_a_future_of_others_is_followed() -> None:
    """Its result, its error and its cancellation come through, and a cancellation goes back."""
    for end, error in ((lambda one: one.set_result(3), None), (lambda one: one.set_exception(KeyError()), KeyError),
                       (lambda one: one.cancel(), CancelledError)):
        running = Future[int]()
        own: AwaitableFuture[int] = awaitable(running)
        end(running)
        if error is None:
            assert own.result(1) == 3
        else:
            with pytest.raises(error):
                own.result(1)
    running = Future[int]()
    assert awaitable(running).cancel()
    assert running.cancelled()

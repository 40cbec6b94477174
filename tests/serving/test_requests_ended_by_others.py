"""A request that something else than its reader ends: the reader gets the end, and the loop keeps nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest

from pagedcore import AsyncEngine, Delta, RequestOutput, SamplingParams
from pagedcore.engine.engine import Engine
from pagedcore.errors import SessionStateError
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.requests.request import Request
from pagedcore.requests.stats import StepStats
from pagedcore.scheduler.waiting_queue import PolicyOrder
from pagedcore.sequence import Sequence
from pagedcore.serving.async_session import AsyncSession
from pagedcore.serving.stream import StreamReader
from support.async_helpers import PausedBackend, SlowBackend
from support.doubles import toy_answer
from support.engine_builders import make_engine
from support.sinks import num_sinks

PARAMS = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
ANSWER = toy_answer([1, 2, 3], 50)


@pytest.fixture
def backend() -> PausedBackend:
    """It makes a few tokens of a completion, and the others when the test has asked for something."""
    backend = PausedBackend()
    backend.pause_after(3)
    return backend


@pytest.fixture
async def engine(backend: PausedBackend) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_engine(backend)) as engine:
        yield engine


async def call(engine: AsyncEngine, backend: PausedBackend, function: Callable[[Engine], None]) -> None:
    """Have a function called before the fifth step, however late this is."""
    calling = asyncio.ensure_future(engine.call(function))
    await asyncio.sleep(0)
    backend.gate.set()
    await calling


async def read(deltas: AsyncGenerator[Delta, None], seen: asyncio.Event) -> tuple[list[int], Delta]:
    tokens = list[int]()
    async with aclosing(deltas):
        async for delta in deltas:
            tokens += delta.token_ids
            seen.set()
    return tokens, delta


async def begin(engine: AsyncEngine, session: AsyncSession, kind: str) -> asyncio.Future[Any]:
    if kind == "completion":
        return asyncio.wrap_future(engine.submit([1, 2, 3], PARAMS))
    seen = asyncio.Event()
    deltas = engine.generate([1, 2, 3], PARAMS) if kind == "stream" else session.stream([1, 2, 3], PARAMS)
    reading = asyncio.create_task(read(deltas, seen))
    await seen.wait()
    return reading


def abort(engine: Engine) -> None:
    for request in engine.requests:
        request.abort()


def remove(engine: Engine) -> None:
    for request in engine.requests:
        request.abort()
        request.remove()


def close_sessions(engine: Engine) -> None:
    for session in engine.sessions:
        session.close()


def generate(engine: Engine) -> None:
    engine.generate([[5, 6]], SamplingParams(max_tokens=60, ignore_eos=True), show_progress=False)


def ask(engine: Engine) -> None:
    with engine.session() as session:
        session.ask([5, 6], SamplingParams(max_tokens=60, ignore_eos=True))


def step(engine: Engine) -> None:
    while engine.has_pending_requests():
        engine.step()


def abort_and_raise(engine: Engine) -> None:
    abort(engine)
    raise ValueError("a caller's function")


@pytest.mark.parametrize(("kind", "end"), [
    *((kind, end) for kind in ("stream", "completion") for end in (abort, remove, abort_and_raise)),
    *(("turn", end) for end in (abort, close_sessions, abort_and_raise)),
])
async def test_the_reader_gets_the_end(
    engine: AsyncEngine, backend: PausedBackend, kind: str, end: Callable[[Engine], None]
) -> None:
    """A caller's function may end any request, as an operator would by its id; its reader must not wait for ever."""
    before, session = num_sinks(), engine.session()
    reading = await begin(engine, session, kind)
    with suppress(ValueError):
        await call(engine, backend, end)
    tokens, reason = ended(await result_of(reading, engine))
    assert (reason, tokens) == ("abort", ANSWER[: len(tokens)])
    await session.aclose()
    assert await engine.call(lambda engine: len(list(engine.requests)) + len(engine.sessions)) == 0
    del reading, session
    await require_gone(before)


async def result_of(reading: asyncio.Future[Any], engine: AsyncEngine) -> Any:
    """Return what was read; a reader who is not told waits for longer than this does."""
    await engine.call(lambda _: None)
    return await asyncio.wait_for(reading, 60)


def ended(result: RequestOutput | tuple[list[int], Delta]) -> tuple[list[int], str | None]:
    if isinstance(result, RequestOutput):
        return list(result.outputs[0].token_ids), result.outputs[0].finish_reason
    tokens, last = result
    assert last.usage is not None
    assert last.usage.num_output_tokens >= len(tokens) > 0
    return tokens, last.finish_reason


@pytest.mark.parametrize(("kind", "run"), [
    ("stream", generate), ("completion", generate), ("turn", generate), ("stream", ask), ("stream", step),
])
async def test_a_function_that_steps_the_engine(
    engine: AsyncEngine, backend: PausedBackend, kind: str, run: Callable[[Engine], None]
) -> None:
    """Steps of a caller's function end requests of others; their readers get the end, and what they generated."""
    session = engine.session()
    reading = await begin(engine, session, kind)
    await call(engine, backend, run)
    tokens, reason = ended(await result_of(reading, engine))
    assert reason == "length"
    # Why: what a function takes of a step's output itself, its readers do not get.
    assert tokens == (ANSWER if run is not step else ANSWER[: len(tokens)])
    await session.aclose()
    assert await engine.call(lambda engine: len(list(engine.requests))) == 0


async def require_gone(before: int) -> None:
    async with asyncio.timeout(60):
        while num_sinks() > before:
            await asyncio.sleep(0.01)


async def test_a_request_that_an_observer_aborts() -> None:
    """What a hook ends while a step is made is found after it; a neighbour goes on."""

    class Observer:
        @hookimpl
        def pagedcore_step(self, stats: StepStats) -> None:
            if stats.num_steps == 3:
                next(iter(inner.requests)).abort()

    inner = make_engine(SlowBackend(), plugins=[Observer()])
    async with AsyncEngine(inner) as engine:
        outputs = [asyncio.wrap_future(engine.submit(prompt, PARAMS)) for prompt in ([1, 2, 3], [4, 5])]
        first, second = [ended(await asyncio.wait_for(output, 20)) for output in outputs]
    assert (first[1], second) == ("abort", (toy_answer([4, 5], 50), "length"))


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_turn_that_is_cancelled_before_the_engine_begins_it(is_open: bool) -> None:
    """The abort overtakes the turn. It is not begun then, and the session goes on; nothing of it is kept."""
    gate, is_held = threading.Event(), threading.Event()
    async with AsyncEngine(make_engine()) as engine:
        session = engine.session()
        if is_open:
            await session.ask([1], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        known = list(session.token_ids)
        begun = engine.read_turn
        before = num_sinks()

        def read_turn(begin: Callable[[], Request]) -> StreamReader:
            # Why here: the engine thread is busy from before the turn is sent until after its reader has left.
            engine.send(lambda _: (is_held.set(), gate.wait(20)))
            assert is_held.wait(20)
            reader = begun(begin)
            reader.close()
            gate.set()
            is_begun.set()
            return reader

        engine.read_turn = read_turn  # type: ignore[method-assign]
        reading, is_begun = asyncio.create_task(session.ask([2, 3], PARAMS)), asyncio.Event()
        await is_begun.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        del engine.read_turn, reading  # type: ignore[method-assign]
        await require_gone(before)
        assert list(session.token_ids) == known
        output = await session.ask([2, 3], PARAMS)
        assert list(output.outputs[0].token_ids) == toy_answer([*known, 2, 3], 50)
        await session.aclose()
        assert await engine.call(lambda engine: len(list(engine.requests)) + len(engine.sessions)) == 0


async def test_a_session_that_is_closed_before_the_engine_begins_its_turn() -> None:
    """The task that asked learns of it; it waits for a turn that is never begun."""
    gate = threading.Event()
    async with AsyncEngine(make_engine()) as engine:
        session, begun = engine.session(), engine.read_turn
        await session.open()

        def read_turn(begin: Callable[[], Request]) -> StreamReader:
            engine.send(lambda _: gate.wait(60))
            is_begun.set()
            return begun(begin)

        engine.read_turn = read_turn  # type: ignore[method-assign]
        asking, is_begun = asyncio.create_task(session.ask([2, 3], PARAMS)), asyncio.Event()
        await is_begun.wait()
        closing = asyncio.create_task(session.aclose())
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(SessionStateError):
            await result_of(asking, engine)
        await closing
        del engine.read_turn  # type: ignore[method-assign]


async def test_a_held_request_whose_policy_raises_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is not held any more and not begun yet: its caller gets the error, and the engine goes on."""
    insert = PolicyOrder._insert

    def exit_for_one(order: PolicyOrder, sequence: Sequence) -> None:
        if sequence.token_ids[0] == 7:
            raise SystemExit
        insert(order, sequence)

    monkeypatch.setattr(PolicyOrder, "_insert", exit_for_one)
    async with AsyncEngine(make_engine(SlowBackend(), max_num_waiting=1, max_num_seqs=1)) as engine:
        outputs = [asyncio.wrap_future(engine.submit([first, 2], PARAMS, wait_for_room=True)) for first in (1, 2, 7, 3)]
        results = await asyncio.wait_for(asyncio.gather(*outputs, return_exceptions=True), 20)
    assert type(results.pop(2)) is RuntimeError
    assert [ended(result)[1] for result in results if isinstance(result, RequestOutput)] == ["length"] * 3

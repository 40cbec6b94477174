"""No caller that is cancelled, and no handle that is lost, leaves a session open in the engine."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import SessionStateError, TooManySequences
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from support.apart import Apart
from support.engine_builders import assert_all_free, make_engine

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


class SteppedEngine(AsyncEngine):
    """An engine without a thread of its own: its commands run when the test says so."""

    def __init__(self, engine: Engine) -> None:
        self._read_session, self._engine = engine.sessions.read, engine
        self._sent: deque[tuple[int, Callable[[Engine], Any], Future[Any]]] = deque()
        self.iteration = 0

    def send(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Take a command."""
        self._sent.append((self.iteration, function, result := Future()))
        return result

    def run_command(self, lag: int) -> bool:
        """Run the oldest command as ``EngineLoop.call`` does, if it was sent ``lag`` iterations ago."""
        if not self._sent or self._sent[0][0] + lag > self.iteration:
            return False
        _, function, result = self._sent.popleft()
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function(self._engine))
            except Exception as error:
                result.set_exception(error)
        return True


async def opened(engine: AsyncEngine, path: Path) -> None:
    """Enter and leave a session, and one that is opened by hand."""
    async with engine.session(PARAMS):
        await asyncio.sleep(0)
    session = engine.session(PARAMS)
    try:
        await session.open()
    finally:
        await session.aclose()


async def forked(engine: AsyncEngine, path: Path) -> None:
    """Fork a session."""
    async with engine.session(PARAMS) as session, await session.fork():
        await asyncio.sleep(0)


async def imported(engine: AsyncEngine, path: Path) -> None:
    """Import a session."""
    async with await engine.import_session(path):
        await asyncio.sleep(0)


SCENARIOS = {"opened": opened, "forked": forked, "imported": imported}
LAGS = {"at once": 0, "an iteration later": 1, "three iterations later": 3}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session file."""
    path = tmp_path_factory.mktemp("session") / "chat.json"
    session = make_engine().session(PARAMS)
    session.ask([1, 2, 3])
    session.export(path)
    return path


async def interrupt(
    engine: SteppedEngine, scenario: Awaitable[None], at: int, lag: int, way: str, runs_late: bool
) -> bool:
    """Run a scenario, interrupt it in the ``at``-th iteration of the loop; return whether it had ended before.

    Commands run ``lag`` iterations after they were sent; ``runs_late``: in the iteration of the interruption after it,
    so that what they return comes too late to be delivered.
    """
    scope = asyncio.timeout(None)

    async def run() -> None:
        async with scope:
            await scenario

    task = asyncio.create_task(run())
    # Why: a task that is cancelled before it has begun would leave its coroutine unused.
    await asyncio.sleep(0)
    has_ended = False
    for iteration in range(60):
        engine.iteration += 1
        if not runs_late:
            engine.run_command(lag)
        if iteration == at:
            has_ended = task.done()
            if way == "cancelled" or has_ended:
                task.cancel()
            else:
                scope.reschedule(asyncio.get_running_loop().time())
        if runs_late:
            engine.run_command(lag)
        await asyncio.sleep(0)
    assert task.done()
    with suppress(asyncio.CancelledError, TimeoutError):
        task.result()
    assert not engine.run_command(0)
    return has_ended


@pytest.mark.parametrize("runs_late", [False, True])
@pytest.mark.parametrize("way", ["cancelled", "timed out"])
@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_cancelled_in_any_iteration(
    name: str, lag: str, way: str, runs_late: bool, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever iteration of the loop a task is interrupted, and whether the engine has opened the session by then
    or opens it afterwards: every session is closed when the task has ended, before any garbage is collected."""

    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    stepped = SteppedEngine(make_engine())
    gc.disable()
    try:
        at = 0
        while not await interrupt(stepped, SCENARIOS[name](stepped, exported), at, LAGS[lag], way, runs_late):
            assert len(stepped._engine.sessions) == 0, at
            at += 1
    finally:
        gc.enable()
    assert at >= 6
    assert_all_free(stepped._engine)


async def test_many_tasks_cancelled_on_a_real_thread(exported: Path) -> None:
    """Three hundred tasks that open, fork and import sessions are cancelled at random moments: none stays open."""
    rng = random.Random(5)
    engine = make_engine()
    async with AsyncEngine(engine) as serving:

        async def one() -> None:
            task = asyncio.create_task(rng.choice(list(SCENARIOS.values()))(serving, exported))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(rng.choice([0, 0, 0.0005]))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(30)))
        assert await serving.call(lambda engine: len(engine.sessions)) == 0
        assert await serving.call(lambda engine: len(list(engine.requests))) == 0


async def require_open(engine: AsyncEngine, num_open: int) -> None:
    """Wait until so many sessions are open.

    Why not at once: the engine thread refers to its latest command until it has another one, and a thread that has read
    or written a file to what it was asked for until it goes on.
    """
    async with asyncio.timeout(60):
        while await engine.call(lambda engine: len(engine.sessions)) != num_open:
            gc.collect()
            await asyncio.sleep(0.001)


async def test_a_lost_session_is_closed() -> None:
    """A session that nothing refers to any more is closed, parked or not, in a cycle or not, on any thread; a turn
    under way keeps its session, and a fork outlives what it was forked from."""
    async with AsyncEngine(make_engine(host_kv_memory="1KiB", preemption="swap")) as engine:
        for number in range(20):
            session = engine.session(PARAMS)
            await session.ask([number % 20, 1, 2])
            if number % 3 == 0:
                await session.park("host" if number % 2 else "disk")
            if number % 3 == 1:
                session.me = session  # type: ignore[attr-defined]
        del session
        await require_open(engine, 0)
        assert engine.stats().num_host_blocks_used == 0
        assert await engine.call(lambda engine: engine.sessions.parking.directory.files) == set()
        sessions = [engine.session(PARAMS) for _ in range(20)]
        await asyncio.gather(*(session.open() for session in sessions))
        loser = threading.Thread(target=sessions.clear)
        loser.start()
        loser.join()
        await require_open(engine, 0)
        stream = engine.session(PARAMS).stream([1, 2])
        assert [delta async for delta in stream][-1].finish_reason == "length"
        del stream
        session = engine.session(PARAMS)
        await session.ask([1, 2])
        fork = await session.fork()
        del session
        await require_open(engine, 1)
        await fork.ask([3])
        await fork.aclose()
        await require_open(engine, 0)


async def test_a_closed_session_is_not_opened() -> None:
    """Closed before its first use, or entered in vain, a session is refused and none is made for it."""
    async with AsyncEngine(make_engine()) as engine:
        session, refused = engine.session(PARAMS), engine.session(SamplingParams(n=2))
        await session.aclose()
        with pytest.raises(TooManySequences):
            await refused.__aenter__()
        for one in (session, refused):
            with pytest.raises(SessionStateError, match="closed"):
                await one.open()
        await require_open(engine, 0)


async def test_an_imported_session_does_not_keep_what_was_read(exported: Path) -> None:
    """The contents of the file, its KV among them, are freed once the session is open."""
    async with AsyncEngine(make_engine()) as engine:
        session = await engine.import_session(exported)
        async with asyncio.timeout(60):
            while any(type(one).__name__ == "SessionSnapshot" for one in gc.get_objects()):
                # Why: the engine's thread has the command until it goes on to wait for the next one.
                await asyncio.sleep(0.02)
                gc.collect()
        await session.aclose()


def test_losing_a_session_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the engine was closed or lost, and in another process than the engine's, losing one does nothing."""
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    closed, lost, other = (AsyncEngine(make_engine()) for _ in range(3))
    sessions = [engine.session(PARAMS) for engine in (closed, lost, other)]
    for session in sessions:
        asyncio.run(session.open())
    closed.close()
    del sessions[0], closed, lost
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        sessions.pop()
    sessions.clear()
    gc.collect()
    assert not failed
    other.close()


def test_sessions_that_are_open_at_the_exit_of_the_interpreter(apart: Apart) -> None:
    """The interpreter ends at once and silently, with sessions of a closed engine, of an open one and of a lost one."""
    script = """
import asyncio
from pagedcore import AsyncEngine
from support.engine_builders import make_engine
engines = [AsyncEngine(make_engine()) for _ in range(3)]
sessions = [engine.session() for engine in engines]
sessions.append(sessions)
for session in sessions[:3]:
    asyncio.run(session.open())
engines[0].close()
del engines[1]
"""
    assert apart.run(script) == ""

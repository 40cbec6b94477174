"""A forward that never returns: every reader is told, every call returns, the process ends, and its memory stays."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.errors import EngineClosed, EngineHung, InvalidConfig
from pagedcore.outputs import Delta, RequestOutput
from pagedcore.serving import async_engine, engine_loop
from pagedcore.serving.async_engine import AsyncEngine
from pagedcore.serving.health import Progress, watch
from pagedcore_kernels.cpu.runtime import compiled
from support.async_helpers import complete, params, wait_until
from support.doubles import FakeClock, ToyBackend, toy_answer
from support.engine_builders import make_engine

SOON_S = 0.3


class HangingBackend(ToyBackend):
    """A toy whose forward does not return while it ``hangs``, and says when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = True
        self.is_entered, self.go_on, self.events = threading.Event(), threading.Event(), list[str]()

    def forward(self, batch):  # type: ignore[no-untyped-def]
        self.is_entered.set()
        if self.hangs:
            self.go_on.wait()
            self.events.append("returned")
        return super().forward(batch)


@pytest.fixture
def backend() -> Iterator[HangingBackend]:
    """A backend that hangs until the test is over."""
    backend = HangingBackend()
    yield backend
    backend.go_on.set()


@pytest.fixture
def may_judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Watchdogs begin to count when this is set, however long a busy machine takes for what comes before."""
    event = threading.Event()

    def watch_later(*arguments: Any) -> None:
        event.wait()
        watch(*arguments)

    monkeypatch.setattr(async_engine, "watch", watch_later)
    yield event
    event.set()


def errors_of(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Make calls, each on a thread of its own, and return what they raise."""
    found: dict[str, Any] = {}

    def make(name: str, call: Callable[[], Any]) -> None:
        try:
            found[name] = call()
        except BaseException as error:
            found[name] = type(error)

    threads = [threading.Thread(target=make, args=one, daemon=True) for one in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def calls_on(engine: AsyncEngine) -> dict[str, Callable[[], Any]]:
    return {
        "stream": lambda: asyncio.run(read(engine)),
        "sync": lambda: list(engine.generate_sync([1], params(5), wait_for_room=True)),
        "submit": lambda: engine.submit([1], params(5), wait_for_room=True).result(),
        "call": lambda: asyncio.run(engine.call(lambda inner: inner.stats())),
        "stats": lambda: engine.stats(),
        "session": lambda: asyncio.run(ask(engine)),
    }


async def read(engine: AsyncEngine) -> list[Delta]:
    return [delta async for delta in engine.generate([1], params(5), wait_for_room=True)]


async def ask(engine: AsyncEngine) -> RequestOutput:
    async with engine.session(params(3)) as session:
        return await session.ask([1, 2])


async def test_a_hang_is_told_to_everybody_and_its_late_return_delivers_nothing(
    backend: HangingBackend, may_judge: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, futures, calls and sessions get EngineHung, those before the hang, those during it and those after it;
    nothing is freed under the forward, which may return: then the engine closes and what it computed is dropped."""
    inner, close = make_engine(backend, max_num_seqs=1, max_num_waiting=2), Engine.close
    monkeypatch.setattr(Engine, "close", lambda inner: (backend.events.append("closed"), close(inner)))
    engine = AsyncEngine(inner, dead_after_s=SOON_S)
    backend.hangs = False
    session = engine.session(params(3))
    first = await session.ask([1, 2])
    backend.is_entered.clear()
    backend.hangs = True
    turn, settled = asyncio.create_task(session.ask([3])), list[object]()
    await asyncio.to_thread(backend.is_entered.wait)
    future = engine.submit([1], params(5))
    future.add_done_callback(settled.append)
    may_judge.set()
    found = await asyncio.to_thread(errors_of, calls_on(engine))
    assert found == dict.fromkeys(calls_on(engine), EngineHung)
    with pytest.raises(EngineHung, match=r"0\.3 seconds .* dead_after_s"):
        await turn
    assert isinstance(future.exception(10), EngineHung)
    assert errors_of(calls_on(engine)) == dict.fromkeys(calls_on(engine), EngineHung)
    assert (engine.health().status, engine.is_alive) == ("dead", False)
    assert "given up" in engine.health().reason
    await session.aclose()
    await engine.aclose()
    engine.close()
    assert backend.events == []
    backend.go_on.set()
    await asyncio.to_thread(engine._thread.join, 10)
    assert backend.events == ["returned", "closed"]
    assert settled == [future]
    assert isinstance(future.exception(), EngineHung)
    assert len(first.outputs[0].token_ids) == 3


def test_a_stream_gets_what_came_before_the_hang_and_nothing_after_it(may_judge: threading.Event) -> None:
    """The deltas of steps that ended are read, then EngineHung is raised, also once the forward has returned."""
    class HangsLater(HangingBackend):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            self.hangs = self.num_steps == 3
            return super().forward(batch)

    later = HangsLater()
    engine = AsyncEngine(make_engine(later), dead_after_s=SOON_S, stream_interval_s=0)
    reader = engine._open([1], params(9), {}, None, False)
    tokens, end = list[int](), None
    try:
        for delta in reader:
            tokens += delta.token_ids
            if len(tokens) == 3:
                may_judge.set()
    except EngineHung as error:
        end = error
    assert (tokens, type(end)) == (toy_answer([1], 9)[:3], EngineHung)
    later.go_on.set()
    engine._thread.join(10)
    with pytest.raises(EngineHung):
        reader._stream.take()


def test_close_with_a_limit_returns(backend: HangingBackend) -> None:
    """``close(timeout_s)`` does not wait for the watchdog: the step is left to itself, and readers are told."""
    engine = AsyncEngine(make_engine(backend))
    future = engine.submit([1], params(5))
    assert backend.is_entered.wait(10)
    engine.close(timeout_s=0.05)
    assert isinstance(future.exception(10), EngineHung)
    assert backend.events == []


async def test_aclose_with_a_limit_returns(backend: HangingBackend) -> None:
    """And leaves no thread of the loop's executor behind."""
    engine = AsyncEngine(make_engine(backend))
    reading = asyncio.create_task(complete(engine, [1], 5))
    await asyncio.to_thread(backend.is_entered.wait)
    await engine.aclose(0.05)
    with pytest.raises(EngineHung):
        await reading


def test_a_call_that_hangs_is_a_hang_too(backend: HangingBackend) -> None:
    """What ``call`` runs is on the same thread; its caller is told as every other."""
    engine = AsyncEngine(make_engine(backend), dead_after_s=SOON_S)
    hanging = engine.send(lambda _: backend.go_on.wait())
    assert isinstance(hanging.exception(10), EngineHung)


def test_an_engine_that_hangs_in_its_shutdown_is_given_up(
    backend: HangingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers are told at once, and ``close`` returns."""
    monkeypatch.setattr(Engine, "close", lambda _: backend.go_on.wait())
    backend.hangs = False
    engine = AsyncEngine(make_engine(backend), dead_after_s=SOON_S)
    engine.close()
    assert engine.health().status == "dead"
    with pytest.raises(EngineClosed):
        engine.submit([1])


def test_callbacks_of_a_hung_engine_may_close_it(backend: HangingBackend) -> None:
    """They run on the watchdog's thread, which does not wait for itself."""
    engine, done = AsyncEngine(make_engine(backend), dead_after_s=SOON_S), threading.Event()
    engine.submit([1], params(5)).add_done_callback(lambda _: (engine.close(), done.set()))
    assert done.wait(10)


def test_an_idle_engine_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to do no step ends either."""
    # Why: it has something to do for a moment at each look around.
    monkeypatch.setattr(engine_loop, "IDLE_CHECK_S", 600.0)
    with AsyncEngine(make_engine()) as engine:
        wait_until(lambda: engine._progress.is_idle)
        assert ticks_until_given_up(engine._progress, *[lambda: None] * 50) is None


def test_a_lost_engine_ends_its_watchdog() -> None:
    """The watchdog keeps nothing alive and goes with the engine's thread."""
    before = set(threading.enumerate())
    engine = AsyncEngine(make_engine())
    own = set(threading.enumerate()) - before
    assert {thread.name for thread in own} == {"pagedcore-engine", "pagedcore-watchdog"}
    del engine
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in own))


@pytest.mark.parametrize("dead_after_s", [0, -1, float("nan"), float("inf"), 1e10, "1", True, None])
def test_a_limit_that_makes_no_sense_is_refused(dead_after_s: Any) -> None:
    """The message names the setting, and no model is loaded first."""
    with pytest.raises(InvalidConfig, match="dead_after_s: "):
        AsyncEngine.from_pretrained("no-such-model", dead_after_s=dead_after_s)


class Ticks(threading.Event):
    """An event that is waited for in no time: each tick does what a test says, and the last one ends the watch."""

    def __init__(self, *ticks: Callable[[], object]) -> None:
        super().__init__()
        self.ticks = list(ticks)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.ticks:
            return True
        self.ticks.pop(0)()
        return False


def ticks_until_given_up(progress: Progress, *ticks: Callable[[], object]) -> int | None:
    """How many ticks the watchdog of an engine that may be silent for ten of them has seen when it gives up."""
    event, given_up = Ticks(*ticks), list[int]()
    watch(progress, event, 10.0, lambda _: given_up.append(len(ticks) - len(event.ticks)))
    return given_up[0] if given_up else None


def test_the_watchdog_counts_its_own_silent_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten of them in a row; a mark, idleness begin anew, and ticks during which a kernel compiles do not count."""
    clock = FakeClock()
    progress = Progress(clock)

    def silence() -> None:
        clock.advance(1000.0)

    def mark() -> None:
        progress.step_ended(has_output=True, has_failed=False)

    def idle(is_idle: bool) -> None:
        progress.is_idle = is_idle

    def compile_kernel(is_compiling: bool) -> None:
        monkeypatch.setattr(compiled, "present_kernel", lambda: "a kernel" if is_compiling else None)

    clock.advance(1.0)
    assert ticks_until_given_up(progress, *[silence] * 9) is None
    assert ticks_until_given_up(progress, *[silence] * 20) == 10
    assert ticks_until_given_up(progress, *[silence] * 9, mark, *[silence] * 20) == 20
    assert ticks_until_given_up(
        progress, *[silence] * 9, lambda: idle(True), silence, lambda: idle(False), *[silence] * 20
    ) == 9 + 2 + 10
    assert ticks_until_given_up(
        progress, *[silence] * 5, lambda: compile_kernel(True), *[silence] * 50, lambda: compile_kernel(False),
        *[silence] * 20,
    ) == 5 + 51 + 5


def test_a_kernel_that_compiles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Numba compiles, and no longer, also if it fails."""
    seen = []

    def fail(*_: object, **__: object) -> None:
        seen.append(compiled.present_kernel())
        raise ZeroDivisionError

    monkeypatch.setattr(compiled, "cfunc", fail)
    with pytest.raises(ZeroDivisionError):
        compiled.compile_entry(wait_until, None)
    assert compiled.present_kernel() is None
    assert [name.startswith("wait_until_") for name in seen] == [True]


SCRIPT = """
import json, os, signal, sys, threading
from pagedcore import AsyncEngine
from support.async_helpers import params
from support.doubles import ToyBackend
from support.engine_builders import make_engine


class Stopped(ToyBackend):
    def forward(self, batch):
        if self.num_steps == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(batch)


class Hanging(ToyBackend):
    def __init__(self):
        super().__init__()
        self.is_entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, batch):
        self.is_entered.set()
        self.go_on.wait()
        return super().forward(batch)


def hanging(dead_after_s):
    backend = Hanging()
    engine = AsyncEngine(make_engine(backend), dead_after_s=dead_after_s)
    future = engine.submit([1], params(3))
    backend.is_entered.wait()
    return backend, engine, future


stopped = AsyncEngine(make_engine(Stopped()), dead_after_s=1.5)
tokens = len(stopped.submit([1], params(3)).result(60).outputs[0].token_ids)
status = stopped.health(degraded_after_s=1000).status
closed, left = hanging(0.3), hanging(0.3)
closed[1].close()
reader = threading.Thread(target=lambda: list(left[1].generate_sync([1], params(3))))
reader.start()
threading.excepthook = lambda error: print(json.dumps(
    {"status": status, "tokens": tokens, "closed": type(closed[2].exception()).__name__,
     "reader": error.exc_type.__name__}), flush=True)
"""


@pytest.fixture(scope="module")
def process() -> dict[str, Any]:
    """A process that is stopped during a step for longer than ``dead_after_s``, then ends with engines that hang.

    It stops itself: asked from outside, a busy machine may make the step itself too long.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        # Why so: its end is left to be waited for.
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(2.0)
        child.send_signal(signal.SIGCONT)
        output, errors = child.communicate(timeout=120)
    return {"rc": child.returncode, "errors": errors, **json.loads(output)}


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGSTOP")
def test_a_stopped_process_is_not_dead(process: dict[str, Any]) -> None:
    """A step that the operating system stops for longer than ``dead_after_s`` ends, and its request is answered."""
    assert (process["status"], process["tokens"]) == ("ready", 3)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGSTOP")
def test_the_interpreter_exits_beside_forwards_that_hang(process: dict[str, Any]) -> None:
    """With an engine that was closed and one that was left open, while a thread reads from it."""
    assert (process["rc"], process["closed"], process["reader"]) == (0, "EngineHung", "EngineHung")
    assert process["errors"] == ""

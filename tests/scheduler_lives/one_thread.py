"""Event loops, executors and queues that share one thread and a clock which moves only when nothing else can happen.

A seed chooses whose callback runs next. Each caller has an event loop of its own, inside of which callbacks keep their
order, as asyncio promises; between loops, and between a loop and the engine, every order is possible.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore.protocols import MonotonicClock
from pagedcore.serving import async_engine, long_prompts
from support.doubles import FakeClock


class Turns:
    """The other threads of a process, one callback at a time, on this thread."""

    def __init__(self, rng: random.Random, clock: FakeClock) -> None:
        self.rng, self.clock = rng, clock
        self.loops: list[SimLoop] = []
        self.jobs: deque[Callable[[], object]] = deque()
        """What executors without a loop have to do."""
        self.before_sleep: Callable[[], object] = lambda: None

    def run_one(self) -> bool:
        """Run one callback of a loop, or one job; return whether there was any."""
        able = [loop for loop in self.loops if loop.is_able()]
        if not able and not self.jobs:
            return False
        place = self.rng.randrange(len(able) + bool(self.jobs))
        if place == len(able):
            self.jobs.popleft()()
        else:
            able[place].run_one()
        return True

    def run_some(self, most: int) -> None:
        """Run up to so many callbacks."""
        for _ in range(self.rng.randint(0, most)):
            if not self.run_one():
                return

    def sleep_until(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Let everything else happen until something is there, for ``timeout_s`` seconds of the clock at most."""
        deadline_s = self.clock.now() + timeout_s
        while not is_over():
            self.before_sleep()
            if is_over() or self.run_one():
                continue
            next_s = min((loop.next_s() for loop in self.loops), default=deadline_s)
            self.clock.advance(max(0.0, min(next_s, deadline_s) - self.clock.now()))
            if next_s >= deadline_s:
                return


class SimLoop(asyncio.BaseEventLoop):
    """An event loop without a selector, whose callbacks are run from outside, one by one."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self.tasks: list[asyncio.Task[Any]] = []
        turns.loops.append(self)

    def create_task(self, coroutine: Any, **settings: Any) -> Any:
        """Remember every task, so that a lost one is found."""
        task = super().create_task(coroutine, **settings)
        self.tasks = [one for one in self.tasks if not one.done()] + [task]
        return task

    def time(self) -> float:
        return self._turns.clock.now()

    def next_s(self) -> float:
        """When the first timer is due."""
        return self._scheduled[0].when() if self._scheduled else float("inf")

    def is_able(self) -> bool:
        """Whether a callback can run now."""
        return bool(self._ready) or self.next_s() <= self.time()

    def run_one(self) -> None:
        """Run the next callback."""
        while self._scheduled and self.next_s() <= self.time():
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        outer, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)
        self._thread_id = threading.get_ident()
        try:
            handle._run()
        finally:
            self._thread_id = None
            events._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """Run a function at some later moment, whether or not the caller still waits for it."""
        future = self.create_future()

        def carry_out() -> None:
            try:
                settle, result = future.set_result, function(*args)
            except BaseException as error:
                settle, result = future.set_exception, error
            self.call_soon(lambda: settle(result) if not future.done() else None)

        self._turns.jobs.append(carry_out)
        return future

    def _write_to_self(self) -> None:
        pass

    def _timer_handle_cancelled(self, handle: object) -> None:
        pass


class SimQueue:
    """A ``CommandQueue`` whose reader lets the others run while it waits."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None:
            self._turns.sleep_until(lambda: bool(self._items), timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()


class SimExecutor:
    """A thread pool whose work is done in turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_closed = False

    def submit(self, function: Any, *args: Any) -> None:
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._turns.jobs.append(lambda: function(*args))

    def shutdown(self, wait: bool = True) -> None:
        self._is_closed = True


class SimThread:
    """A thread that does not start by itself; ``target`` is run by the simulation."""

    def __init__(self, target: Callable[..., object], **_: object) -> None:
        self.target = target
        self._is_alive = False

    def start(self) -> None:
        self._is_alive = True

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self) -> None:
        pass


@contextmanager
def one_thread(turns: Turns) -> Iterator[list[SimThread]]:
    """Let everything of ``serving`` that would start a thread, sleep or look at a clock use the simulation's."""
    threads: list[SimThread] = []

    def make_thread(*args: Any, **settings: Any) -> SimThread:
        threads.append(SimThread(*args, **settings))
        return threads[-1]

    # Why: to ``close``, the caller is the engine's own thread, so that it does not wait for the end.
    present = {"Thread": make_thread, "current_thread": lambda: threads[0]}
    threading_of_engine = SimpleNamespace(**{**vars(threading), **present})
    commands = sys.modules[async_engine.Commands.__module__]
    was_enabled = gc.isenabled()
    # Why: the garbage collector runs when it likes; the simulation calls it where the seed says.
    gc.disable()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_engine, "threading", threading_of_engine)
        patch.setattr(async_engine, "EngineThread", make_thread)
        patch.setattr(commands, "CommandQueue", lambda: SimQueue(turns))
        patch.setattr(long_prompts, "ThreadPoolExecutor", lambda *_, **__: SimExecutor(turns))
        patch.setattr(MonotonicClock, "now", staticmethod(turns.clock.now))
        patch.setattr("time.sleep", turns.clock.advance)
        patch.setattr("os.fsync", lambda handle: None)
        try:
            yield threads
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

"""Uses a real ``AsyncEngine`` for the minutes it is given, as badly as callers do, and prints what is left behind.

    make soak MINUTES=60 [SOAK_ARGS="--model toy|demo|both --seed N"]

Requests are streams, futures and turns of sessions; 30 % are aborted at a random moment, 5 % of the readers vanish
without a word, 5 % read slowly; sessions are parked, forked, exported, lost; bursts overload the queue. Once a minute
all callers leave, and what is left is counted. It passes if that is nothing, and if memory is flat after the first
thousand requests: traced memory grows by less than 1 MiB, and resident memory by less than 2 % after the first ten
thousand. Pages of files are left out: libraries have more of them as rare code runs for the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import EngineOverloaded
from pagedcore.serving.async_session import AsyncSession
from support.doubles import ToyBackend, toy_answer
from support.sinks import num_sinks
from support.toy_sessions import BLOCK

ROOT_REQUESTS = 1000
"""Requests before the first look at traced memory."""
ROOT_RESIDENT = 10_000
"""Requests before the first look at resident memory."""
NUM_THREADS = 4
"""For blocking calls."""
MOST_TRACED = 2**20
MOST_RESIDENT = 1.02


@dataclass(frozen=True)
class Left:
    """What is there when no caller is."""

    blocks: int
    requests: int
    sinks: int
    """Streams and futures of the hand-over to readers."""
    sessions: int
    tasks: int
    threads: int
    files: int
    handles: int
    traced: int
    resident: int

    def leaks(self, before: Left) -> list[str]:
        """Say what is too much compared with an earlier moment."""
        found = [name for name in ("blocks", "requests", "sinks", "sessions", "tasks", "files") if getattr(self, name)]
        found += [name for name in ("threads", "handles") if getattr(self, name) > getattr(before, name)]
        if self.traced - before.traced >= MOST_TRACED:
            found.append(f"traced memory by {self.traced - before.traced} bytes")
        if self.resident > MOST_RESIDENT * before.resident:
            found.append(f"resident memory from {before.resident} to {self.resident} bytes")
        return found


class Soak:
    """Callers of one engine."""

    def __init__(self, engine: AsyncEngine, rng: random.Random, folder: Path, *, is_toy: bool) -> None:
        self.engine, self.rng, self.folder, self.is_toy = engine, rng, folder, is_toy
        self.counts: Counter[str] = Counter()
        self._files = iter(range(sys.maxsize))
        self._late_exports: list[Path] = []
        """Exports whose callers were cancelled; a thread may write their files after that."""
        # Why: what was there before is not looked at again, which takes a second each time, nor counted.
        gc.freeze()

    async def run(self, is_over: Callable[[], bool], num_callers: int = 48) -> None:
        """Let callers come and go until it is over."""
        if not self.counts["requests"]:
            await self._open_directory()
        running: set[asyncio.Task[None]] = set()
        while not is_over() or running:
            while len(running) < num_callers and not is_over():
                running.add(asyncio.create_task(self._call()))
                if self.rng.random() < 0.003:
                    self._burst()
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                if not one.cancelled() and (error := one.exception()) is not None:
                    raise error

    async def look(self) -> Left:
        """Wait until the engine has nothing to do, and count what is left."""
        for _ in range(200):
            stats = await self.engine.call(lambda engine: engine.stats())
            if stats.num_running + stats.num_waiting + stats.num_blocks_used + stats.num_host_blocks_used == 0:
                break
            await asyncio.sleep(0.02)
        gc.collect()
        await asyncio.sleep(0.1)
        stats = await self.engine.call(lambda engine: engine.stats())
        left = await self.engine.call(lambda engine: (
            len(list(engine.requests)), len(engine.sessions), len(engine.sessions.parking.directory.files)
        ))
        # Why: an export whose caller was cancelled is completed.
        await all_threads()
        # Why again: the engine's thread may not have let go of the last call yet.
        sinks, handles = num_sinks(), num_handles()
        for number in range(600):
            if number >= 10 and not sinks:
                break
            await asyncio.sleep(0.05)
            sinks, handles = sinks and num_sinks(), min(handles, num_handles())
        while self._late_exports:
            remove_export(self._late_exports.pop())
        return Left(
            stats.num_blocks_used + stats.num_host_blocks_used, left[0], sinks, left[1], len(asyncio.all_tasks()) - 1,
            threading.active_count(), left[2] + len(list(self.folder.iterdir())), handles,
            tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0, anonymous_memory(),
        )

    async def _open_directory(self) -> None:
        """Park a session on the disk: from then on the engine has a directory and its lock."""
        async with self.engine.session() as session:
            await session.ask(*self._draw())
            await session.park("disk")

    async def _call(self) -> None:
        kind = self.rng.choices([self._stream, self._submit, self._converse], [60, 25, 15])[0]
        task = asyncio.create_task(kind())
        try:
            if self.rng.random() < 0.3:
                self.counts["cancelled"] += 1
                await asyncio.wait([task], timeout=self.rng.uniform(0.0, 0.03))
                task.cancel()
            await task
        except asyncio.CancelledError:
            pass
        except EngineOverloaded:
            self.counts["refused"] += 1

    def _draw(self) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prompt = [1, 2, 3, 4, 5, 6][: rng.randint(1, 6)] + [rng.randrange(28) for _ in range(rng.randint(0, 8))]
        self.counts["requests"] += 1
        return prompt, SamplingParams(max_tokens=rng.randint(1, 16), temperature=0.0, ignore_eos=True)

    def _compare(self, prompt: list[int], tokens: list[int], params: SamplingParams, *, is_whole: bool) -> None:
        assert params.max_tokens is not None
        if is_whole and len(tokens) != params.max_tokens:
            raise AssertionError(f"{len(tokens)} tokens of {params.max_tokens}")
        if self.is_toy and tokens != toy_answer(prompt, len(tokens)):
            raise AssertionError(f"{tokens} is not the completion of {prompt}")

    async def _stream(self) -> None:
        prompt, params = self._draw()
        chance, tokens = self.rng.random(), list[int]()
        deltas = self.engine.generate(prompt, params, wait_for_room=self.rng.random() < 0.8)
        async for delta in deltas:
            tokens += delta.token_ids
            if chance < 0.05:
                self.counts["vanished"] += 1
                break
            if chance < 0.1:
                self.counts["slow"] += 1
                await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        self._compare(prompt, tokens, params, is_whole=chance >= 0.05)

    async def _submit(self) -> None:
        prompt, params = self._draw()
        output = await asyncio.wrap_future(self.engine.submit(prompt, params, wait_for_room=True))
        self._compare(prompt, list(output.outputs[0].token_ids), params, is_whole=True)

    async def _converse(self) -> None:
        self.counts["sessions"] += 1
        if self.rng.random() < 0.05:
            self.counts["lost sessions"] += 1
            await self.engine.session().ask(*self._draw())
            return
        async with self.engine.session() as session:
            for _ in range(self.rng.randint(1, 3)):
                prompt, params = self._draw()
                known = [*session.token_ids, *prompt]
                output = await session.ask(prompt, params)
                self._compare(known, list(output.outputs[0].token_ids), params, is_whole=True)
                acts: list[Callable[[], Awaitable[object]]] = [
                    lambda: session.park("host"), lambda: session.park("disk"), session.resume,
                    lambda: self._fork(session), lambda: self._travel(session),
                ]
                await self.rng.choice(acts)()

    async def _fork(self, session: AsyncSession) -> None:
        async with await session.fork() as fork:
            self.counts["sessions"] += 1
            await fork.ask(*self._draw())

    async def _travel(self, session: AsyncSession) -> None:
        path = self.folder / f"{next(self._files)}.json"
        try:
            await session.export(path)
            async with await self.engine.import_session(path):
                self.counts["sessions"] += 1
        except asyncio.CancelledError:
            self._late_exports.append(path)
            raise
        finally:
            remove_export(path)

    def _burst(self) -> None:
        """Ask for three times what may wait, at once, and forget half of it."""
        self.counts["bursts"] += 1
        for number in range(300):
            prompt, params = self._draw()
            try:
                future = self.engine.submit(prompt, params)
            except EngineOverloaded:
                self.counts["refused"] += 1
                continue
            if number % 2:
                future.cancel()


def remove_export(path: Path) -> None:
    """Remove the two files of an exported session, if they are there."""
    for file in (path, path.with_name(f"{path.name}.kv.safetensors")):
        file.unlink(missing_ok=True)


def anonymous_memory() -> int:
    """Return the bytes of resident memory that are no pages of files, where the system tells, else of all of it.

    The C library first gives back what it keeps for later, which is more after every moment that was busier than all
    before it.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def num_handles() -> int:
    """Count the file handles of this process."""
    return len(os.listdir("/proc/self/fd"))


def make_engine(model: str, folder: Path) -> AsyncEngine:
    """Return a small engine under memory pressure, whose memories are full after a thousand requests."""
    settings = {"max_num_seqs": 16, "disk_kv_dir": str(folder / "kv")}
    if model == "toy":
        return AsyncEngine.from_pretrained(
            ToyBackend(), num_kv_blocks=64, block_size=4, host_kv_memory=128 * BLOCK, **settings
        )
    return AsyncEngine.from_pretrained("demo", num_kv_blocks=40, block_size=16, host_kv_memory="1MiB", **settings)


async def warm_up() -> None:
    """Start all threads that the event loop will have for blocking calls, and let Python's own tables grow."""
    for number in range(2**18):
        # Why: pathlib interns every name of a file, and the table of interned strings grows once, by 3.8 MiB.
        sys.intern(f"soak {number}")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
    await all_threads()


async def all_threads() -> None:
    """Wait until every thread for blocking calls has ended what it was asked before."""
    barrier = threading.Barrier(NUM_THREADS)
    await asyncio.gather(*(asyncio.to_thread(barrier.wait) for _ in range(NUM_THREADS)))


async def soak(model: str, seconds: float, seed: int, say: Callable[[str], object] = print) -> bool:
    """Use one engine for so many seconds; return whether nothing was left behind."""
    end_s, is_first, is_good = time.monotonic() + seconds, True, True
    with tempfile.TemporaryDirectory() as name:
        exports = Path(name) / "exports"
        exports.mkdir()
        await warm_up()
        async with make_engine(model, Path(name)) as engine:
            lives = Soak(engine, random.Random(seed), exports, is_toy=model == "toy")
            await lives.run(lambda: lives.counts["requests"] >= ROOT_REQUESTS)
            before = await lives.look()
            while is_first or time.monotonic() < end_s:
                is_first, next_s = False, min(max(end_s, time.monotonic() + 1.0), time.monotonic() + 60.0)
                requests = lives.counts["requests"]
                await lives.run(lambda at=next_s: time.monotonic() >= at)  # type: ignore[misc]
                left = await lives.look()
                if requests < ROOT_RESIDENT:
                    before = replace(before, resident=left.resident)
                leaks = left.leaks(before)
                is_good = is_good and not leaks
                counts = " ".join(f"{name} {count}" for name, count in sorted(lives.counts.items()))
                say(f"{model}: {left} | {counts} | {'LEAKED: ' + ', '.join(leaks) if leaks else 'nothing leaked'}")
    return is_good


def main() -> int:
    """Soak and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", choices=["toy", "demo", "both"], default="both")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    models = ["toy", "demo"] if options.model == "both" else [options.model]
    print(f"seed {options.seed}", flush=True)
    tracemalloc.start()
    try:
        results = [asyncio.run(soak(one, 60 * options.minutes / len(models), options.seed)) for one in models]
    except KeyboardInterrupt:
        print("ended early")
        return 1
    print("passed" if all(results) else "failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
